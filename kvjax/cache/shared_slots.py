"""Slots that layers take in turns: what a layer that keeps nothing has read into, the next one reads into after it.

Made anew in each layer they were page faults for a fifth of a token. Between steps the first such layer has them; a
driver lends them from layer to layer. A read of a layer comes after the attention of the one before
(`kvjax.inference.decode` makes what is needed wait for that), so that XLA copies nothing.
"""

import dataclasses
from collections.abc import Sequence
from typing import TypeGuard

from kvjax.cache.layer import LayerCache
from kvjax.cache.pool import Pool
from kvjax.cache.slots import SlotPool
from kvjax.typing import Array, Num

Space = Num[Array, "B KB NS C X2"] | None  # slots on their way; None = there are none


def take(cache: LayerCache, slots: Space) -> LayerCache:
    """The layer with slots that another one left, if it takes any."""
    if slots is None or not _passes(cache.pool):
        return cache
    return dataclasses.replace(cache, pool=dataclasses.replace(cache.pool, rows=slots))


def leave(cache: LayerCache) -> tuple[LayerCache, Space]:
    """The layer without its slots, and these; a layer that keeps them as it is, and None."""
    if not _passes(cache.pool):
        return cache, None
    rows = cache.pool.rows
    return dataclasses.replace(cache, pool=dataclasses.replace(cache.pool, rows=rows[:, :, :0])), rows


def give_back(layers: Sequence[LayerCache], slots: Space) -> list[LayerCache]:
    """The layers after a step: slots are where the next one looks for them first."""
    first = next((i for i, one in enumerate(layers) if _passes(one.pool)), len(layers))
    return [take(one, slots) if i == first else one for i, one in enumerate(layers)]


def between_steps(layers: Sequence[LayerCache]) -> Space:
    """Where `give_back` put them; None where no layer passes any on, or parked ones make them in each step."""
    return next((one.pool.rows for one in layers if _passes(one.pool) and not one.pool.waits), None)


def _passes(pool: Pool) -> TypeGuard[SlotPool]:
    return isinstance(pool, SlotPool) and pool.passing
