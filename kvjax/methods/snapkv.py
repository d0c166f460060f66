"""SnapKV (Li et al., 2024): the prompt's last queries decide which of its tokens each head keeps.

The attention weights of the last `observation` queries to the tokens before the window are summed over these queries
(the observation-window scores, "votes" in section 4) and pooled over neighbours, so that a token's surroundings are
kept with it. The tokens with the best pooled scores are kept (Listing 1). The choice is made once, after the prompt.

Aggregation: the paper has a cache per query head. Here the query heads of a group share keys, and their pooled scores
are averaged (`softmax_mean`), or the largest one counts (`softmax_max`).

Differences from the paper:
  - The budget holds while decoding. The paper keeps all generated tokens beside the budget; here each takes the row of
    the prompt's token with the lowest score, and once none of the prompt is left, of the oldest generated token.
  - The first `sinks` tokens are kept whatever their scores; sinks=0 is the paper.
  - The kept window (W - 1 tokens of the prompt) and the number of observed queries are separate settings. In the paper
    they are the same: observation = window - 1.

Resident: the budget, and one number per kept row. Cost per step: nothing but attention over the budget; the scores cost
`observation` rows of attention, once per prompt.
"""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.errors import ConfigError
from kvjax.methods.shared.eviction import PromptEvictor
from kvjax.methods.shared.observation import check_rule, observation_scores, over_group, prompt_length
from kvjax.typing import Array, Float

POOLINGS = ("mean", "max")


@dataclasses.dataclass(frozen=True)
class SnapKV(PromptEvictor):
    """A cache that keeps the tokens with the highest pooled observation-window scores.

    Attributes:
      kernel: tokens that scores are pooled over, an odd number; 1 = no pooling.
      pooling: "mean" or "max".

    Raises:
      ConfigError: `kernel` is even or below 1, `pooling` is unknown, or `aggregation` is not of softmax weights.
    """

    aggregation: str = "softmax_mean"
    kernel: int = 5
    pooling: str = "mean"

    def __post_init__(self):
        super().__post_init__()
        check_rule(self.aggregation)
        if self.kernel < 1 or self.kernel % 2 == 0 or self.pooling not in POOLINGS:
            raise ConfigError(f"kernel={self.kernel} must be a positive odd number, and pooling={self.pooling!r} one "
                              f"of {', '.join(POOLINGS)}")

    def prompt_worth(self, spec, context):
        scores = observation_scores(spec, context)
        before = context.pos < prompt_length(context) - spec.ring
        pooled = _pool(jnp.where(before, scores, 0.0), self.kernel, self.pooling)
        return over_group(pooled, self.aggregation)


def _pool(observation_scores: Float[Array, "K G T"], kernel: int, pooling: str) -> Float[Array, "K G T"]:
    """Returns the mean or maximum over `kernel` neighbours; scores beyond the ends count as 0 for the mean."""
    around = (1, 1, kernel)
    if pooling == "max":
        return jax.lax.reduce_window(observation_scores, -jnp.inf, jax.lax.max, around, (1, 1, 1), "SAME")
    return jax.lax.reduce_window(observation_scores, 0.0, jax.lax.add, around, (1, 1, 1), "SAME") / kernel
