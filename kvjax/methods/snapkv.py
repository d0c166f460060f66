"""SnapKV (Li et al., 2024): the prompt's last queries vote which of its tokens each head keeps.

The attention weights of the last `observation` queries to the tokens before the window are summed over these queries
(the votes of section 4), pooled over neighbours so that what surrounds a token is kept with it, and the tokens with
most votes are kept (Listing 1). Nothing is decided later.

Aggregation: the paper has a cache per query head. Here the heads of a group share keys, and their pooled votes are
averaged (`softmax_mean`), or the largest counts (`softmax_max`).

Differences from the paper:
  - the budget holds while decoding. The paper keeps all generated tokens beside it; here they take the rows of the
    prompt's tokens with fewest votes, and once none is left, of the oldest generated ones.
  - `sinks` first tokens are kept whatever their votes; sinks=0 is the paper.
  - the window that is kept (W - 1 tokens of the prompt) and the queries that vote are set apart; in the paper they are
    the same: observation = window - 1.

Resident: the budget, and one number per kept row. Cost per step: nothing but attention over the budget; the votes cost
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
    """Tokens with the most pooled votes.

    Attributes:
      kernel: tokens that votes are pooled over, an odd number; 1 = no pooling.
      pooling: "mean" or "max".
    """

    aggregation: str = "softmax_mean"
    kernel: int = 5
    pooling: str = "mean"

    def __post_init__(self):
        super().__post_init__()
        check_rule(self.aggregation)
        if self.kernel < 1 or self.kernel % 2 == 0 or self.pooling not in POOLINGS:
            raise ConfigError(f"kernel={self.kernel} must be odd, and pooling={self.pooling!r} one of "
                              f"{', '.join(POOLINGS)}")

    def prompt_worth(self, spec, context):
        cast = observation_scores(spec, context)
        before = context.pos < prompt_length(context) - spec.ring
        pooled = _pool(jnp.where(before, cast, 0.0), self.kernel, self.pooling)
        return over_group(pooled, self.aggregation)


def _pool(observation_scores: Float[Array, "K G T"], kernel: int, pooling: str) -> Float[Array, "K G T"]:
    """Mean or maximum over `kernel` neighbours; beyond the ends there are no votes."""
    around = (1, 1, kernel)
    if pooling == "max":
        return jax.lax.reduce_window(observation_scores, -jnp.inf, jax.lax.max, around, (1, 1, 1), "SAME")
    return jax.lax.reduce_window(observation_scores, 0.0, jax.lax.add, around, (1, 1, 1), "SAME") / kernel
