"""Shared slots: one slot buffer for all layers that keep no blocks between steps.

Layer i + 1 reuses the buffer once layer i has attended. Allocating it anew in each layer costs page faults that take a
fifth of a token's time. Between steps the first such layer holds the buffer; during a step a driver hands it from layer
to layer. `kvjax.inference.decode` makes each layer's read depend on the attention of the layer before, so XLA copies
nothing.
"""

import dataclasses
from collections.abc import Sequence
from typing import TypeGuard

from kvjax.cache.layer import LayerCache
from kvjax.cache.pool import Pool
from kvjax.cache.slots import SlotPool
from kvjax.typing import Array, Num

Space = Num[Array, "B KB NS C X2"] | None  # shared slots on their way to the next layer; None = there are none


def take(cache: LayerCache, slots: Space) -> LayerCache:
    """Gives shared slots to a layer if it uses them; returns the layer."""
    if slots is None or not _passes(cache.pool):
        return cache
    return dataclasses.replace(cache, pool=dataclasses.replace(cache.pool, rows=slots))


def leave(cache: LayerCache) -> tuple[LayerCache, Space]:
    """Takes the shared slots from a layer; returns the layer and the slots (None if it does not use shared slots)."""
    if not _passes(cache.pool):
        return cache, None
    rows = cache.pool.rows
    return dataclasses.replace(cache, pool=dataclasses.replace(cache.pool, rows=rows[:, :, :0])), rows


def give_back(layers: Sequence[LayerCache], slots: Space) -> list[LayerCache]:
    """Gives shared slots to the first layer that uses them, where the next step begins; returns the layers."""
    first = next((i for i, layer in enumerate(layers) if _passes(layer.pool)), len(layers))
    return [take(layer, slots) if i == first else layer for i, layer in enumerate(layers)]


def made(layers: Sequence[LayerCache]) -> list[LayerCache]:
    """Makes the slots now if no step has made them, for a loop, whose arrays keep their shapes; returns the layers."""
    first = next((layer.pool for layer in layers if _passes(layer.pool)), None)
    return list(layers) if first is None or between_steps(layers) is not None else give_back(layers, first.own_rows)


def between_steps(layers: Sequence[LayerCache]) -> Space:
    """Returns the shared slots that `give_back` stored.

    Returns None if no layer uses any, or if layers are offloaded, so that each step makes them anew.
    """
    return next((layer.pool.rows for layer in layers if _passes(layer.pool) and not layer.pool.waits), None)


def _passes(pool: Pool) -> TypeGuard[SlotPool]:
    return isinstance(pool, SlotPool) and pool.passing
