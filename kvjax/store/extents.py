"""Which extents of a file are in use, by how many branches, and what their bytes must hash to."""

from typing import SupportsInt

import numpy as np

from kvjax.errors import NoSpace
from kvjax.store.format import HEADER_BYTES


class ExtentPool:
    """Allocator with owner counts. Not thread-safe: the volume's lock is held around every call.

    Attributes:
      checksums: [extents] uint64, of the block in each extent; replaced by a longer array as the file grows.
    """

    def __init__(self, path: str, extent_bytes: int, max_bytes: int | None):
        self.checksums = np.zeros(64, np.uint64)
        self._owners = np.zeros(64, np.int32)
        self._path = path
        self._extent_bytes = extent_bytes
        self._max_bytes = max_bytes
        self._end = 0  # extents from here on were never used
        self._free: list[int] = []  # descending once sorted, so that the lowest is popped first
        self._sorted = True

    def offset(self, extent: SupportsInt) -> int:
        """Where an extent begins in the file, bytes."""
        return HEADER_BYTES + int(extent) * self._extent_bytes

    def allocate(self, count: int) -> np.ndarray:
        """int32[count] extents with one owner each: free ones first, ascending. NoSpace beyond max_bytes."""
        reused = min(count, len(self._free))
        end = self._end + count - reused
        if self._max_bytes is not None and end > self._end and self.offset(end) > self._max_bytes:
            raise NoSpace(f"{self._path}: {count} more blocks of {self._extent_bytes} bytes do not fit in max_bytes="
                          f"{self._max_bytes}; raise the limit or close forks that are no longer needed")
        if not self._sorted:
            self._free.sort(reverse=True)
            self._sorted = True
        taken = [self._free.pop() for _ in range(reused)]
        extents = np.array([*taken, *range(self._end, end)], np.int32)
        self._grow(end)
        self._owners[extents] = 1
        return extents

    def _grow(self, end: int) -> None:
        self._end = end
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
