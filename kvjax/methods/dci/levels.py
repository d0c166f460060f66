"""Random promotion: the level of every point (IceCache, Algorithm 2)."""

import jax
import jax.numpy as jnp

from kvjax.typing import Array, Int32, PRNGKey


def draw_levels(seed: PRNGKey, number: Int32[Array, "*T"], ratio: float, most: int) -> Int32[Array, "*T"]:
    """Level of each point, 1 = bottom; a point gets to level l + 1 from level l with probability `ratio`.

    It depends on the seed and the point's own number alone, so that as many are drawn for a tree built by inserts as
    for one built at once; inserted points pass them on (`kvjax.methods.dci.promotion`). At most `most`.
    """
    draw = jax.vmap(lambda one: jax.random.uniform(jax.random.fold_in(seed, one), dtype=jnp.float32, minval=1e-30))
    luck = draw(number.reshape(-1)).reshape(number.shape)
    promotions = jnp.floor(jnp.log(luck) / jnp.log(jnp.float32(ratio)))
    return jnp.minimum(1 + promotions, most).astype(jnp.int32)
