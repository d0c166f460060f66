"""Blocks that are read before anybody asks for them, and what became of the guess."""

import numpy as np

from kvjax.store.reader import Fetch


class Ahead:
    """Prefetched extents of one layer.

    A prefetched block is used only if it still lies in the same extent and has the same checksum as when it was
    asked for; everything else is read again. So a prefetch can be wrong, late or broken, and never changes a result.
    """

    def __init__(self, fetch: Fetch):
        self._fetch = fetch

    def find(self, extents: np.ndarray, sums: np.ndarray) -> np.ndarray:
        """Position of each block in the prefetch, -1 where it is not there: int64[n]."""
        ours = self._fetch.extents
        place = np.minimum(ours.searchsorted(extents), ours.size - 1)
        return np.where((ours[place] == extents) & (self._fetch.sums[place] == sums), place, -1)

    def copy(self, place: np.ndarray, targets: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Copies blocks at place[n] (-1: none) to out[targets]; returns int64 positions of those that did not arrive
        sound and are to be read again. Raises ReadFailed when the device hangs."""
        done = place < 0
        for chunk in self._fetch.landed():
            if chunk.error is not None:
                continue
            inside = place - chunk.first
            mine = ((inside >= 0) & (inside < chunk.sums.size)).nonzero()[0]
            mine = mine[chunk.right[inside[mine]]]
            out[targets[mine]] = chunk.arena.blocks[inside[mine]]
            done[mine] = True
        return (~done).nonzero()[0]

    @property
    def fetch(self) -> Fetch:
        return self._fetch
