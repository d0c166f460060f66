"""InfiniGen (Lee et al., 2024): attention predicted one layer ahead from a few dimensions of queries and keys.

Each KV head keeps the dimensions with the largest mean magnitude in the prompt's keys and queries (partial index
selection), scores all tokens by these, and reads its own best tokens one by one. KVSwap compares with three variants:

    infinigen()                                     InfiniGen
    infinigen(shared=True)                          "InfiniGen*": scores summed over all heads, as KVSwap does
    infinigen(shared=True), Slots(policy="fifo")    "InfiniGen*+ru", with more slots than one step needs

Differences from the paper:
  - The offline rotation that skews the query and key weights is left out, as it does not commute with rotary embedding.
  - The threshold by which the number of tokens varies is left out, as the budget is fixed here.
  - Magnitudes of queries are those of the prompt's last `observation` tokens.

Resident: D / sigma numbers per token and KV head. Cost per step: as many products per token and query head.
"""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.errors import ConfigError
from kvjax.methods.shared.lowrank import LowRankMethod


@dataclasses.dataclass(frozen=True)
class InfiniGen(LowRankMethod):
    """A cache of single tokens, ranked by selected dimensions.

    Attributes:
      sigma: one of this many dimensions is kept (1 / partial weight ratio), from 1 to the head size.
    """

    group: int = 1
    shared: bool = False
    observation: int | None = 64
    sigma: int = 4

    @property
    def joint(self):
        return False

    def init(self, spec, weights):
        if not 1 <= self.sigma <= spec.head_dim:
            raise ConfigError(f"sigma={self.sigma} must be from 1 to the head size {spec.head_dim}")
        return self.empty(spec, jnp.zeros((spec.kv_heads, spec.head_dim, spec.head_dim // self.sigma), jnp.float32))

    def adapter(self, spec, index, context):
        """Returns unit vectors of the dimensions with the largest mean |K| + mean |Q|, each averaged over its tokens.
        """
        asked = (context.query_pos >= 0)[:, None]
        query = jnp.sum(jnp.where(asked, jnp.abs(context.query.astype(jnp.float32)), 0.0), axis=(1, 2))
        key = jnp.sum(jnp.where(context.valid[:, None], jnp.abs(context.key.astype(jnp.float32)), 0.0), axis=1)
        query /= jnp.maximum(spec.group * jnp.sum(asked, dtype=jnp.int32), 1)
        key /= jnp.maximum(jnp.sum(context.valid, dtype=jnp.int32), 1)
        kept = jax.lax.top_k(query + key, index.adapter.shape[-1])[1]
        return jax.nn.one_hot(kept, spec.head_dim, dtype=jnp.float32, axis=1)
