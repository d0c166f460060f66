"""What is static about one layer's cache, its state and its pool, and how a function runs over a batch."""

import dataclasses
import functools

import jax

from kvjax.cache.method import Method
from kvjax.cache.pool import Pool
from kvjax.cache.state import LayerState
from kvjax.cache.types import Spec
from kvjax.ops import quantize
from kvjax.typing import pytree


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """What is static about a layer's cache."""

    method: Method
    spec: Spec
    follows: bool = False  # placements and choices are those of the layer before (`Method.reuse`)
    filters: bool = False  # attends everything, and selects for those that follow (`Method.dense_filters`)

    @property
    def observes(self) -> bool:
        """Whether the method is shown what is attended; a layer that follows has nothing to learn."""
        return self.method.observes and not self.follows

    @property
    def dense(self) -> bool:
        """Whether every block is attended."""
        return self.method.attends_all or self.filters


@pytree
class LayerCache:
    """One layer's cache for a batch."""

    state: LayerState
    pool: Pool


def each_sequence(function, args, together: bool = False):
    """Maps over the batch: as one program on accelerators and if `together`, else one sequence after the other on CPU.

    XLA:CPU orders the sums of a softmax by the whole shape, so that a batched one would not be bit-equal to the
    sequence alone, and what is made of one sequence stays in its caches. But it copies the sequence's part of every
    array that meets a product, which takes longer than the product where that gives few numbers.
    """
    if jax.default_backend() == "cpu" and not together:
        return jax.lax.map(function, args)
    return jax.vmap(lambda *one: function(one))(*args)


@functools.partial(jax.jit, static_argnums=(0, 4))
def kept_rows(plan: LayerPlan, smoothing: quantize.Smoothing | None, key, value, dtype: str):
    """Keys and values `[B, K, *E, D]` as blocks keep them; None for keys that they do not."""
    kept = quantize.pack_keys(key, smoothing, dtype) if plan.spec.keeps_keys else None
    return kept, quantize.pack(value, dtype)
