"""What a branch has read and written, in totals and as timestamped events."""

import dataclasses
import threading
from typing import Any, NamedTuple

import numpy as np


@dataclasses.dataclass(frozen=True)
class Stats:
    """Totals of a branch since it was made; a fork starts at zero."""

    reads: int = 0  # I/O requests made by read_into
    blocks_read: int = 0  # blocks that came from the device
    bytes_read: int = 0  # bytes requested from the device, including padding
    rows_written: int = 0  # appended rows that reached the device
    blocks_written: int = 0  # blocks written, for any reason
    blocks_short: int = 0  # of these, blocks stored in fewer pages than an extent has (`kvjax.store.format.codec`)
    bytes_put: int = 0  # bytes of committed rows and blocks and of prompts
    bytes_written: int = 0  # bytes given to the device, including padding
    read_seconds: float = 0.0  # wall time inside read_into
    # Summed over all reads whose blocks were used: from the first request to the last answer of the device. An
    # asynchronous answer is noticed only while a caller waits for it, so this is an upper bound for reads that
    # completed before they were needed.
    io_seconds: float = 0.0
    wait_seconds: float = 0.0  # time that read_into was blocked waiting for the device
    prefetched: int = 0  # blocks whose read began before they were requested
    prefetch_used: int = 0  # of these, blocks that read_into then requested
    mispredicted: int = 0  # blocks of a prefetched layer that were not prefetched and had to be read

    @property
    def write_amplification(self) -> float:
        """Bytes that reached the device per byte put. Flush first: blocks still staged are not counted."""
        return self.bytes_written / self.bytes_put if self.bytes_put else 0.0


class Event(NamedTuple):
    """A timestamped event of a layer's reads.

    `submit`: a prefetch was requested; `read`: read_into began; `request`: the first request went to the device;
    `landed`: the device answered; `answer`: read_into returned.
    """

    seconds: float  # time.perf_counter
    kind: str
    layer: int


# Totals that `native.fetch` adds to while it holds the GIL; the struct Totals of fetch.c.
FETCHED = np.dtype([
    ("reads", np.int64), ("blocks_read", np.int64), ("bytes_read", np.int64), ("prefetch_used", np.int64),
    ("mispredicted", np.int64), ("read_seconds", np.float64), ("io_seconds", np.float64), ("wait_seconds", np.float64),
])


class Tally:
    """The running totals behind `Stats`; several threads add to them.

    Attributes:
      fetched: the fields of FETCHED, as bytes.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._totals: dict[str, Any] = {}
        self._fetched = np.zeros(1, FETCHED)
        self.fetched = self._fetched.view(np.uint8)

    def add(self, **amounts) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._totals[name] = self._totals.get(name, 0) + amount

    def stats(self) -> Stats:
        with self._lock:
            totals = dict(self._totals)
        fetched = self._fetched.tolist()[0]  # one call under the GIL, so that no fetch is half counted
        for name, amount in zip(FETCHED.names, fetched, strict=True):  # type: ignore[arg-type]
            totals[name] = totals.get(name, 0) + amount
        return Stats(**totals)
