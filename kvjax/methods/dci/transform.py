"""Reduction of largest inner product to nearest neighbour (IceCache, Eq. 2 and 3).

T_K and T_Q map to the unit sphere of R^{D+1}, where |T_K(k) - T_Q(q)|^2 = 2 - 2 q.k / (c |q|). The nearest key is
therefore the one with the largest inner product, for any c at least as large as the norm of every key. The stored data
of a key (the key and its squared norm) do not depend on c: a longer key raises c, and later comparisons use the new c
for all keys.
"""

import jax.numpy as jnp

from kvjax.typing import Array, Float


def lift(squared: Float[Array, "*N"], radius: Float[Array, ""]) -> Float[Array, "*N"]:
    """Returns the last coordinate of c T_K(k), for keys of squared norm `squared`, and `radius` = c^2."""
    return jnp.sqrt(jnp.maximum(radius - squared, 0.0))


def transform_key(key: Float[Array, "*N D"], radius: Float[Array, ""]) -> Float[Array, "*N D1"]:
    """Returns T_K(k) = [k / c, sqrt(1 - |k|^2 / c^2)] (Eq. 2); `radius` = c^2 is at least the largest squared norm."""
    last = lift(jnp.sum(jnp.square(key), axis=-1), radius)
    return jnp.concatenate([key, last[..., None]], axis=-1) / jnp.sqrt(jnp.maximum(radius, 1e-30))


def transform_query(query: Float[Array, "*N D"]) -> Float[Array, "*N D1"]:
    """Returns T_Q(q) = [q / |q|, 0] (Eq. 3); zero for a zero query."""
    query = query.astype(jnp.float32)
    norm = jnp.sqrt(jnp.maximum(jnp.sum(jnp.square(query), axis=-1, keepdims=True), 1e-30))
    return jnp.concatenate([query / norm, jnp.zeros_like(norm)], axis=-1)
