"""H2O (Zhang et al., 2023): heavy hitters, the tokens that have received the most attention so far.

Every token's attention weights are summed over the prompt's queries and then over those of all decoded tokens (section
4.1, Algorithm 1). When a token leaves the recent window, it competes with the kept tokens, and the token with the
smallest sum is dropped. Weights are those of the attention over the tokens that were still kept.

Aggregation: weights are summed over the query heads of a KV head, and each KV head keeps its own tokens. The paper has
a cache per query head.

Differences from the paper:
  - `window` is a setting of its own. The paper gives half of the budget to recent tokens: window = budget // 2.
  - The first `sinks` tokens are kept whatever their sums; sinks=0 is the paper.
  - If `observation` is a number, only that many last queries of the prompt are summed: cheaper, and fairer to late
    tokens, which fewer queries can see. None = all queries, as in the paper.

Resident: the budget, and one number per kept row and token of the window. Cost per step: attention over the budget, its
weights, and a comparison of every attended token with every kept one. The prompt's sums cost the
prompt's attention once more, without values.
"""

import dataclasses

import jax.numpy as jnp

from kvjax.cache.method import ObservingMethod
from kvjax.errors import ConfigError
from kvjax.methods.shared.eviction import Evictor, Kept
from kvjax.methods.shared.observation import observation_scores, prompt_length
from kvjax.typing import Array, Float, pytree


@pytree
class HeavyHitters(Kept):
    """Accumulated attention of the kept tokens (`worth`) and of the window's."""

    recent: Float[Array, "*B K W"]  # sums of the window's tokens, position p in row (p - S) % W


@dataclasses.dataclass(frozen=True)
class H2O(ObservingMethod, Evictor):
    """A cache that keeps the tokens with the largest accumulated attention.

    Raises:
      ConfigError: `aggregation` is not "softmax_mean".
    """

    aggregation: str = "softmax_mean"
    observation: int | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.aggregation != "softmax_mean":
            raise ConfigError(f"aggregation={self.aggregation!r} must be 'softmax_mean', because h2o sums weights over "
                              "a group; leave it out")

    def init(self, spec, weights):
        return HeavyHitters(super().init(spec, weights).worth, jnp.zeros((spec.kv_heads, spec.window), jnp.float32))

    def build(self, spec, index, context):
        worth = self.prompt_worth(spec, context)
        index, placement = self.keep(spec, index, context, worth)
        pos = prompt_length(context) - 1 - jnp.arange(spec.window, dtype=jnp.int32)
        row = jnp.where(pos >= spec.sinks, (pos - spec.sinks) % spec.window, spec.window)
        recent = index.recent.at[:, row].set(worth[:, jnp.maximum(pos, 0)], mode="drop")
        return dataclasses.replace(index, recent=recent), placement

    def prompt_worth(self, spec, context):
        return jnp.sum(observation_scores(spec, context), axis=1)

    def leaving_worth(self, spec, index, evicted):
        return index.recent[:, (evicted.pos - spec.sinks) % spec.window]

    def observe(self, spec, index, view, pos, weight):
        def received(by):
            """Returns the weight of the tokens at positions [K, N]."""
            return jnp.sum(jnp.where(by[:, :, None] == pos[:, None], weight[:, None], 0.0), axis=-1)

        kept = view.pos.reshape(spec.kv_heads, -1)[:, : index.worth.shape[-1]]
        worth = index.worth + jnp.where(kept >= 0, received(kept), 0.0)  # a free row stays at -inf
        newest = jnp.max(pos)  # -1 where there was no step
        near = newest - jnp.arange(spec.window, dtype=jnp.int32)
        sums = index.recent[:, (near - spec.sinks) % spec.window]
        sums = jnp.where(near == newest, 0.0, sums) + received(jnp.broadcast_to(near, sums.shape))
        row = jnp.where((near >= spec.sinks) & (near >= 0), (near - spec.sinks) % spec.window, spec.window)
        return dataclasses.replace(index, worth=worth, recent=index.recent.at[:, row].set(sums, mode="drop"))
