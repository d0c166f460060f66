"""Random blocks (no paper): the floor. A method that is no better than this gains nothing from query and keys.

A block has `page` consecutive tokens, and at every step each KV head draws its blocks anew. A draw depends only on the
seed, the layer, the head and the number of stored tokens, so runs can be repeated, and the sequences of a batch do not
depend on each other.

Resident: nothing beside the tail. Cost per step: one random number per block and KV head, then the drawn blocks.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from kvjax.cache.method import HowPlaced, Method, in_token_order
from kvjax.cache.types import Selection
from kvjax.ops.topk import top_blocks
from kvjax.typing import Array, Int32, pytree


@pytree
class RandomIndex:
    """Numbers that a draw depends on, beside the seed and the head."""

    layer: Int32[Array, "*B"]  # number of the layer
    stored: Int32[Array, "*B"]  # tokens in blocks


@dataclasses.dataclass(frozen=True)
class Random(Method):
    """A cache that attends random pages.

    Attributes:
      page: tokens of a page.
      seed: seed of the draws.
    """

    page: int = 1
    seed: int = 0
    placement: ClassVar[HowPlaced] = "in_order"

    def blocks(self, capacity, rows):
        # One more page than fills the budget, because the last page of a sequence may be drawn and is short.
        return -(-capacity // self.page), self.page, max(1, -(-rows // self.page) + (self.page > 1)), 0

    def weights(self, layer):
        return layer

    def init(self, spec, weights):
        return RandomIndex(jnp.int32(weights), jnp.int32(0))

    def build(self, spec, index, context):
        placement = in_token_order(spec, context)
        return dataclasses.replace(index, stored=jnp.sum(context.valid, dtype=jnp.int32)), placement

    def select(self, spec, index, view, q):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), index.layer), index.stored)
        drawn = jax.random.uniform(key, (spec.all_heads, spec.num_blocks), jnp.float32)
        return Selection(top_blocks(spec.shards.own(drawn), view.count > 0, spec.max_blocks))

    def append(self, spec, index, view, evicted):
        placement = in_token_order(spec, evicted)
        return dataclasses.replace(index, stored=index.stored + evicted.valid), placement
