"""StreamingLLM (Xiao et al., 2023): attention sinks and a recent window; all other tokens are dropped.

The window takes the whole budget that the sinks leave. Positions stay true positions, as in the other methods. The
paper renumbers them inside the cache, which only matters beyond the trained length.

Resident: the budget. Cost per step: nothing beyond the tail.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from kvjax.cache.method import HowPlaced, Method
from kvjax.cache.types import Placement, Selection
from kvjax.errors import BudgetTooSmall, ConfigError


@dataclasses.dataclass(frozen=True)
class StreamingLLM(Method):
    """A cache of sinks and window only; the setting `window` is ignored, as the window is what the budget leaves."""

    evicts: ClassVar[bool] = True
    endless: ClassVar[bool] = True
    placement: ClassVar[HowPlaced] = "alike"

    def spec(self, *, kv_heads, group, head_dim, capacity):
        if self.budget is None:
            raise ConfigError("budget=None, but streaming_llm sizes its window by the budget; give one")
        window = min(self.budget, capacity) - self.sinks
        if window < 2:
            raise BudgetTooSmall(f"budget={self.budget} leaves no window of at least 2 tokens beside {self.sinks} "
                                 "sinks; raise it, or lower sinks")
        widened = dataclasses.replace(self, window=window)
        return super(StreamingLLM, widened).spec(
            kv_heads=kv_heads, group=group, head_dim=head_dim, capacity=capacity
        )

    def blocks(self, capacity, rows):
        return 1, 1, 1, 0

    def init(self, spec, weights):
        return ()

    def build(self, spec, index, context):
        return index, _nowhere(spec, context.pos.shape)

    def select(self, spec, index, view, q):
        return Selection(jnp.full((spec.kv_heads, spec.max_blocks), spec.num_blocks, jnp.int32))

    def append(self, spec, index, view, evicted):
        return index, _nowhere(spec, ())


def _nowhere(spec, shape):
    block = jnp.full((spec.kv_heads, *shape), spec.num_blocks, jnp.int32)
    return Placement(block, jnp.zeros_like(block))
