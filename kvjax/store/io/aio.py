"""Reading with Linux native asynchronous I/O: the caller hands the kernel many reads at once, and no thread blocks.

A fetch borrows a `Ring`: a kernel context and the memory it reads into. The kernel may write to that memory until it
has answered, so a ring is used again only when all its answers are in; one that is given back earlier is parked. Only
O_DIRECT reads are asynchronous, buffered ones would block in their submission.

The fast way is for whole reads. What comes short, was interrupted or could not be begun without blocking (the range is
still being written back, the device's queue is full) is read once more by threads, which know how to go on.
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
from kvjax.store.interface import PAGE_BYTES, Geometry
from kvjax.store.io.emulation import EmulatedIO
from kvjax.store.io.fetch import Fetch, Times, hung
from kvjax.store.io.file import BlockFile, Where
from kvjax.store.io.libaio import EVENT, IOCB
from kvjax.store.io.system import SystemIO
from kvjax.store.io.threads import ThreadEngine
from kvjax.store.io.workers import PIECE_BYTES, Arena
from kvjax.store.native import native

_TRY_AGAIN = (errno.EINTR, errno.EAGAIN, errno.EINVAL, errno.EOPNOTSUPP)  # threads find out what is behind the last two
_NO_ANSWER = np.iinfo(np.int64).min
NONE = np.zeros(0, np.int64)


def _hash_function() -> int:
    """Address of `checksum` for C, in the library behind the Python package; 0 if it cannot be had."""
    library = ctypes.CDLL(xxhash._xxhash.__file__)  # type: ignore[attr-defined]
    function = getattr(library, "XXH3_64bits_dispatch", None) or getattr(library, "XXH3_64bits", None)
    return ctypes.cast(function, ctypes.c_void_p).value or 0 if function else 0


XXH3 = _hash_function()


class Landed(NamedTuple):
    """What `native.fetch` did with one ring."""

    ring: "Ring"  # None where there was no guess
    asked: int  # blocks that were to be read
    began: float  # as `Times`
    ended: float


class Ring:
    """A kernel context and an arena; the user of the ring says which read goes where in it.

    Attributes:
      arena: memory for extents, of which a read has one or several neighbours.
      control: bytes of IOCB[room], the reads of the user's fetch.
      events: bytes of the EVENT[extents] that `wait` fills.
      layout: where all of it lies, for `native.fetch`, as bytes of a RingLayout of reads.h.
      targets: int64[extents] flat slots of the blocks that `native.fetch` read, -1 = nowhere.
      used: most extents that the arena has had at once.
      lent: whether `native.fetch` or `native.guess` has it.
      home: where it goes back to.
      in_flight: reads the kernel has not answered yet, or whose answers were not taken.
    """

    def __init__(self, system: SystemIO, extents: int, extent_bytes: int, block_bytes: int, piece: int = 1,
                 depth: int | None = None, home: "RingStack | None" = None):
        """`depth` reads can be in flight; None = one per extent."""
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
        """The kernel's part of it."""
        return self._system.io_setup(self._depth)

    def _map(self) -> tuple[int, int]:
        """Address and bytes of the file's map, if it is read through one."""
        return 0, 0

    def make_room(self, reads: int) -> None:
        """Lets `control` have room for so many."""
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
        """Those of the first `count` targets that `native.fetch` copied nothing to."""
        targets = self.targets[:count]
        return targets[(self._done[:count] == 0) & (targets >= 0)]

    def submit(self, first: int, stop: int) -> int:
        """How many of `control`'s reads the kernel took: the first ones, none when it has no room. OSError when it will
        not take the first whatever happens."""
        asked = min(stop - first, self._depth - self.in_flight)
        if not asked:
            return 0
        self.in_flight += asked  # first: if Ctrl-C comes as the call returns, memory in doubt is not used again
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
        """How many events came, `least` or more; fewer only when the time is up. `events` has them until the next call.
        """
        until = time.monotonic() + seconds
        while True:
            with contextlib.suppress(InterruptedError):
                count = self._system.io_getevents(self._context, least, self._events, seconds)
                self.in_flight -= count
                return count
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

    MAX_BYTES = 32 << 20  # in flight for one fetch; a guess beyond it waits. What is never read into takes no memory
    MAX_DEPTH = 2048  # reads, of /proc/sys/fs/aio-max-nr, 65,536 by default, for all processes
    GUESS_DEPTH = 512  # reads of a guess: as many guesses as there are layers may be on their way
    KIND = Ring

    def __init__(self, system: SystemIO, extent_bytes: int, block_bytes: int, most: int):
        """Rings in which at most `most` reads are in flight."""
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
        """A ring with nothing in flight. OSError when the kernel gives no more."""
        if self._parked:
            self._look_at_parked()
        try:
            return self._idle.pop()
        except IndexError:
            ring = self.KIND(*self._arguments, self)
        self._all.append(ring)
        return ring

    def _look_at_parked(self) -> None:
        with contextlib.suppress(IndexError):  # somebody else was quicker
            for _ in range(len(self._parked)):
                self.give(self._parked.popleft())

    def give(self, ring: Ring) -> None:
        """Takes a ring back; while the kernel may still write to its memory, it is parked."""
        (self._parked if ring.in_flight and not ring.settled() else self._idle).append(ring)

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
        self._all = [ring for ring in self._all if ring.in_flight]  # each knows us: what is done goes with its owner


