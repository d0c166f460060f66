"""Reads with Linux native asynchronous I/O: the caller submits many reads at once, and no thread blocks.

A fetch borrows a `Ring`: a kernel context and the memory it reads into. The kernel may write to that memory until it
has answered, so a ring is reused only when all its answers have arrived; a ring returned earlier is parked. Only
O_DIRECT reads are asynchronous; buffered reads would block in their submission.

Only reads that return all their bytes are handled here. A read that was short, was interrupted, or could not be begun
without blocking (the range is still being written back, or the device's queue is full) is repeated by threads, which
handle all of these cases.
"""

import collections
import contextlib
import ctypes
import errno
import os
import time
from typing import NamedTuple

import numpy as np
import xxhash

from kvjax.errors import StoreError
from kvjax.store.format.pages import HEADER_BYTES
from kvjax.store.geometry import PAGE_BYTES, Geometry
from kvjax.store.io.emulation import EmulatedIO
from kvjax.store.io.fetch import Fetch, Times, hung
from kvjax.store.io.file import BlockFile, Where
from kvjax.store.io.libaio import EVENT, IOCB
from kvjax.store.io.system import SystemIO
from kvjax.store.io.threads import ThreadEngine
from kvjax.store.io.workers import PIECE_BYTES, Arena
from kvjax.store.native import native

_TRY_AGAIN = (errno.EINTR, errno.EAGAIN, errno.EINVAL, errno.EOPNOTSUPP)  # threads report the cause of the last two
_NO_ANSWER = np.iinfo(np.int64).min
NONE = np.zeros(0, np.int64)


def _hash_function() -> int:
    """Returns the address of `checksum` in the C library behind the Python package xxhash, or 0 if it is not
    accessible."""
    library = ctypes.CDLL(xxhash._xxhash.__file__)  # type: ignore[attr-defined]
    function = getattr(library, "XXH3_64bits_dispatch", None) or getattr(library, "XXH3_64bits", None)
    return ctypes.cast(function, ctypes.c_void_p).value or 0 if function else 0


XXH3 = _hash_function()


class Landed(NamedTuple):
    """The result of `native.fetch` for one ring."""

    ring: "Ring"  # None if there was no guess
    asked: int  # blocks to be read
    began: float  # as in `Times`
    ended: float


class Ring:
    """A kernel context and an arena; its user decides which read goes where in the arena.

    Attributes:
      arena: memory for extents; one read covers one or several neighbouring extents.
      control: bytes of IOCB[room], the control blocks of the current fetch.
      events: bytes of the EVENT[extents] that `wait` fills.
      layout: addresses and sizes of all of this for `native.fetch`, as bytes of a RingLayout of reads.h.
      targets: int64[extents] flat slots of the blocks that `native.fetch` read, -1 = none.
      used: the most extents that the arena has held at once.
      lent: whether `native.fetch` or `native.guess` is using it.
      home: the stack it is returned to.
      in_flight: reads that the kernel has not answered, or whose answers were not taken yet.
    """

    def __init__(self, system: SystemIO, extents: int, extent_bytes: int, block_bytes: int, piece: int = 1,
                 depth: int | None = None, home: "RingStack | None" = None):
        """Allocates the arena and the context; at most `depth` reads can be in flight (None: one per extent)."""
        self.arena = Arena(extents, extent_bytes, block_bytes)
        self.in_flight = self.used = 0
        self.lent = False
        self.home = home
        self._system = system
        self._events = np.zeros(extents, EVENT)
        self.events = self._events.view(np.uint8)
        self._extents, self._sums = np.zeros(extents, np.int32), np.zeros(extents, np.uint64)
        self.targets, self._starts, self._results = np.zeros((3, extents), np.int64)
        self._found, self._staged = np.zeros((extents, 2), np.int32), np.zeros((extents, 2), np.int64)
        self._done = np.zeros(extents, np.uint8)
        self._sizes = (extents, piece, extent_bytes, block_bytes, HEADER_BYTES, PAGE_BYTES)
        self._depth = depth or extents
        self._closed = False
        self._context = self._set_up()
        self.make_room(extents)

    def _set_up(self) -> int:
        """Creates the kernel context and returns its id."""
        return self._system.io_setup(self._depth)

    def _map(self) -> tuple[int, int]:
        """Returns address and size (bytes) of the file's map, or (0, 0) if reads do not go through a map."""
        return 0, 0

    def make_room(self, reads: int) -> None:
        """Allocates `control` for this many reads."""
        blocks = np.zeros(reads, IOCB)
        self._pointers = blocks.ctypes.data + np.arange(reads) * IOCB.itemsize
        self.control = blocks.view(np.uint8)
        self.room = reads
        memory = (blocks, self._pointers, self._events, self._extents, self._sums, self.targets, self._starts,
                  self._results, self._done, self._found, self._staged)
        layout = [self._context, *self._sizes, self.arena.address, XXH3, *(array.ctypes.data for array in memory),
                  self._depth, type(self._system) is SystemIO, *self._map()]
        self.layout = np.array(layout, np.int64).view(np.uint8)

    def missed(self, count: int) -> np.ndarray:
        """Returns those of the first `count` targets that `native.fetch` copied nothing to."""
        targets = self.targets[:count]
        return targets[(self._done[:count] == 0) & (targets >= 0)]

    def submit(self, first: int, stop: int) -> int:
        """Submits reads first..stop-1 of `control`.

        Args:
          first: index of the first read.
          stop: index after the last read.

        Returns:
          How many reads the kernel took, in order; 0 when it has no room.

        Raises:
          OSError: the kernel refuses the first read for good.
        """
        asked = min(stop - first, self._depth - self.in_flight)
        if not asked:
            return 0
        self.in_flight += asked  # before the call: if KeyboardInterrupt hits its return, the memory is not reused
        try:
            taken = self._system.io_submit(self._context, self._pointers[first : first + asked])
        except OSError as cause:
            self.in_flight -= asked
            if cause.errno not in (errno.EAGAIN, errno.EINTR):
                raise
            return 0
        self.in_flight -= asked - taken
        return taken

    def wait(self, least: int, seconds: float) -> int:
        """Waits for events and stores them in `events`, where they stay until the next call.

        Args:
          least: events to wait for.
          seconds: time limit.

        Returns:
          How many events arrived: `least` or more, or fewer when the time is up.
        """
        until = time.monotonic() + seconds
        while True:
            with contextlib.suppress(InterruptedError):
                count = self._system.io_getevents(self._context, least, self._events, seconds)
                self.in_flight -= count
                return count
            seconds = max(0.0, until - time.monotonic())

    def settled(self) -> bool:
        """Returns whether the kernel has finished with the memory. Does not block."""
        if self.in_flight:
            self.wait(0, 0.0)
        return not self.in_flight

    def close(self, seconds: float) -> None:
        """Destroys the context, waiting at most this many seconds for reads in flight. If the device still hangs then,
        the context is left alone, as destroying it would hang too."""
        if self.in_flight:
            self.wait(self.in_flight, seconds)
        if not self.in_flight and not self._closed:
            self._closed = True
            self._system.io_destroy(self._context)


