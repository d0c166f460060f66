"""ChunkKV (Liu et al., 2025): whole chunks of a prompt are kept or dropped by the attention of its last queries.

The prompt is cut into chunks of `chunk` tokens. A chunk's score is the attention that the last `observation` queries
pay to its tokens (Algorithm 1), and the chunks with the best scores are kept. `reuse=2` is the layer-wise index reuse
(Algorithm 2): every second layer takes the kept set of the layer before it.

Aggregation: observation-window scores are averaged over the query heads of a KV head, and each KV head keeps its own
chunks. With `shared` the scores are summed over all heads, which then keep the same chunks.

Differences from the paper:
  - The budget holds while decoding. The paper keeps all generated tokens beside the budget; here each takes the row of
    a token of the worst chunk, and once none of the prompt is left, of the oldest generated token.
  - The score is the mean over the tokens of a chunk instead of their sum, because the chunks next to sinks and window
    are cut short.
  - The budget is used up: of the first chunk that does not fit, the first tokens are kept.
  - The first `sinks` tokens are kept whatever their scores; sinks=0 is the paper. The kept window and the number of
    observed queries are separate settings; the paper has observation = window - 1.

Resident: the budget, and one number per kept row. Cost per step: nothing but attention over the budget; the scores cost
`observation` rows of attention, once per prompt and per layer that selects.
"""

import dataclasses

import jax.numpy as jnp

from kvjax.methods.shared.eviction import PromptEvictor
from kvjax.methods.shared.observation import check_rule, observation_scores, over_group
from kvjax.typing import Array, Bool, Float


@dataclasses.dataclass(frozen=True)
class ChunkKV(PromptEvictor):
    """A cache that keeps the chunks with the highest observation-window scores.

    Attributes:
      chunk: tokens of a chunk.
      shared: whether all KV heads keep the same chunks.

    Raises:
      ConfigError: `aggregation` is not of softmax weights.
    """

    aggregation: str = "softmax_mean"
    chunk: int = 10
    shared: bool = False

    def __post_init__(self):
        super().__post_init__()
        check_rule(self.aggregation)

    @property
    def head_shared(self) -> bool:  # type: ignore[override]  # a class attribute elsewhere
        """Whether KV heads depend on each other."""
        return self.shared

    def prompt_worth(self, spec, context):
        scores = over_group(observation_scores(spec, context), self.aggregation)
        if self.shared:
            scores = jnp.broadcast_to(spec.shards.sum(jnp.sum(scores, axis=0)), scores.shape)
        return _chunk_means(scores, context.valid, self.chunk)


def _chunk_means(observation_scores: Float[Array, "K T"], valid: Bool[Array, "T"], chunk: int) -> Float[Array, "K T"]:
    """Returns for each token the mean score of the valid tokens of its chunk; chunks are cut from position 0 on."""
    heads, tokens = observation_scores.shape
    short = (0, -tokens % chunk)
    total = jnp.pad(jnp.where(valid, observation_scores, 0.0), ((0, 0), short)).reshape(heads, -1, chunk).sum(-1)
    count = jnp.pad(valid, short).reshape(-1, chunk).sum(-1, dtype=jnp.int32)
    return jnp.repeat(total / jnp.maximum(count, 1), chunk, axis=-1)[:, :tokens]
