"""Reading with Linux native asynchronous I/O: the caller hands the kernel all reads at once, and no thread blocks.

A fetch borrows a `Ring`: a kernel context and the memory it reads into. The kernel may write to that memory until it
has answered, so a ring is used again only when all its answers are in; one that is given back earlier is parked. Only
O_DIRECT reads are asynchronous, buffered ones would block in their submission.

The fast way is for whole reads. What comes short, was interrupted or could not be begun without blocking (the range is
still being written back, the device's queue is full) is read once more by threads, which know how to go on.
"""

import collections
import contextlib
import errno
import itertools
import os
import time

import numpy as np

from kvjax.errors import ReadFailed
from kvjax.store.base import Geometry
from kvjax.store.extents import breaks
from kvjax.store.fetch import Fetch, Times, hung
from kvjax.store.file import BlockFile, Where
from kvjax.store.format import HEADER_BYTES, checksum
from kvjax.store.linux import EVENT, IOCB, IOCB_CMD_PREAD, RWF_NOWAIT
from kvjax.store.system import SystemIO
from kvjax.store.threaded import ThreadEngine
from kvjax.store.workers import PIECE_BYTES, Arena

_TRY_AGAIN = (errno.EINTR, errno.EAGAIN, errno.EINVAL, errno.EOPNOTSUPP)  # threads find out what is behind the last two


class Ring:
    """A kernel context and an arena; the user of the ring says which read goes where in it.

    Attributes:
      arena: memory for as many extents as there can be reads in flight.
      in_flight: reads the kernel has not answered yet, or whose answers were not taken.
    """

    def __init__(self, system: SystemIO, extents: int, extent_bytes: int, block_bytes: int):
        self.arena = Arena(extents, extent_bytes, block_bytes)
        self.in_flight = 0
        self._system = system
        self._events = np.zeros(extents, EVENT)
        self._context = system.io_setup(extents)
        self._closed = False

    def submit(self, control: np.ndarray) -> int:
        """How many of the IOCB control[n] the kernel took: the first ones, none when it has no room. OSError when it
        will not take the first whatever happens."""
        pointers = np.arange(control.size, dtype=np.uint64) * np.uint64(IOCB.itemsize) + np.uint64(control.ctypes.data)
        try:
            taken = self._system.io_submit(self._context, pointers)
        except OSError as cause:
            if cause.errno not in (errno.EAGAIN, errno.EINTR):
                raise
            taken = 0
        self.in_flight += taken
        return taken

    def wait(self, least: int, seconds: float) -> np.ndarray:
        """EVENT[n] that came, `least` or more; fewer only when the time is up. Good until the next call."""
        until = time.monotonic() + seconds
        while True:
            with contextlib.suppress(InterruptedError):
                count = self._system.io_getevents(self._context, least, self._events, seconds)
                self.in_flight -= count
                return self._events[:count]
            seconds = max(0.0, until - time.monotonic())

    def settled(self) -> bool:
        """Whether the kernel has done with the memory. Does not block."""
        if self.in_flight:
            self.wait(0, 0.0)
        return not self.in_flight

    def close(self, seconds: float) -> None:
        """Ends the context. A device that hangs for so long keeps it, as ending it would hang too."""
        if self.in_flight:
            self.wait(self.in_flight, seconds)
        if not self.in_flight and not self._closed:
            self._closed = True
            self._system.io_destroy(self._context)