class RingStack:
    """A pool of rings to borrow. Takes no lock, because a fetch may be dropped anywhere, also inside a finalizer."""

    MAX_BYTES = 32 << 20  # in flight for one fetch; a larger guess waits. Pages never read into take no memory
    MAX_DEPTH = 2048  # reads; /proc/sys/fs/aio-max-nr limits all processes together, to 65,536 by default
    GUESS_DEPTH = 512  # reads of one guess; every layer may have a guess in flight
    KIND = Ring

    def __init__(self, system: SystemIO, extent_bytes: int, block_bytes: int, most: int):
        """Creates rings with at most `most` reads in flight each."""
        self.piece = max(1, min(PIECE_BYTES, self.MAX_BYTES // 2) // extent_bytes)
        self.extents = self.piece * max(2, self.MAX_BYTES // (self.piece * extent_bytes))
        depth = min(self.extents, most)
        self._arguments = (system, self.extents, extent_bytes, block_bytes, self.piece, depth)
        self._extent_bytes = extent_bytes
        self._all: list[Ring] = []
        self._idle: collections.deque[Ring] = collections.deque()
        self._parked: collections.deque[Ring] = collections.deque()

    @property
    def held_bytes(self) -> int:
        """Bytes of the arenas that were ever read into."""
        return sum(ring.used for ring in list(self._all)) * self._extent_bytes

    def take(self) -> Ring:
        """Returns a ring with nothing in flight. Raises OSError when the kernel provides no more contexts."""
        if self._parked:
            self._look_at_parked()
        try:
            return self._idle.pop()
        except IndexError:
            ring = self.KIND(*self._arguments, self)
        self._all.append(ring)
        return ring

    def _look_at_parked(self) -> None:
        with contextlib.suppress(IndexError):  # another thread took them
            for _ in range(len(self._parked)):
                self.give(self._parked.popleft())

    def give(self, ring: Ring) -> None:
        """Takes a ring back; parks it while the kernel may still write to its memory."""
        (self._parked if ring.in_flight and not ring.settled() else self._idle).append(ring)

    def park(self, ring: Ring) -> None:
        """Takes a ring back without checking it. Makes no system call: for finalizers, also at interpreter exit."""
        self._parked.append(ring)

    def close(self, seconds: float) -> None:
        """Closes all rings within this many seconds. Call it once nothing reads any more and no ring will be used."""
        self._idle.clear()
        self._parked.clear()
        until = time.monotonic() + seconds
        for ring in self._all:
            ring.close(max(0.0, until - time.monotonic()))
        self._all = [ring for ring in self._all if ring.in_flight]  # a reference cycle: drops the finished ones


class Guess:
    """Speculative reads begun by `native.guess`, until `native.fetch` takes the blocks that are wanted."""

    _ring: Ring | None = None

    def __init__(self, ring: Ring, blocks: int, reads: int, sent: int, began: float):
        self._ring = ring
        self._numbers = blocks, reads, sent
        self._began = began
        ring.used = max(ring.used, blocks)

    @property
    def ring(self) -> Ring:
        assert self._ring is not None, "a guess is landed once"
        return self._ring

    def window(self) -> tuple:
        """Returns the guess's part of the window of `native.fetch`."""
        return self, self.ring, self.ring.layout, *self._numbers, self.ring.in_flight, self._began

    def drop(self) -> None:
        """Discards the guess: its ring goes back, and is reused once the kernel has finished with it."""
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.home.give(ring)  # type: ignore[union-attr]

    def __del__(self):  # a guess collected together with its branch
        if self._ring is not None:
            self._ring.home.park(self._ring)


class RingFetch(Fetch):
    """A fetch through one ring.

    Block i passes through place i % extents of the arena: a read is submitted once the earlier reads in its places have
    been copied and fewer reads than the ring's depth are in flight. Neighbouring extents are one read, cut at every
    `piece` of the fetch.
    """

    _ring: Ring | None = None

    def __init__(self, engine: "RingEngine", rings: RingStack, extents: np.ndarray, sums: np.ndarray, where: Where):
        super().__init__(extents, sums)
        self._engine = engine
        self._rings = rings
        self._where = where
        self._second: Fetch | None = None
        self._sent = self._not_begun = 0
        self._ended = self._waited = 0.0
        self._ring = rings.take()
        self._ring.used = max(self._ring.used, min(extents.size, self._ring.arena.extents))
        self._starts, self._asked = engine.control(self._ring, extents, sums)
        self._results = np.full(self._starts.size, _NO_ANSWER)
        self._began = time.perf_counter()
        self._send(first=0)

    def _send(self, first: int) -> None:
        """Submits the reads whose places are free, as far as the kernel takes them; `first` is the earliest read that
        was not copied yet."""
        ring: Ring = self._ring  # type: ignore[assignment]
        stop = self._starts.size
        if self.extents.size > ring.arena.extents:
            free = self._starts[first] + ring.arena.extents
            stop = stop if free >= self.extents.size else int(self._starts.searchsorted(free, "right")) - 1
        while self._sent < stop:
            taken = ring.submit(self._sent, stop)
            if not taken:
                return
            self._sent += taken

    def collect(self, targets, out):
        engine, ring = self._engine, self._ring
        assert ring is not None, "a fetch is collected once"
        done = (targets < 0).view(np.uint8)
        left = targets.size - int(np.count_nonzero(done))
        arrays = ring.events, ring.control, self._starts, self.sums, targets, self._results, done, out
        numbers = (self._starts.size, ring.arena.address, ring.arena.extents, engine.extent_bytes, engine.block_bytes,
                   PAGE_BYTES)
        try:
            while ring.in_flight:
                left -= native.land(*arrays, self._wait(ring), *numbers, XXH3)
                if self._sent < self._starts.size:
                    self._send(int(self._whole().argmin()))
        finally:
            self.drop()
        return self._finish(done, targets, out) if left else (NONE, None)

    def _wait(self, ring: Ring) -> int:
        """Waits for a quarter of the reads in flight or more, and returns how many arrived: this takes few calls, and
        leaves hardly any work for after the last answer."""
        began = time.perf_counter()
        count = ring.wait(-(-ring.in_flight // 4), self._engine.timeout)
        self._ended = time.perf_counter()
        self._waited += self._ended - began
        if not count:
            raise hung(self._engine.path, self._engine.timeout)
        return count

    def _lengths(self) -> np.ndarray:
        """Returns the number of extents of each read, int64[reads]."""
        return np.diff(self._starts, append=self.extents.size)

    def _whole(self) -> np.ndarray:
        """Returns which reads returned all their bytes, bool[reads]."""
        return self._results == self._asked

    def _finish(self, done: np.ndarray, targets, out) -> tuple[np.ndarray, BaseException | None]:
        """Has threads repeat the reads that may succeed then; returns lost positions and the first error as `collect`.
        """
        results, missing = self._results, done == 0
        self._not_begun = int(np.count_nonzero(results == -errno.EAGAIN))
        given_up = (results < 0) & (results != _NO_ANSWER) & ~np.isin(-results, _TRY_AGAIN)
        lost, error = missing.nonzero()[0], None
        for read in given_up.nonzero()[0].tolist():
            error = error or self._failed(read, -int(results[read]))
        again = (missing & np.repeat(~self._whole() & ~given_up, self._lengths())).nonzero()[0]
        if again.size:
            self._second = self._engine.threads.start(self.extents[again], self.sums[again], self._where)
            missed, cause = self._second.collect(targets[again], out)
            lost = np.setdiff1d(lost, np.delete(again, missed))
            error = error or cause
        return lost, error

    def _failed(self, read: int, code: int) -> StoreError:
        engine = self._engine
        offset = HEADER_BYTES + int(self.extents[self._starts[read]]) * engine.extent_bytes
        return engine.file.read_error(OSError(code, os.strerror(code)), offset, self._where)

    @property
    def requests(self) -> int:
        return self._sent - self._not_begun + (self._second.requests if self._second else 0)

    @property
    def size(self) -> int:
        begun = self._results[:self._sent] != -errno.EAGAIN
        return int(self._asked[:self._sent][begun].sum()) + (self._second.size if self._second else 0)

    @property
    def times(self) -> Times:
        if self._second is None:
            return Times(self._began, self._ended, self._waited)
        second = self._second.times
        return Times(self._began, second.ended, self._waited + second.waited)

    def drop(self) -> None:
        ring, self._ring = self._ring, None
        if ring is not None:
            self._rings.give(ring)

    def __del__(self):  # a guess collected together with its branch
        if self._ring is not None:
            self._rings.park(self._ring)


class RingEngine:
    """The engine that fetches extents of one O_DIRECT file with rings.

    Attributes:
      path: path of the file, for messages.
      timeout: seconds after which an unanswered read becomes an error.
      threads: the engine that repeats failed reads.
      rings: rings of fetches that a caller waits for.
      guess_rings: rings of speculative reads.
      descriptor: the file's descriptor for O_DIRECT.
      quick: whether `native.fetch` and `native.guess` may be used while reads bypass the page cache: there is a single
        file, and system calls are the kernel's or those of an emulated device.
    """

    def __init__(self, file: BlockFile, geometry: Geometry, system: SystemIO, threads: ThreadEngine, timeout: float):
        """Creates the first ring. Raises OSError where the kernel has no asynchronous I/O, or no contexts left."""
        self.path = file.path
        self.timeout = timeout
        self.threads = threads
        self.file = file
        self.extent_bytes, self.block_bytes = geometry.extent_bytes, geometry.block_bytes
        if native is None or not XXH3:
            raise OSError("kvjax was installed without its compiled part, or xxhash without its C library")
        self.descriptor = file.direct_descriptor
        self.quick = type(file) is BlockFile and type(system) in (SystemIO, EmulatedIO)
        sizes = geometry.extent_bytes, geometry.block_bytes
        self.rings = RingStack(system, *sizes, RingStack.MAX_DEPTH)
        self.guess_rings = RingStack(system, *sizes, RingStack.GUESS_DEPTH)
        self.rings.give(self.rings.take())

    def start(self, extents: np.ndarray, sums: np.ndarray, where: Where) -> RingFetch:
        """Begins to read extents[n], ascending, with checksums sums[n]. Raises OSError when no ring is left or the
        kernel refuses."""
        return RingFetch(self, self.rings, extents, sums, where)

    def guess(self, extents: np.ndarray, sums: np.ndarray, where: Where) -> RingFetch | None:
        """Begins a speculative read like `start`; returns None while the kernel has no ring left for it."""
        try:
            return RingFetch(self, self.guess_rings, extents, sums, where)
        except BlockingIOError:  # EAGAIN
            return None

    @property
    def held_bytes(self) -> int:
        """Bytes of the arenas that were ever read into."""
        return self.rings.held_bytes + self.guess_rings.held_bytes

    def control(self, ring: Ring, extents: np.ndarray, sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Fills the ring's control blocks.

        Args:
          ring: the ring to read with.
          extents: int32[n] extents to read, ascending; neighbours become one read.
          sums: uint64[n] their checksums, which say how many pages each block takes.

        Returns:
          int64 starts[reads], the position in `extents` where each read begins, and int64[reads] bytes of each read.
        """
        if ring.room < extents.size:
            ring.make_room(extents.size)
        starts = np.empty(extents.size, np.int64)
        reads = native.control(extents, sums, ring.control, starts, self.rings.piece, ring.arena.extents,
                               ring.arena.address, self.extent_bytes, PAGE_BYTES, HEADER_BYTES, self.descriptor)
        control = ring.control[:reads * IOCB.itemsize].view(IOCB)
        self.file.redirect(control)
        return starts[:reads], control["nbytes"].astype(np.int64)

    def close(self) -> None:
        """Destroys the kernel contexts. Call it once nothing reads any more."""
        for rings in (self.rings, self.guess_rings):
            rings.close(self.timeout)
