"""Orders of operations that XLA does not see: what must not begin before something else was computed.

XLA:CPU copies a whole pool, or table of positions, that is read and then written unless the write depends on the read.
"""

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from kvjax.typing import Array, Bool, Int32


def after(token: Int32[Array, ""], x: Array) -> Array:
    """`x`, but not before the token exists. Tokens are 0 or 1, which the compiler cannot know."""
    return jnp.where(token < 0, jnp.nan, x)


def exists(x: Array) -> Bool[Array, ""]:
    """True once `x` has been computed. No hidden state has this bit pattern, but the compiler cannot know that."""
    return jax.lax.bitcast_convert_type(jnp.sum(x, dtype=jnp.float32), jnp.int32) != -0x7FEDCBA9


def positions_exist(selected: Iterable[Int32[Array, "B K N"]]) -> Bool[Array, ""]:
    """True once all attended positions have been looked up: the compiler cannot know that none is below -1."""
    return functools.reduce(jnp.minimum, [jnp.min(one, initial=0) for one in selected]) > -2
