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
_NONE = np.zeros(0, np.int64)


class Ring:
    """A kernel context and an arena; the user of the ring says which read goes where in it.

    Attributes:
      arena: memory for as many extents as there can be reads in flight.
      single: IOCB[extents] that read one extent each, number i to place i; all but descriptor and offset.
      in_flight: reads the kernel has not answered yet, or whose answers were not taken.
    """

    def __init__(self, system: SystemIO, extents: int, extent_bytes: int, block_bytes: int):
        self.arena = Arena(extents, extent_bytes, block_bytes)
        self.in_flight = 0
        self._system = system
        self._events = np.zeros(extents, EVENT)
        self._steps = np.arange(extents) * IOCB.itemsize
        self.single = np.zeros(extents, IOCB)
        self.single["data"] = np.arange(extents)
        self.single["opcode"], self.single["rw_flags"] = IOCB_CMD_PREAD, RWF_NOWAIT
        self.single["buffer"] = self.arena.address + extent_bytes * np.arange(extents)
        self.single["nbytes"] = extent_bytes
        self._context = system.io_setup(extents)
        self._closed = False

    def submit(self, control: np.ndarray) -> int:
        """How many of the IOCB control[n] the kernel took: the first ones, none when it has no room. OSError when it
        will not take the first whatever happens."""
        try:
            taken = self._system.io_submit(self._context, self._steps[:control.size] + control.ctypes.data)
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

    def park(self, ring: Ring) -> None:
        """Takes a ring back unseen. Makes no system call: for finalizers, also when the interpreter exits."""
        self._parked.append(ring)

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
        self._sent = self._not_begun = 0
        self._second: Fetch | None = None
        self._ended = self._waited = 0.0
        self._ring = engine.rings.take()
        self._control = engine.control(self._ring, extents, self._starts)
        self._began = time.perf_counter()
        self._send(first=0)

    def _send(self, first: int) -> None:
        """Hands over the reads whose places are free, as far as the kernel takes them; `first` is the earliest read
        that was not copied."""
        ring: Ring = self._ring  # type: ignore[assignment]
        stop = self._starts.size
        if self.extents.size > ring.arena.extents:
            free = self._starts[first] + ring.arena.extents
            stop = stop if free >= self.extents.size else int(self._starts.searchsorted(free, "right")) - 1
        while self._sent < stop:
            taken = ring.submit(self._control[self._sent:stop])
            if not taken:
                return
            self._sent += taken

    def collect(self, targets, out):
        landing = _Landing(self, targets, out)
        ring: Ring = self._ring  # type: ignore[assignment]
        try:
            while ring.in_flight:
                landing.take(ring.arena, *self._wait(ring))
                if self._sent < self._starts.size:
                    self._send(landing.first)
        finally:
            self.drop()
            self._not_begun = landing.not_begun
        if landing.complete:
            return _NONE, None
        return self._finish(landing, targets, out)

    def _wait(self, ring: Ring) -> tuple[list[int], list[int]]:
        """Numbers and results of a quarter of the reads in flight, or more: so there are few calls, and hardly anything
        is left to do when the device is done."""
        began = time.perf_counter()
        events = ring.wait(-(-ring.in_flight // 4), self._engine.timeout)
        self._ended = time.perf_counter()
        self._waited += self._ended - began
        if not events.size:
            raise hung(self._engine.path, self._engine.timeout)
        return events["data"].tolist(), events["result"].tolist()

    def _finish(self, landing: "_Landing", targets, out) -> tuple[np.ndarray, BaseException | None]:
        """Lets threads read again what may come then."""
        lost, error = landing.lost, None
        for read, code in landing.failed:
            error = error or self._failed(read, code)
        again = landing.again
        if again.size:
            self._second = self._engine.threads.start(self.extents[again], self.sums[again], self._where)
            missed, cause = self._second.collect(targets[again], out)
            lost = np.setdiff1d(lost, np.delete(again, missed))
            error = error or cause
        return lost, error

    def _failed(self, read: int, code: int) -> ReadFailed:
        engine = self._engine
        offset = HEADER_BYTES + int(self.extents[self._starts[read]]) * engine.extent_bytes
        return engine.file.read_error(OSError(code, os.strerror(code)), offset, self._where)

    @property
    def requests(self) -> int:
        return self._sent - self._not_begun + (self._second.requests if self._second else 0)

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

    def __del__(self):  # a guess that is forgotten with its branch
        if self._ring is not None:
            self._engine.rings.park(self._ring)


class _Landing:
    """What has landed of a fetch. Reads come a few at a time, so plain lists are faster than arrays.

    Attributes:
      failed: (read, errno) of those that need not be tried again.
      not_begun: reads that the kernel sent back, as they would have blocked.
    """

    def __init__(self, fetch: RingFetch, targets: np.ndarray, out: np.ndarray):
        starts = fetch._starts.tolist()
        self._bounds = [*starts, fetch.extents.size]
        self._sizes = fetch._control["nbytes"].tolist()
        self._goals, self._sums, self._out = targets.tolist(), fetch.sums.tolist(), out
        self._whole = [False] * len(starts)  # reads
        self._copied = [goal < 0 for goal in self._goals]  # blocks, or not wanted
        self.failed: list[tuple[int, int]] = []
        self.not_begun = 0

    def take(self, arena: Arena, reads: list[int], results: list[int]) -> None:
        """Verifies and copies block by block, while one is in the CPU's cache."""
        goals, sums, out, bounds, copied = self._goals, self._sums, self._out, self._bounds, self._copied
        payloads, blocks, places = arena.payloads, arena.blocks, arena.extents
        for read, result in zip(reads, results, strict=True):
            if result != self._sizes[read]:
                self.not_begun += result == -errno.EAGAIN
                if result < 0 and -result not in _TRY_AGAIN:
                    self.failed.append((read, -result))
                continue
            self._whole[read] = True
            for i in range(bounds[read], bounds[read + 1]):
                if not copied[i] and checksum(payloads[i % places]) == sums[i]:
                    out[goals[i]] = blocks[i % places]
                    copied[i] = True

    @property
    def first(self) -> int:
        """The earliest read that has not come whole."""
        return self._whole.index(False)

    @property
    def complete(self) -> bool:
        return all(self._copied)

    @property
    def lost(self) -> np.ndarray:
        """int64 positions of blocks that are wanted and were not copied."""
        return np.flatnonzero(~np.array(self._copied))

    @property
    def again(self) -> np.ndarray:
        """Those of them whose read did not come whole, but may."""
        given_up = {read for read, _ in self.failed}
        reads = [read for read, whole in enumerate(self._whole) if not whole and read not in given_up]
        positions = [i for read in reads for i in range(self._bounds[read], self._bounds[read + 1])]
        return np.array([i for i in positions if not self._copied[i]], np.int64)


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

    def control(self, ring: Ring, extents: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """IOCB[reads] that read extents[n] from each of the positions starts[reads] to the next."""
        reads, places = starts.size, ring.arena.extents
        control = ring.single[:reads].copy() if reads <= places else np.resize(ring.single, reads)
        offsets = HEADER_BYTES + extents[starts].astype(np.int64) * self.extent_bytes
        control["descriptor"], control["offset"] = self.file.direct_places(offsets)
        if extents.size > min(reads, places):  # there are neighbours, or places are used again
            control["data"] = np.arange(reads)
            control["buffer"] = ring.arena.address + starts % places * self.extent_bytes
            control["nbytes"] = np.diff(starts, append=extents.size) * self.extent_bytes
        return control

    def close(self) -> None:
        """Ends what the kernel holds for us; nobody reads any more."""
        self.rings.close(self.timeout)
