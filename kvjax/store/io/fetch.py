"""What every engine's fetch can do: extents on their way into memory of the store, for whoever asked to copy."""

import abc
from typing import NamedTuple

import numpy as np

from kvjax.errors import ReadFailed


class Times(NamedTuple):
    """When the device was first asked and was seen to have answered all (`time.perf_counter`); seconds the caller was
    blocked. An answer is seen when somebody waits for it or a thread takes it, whichever the engine has."""

    began: float
    ended: float
    waited: float


class Fetch(abc.ABC):
    """Extents being read, ascending. A read that hangs touches no memory but the engine's.

    Attributes:
      extents, sums: int32[n] and uint64[n], what was asked for, and what the blocks must hash to.
    """

    def __init__(self, extents: np.ndarray, sums: np.ndarray):
        self.extents, self.sums = extents, sums

    @abc.abstractmethod
    def collect(self, targets: np.ndarray, out: np.ndarray) -> tuple[np.ndarray, BaseException | None]:
        """Waits for everything and copies verified blocks to out[targets], out[slots, block_bytes]; a target of -1 is
        nowhere. Called once at most.

        Returns ascending int64 positions of blocks that have a target and are not there, and the first error; without
        one they are damaged. Raises ReadFailed when nothing lands for the engine's timeout.
        """

    def copy(self, targets: np.ndarray, out: np.ndarray) -> np.ndarray:
        """`collect` that raises the first error; then part of `out` may be written."""
        lost, error = self.collect(targets, out)
        if error is not None:
            raise error
        return lost

    @property
    @abc.abstractmethod
    def requests(self) -> int:
        """Reads made so far."""

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Bytes of these."""

    @property
    @abc.abstractmethod
    def times(self) -> Times:
        """Meaningful once everything has been collected."""

    @abc.abstractmethod
    def drop(self) -> None:
        """Nobody will collect: what has not begun never will, and memory goes back as soon as it can."""


def hung(path: str, timeout: float) -> ReadFailed:
    return ReadFailed(f"{path}: the device did not answer within {timeout} s; check it, or raise timeout")
