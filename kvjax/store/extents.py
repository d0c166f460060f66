"""Which extents of a file are in use, by how many owners, and what their bytes must hash to."""

from typing import SupportsInt

import numpy as np

from kvjax.errors import NoSpace
from kvjax.store.format import HEADER_BYTES


class ExtentPool:
    """Allocator with owner counts. Not thread-safe: the volume's lock is held around every call.

    Attributes:
      checksums: [extents] uint64, of the block in each extent; replaced by a longer array as the file grows.
      end: extents from here on were never used.
    """

    def __init__(self, path: str, extent_bytes: int, max_bytes: int | None):
        self.checksums = np.zeros(64, np.uint64)
        self.end = 0
        self._owners = np.zeros(64, np.int32)
        self._path = path
        self._extent_bytes = extent_bytes
        self._max_bytes = max_bytes
        self._free: list[int] = []  # descending once sorted, so that the lowest is popped first
        self._sorted = True

    def offset(self, extent: SupportsInt) -> int:
        """Where an extent begins in the file, bytes."""
        return HEADER_BYTES + int(extent) * self._extent_bytes

    def allocate(self, count: int) -> np.ndarray:
        """int32[count] extents with one owner each: free ones first, ascending. NoSpace beyond max_bytes."""
        reused = min(count, len(self._free))
        end = self.end + count - reused
        self._check_limit(count, end)
        self._sort()
        taken = [self._free.pop() for _ in range(reused)]
        extents = np.array([*taken, *range(self.end, end)], np.int32)
        self._grow(end)
        self._owners[extents] = 1
        return extents

    def allocate_run(self, count: int) -> np.ndarray:
        """int32[count] neighbouring extents with one owner each: the lowest that are free, else behind all others."""
        self._sort()
        free = np.array(self._free[::-1], np.int32)
        runs = np.flatnonzero(free[count - 1:] - free[:max(0, free.size - count + 1)] == count - 1)
        first = int(free[runs[0]]) if runs.size else self.end
        self._check_limit(count, max(self.end, first + count))
        self._grow(max(self.end, first + count))
        if runs.size:
            behind = len(self._free) - int(runs[0])
            del self._free[behind - count:behind]
        extents = np.arange(first, first + count, dtype=np.int32)
        self._owners[extents] = 1
        return extents

    def _check_limit(self, count: int, end: int) -> None:
        if self._max_bytes is not None and end > self.end and self.offset(end) > self._max_bytes:
            raise NoSpace(f"{self._path}: {count} more blocks of {self._extent_bytes} bytes do not fit in max_bytes="
                          f"{self._max_bytes}; raise the limit or close forks that are no longer needed")

    def _sort(self) -> None:
        if not self._sorted:
            self._free.sort(reverse=True)
            self._sorted = True

    def _grow(self, end: int) -> None:
        self.end = end
        if end > self._owners.size:
            room = max(end, 2 * self._owners.size) - self._owners.size
            self._owners = np.concatenate([self._owners, np.zeros(room, np.int32)])
            self.checksums = np.concatenate([self.checksums, np.zeros(room, np.uint64)])

    def share(self, extents: np.ndarray) -> None:
        """Adds one owner to each of distinct extents."""
        self._owners[extents] += 1

    def release(self, extents: np.ndarray) -> None:
        """Takes one owner from each of distinct extents; those without any may be allocated again."""
        self._owners[extents] -= 1
        freed = extents[self._owners[extents] == 0]
        self._free.extend(freed.tolist())
        self._sorted = self._sorted and not freed.size

    def is_shared(self, extent: int) -> bool:
        return bool(self._owners[extent] > 1)

    # ---- reopening a file

    def restore(self, extents: np.ndarray, sums: np.ndarray) -> None:
        """Learns what blocks in these distinct extents hash to; their owners come afterwards, through `share`."""
        if extents.size:
            self._grow(max(self.end, int(extents.max()) + 1))
            self.checksums[extents] = sums

    def restored(self, private: bool) -> None:
        """All owners are known: the rest is free. If `private`, nothing up to here belongs to us, nor counts for
        `max_bytes`: new extents begin after a gap, so that no request spans both kinds."""
        self._free = [] if private else np.flatnonzero(self._owners[:self.end] == 0)[::-1].tolist()
        self._grow(self.end + private)
        if private and self._max_bytes is not None:
            self._max_bytes += self.offset(self.end) - HEADER_BYTES

    @property
    def free(self) -> int:
        """How many extents before `end` have no owner."""
        return len(self._free)
