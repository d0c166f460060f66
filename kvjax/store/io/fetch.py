"""The interface of every engine's fetch: extents are read into memory of the store, then copied for the caller."""

import abc
from typing import NamedTuple

import numpy as np

from kvjax.errors import ReadFailed


class Times(NamedTuple):
    """The times of a fetch.

    An answer is noticed when a caller waits for it or a thread takes it, depending on the engine.

    Attributes:
      began: when the device was first asked, `time.perf_counter` seconds.
      ended: when the last answer was noticed.
      waited: seconds that the caller was blocked.
    """

    began: float
    ended: float
    waited: float


class Fetch(abc.ABC):
    """Extents that are being read, ascending. A read that hangs touches no memory but the engine's.

    Attributes:
      extents: int32[n] extents requested.
      sums: uint64[n] checksums of their blocks.
    """

    def __init__(self, extents: np.ndarray, sums: np.ndarray):
        self.extents, self.sums = extents, sums

    @abc.abstractmethod
    def collect(self, targets: np.ndarray, out: np.ndarray) -> tuple[np.ndarray, BaseException | None]:
        """Waits for everything and copies verified blocks. Call it at most once.

        Args:
          targets: int64[n] slot of each block in `out`, -1 = none.
          out: uint8[slots, block_bytes] memory of the slots.

        Returns:
          Ascending int64 positions of blocks that have a target and were not copied, and the first error; if that is
          None, these blocks are damaged.

        Raises:
          ReadFailed: nothing landed for the engine's timeout.
        """

    def copy(self, targets: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Calls `collect` and raises the first error, in which case part of `out` may be written; returns the
        positions."""
        lost, error = self.collect(targets, out)
        if error is not None:
            raise error
        return lost

    @property
    @abc.abstractmethod
    def requests(self) -> int:
        """Number of reads made so far."""

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Bytes of these reads."""

    @property
    @abc.abstractmethod
    def times(self) -> Times:
        """Times of the fetch; valid once everything has been collected."""

    @abc.abstractmethod
    def drop(self) -> None:
        """Abandons the fetch: reads that have not begun never will, and memory is released as soon as possible."""


def hung(path: str, timeout: float) -> ReadFailed:
    return ReadFailed(f"{path}: the device did not answer within {timeout} s; check the device, or increase timeout")
