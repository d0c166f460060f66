"""H2O (Zhang et al., 2023): heavy hitters, the tokens that have been paid the most attention so far.

Every token's attention weights are summed up, over the prompt's queries and then over every decoded token's (section
4.1, Algorithm 1). When a token leaves the recent window, the one with the smallest sum of it and the kept tokens is
dropped. Weights are those of the attention over what was still there.

Aggregation: weights are summed over the query heads of a KV head, of which each keeps tokens of its own; the paper has
a cache per query head.

Differences from the paper:
  - `window` is a setting of its own; the paper gives half of the budget to recent tokens: window = budget // 2.
  - `sinks` first tokens are kept whatever their sums; sinks=0 is the paper.
  - with a number as `observation` only so many last queries of the prompt are summed up: cheaper, and fairer to late
    tokens, which fewer queries can see. None = all of them, the paper.

Resident: the budget, and one number per kept row and token of the window. Cost per step: attention over the budget, its
weights, and one number per token of the capacity, in which these are laid down by position; the prompt's sums cost the
prompt's attention once more, without values.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from kvjax.errors import ConfigError
from kvjax.methods.shared.eviction import Evictor, Kept
from kvjax.methods.shared.observation import observation_scores, prompt_length
from kvjax.typing import Array, Float, pytree


@pytree
class HeavyHitters(Kept):
    recent: Float[Array, "*B K W"]  # sums of the window's tokens, position p in row (p - S) % W


@dataclasses.dataclass(frozen=True)
class H2O(Evictor):
    """Tokens with the largest accumulated attention."""

    aggregation: str = "softmax_mean"
    observation: int | None = None
    observes: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        if self.aggregation != "softmax_mean":
            raise ConfigError(f"aggregation={self.aggregation!r}: h2o sums weights over a group; leave softmax_mean")

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
        head = jnp.arange(spec.kv_heads, dtype=jnp.int32)[:, None]
        paid = jnp.zeros((spec.kv_heads, spec.capacity), jnp.float32)
        paid = paid.at[head, jnp.where(pos >= 0, pos, spec.capacity)].add(weight, mode="drop")
        kept = view.pos.reshape(spec.kv_heads, -1)[:, : index.worth.shape[-1]]
        worth = index.worth + paid[head, jnp.maximum(kept, 0)]  # a free row stays at -inf
        at = jnp.max(pos)  # the newest token; -1 where nothing happened
        near = at - jnp.arange(spec.window, dtype=jnp.int32)
        sums = index.recent[:, (near - spec.sinks) % spec.window]
        sums = jnp.where(near == at, 0.0, sums) + paid[:, jnp.maximum(near, 0)]
        row = jnp.where((near >= spec.sinks) & (near >= 0), (near - spec.sinks) % spec.window, spec.window)
        return dataclasses.replace(index, worth=worth, recent=index.recent.at[:, row].set(sums, mode="drop"))
