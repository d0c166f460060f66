"""Orders of operations that XLA does not see: what must not begin before something else was computed, nor be computed
again.

XLA:CPU copies a whole pool, or table of positions, that is read and then written unless the write depends on the read.
"""

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from kvjax.ops import kernels
from kvjax.typing import Array, Bool, Float, Int32


def computed_once(x: Array) -> Array:
    """`x`, which no later operation computes again: XLA:CPU would transpose scores, take their exponentials, rank
    blocks by them, or find a row's place for each of its numbers, in all that use the result, which makes attention a
    third to a half slower."""
    return jax.lax.optimization_barrier(x) if jax.default_backend() == "cpu" else x


def written_out(x: Float[Array, "*N"]) -> Float[Array, "*N"]:
    """`x` in memory, where later operations find it. XLA:CPU fuses across the barrier of `computed_once`: it would
    compute functions of an angle again for every head, and once more in every fusion that uses them, and look up a key
    for each of its uses, whatever is to be written there meanwhile. No derivative."""
    wide = x.astype(jnp.float32)
    return kernels.on_cpu("copy", jax.ShapeDtypeStruct(x.shape, wide.dtype), lambda x: x, wide).astype(x.dtype)


def rounded(x: Array) -> Array:
    """`x` as numbers of its type: in one program XLA computes on with the wider ones that they were rounded from, and a
    token as one program would differ from one of several."""
    return x if x.dtype == jnp.float32 else jax.lax.optimization_barrier(x)


def after(token: Int32[Array, ""], x: Array) -> Array:
    """`x`, but not before the token exists. Tokens are 0 or 1, which the compiler cannot know."""
    return jnp.where(token < 0, jnp.nan, x)


def exists(x: Array) -> Bool[Array, ""]:
    """True once `x` has been computed. No hidden state or key sums to this bit pattern, which the compiler cannot know.
    """
    return jax.lax.bitcast_convert_type(jnp.sum(x, dtype=jnp.float32), jnp.int32) != -0x7FEDCBA9


def positions_exist(selected: Iterable[Int32[Array, "B K N"]]) -> Bool[Array, ""]:
    """True once all attended positions have been looked up: the compiler cannot know that none is below -1."""
    return functools.reduce(jnp.minimum, [jnp.min(one, initial=0) for one in selected]) > -2
