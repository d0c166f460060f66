"""Random levels of points (IceCache, Algorithm 2)."""

import jax
import jax.numpy as jnp

from kvjax.typing import Array, Int32, PRNGKey


def draw_levels(seed: PRNGKey, number: Int32[Array, "*T"], ratio: float, most: int) -> Int32[Array, "*T"]:
    """Draws the level of each point; a point of level l is promoted to level l + 1 with probability `ratio`.

    A level only depends on the seed and the point's own number, so the draws are the same for a tree built by inserts
    and one built at once. Inserted points may pass a promotion on (`kvjax.methods.dci.promotion`).

    Args:
      seed: key of the draws.
      number: number of each point.
      ratio: promotion ratio r.
      most: highest level.

    Returns:
      Levels from 1 (bottom) to `most`.
    """
    draw = jax.vmap(lambda n: jax.random.uniform(jax.random.fold_in(seed, n), dtype=jnp.float32, minval=1e-30))
    uniform = draw(number.reshape(-1)).reshape(number.shape)
    promotions = jnp.floor(jnp.log(uniform) / jnp.log(jnp.float32(ratio)))
    return jnp.minimum(1 + promotions, most).astype(jnp.int32)
