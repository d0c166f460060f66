"""ChunkKV (Liu et al., 2025): whole chunks of a prompt are kept or dropped, by the votes of its last queries.

The prompt is cut into chunks of `chunk` tokens. A chunk's score is the attention that the last `observation` queries
pay to its tokens (Algorithm 1), and the chunks with the best scores are kept. `reuse=2` is the layer-wise index reuse
(Algorithm 2): every second layer takes the kept set of the layer before it.

Aggregation: votes are averaged over the query heads of a KV head, and each KV head keeps chunks of its own. With
`shared` they are summed over all heads, which then keep the same chunks.

Differences from the paper:
  - the budget holds while decoding. The paper keeps all generated tokens beside it; here they take the rows of the
    worst chunk's tokens, one by one, and once none is left, of the oldest generated ones.
  - the score is the mean over the tokens of a chunk and not their sum, as the chunks next to sinks and window are cut.
  - the budget is used up: of the first chunk that does not fit, the first tokens are kept.
  - `sinks` first tokens are kept whatever their votes; sinks=0 is the paper. The window that is kept and the queries
    that vote are set apart; the paper has observation = window - 1.

Resident: the budget, and one number per kept row. Cost per step: nothing but attention over the budget; the votes cost
`observation` rows of attention, once per prompt and leading layer.
"""

import dataclasses

import jax.numpy as jnp

from kvjax.methods.shared.eviction import PromptEvictor
from kvjax.methods.shared.observation import check_rule, observation_scores, over_group
from kvjax.typing import Array, Bool, Float


@dataclasses.dataclass(frozen=True)
class ChunkKV(PromptEvictor):
    """Chunks with the most votes.

    Attributes:
      chunk: tokens of a chunk.
      shared: whether all KV heads keep the same chunks.
    """

    aggregation: str = "softmax_mean"
    chunk: int = 10
    shared: bool = False

    def __post_init__(self):
        super().__post_init__()
        check_rule(self.aggregation)

    @property
    def head_shared(self) -> bool:  # type: ignore[override]  # of the class elsewhere, of its settings here
        """Whether KV heads depend on each other."""
        return self.shared

    def prompt_worth(self, spec, context):
        paid = over_group(observation_scores(spec, context), self.aggregation)
        if self.shared:
            paid = jnp.broadcast_to(jnp.sum(paid, axis=0), paid.shape)
        return _chunk_means(paid, context.valid, self.chunk)


def _chunk_means(observation_scores: Float[Array, "K T"], valid: Bool[Array, "T"], chunk: int) -> Float[Array, "K T"]:
    """For each token the mean of the valid tokens of its chunk; chunks are cut from position 0 on."""
    heads, tokens = observation_scores.shape
    short = (0, -tokens % chunk)
    total = jnp.pad(jnp.where(valid, observation_scores, 0.0), ((0, 0), short)).reshape(heads, -1, chunk).sum(-1)
    count = jnp.pad(valid, short).reshape(-1, chunk).sum(-1, dtype=jnp.int32)
    return jnp.repeat(total / jnp.maximum(count, 1), chunk, axis=-1)[:, :tokens]