class RingStack:
    """Rings that are lent and come back. Takes no lock: a fetch may be forgotten anywhere, also inside a finalizer."""

    MAX_BYTES = 8 << 20  # in flight for one fetch, more than any device needs to be busy
    MAX_DEPTH = 512  # of /proc/sys/fs/aio-max-nr, 65,536 by default, for all processes

    def __init__(self, system: SystemIO, extent_bytes: int, block_bytes: int):
        self.piece = max(1, min(PIECE_BYTES, self.MAX_BYTES // 2) // extent_bytes)
        pieces = min(self.MAX_BYTES // (self.piece * extent_bytes), self.MAX_DEPTH // self.piece)
        self.extents = self.piece * max(2, pieces)
        self._arguments = (system, self.extents, extent_bytes, block_bytes)
        self._all: list[Ring] = []
        self._idle: collections.deque[Ring] = collections.deque()
        self._parked: collections.deque[Ring] = collections.deque()

    def take(self) -> Ring:
        """A ring with nothing in flight. OSError when the kernel gives no more."""
        with contextlib.suppress(IndexError):
            for _ in range(len(self._parked)):
                self.give(self._parked.popleft())
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        ring = Ring(*self._arguments)
        self._all.append(ring)
        return ring

    def give(self, ring: Ring) -> None:
        """Takes a ring back; while the kernel may still write to its memory, it is parked."""
        (self._idle if ring.settled() else self._parked).append(ring)

    def close(self, seconds: float) -> None:
        """Nobody reads any more, and whoever has a ring will not use it."""
        self._idle.clear()
        self._parked.clear()
        until = time.monotonic() + seconds
        for ring in self._all:
            ring.close(max(0.0, until - time.monotonic()))


class RingFetch(Fetch):
    """A fetch whose block i passes through place i % extents of its ring: a read is handed to the kernel once those
    that had its places before have been copied. Runs of neighbours are one read, cut at every `piece` of the fetch."""

    _ring: Ring | None = None

    def __init__(self, engine: "RingEngine", extents: np.ndarray, sums: np.ndarray, where: Where):
        super().__init__(extents, sums)
        self._engine = engine
        self._where = where
        begins = breaks(extents)
        begins[::engine.rings.piece] = True
        self._starts = begins.nonzero()[0]
        self._stops = np.append(self._starts[1:], extents.size)
        self._sent = 0
        self._second: Fetch | None = None
        self._ended = self._waited = 0.0
        self._ring = engine.rings.take()
        self._control = engine.control(self._ring, extents[self._starts], self._starts, self._stops)
        self._began = time.perf_counter()
        self._send(first=0)

    def _send(self, first: int) -> None:
        """Hands over the reads whose places are free, as far as the kernel takes them; `first` is the earliest read
        that was not copied."""
        ring: Ring = self._ring  # type: ignore[assignment]
        stop = int(self._stops.searchsorted(self._starts[first] + ring.arena.extents, "right"))
        while self._sent < stop:
            taken = ring.submit(self._control[self._sent:stop])
            if not taken:
                return
            self._sent += taken

    def collect(self, targets, out):
        lost = targets >= 0
        try:
            again, error = self._collect(targets, out, lost)
        finally:
            self.drop()
        again = again[lost[again]]
        if again.size:
            self._second = self._engine.threads.start(self.extents[again], self.sums[again], self._where)
            missed, cause = self._second.collect(targets[again], out)
            lost[again] = False
            lost[again[missed]] = True
            error = error or cause
        return lost.nonzero()[0], error

    def _collect(self, targets, out, lost) -> tuple[np.ndarray, ReadFailed | None]:
        """Copies what lands, and clears its marks in lost[n]. Returns positions to read again, and the first error."""
        ring: Ring = self._ring  # type: ignore[assignment]
        goals, sums, sizes = targets.tolist(), self.sums.tolist(), self._control["nbytes"].astype(np.int64)
        copied = np.zeros(self._starts.size, bool)
        again, error = [], None
        while ring.in_flight:
            reads, results = self._wait(ring)
            whole = results == sizes[reads]
            lost[self._copy(ring.arena, self._positions(reads[whole]), goals, sums, out)] = False
            for read, result in zip(reads[~whole].tolist(), results[~whole].tolist(), strict=True):
                if result < 0 and -result not in _TRY_AGAIN:
                    error = error or self._failed(read, -result)
                else:
                    again.append(read)
            if self._sent < copied.size:
                copied[reads] = True
                self._send(int(copied.argmin()))
        again.extend(range(self._sent, copied.size))
        return np.array(self._positions(np.sort(np.array(again, np.int64))), np.int64), error

    def _wait(self, ring: Ring) -> tuple[np.ndarray, np.ndarray]:
        """Numbers and results of half of the reads in flight, or more: so there are few calls, and hardly anything is
        left to do when the device is done."""
        began = time.perf_counter()
        events = ring.wait(-(-ring.in_flight // 2), self._engine.timeout)
        self._ended = time.perf_counter()
        self._waited += self._ended - began
        if not events.size:
            raise hung(self._engine.path, self._engine.timeout)
        return events["data"].astype(np.int64), events["result"]

    def _positions(self, reads: np.ndarray) -> list[int]:
        """Of all blocks of these reads."""
        if self._starts.size == self.extents.size:
            return reads.tolist()
        spans = zip(self._starts[reads].tolist(), self._stops[reads].tolist(), strict=True)
        return list(itertools.chain.from_iterable(itertools.starmap(range, spans)))

    @staticmethod
    def _copy(arena: Arena, positions: list[int], goals: list[int], sums: list[int], out: np.ndarray) -> list[int]:
        """Verifies and copies block by block, while one is in the CPU's cache; returns positions of those it did."""
        sound = []
        for i in positions:
            place = i % arena.extents
            if goals[i] >= 0 and checksum(arena.payloads[place]) == sums[i]:
                out[goals[i]] = arena.blocks[place]
                sound.append(i)
        return sound

    def _failed(self, read: int, code: int) -> ReadFailed:
        engine = self._engine
        offset = HEADER_BYTES + int(self.extents[self._starts[read]]) * engine.extent_bytes
        return engine.file.read_error(OSError(code, os.strerror(code)), offset, self._where)

    @property
    def requests(self) -> int:
        return self._sent + (self._second.requests if self._second else 0)

    @property
    def times(self) -> Times:
        if self._second is None:
            return Times(self._began, self._ended, self._waited)
        second = self._second.times
        return Times(self._began, second.ended, self._waited + second.waited)

    def drop(self) -> None:
        ring, self._ring = self._ring, None
        if ring is not None:
            self._engine.rings.give(ring)

    __del__ = drop  # a guess that is forgotten with its branch


class RingEngine:
    """Fetches extents of one O_DIRECT file with rings.

    Attributes:
      path: the file's, for messages.
      timeout: seconds after which a device that has not answered is given up.
      threads: for what has to be read again.
    """

    def __init__(self, file: BlockFile, geometry: Geometry, system: SystemIO, threads: ThreadEngine, timeout: float):
        """OSError where the kernel has no asynchronous I/O, or none left."""
        self.path = file.path
        self.timeout = timeout
        self.threads = threads
        self.file = file
        self.extent_bytes = geometry.extent_bytes
        self.rings = RingStack(system, geometry.extent_bytes, geometry.block_bytes)
        self.rings.give(self.rings.take())

    def start(self, extents: np.ndarray, sums: np.ndarray, where: Where) -> RingFetch:
        """OSError when there is no ring left, or the kernel refuses to use it."""
        return RingFetch(self, extents, sums, where)

    def control(self, ring: Ring, extents: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """IOCB[reads] that read extents[reads] and their neighbours, as many as from position start to stop."""
        control = np.zeros(starts.size, IOCB)
        offsets = HEADER_BYTES + extents.astype(np.int64) * self.extent_bytes
        control["descriptor"], control["offset"] = self.file.direct_places(offsets)
        control["data"] = np.arange(starts.size)
        control["opcode"], control["rw_flags"] = IOCB_CMD_PREAD, RWF_NOWAIT
        control["buffer"] = ring.arena.address + starts % ring.arena.extents * self.extent_bytes
        control["nbytes"] = (stops - starts) * self.extent_bytes
        return control

    def close(self) -> None:
        """Ends what the kernel holds for us; nobody reads any more."""
        self.rings.close(self.timeout)