class Guess:
    """Reads that `native.guess` began, until `native.fetch` lands what is wanted of them."""

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
        """What `native.fetch` is to know."""
        return self, self.ring, self.ring.layout, *self._numbers, self.ring.in_flight, self._began

    def drop(self) -> None:
        """Nobody will land it: its ring goes back, and is not used before the kernel has done with it."""
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.home.give(ring)  # type: ignore[union-attr]

    def __del__(self):  # one that is forgotten with its branch
        if self._ring is not None:
            self._ring.home.park(self._ring)


class RingFetch(Fetch):
    """A fetch whose block i passes through place i % extents of its ring: a read is handed to the kernel once those
    that had its places before have been copied, and fewer are in flight than the ring's depth. Runs of neighbours are
    one read, cut at every `piece` of the fetch."""

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
        """Hands over the reads whose places are free, as far as the kernel takes them; `first` is the earliest read
        that was not copied."""
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
        """How many events came, those of a quarter of the reads in flight or more: so there are few calls, and hardly
        anything is left to do when the device is done."""
        began = time.perf_counter()
        count = ring.wait(-(-ring.in_flight // 4), self._engine.timeout)
        self._ended = time.perf_counter()
        self._waited += self._ended - began
        if not count:
            raise hung(self._engine.path, self._engine.timeout)
        return count

    def _lengths(self) -> np.ndarray:
        """int64[reads] extents of each."""
        return np.diff(self._starts, append=self.extents.size)

    def _whole(self) -> np.ndarray:
        """bool[reads] that came whole."""
        return self._results == self._asked

    def _finish(self, done: np.ndarray, targets, out) -> tuple[np.ndarray, BaseException | None]:
        """Lets threads read again what may come then."""
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

    def __del__(self):  # a guess that is forgotten with its branch
        if self._ring is not None:
            self._rings.park(self._ring)


class RingEngine:
    """Fetches extents of one O_DIRECT file with rings.

    Attributes:
      path: the file's, for messages.
      timeout: seconds after which a device that has not answered is given up.
      threads: for what has to be read again.
      rings, guess_rings: for what somebody waits for, and for guesses.
      descriptor: of the file, past the page cache.
      quick: whether `native.fetch` and `native.guess` may be used while reads go past the page cache: the file is one,
        and system calls are the kernel's, or those of an emulated device.
    """

    def __init__(self, file: BlockFile, geometry: Geometry, system: SystemIO, threads: ThreadEngine, timeout: float):
        """OSError where the kernel has no asynchronous I/O, or none left."""
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
        """OSError when there is no ring left, or the kernel refuses to use it."""
        return RingFetch(self, self.rings, extents, sums, where)

    def guess(self, extents: np.ndarray, sums: np.ndarray, where: Where) -> RingFetch | None:
        """The same for what may be wanted later; None while the kernel has no ring left for that."""
        try:
            return RingFetch(self, self.guess_rings, extents, sums, where)
        except BlockingIOError:  # EAGAIN
            return None

    @property
    def held_bytes(self) -> int:
        """Bytes of the arenas that were ever read into."""
        return self.rings.held_bytes + self.guess_rings.held_bytes

    def control(self, ring: Ring, extents: np.ndarray, sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Fills the ring's control blocks with reads of extents[n], of which sums[n] tell the pages, neighbours in one;
        int64 starts[reads], where in `extents` each begins, and how many bytes each has."""
        if ring.room < extents.size:
            ring.make_room(extents.size)
        starts = np.empty(extents.size, np.int64)
        reads = native.control(extents, sums, ring.control, starts, self.rings.piece, ring.arena.extents,
                               ring.arena.address, self.extent_bytes, PAGE_BYTES, HEADER_BYTES, self.descriptor)
        control = ring.control[:reads * IOCB.itemsize].view(IOCB)
        self.file.redirect(control)
        return starts[:reads], control["nbytes"].astype(np.int64)

    def close(self) -> None:
        """Ends what the kernel holds for us; nobody reads any more."""
        for rings in (self.rings, self.guess_rings):
            rings.close(self.timeout)
