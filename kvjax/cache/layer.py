"""The static plan of one layer's cache, the cache itself, and how a function runs over a batch."""

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
    """The static part of a layer's cache."""

    method: Method
    spec: Spec
    follows: bool = False  # takes placements and selections from the layer before (`Method.reuse`)
    filters: bool = False  # attends everything, and selects for the layers that follow it (`Method.dense_filters`)

    @property
    def observes(self) -> bool:
        """True if the method sees the attention weights; never in a layer that follows another."""
        return self.method.observes and not self.follows

    @property
    def dense(self) -> bool:
        """True if every block is attended."""
        return self.method.attends_all or self.filters


@pytree
class LayerCache:
    """The cache of one layer for a batch."""

    state: LayerState
    pool: Pool


def each_sequence(function, args, together: bool = False):
    """Maps a function over the batch: vectorised on accelerators and if `together`, else one by one on CPU.

    XLA:CPU orders the sums of a softmax by the whole shape, so a batched result would not be bit-equal to that of the
    sequence alone; besides, the intermediate results of one sequence stay in the CPU's caches. The drawback is that it
    copies each sequence's part of every array that enters a product, which takes longer than the product itself if that
    has few results.

    Args:
      function: function of one sequence, which takes a tuple.
      args: tuple of pytrees with a leading batch axis.
      together: True = vectorise on CPU, too.

    Returns:
      The results, with a leading batch axis.
    """
    if jax.default_backend() == "cpu" and not together:
        return jax.lax.map(function, args)
    return jax.vmap(lambda *one: function(one))(*args)


@functools.partial(jax.jit, static_argnums=(0, 4))
def kept_rows(plan: LayerPlan, smoothing: quantize.Smoothing | None, key, value, dtype: str):
    """Packs keys and values [B, K, *E, D] as blocks store them; keys are None if blocks hold values alone."""
    kept = quantize.pack_keys(key, smoothing, dtype) if plan.spec.keeps_keys else None
    return kept, quantize.pack(value, dtype)
