"""Scheduling barriers: operations that must wait for others, and results that must not be computed twice.

XLA:CPU copies a whole pool or position table that is read and then written, unless the write depends on the read.
"""

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from kvjax.ops import kernels
from kvjax.typing import Array, Bool, Float, Int32


def computed_once(x: Array) -> Array:
    """Returns `x` behind a barrier on CPU, so that no consumer recomputes it.

    XLA:CPU would fuse transposed scores, their exponentials, the ranking of blocks or the place of a row into each
    consumer and compute them once for each, which makes attention a third to a half slower.
    """
    return jax.lax.optimization_barrier(x) if jax.default_backend() == "cpu" else x


def written_out(x: Float[Array, "*N"]) -> Float[Array, "*N"]:
    """Returns a copy of `x` in memory of its own, which later operations read; it has no derivative.

    XLA:CPU fuses across the barrier of `computed_once`. Without the copy it recomputes the cosine and sine of an angle
    for every head and in every fusion that uses them, and looks a key up for each use, even after a write to its place.
    """
    wide = x.astype(jnp.float32)
    return kernels.on_cpu("copy", jax.ShapeDtypeStruct(x.shape, wide.dtype), lambda x: x, wide).astype(x.dtype)


def rounded(x: Array) -> Array:
    """Returns `x` rounded to its type.

    Within one program XLA goes on with the wider numbers that were to be rounded, so that a token computed by one
    program would differ from the same token computed by several.
    """
    return x if x.dtype == jnp.float32 else jax.lax.optimization_barrier(x)


def after(token: Int32[Array, ""], x: Array) -> Array:
    """Returns `x`, scheduled after the scheduling token: a token is 0 or 1, which the compiler cannot know."""
    return jnp.where(token < 0, jnp.nan, x)


def exists(x: Array) -> Bool[Array, ""]:
    """Returns True, data-dependent on `x`, so that whatever uses it is scheduled after `x`.

    No hidden state or key sums to the bit pattern compared with, which the compiler cannot know.
    """
    return jax.lax.bitcast_convert_type(jnp.sum(x, dtype=jnp.float32), jnp.int32) != -0x7FEDCBA9


def positions_exist(selected: Iterable[Int32[Array, "B K N"]]) -> Bool[Array, ""]:
    """Returns True, data-dependent on all selected positions: none is below -1, which the compiler cannot know."""
    return functools.reduce(jnp.minimum, [jnp.min(positions, initial=0) for positions in selected]) > -2
