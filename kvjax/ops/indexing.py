"""Where something is in an array, as XLA:CPU finds it fastest."""

import jax.numpy as jnp

from kvjax.typing import Array, Bool, Int32


def places_of(among: Bool[Array, "N"], size: int) -> Int32[Array, "size"]:
    """The first `size` places that are marked, in order, padded with -1: a sum and a scatter, no sort."""
    nth = jnp.where(among, jnp.cumsum(among, dtype=jnp.int32) - 1, size)
    return jnp.full(size, -1, jnp.int32).at[nth].set(jnp.arange(among.shape[0], dtype=jnp.int32), mode="drop")


def first(among: Bool[Array, "N"]) -> Int32[Array, ""]:
    """The first place that is marked; the last place if none is."""
    return jnp.min(jnp.where(among, jnp.arange(among.shape[0], dtype=jnp.int32), among.shape[0] - 1))
