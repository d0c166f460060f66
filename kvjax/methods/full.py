"""Full attention: every token is attended. This is the reference for all other methods.

Over a store, with `kvjax.Slots(keep=False)`, it is FlexGen (Sheng et al., 2023): the whole cache is on disk and is read
layer by layer in every step. Blocks are pages in token order.

Resident: everything. Cost per step: all keys and values.
"""

import dataclasses
from typing import ClassVar

from kvjax.cache.method import HowPlaced, Method, every_occupied, in_pages, in_token_order


@dataclasses.dataclass(frozen=True)
class Full(Method):
    """A cache that attends all blocks; `page` (tokens) is only the unit of storage."""

    budget: int | None = None
    window: int = 2
    sinks: int = 0
    page: int = 64
    attends_all: ClassVar[bool] = True
    placement: ClassVar[HowPlaced] = "in_order"

    def blocks(self, capacity, rows):
        return in_pages(capacity, self.page, capacity)

    def init(self, spec, weights):
        return ()

    def build(self, spec, index, context):
        return index, in_token_order(spec, context)

    def select(self, spec, index, view, q):
        return every_occupied(spec, view)

    def append(self, spec, index, view, evicted):
        return index, in_token_order(spec, evicted)
