"""Survey of a head's clusters, in one pass: the numbers that decide where a new key goes."""

import functools

import jax.numpy as jnp

from kvjax.ops.indexing import first
from kvjax.typing import Array, Bool, Float, Int32, pytree


@pytree
class Survey:
    """Numbers of one head; a block that does not exist is given as the last one."""

    keys: Int32[Array, ""]  # keys in all clusters
    used: Int32[Array, ""]  # clusters that have keys
    flagged: Int32[Array, ""]  # clusters that are to be split
    free: Int32[Array, ""]  # the first block without keys
    nearest: Int32[Array, ""]  # the nearest cluster that has keys; the first one of equals
    nearest_flagged: Int32[Array, ""]  # the nearest flagged cluster
    roomy: Int32[Array, ""]  # the nearest cluster that is not full; `free` if all are full


def survey(
    squared: Float[Array, "NB"], count: Int32[Array, "NB"], split: Bool[Array, "NB"], block_rows: int
) -> Survey:
    """Surveys the clusters of one head.

    Args:
      squared: [NB], squared distance of a key to each centroid.
      count: int32[NB], keys of each cluster.
      split: bool[NB], flagged clusters; all of them have keys.
      block_rows: keys of a full cluster.
    """
    used, free = count > 0, first(count == 0)
    nearest, flagged, roomy = (_first_least(squared, among) for among in (used, split, has_room(count, block_rows)))
    roomy = jnp.where(has_room(count[roomy], block_rows), roomy, free)
    total = functools.partial(jnp.sum, dtype=jnp.int32)
    return Survey(total(count), total(used), total(split), free, nearest, flagged, roomy)


def has_room(count: Int32[Array, "*N"], block_rows: int | Int32[Array, ""]) -> Bool[Array, "*N"]:
    """Returns whether clusters of `count` keys exist and are not full."""
    return (count > 0) & (count < block_rows)


def _first_least(x: Float[Array, "N"], among: Bool[Array, "N"]) -> Int32[Array, ""]:
    """Returns the index of the smallest of the marked numbers, the first one of equals; the last index if none is
    marked."""
    x = jnp.where(among, x, jnp.inf)
    return first(among & (x == jnp.min(x)))
