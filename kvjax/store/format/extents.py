"""Which extents of a file are in use, by how many owners, and what their bytes must hash to."""

from typing import SupportsInt

import numpy as np

from kvjax.errors import NoSpace
from kvjax.store.format.pages import HEADER_BYTES, MAX_EXTENTS

_WINDOW = 4096  # extents that are looked through at once for free ones


def run_starts(extents: np.ndarray, whole: np.ndarray | None = None) -> np.ndarray:
    """Where runs of neighbours begin in extents[n], n >= 1: int64, the first 0. One that is not whole[n] ends a run, as
    its last pages are not wanted."""
    found = np.ones(extents.size, bool)
    np.not_equal(extents[1:] - extents[:-1], 1, out=found[1:])
    if whole is not None:
        found[1:] |= ~whole[:-1]
    return found.nonzero()[0]


class ExtentPool:
    """Allocator with owner counts. Not thread-safe: the volume's lock is held around every call.

    Attributes:
      checksums: [extents] uint64, of the block in each extent, as its codec makes them; replaced by a longer array as
        the file grows. Of a file with large holes most of it is never touched, and takes no memory.
      extent_bytes: size of each.
      begin: the first extent that is not somebody else's.
    """

    def __init__(self, path: str, extent_bytes: int, max_bytes: int | None):
        self.checksums = np.zeros(64, np.uint64)
        self._owners = np.zeros(64, np.int32)
        self._path = path
        self.extent_bytes = extent_bytes
        self._max_bytes = max_bytes
        self._end = 0  # extents from here on were never used
        self._lowest = 0  # before here none is free
        self.begin = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of owner counts and checksums."""
        return self.checksums.nbytes + self._owners.nbytes

    def offset(self, extent: SupportsInt) -> int:
        """Where an extent begins in the file, bytes."""
        return HEADER_BYTES + int(extent) * self.extent_bytes

    def allocate(self, count: int) -> np.ndarray:
        """int32[count] extents with one owner each: free ones first, ascending. NoSpace beyond max_bytes."""
        free = self._first_free(count)
        found = self.claim(np.concatenate([free, np.arange(self._end, self._end + count - free.size)]))
        self._lowest = int(found.max(initial=self._lowest - 1)) + 1
        return found

    def _first_free(self, count: int) -> np.ndarray:
        """The lowest free extents before `end`, `count` if there are as many."""
        found, size, start = [np.zeros(0, np.int64)], 0, self._lowest
        while size < count and start < self._end:
            found.append(self._free(start, min(start + _WINDOW, self._end)))
            size, start = size + found[-1].size, start + _WINDOW
        return np.concatenate(found)[:count]

    def _free(self, start: int, stop: int) -> np.ndarray:
        return start + np.flatnonzero(self._owners[start:stop] == 0)

    def allocate_run(self, count: int) -> np.ndarray:
        """int32[count] neighbouring extents with one owner each: the lowest that are free, else behind all others."""
        first = self._first_run(count)
        return self.claim(np.arange(first, first + count))

    def _first_run(self, count: int) -> int:
        """Where the lowest run of free extents begins, or `end`."""
        free = np.zeros(0, np.int64)
        for start in range(self._lowest, self._end, _WINDOW):
            free = np.concatenate([free, self._free(start, min(start + _WINDOW, self._end))])
            begins = np.flatnonzero(free[count - 1:] - free[:max(0, free.size - count + 1)] == count - 1)
            if begins.size:
                return int(free[begins[0]])
            free = free[free.size - count + 1:] if free.size >= count else free  # a run may go on in the next window
        return self._end

    def claim(self, extents: np.ndarray) -> np.ndarray:
        """Gives one owner to distinct free extents, wherever they are; int32, as given. NoSpace beyond max_bytes."""
        end = max(self._end, int(extents.max(initial=-1)) + 1)
        if end > MAX_EXTENTS:
            raise NoSpace(f"{self._path}: a store file has at most {MAX_EXTENTS} blocks; save to another file")
        if self._max_bytes is not None and end > self._end and self.offset(end) > self._max_bytes:
            raise NoSpace(f"{self._path}: {extents.size} more blocks of {self.extent_bytes} bytes do not fit in "
                          f"max_bytes={self._max_bytes}; raise the limit or close forks that are no longer needed")
        self._grow(end)
        self._owners[extents] = 1
        return extents.astype(np.int32)

    def occupied(self, extents: np.ndarray) -> np.ndarray:
        """bool of extents' shape: which have an owner. Any extent may be asked about."""
        found = extents < self.begin
        used = extents < self._end
        found[used] |= self._owners[extents[used]] > 0
        return found

    def groups_in_use(self, size: int) -> np.ndarray:
        """bool[n]: which groups of `size` neighbours, those before `end`, are not wholly free."""
        count = -(-self._end // size)
        owners = _longer(self._owners, count * size)[:count * size]
        found = owners.reshape(count, size).max(-1) > 0
        found[:-(-self.begin // size)] = True
        return found

    @property
    def end(self) -> int:
        """Extents from here on were never used."""
        return self._end

    def _grow(self, end: int) -> None:
        self._end = end
        if end > self._owners.size:
            room = max(end + end // 8, 2 * self._owners.size)
            self._owners, self.checksums = _longer(self._owners, room), _longer(self.checksums, room)

    def share(self, extents: np.ndarray) -> None:
        """Adds one owner to each of distinct extents."""
        self._owners[extents] += 1

    def release(self, extents: np.ndarray) -> None:
        """Takes one owner from each of distinct extents; those without any may be allocated again."""
        self._owners[extents] -= 1
        free = extents[self._owners[extents] == 0]
        self._lowest = int(free.min(initial=self._lowest))

    def is_shared(self, extent: int) -> bool:
        return bool(extent < self.begin or self._owners[extent] > 1)

    # ---- reopening a file

    def restore(self, extents: np.ndarray, sums: np.ndarray) -> None:
        """Learns what blocks in these extents hash to; their owners come afterwards, through `share`."""
        self._grow(max(self._end, int(extents.max(initial=-1)) + 1))
        self.checksums[extents] = sums

    def leave_shared(self) -> None:
        """What there is so far belongs to somebody else: it is never allocated nor counts for `max_bytes`, and new
        extents begin after a gap, so that no request spans both kinds."""
        self._grow(self._end + 1)
        self.begin = self._lowest = self._end
        if self._max_bytes is not None:
            self._max_bytes += self.offset(self._end) - HEADER_BYTES


def _longer(array: np.ndarray, size: int) -> np.ndarray:
    """The array with zeros behind it, which take no memory until they are touched; itself if it is no shorter."""
    if size <= array.size:
        return array
    found = np.zeros(size, array.dtype)
    found[:array.size] = array
    return found
