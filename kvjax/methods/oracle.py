"""Exact top-k by attention (no paper): the bound for any selection of single tokens.

Every stored key is scored with the true query, and the best tokens are attended. Blocks are single tokens. The query
heads of a group are aggregated by the mean of their softmax over the stored keys. With one query head per KV head, no
selection of as many tokens keeps more of its attention mass. With several, each query head has an equal say, however
much of its mass is on sinks and window, whose keys a method does not see.

Resident: all keys, which defeats the purpose of a cache; hence an oracle. Cost per step: full attention's scores.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from kvjax.cache.method import HowPlaced, Method, in_token_order
from kvjax.cache.types import Selection, Spec, View
from kvjax.ops.attention import NEGATIVE, products, soft_capped
from kvjax.ops.topk import aggregate, top_blocks
from kvjax.typing import Array, Float, pytree


@pytree
class OracleIndex:
    """All stored keys, one per block."""

    key: Float[Array, "*B K NB D"]

@dataclasses.dataclass(frozen=True)
class Oracle(Method):
    """A cache that attends the tokens with the largest attention weights."""

    aggregation: str = "softmax_mean"
    placement: ClassVar[HowPlaced] = "in_order"

    def blocks(self, capacity, rows):
        return capacity, 1, max(1, rows), 0

    def init(self, spec, weights):
        return OracleIndex(jnp.zeros((spec.kv_heads, spec.num_blocks, spec.head_dim), jnp.float32))

    def build(self, spec, index, context):
        placement = in_token_order(spec, context)
        return OracleIndex(_store(index.key, placement.block, context.key)), placement

    def scores(self, spec: Spec, index: OracleIndex, view: View, q: Float[Array, "K G D"]) -> Float[Array, "K G NB"]:
        """Returns the model's scores of each query and every stored key; NEGATIVE for empty blocks."""
        scores = soft_capped(products((index.key, q)) * spec.head_dim**-0.5, spec.soft_cap)
        return jnp.where(view.count[:, None] > 0, scores, NEGATIVE)

    def select(self, spec, index, view, q):
        score = aggregate(self.scores(spec, index, view, q), self.aggregation)
        return Selection(top_blocks(score, view.count > 0, spec.max_blocks))

    def append(self, spec, index, view, evicted):
        placement = in_token_order(spec, evicted)
        return OracleIndex(_store(index.key, placement.block[:, None], evicted.key[:, None])), placement


def _store(table, block, keys):
    head = jnp.arange(block.shape[0], dtype=jnp.int32)[:, None]
    return table.at[head, block].set(keys.astype(table.dtype), mode="drop")
