"""OmniKV (Hao et al., 2025): a few filter layers choose the context tokens, and the layers after each use their choice.

A filter layer scores every token by the attention of the newest one, sinks and window apart, and takes those with the
largest weight; the layers up to the next filter layer attend the same tokens (Algorithm 1). As consecutive layers need
much the same tokens, that is nearly as good as a choice of their own, and only filter layers need their keys at hand.

Aggregation: the largest softmax weight over all query heads of the layer, so that all KV heads get the same tokens.

Differences from the paper:
  - in the paper a layer behind each filter layer attends everything, too, while the others' tokens are being read.
  - filter layers come at equal distances: every `reuse`-th after the dense ones. The paper places three of them by
    hand (2, 8 and 18 of 32 layers), which gives the last ones longer runs.
  - tokens of the answer are chosen like others once they leave the window; in the paper they always stay.
  - of the paper's selectors this is the one that looks at the newest token alone.

Filter layers attend everything and stay in memory, as dense layers do; with `dense_filters=False` the budget holds for
them, too. The last layer is no filter layer in the paper either, as nobody would follow it.

Resident: keys and values of the filter layers, or their keys alone if the budget holds for them. Cost per step: full
attention in filter layers, nothing but that of the chosen tokens in the others.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from kvjax.cache.method import Selection, no_force
from kvjax.methods.oracle import Oracle
from kvjax.ops.topk import aggregate, top_blocks


@dataclasses.dataclass(frozen=True)
class OmniKV(Oracle):
    """Tokens with the largest attention weight of any head, chosen by one layer for `reuse` layers.

    Attributes:
      dense_filters: whether the layers that choose attend everything.
    """

    aggregation: str = "softmax_max"
    dense_layers: int = 2
    reuse: int = 4
    dense_filters: bool = True  # type: ignore[misc]  # of the class elsewhere, a setting here
    head_shared: ClassVar[bool] = True
    fetches_alike: ClassVar[bool] = True

    def select(self, spec, index, view, q):
        everyone = self.scores(spec, index, view, q).reshape(1, -1, spec.num_blocks)
        score = jnp.broadcast_to(aggregate(everyone, self.aggregation), (spec.kv_heads, spec.num_blocks))
        return Selection(top_blocks(score, view.count > 0, spec.max_blocks), no_force(spec))
