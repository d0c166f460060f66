"""OmniKV (Hao et al., 2025): a few filter layers select the context tokens for the layers that follow them.

A filter layer scores every token outside sinks and window by the attention of the newest token and selects those with
the largest weights; the layers up to the next filter layer attend the same tokens (Algorithm 1). Consecutive layers
need largely the same tokens, so this is nearly as good as a selection per layer, and only filter layers need their keys
in memory.

Aggregation: the largest softmax weight over all query heads of the layer, so that all KV heads get the same tokens.

Differences from the paper:
  - In the paper one layer after each filter layer also attends everything, while the tokens of the others are read.
  - Filter layers come at equal distances: every `reuse`-th layer after the dense ones. The paper places three by hand
    (2, 8 and 18 of 32 layers), so that the later ones serve more layers.
  - Tokens of the answer are selected like others once they leave the window. In the paper they always stay.
  - Of the paper's selectors, this is the one that uses the newest token alone.

Filter layers attend everything and stay in memory, as dense layers do; with `dense_filters=False` the budget holds for
them as well. The last layer is no filter layer, as in the paper, because no layer would follow it.

Resident: keys and values of the filter layers, or their keys alone if the budget holds for them. Cost per step: full
attention in filter layers, and only attention over the selected tokens in the others.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from kvjax.cache.types import Selection
from kvjax.methods.oracle import Oracle
from kvjax.ops.topk import aggregate, top_blocks


@dataclasses.dataclass(frozen=True)
class OmniKV(Oracle):
    """A cache of tokens with the largest attention weight of any head, selected by one layer for `reuse` layers.

    Attributes:
      dense_filters: whether the layers that select attend everything.
    """

    aggregation: str = "softmax_max"
    dense_layers: int = 2
    reuse: int = 4
    dense_filters: bool = True  # type: ignore[misc]  # a class attribute elsewhere
    head_shared: ClassVar[bool] = True
    fetches_alike: ClassVar[bool] = True

    def select(self, spec, index, view, q):
        all_heads = self.scores(spec, index, view, q).reshape(1, -1, spec.num_blocks)
        score = spec.shards.over_all(aggregate(all_heads, self.aggregation), self.aggregation)
        score = jnp.broadcast_to(score, (spec.kv_heads, spec.num_blocks))
        return Selection(top_blocks(score, view.count > 0, spec.max_blocks))
