"""What a key that looks for a cluster must know of all clusters of its head, in one pass over them."""

import functools

import jax
import jax.numpy as jnp

from kvjax.ops import kernels
from kvjax.ops.indexing import first
from kvjax.typing import Array, Bool, Float, Int32, pytree


@pytree
class Survey:
    """Of one head, in the order of the kernel's numbers. A place that there is none of is the last block."""

    keys: Int32[Array, ""]  # in all clusters
    used: Int32[Array, ""]  # clusters that have keys
    flagged: Int32[Array, ""]  # clusters that wait for a split
    free: Int32[Array, ""]  # the first block without keys
    nearest: Int32[Array, ""]  # of the clusters that have keys, the first one of equals
    nearest_flagged: Int32[Array, ""]
    roomy: Int32[Array, ""]  # the nearest that is not full; where all are full, `free`


def survey(
    squared: Float[Array, "NB"], count: Int32[Array, "NB"], split: Bool[Array, "NB"], block_rows: int
) -> Survey:
    """Of clusters at those distances, with so many keys, of which some are flagged; flagged ones have keys."""
    like = jax.ShapeDtypeStruct((7,), jnp.int32)
    found = kernels.on_cpu("survey", like, _survey, squared, count, split, jnp.int32(block_rows))
    return Survey(*found)


def has_room(count: Int32[Array, "*N"], block_rows: int | Int32[Array, ""]) -> Bool[Array, "*N"]:
    """Whether clusters of so many keys are there, and not full."""
    return (count > 0) & (count < block_rows)


def _survey(squared, count, split, block_rows) -> Int32[Array, "7"]:
    used, free = count > 0, first(count == 0)
    nearest, flagged, roomy = (_first_least(squared, among) for among in (used, split, has_room(count, block_rows)))
    roomy = jnp.where(has_room(count[roomy], block_rows), roomy, free)
    total = functools.partial(jnp.sum, dtype=jnp.int32)
    return jnp.stack([total(count), total(used), total(split), free, nearest, flagged, roomy])


def _first_least(x: Float[Array, "N"], among: Bool[Array, "N"]) -> Int32[Array, ""]:
    """Where the least of some numbers is, the first one of equals; the last place if there are none."""
    x = jnp.where(among, x, jnp.inf)
    return first(among & (x == jnp.min(x)))
