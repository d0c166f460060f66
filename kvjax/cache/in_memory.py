"""The choice of a pool in memory for the platform, in one place."""

from kvjax.cache.pool import MemoryPool, Pool
from kvjax.cache.types import Spec
from kvjax.ops.kernels import tiles


def empty_pool(spec: Spec, batch: int, dtype: str) -> Pool:
    """Creates an empty pool in memory, of the kind that suits the platform.

    Args:
      spec: sizes of the layer's cache.
      batch: number of sequences.
      dtype: type of keys and values (`kvjax.ops.quantize`).
    """
    return suited(MemoryPool.zeros(spec, batch, dtype))


def suited(pool: MemoryPool) -> Pool:
    """Returns a pool in memory in the form that suits the platform."""
    if not tiles.wanted():
        return pool
    from kvjax.cache.tiled_pool import TiledPool  # imports Pallas, which takes a while

    return TiledPool.of(pool)
