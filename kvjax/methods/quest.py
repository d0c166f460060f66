"""Quest (Tang et al., 2024): pages in token order, ranked by an upper bound of the attention score.

Each page keeps the element-wise minimum and maximum of its keys; the largest score that any key of the page could have
with q is sum_d max(q_d * min_d, q_d * max_d) (section 3.3), and the pages with the largest bounds are attended. The
paper uses multi-head attention; for grouped queries the bound is aggregated over the group by `aggregation` (default:
maximum). The paper keeps layers 0 and 1 dense: set `dense_layers=2` for that.

Resident: 2 D numbers per page. Cost per step: one score per page, then the selected pages.
"""

import dataclasses
from typing import ClassVar

from kvjax.cache.method import HowPlaced, Method, in_pages, in_token_order
from kvjax.cache.types import Selection
from kvjax.methods.shared.page_bounds import Bounds
from kvjax.ops.topk import aggregate, top_blocks


@dataclasses.dataclass(frozen=True)
class Quest(Method):
    """A cache of pages of `page` consecutive tokens, ranked by upper bounds of their scores."""

    page: int = 16
    placement: ClassVar[HowPlaced] = "in_order"

    def blocks(self, capacity, rows):
        return in_pages(capacity, self.page, rows)

    def init(self, spec, weights):
        return Bounds.empty(spec)

    def build(self, spec, index, context):
        placement = in_token_order(spec, context)
        return index.take(placement.block, context.key), placement

    def select(self, spec, index, view, q):
        occupied = view.count > 0
        score = aggregate(index.scores(q, view.count), self.aggregation)
        return Selection(top_blocks(score, occupied, spec.max_blocks))

    def append(self, spec, index, view, evicted):
        placement = in_token_order(spec, evicted)
        return index.take(placement.block[:, None], evicted.key[:, None]), placement
