"""A pool of persistent threads that serve urgent jobs first, and page-aligned memory for O_DIRECT to read into."""

import collections
import contextlib
import functools
import mmap
import queue
import threading
import weakref
from collections.abc import Callable

import numpy as np

from kvjax.store.geometry import PAGE_BYTES

PIECE_BYTES = 256 << 10  # a run of neighbouring extents is split into reads of about this size


class WorkerPool:
    """A pool of `threads` daemon threads, started by the first job; one that hangs leaves its work to the others.

    Unlike in concurrent.futures, no thread is joined at interpreter exit, where one that hangs would block for ever. A
    job never raises: it keeps its error for the caller that waits for it.
    """

    def __init__(self, threads: int):
        self.threads = threads
        self._urgent: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._later: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()  # one True per job, then one False per thread
        self._running = False
        self._lock = threading.Lock()

    def _start(self) -> None:
        with self._lock:
            if self._running:
                return
            queues, started = (self._wake, self._urgent, self._later), 0
            try:
                for index in range(self.threads):
                    threading.Thread(target=_serve, args=queues, name=f"kvjax-read-{index}", daemon=True).start()
                    started += 1
            except BaseException:  # no more threads available: the next job tries again
                for _ in range(started):
                    self._wake.put(False)
                raise
            self._running = True

    def put(self, job: Callable[[], None], urgent: bool = True) -> None:
        """Queues a job; jobs that are not urgent wait until no urgent one is queued."""
        if not self._running:
            self._start()
        (self._urgent if urgent else self._later).put(job)
        self._wake.put(True)

    def stop(self) -> None:
        """Ends the threads once they are idle. Takes no lock: safe inside a finalizer."""
        for _ in range(self.threads):
            self._wake.put(False)


def _serve(wake, urgent, later) -> None:
    while wake.get():
        try:
            job = urgent.get_nowait()
        except queue.Empty:
            job = later.get()
        job()
        del job  # an idle thread must not keep a caller's arrays alive


class Arena:
    """Page-aligned memory for whole extents.

    Attributes:
      extents: how many extents fit.
      address: address of the first one.
      blocks: uint8[extents, block_bytes] view of their payloads.
      payloads: the same, as one memoryview per extent.
    """

    def __init__(self, extents: int, extent_bytes: int, block_bytes: int):
        self.extents = extents
        self._extent_bytes = extent_bytes
        self._memory = memoryview(mmap.mmap(-1, extents * extent_bytes))
        whole = np.frombuffer(self._memory, np.uint8).reshape(extents, extent_bytes)
        self.address = whole.ctypes.data
        self.blocks = whole[:, :block_bytes]

    @functools.cached_property
    def payloads(self) -> list[memoryview]:
        count, size = self.blocks.shape
        return [self._memory[i * self._extent_bytes:][:size] for i in range(count)]

    def part(self, start: int, stop: int, last: int) -> memoryview:
        """Returns the bytes of extents start..stop-1, padding included; of the last one only the first `last` bytes."""
        return self._memory[start * self._extent_bytes:(stop - 1) * self._extent_bytes + last]


class ArenaStack:
    """A pool of arenas to borrow; a thread that hangs keeps the one it has."""

    MAX_BYTES = 1 << 20  # about one L2 cache, so that data are still in it when they are verified and copied

    def __init__(self, extent_bytes: int, block_bytes: int):
        assert extent_bytes % PAGE_BYTES == 0
        self.extents = max(1, self.MAX_BYTES // extent_bytes)
        self._sizes = (extent_bytes, block_bytes)
        self._idle: collections.deque[Arena] = collections.deque()
        self._all: weakref.WeakSet[Arena] = weakref.WeakSet()  # weak: arenas of a collected fetch are freed with it

    @property
    def held_bytes(self) -> int:
        """Bytes of all arenas, lent or not."""
        return len(self._all) * self.extents * self._sizes[0]

    def take(self) -> Arena:
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        arena = Arena(self.extents, *self._sizes)
        self._all.add(arena)
        return arena

    def give(self, arena: Arena) -> None:
        self._idle.append(arena)
