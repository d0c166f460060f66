"""Allocation of a file's extents: which are in use, by how many owners, and the checksums of their blocks."""

from typing import SupportsInt

import numpy as np

from kvjax.errors import NoSpace
from kvjax.store.format.pages import HEADER_BYTES, MAX_EXTENTS

_WINDOW = 4096  # extents searched at a time for free ones


def run_starts(extents: np.ndarray, whole: np.ndarray | None = None) -> np.ndarray:
    """Finds runs of neighbouring extents.

    Args:
      extents: int32[n] ascending, n >= 1.
      whole: bool[n]; an extent that is not whole ends its run, as its last pages are not wanted. None = all are whole.

    Returns:
      int64 positions where runs begin; the first one is 0.
    """
    begins = np.ones(extents.size, bool)
    np.not_equal(extents[1:] - extents[:-1], 1, out=begins[1:])
    if whole is not None:
        begins[1:] |= ~whole[:-1]
    return begins.nonzero()[0]


class ExtentPool:
    """An allocator of extents with owner counts. Not thread-safe: the volume's lock is held around every call.

    Attributes:
      checksums: uint64[extents] of the block in each extent, as its codec makes them; replaced by a longer array as the
        file grows. In a file with large holes most of it is never touched, and takes no memory.
      extent_bytes: size of an extent.
      begin: the first extent that is not part of a shared file opened read-only.
    """

    def __init__(self, path: str, extent_bytes: int, max_bytes: int | None):
        self.checksums = np.zeros(64, np.uint64)
        self._owners = np.zeros(64, np.int32)
        self._path = path
        self.extent_bytes = extent_bytes
        self._max_bytes = max_bytes
        self._end = 0  # extents from here on were never used
        self._lowest = 0  # no extent before this one is free
        self.begin = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of owner counts and checksums."""
        return self.checksums.nbytes + self._owners.nbytes

    def offset(self, extent: SupportsInt) -> int:
        """Returns where an extent begins in the file, in bytes."""
        return HEADER_BYTES + int(extent) * self.extent_bytes

    def allocate(self, count: int) -> np.ndarray:
        """Returns int32[count] extents with one owner each: free ones first, ascending. Raises NoSpace beyond
        max_bytes."""
        free = self._first_free(count)
        extents = self.claim(np.concatenate([free, np.arange(self._end, self._end + count - free.size)]))
        self._lowest = int(extents.max(initial=self._lowest - 1)) + 1
        return extents

    def _first_free(self, count: int) -> np.ndarray:
        """Returns the lowest free extents before `end`, at most `count`."""
        found, size, start = [np.zeros(0, np.int64)], 0, self._lowest
        while size < count and start < self._end:
            found.append(self._free(start, min(start + _WINDOW, self._end)))
            size, start = size + found[-1].size, start + _WINDOW
        return np.concatenate(found)[:count]

    def _free(self, start: int, stop: int) -> np.ndarray:
        return start + np.flatnonzero(self._owners[start:stop] == 0)

    def allocate_run(self, count: int) -> np.ndarray:
        """Returns int32[count] neighbouring extents with one owner each: the lowest free run, else one after all
        others. Raises NoSpace beyond max_bytes."""
        first = self._first_run(count)
        return self.claim(np.arange(first, first + count))

    def _first_run(self, count: int) -> int:
        """Returns where the lowest run of free extents begins, or `end`."""
        free = np.zeros(0, np.int64)
        for start in range(self._lowest, self._end, _WINDOW):
            free = np.concatenate([free, self._free(start, min(start + _WINDOW, self._end))])
            begins = np.flatnonzero(free[count - 1:] - free[:max(0, free.size - count + 1)] == count - 1)
            if begins.size:
                return int(free[begins[0]])
            free = free[free.size - count + 1:] if free.size >= count else free  # runs may continue in the next window
        return self._end

    def claim(self, extents: np.ndarray) -> np.ndarray:
        """Gives one owner to distinct free extents at any position; returns them as int32. Raises NoSpace beyond
        max_bytes."""
        end = max(self._end, int(extents.max(initial=-1)) + 1)
        if end > MAX_EXTENTS:
            raise NoSpace(f"{self._path}: a store file has at most {MAX_EXTENTS} extents; save to another file")
        if self._max_bytes is not None and end > self._end and self.offset(end) > self._max_bytes:
            raise NoSpace(f"{self._path}: {extents.size} more blocks of {self.extent_bytes} bytes do not fit in "
                          f"max_bytes={self._max_bytes}; increase it, or close forks that are no longer needed")
        self._grow(end)
        self._owners[extents] = 1
        return extents.astype(np.int32)

    def occupied(self, extents: np.ndarray) -> np.ndarray:
        """Returns which extents have an owner, a bool array of their shape; extents beyond the end are allowed."""
        taken = extents < self.begin
        used = extents < self._end
        taken[used] |= self._owners[extents[used]] > 0
        return taken

    def groups_in_use(self, size: int) -> np.ndarray:
        """Returns which groups of `size` consecutive extents before `end` are not entirely free, bool[n]."""
        count = -(-self._end // size)
        owners = _longer(self._owners, count * size)[:count * size]
        in_use = owners.reshape(count, size).max(-1) > 0
        in_use[:-(-self.begin // size)] = True
        return in_use

    @property
    def end(self) -> int:
        """The first extent after all that were ever used."""
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
        """Removes one owner from each of distinct extents; extents without owners may be allocated again."""
        self._owners[extents] -= 1
        free = extents[self._owners[extents] == 0]
        self._lowest = int(free.min(initial=self._lowest))

    def is_shared(self, extent: int) -> bool:
        return bool(extent < self.begin or self._owners[extent] > 1)

    # ---- reopening a file

    def restore(self, extents: np.ndarray, sums: np.ndarray) -> None:
        """Sets the checksums of the blocks in these extents; owners are added afterwards by `share`."""
        self._grow(max(self._end, int(extents.max(initial=-1)) + 1))
        self.checksums[extents] = sums

    def leave_shared(self) -> None:
        """Excludes all present extents, which belong to a shared file: they are never allocated and do not count for
        `max_bytes`. New extents begin after a gap, so that no request spans both kinds."""
        self._grow(self._end + 1)
        self.begin = self._lowest = self._end
        if self._max_bytes is not None:
            self._max_bytes += self.offset(self._end) - HEADER_BYTES


def _longer(array: np.ndarray, size: int) -> np.ndarray:
    """Returns the array with zeros appended, which take no memory until they are touched; the array itself if it is no
    shorter."""
    if size <= array.size:
        return array
    longer = np.zeros(size, array.dtype)
    longer[:array.size] = array
    return longer
