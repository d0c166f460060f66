"""Persistent threads that a caller waits for with a deadline, and pages of memory for O_DIRECT to read into."""

import collections
import contextlib
import mmap
import queue
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from kvjax.store.base import PAGE_BYTES


class Ticket:
    """Leave to touch the caller's memory, held by a job and withdrawn when the caller stops waiting.

    A read that hangs can end long after its caller has returned, when the memory belongs to somebody else. So a job
    reads into memory of its own, and copies from there under the ticket's lock.
    """

    def __init__(self):
        self.lock = threading.Lock()
        self.valid = True

    def withdraw(self) -> None:
        with self.lock:
            self.valid = False


class WorkerPool:
    """`threads` daemon threads that serve one queue; a thread that hangs leaves its work to the others.

    Unlike concurrent.futures, no thread is joined at interpreter exit, where one that hangs would block for ever.
    """

    def __init__(self, threads: int):
        self.threads = threads
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        for index in range(threads):
            threading.Thread(target=_serve, args=(self._jobs,), name=f"kvjax-read-{index}", daemon=True).start()

    def run(self, jobs: list[Callable[[Ticket], object]], timeout: float) -> list:
        """Results of job(ticket) in the order of completion; raises the first exception, after all have ended.

        TimeoutError when that takes longer than `timeout` seconds; no job touches the caller's memory afterwards.
        """
        outcomes: queue.SimpleQueue = queue.SimpleQueue()
        tickets = [Ticket() for _ in jobs]
        for job, ticket in zip(jobs, tickets, strict=True):
            self._jobs.put((job, ticket, outcomes))
        deadline = time.monotonic() + timeout
        try:
            results = [outcomes.get(timeout=max(deadline - time.monotonic(), 0)) for _ in jobs]
        except queue.Empty:
            raise TimeoutError from None
        finally:
            for ticket in tickets:
                ticket.withdraw()
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def stop(self) -> None:
        """Ends the threads once they are idle. Takes no lock: safe inside a finalizer."""
        for _ in range(self.threads):
            self._jobs.put(None)


def _serve(jobs: queue.SimpleQueue) -> None:
    while (item := jobs.get()) is not None:
        job, ticket, outcomes = item
        try:
            outcome = job(ticket) if ticket.valid else None
        except BaseException as cause:
            outcome = cause
        outcomes.put(outcome)
        del item, job, ticket, outcomes, outcome  # an idle thread must not keep a caller's arrays alive


class Arena:
    """Page-aligned memory for whole extents.

    Attributes:
      extents: how many fit.
      blocks: uint8[extents, block_bytes] view of their payloads.
    """

    def __init__(self, extents: int, extent_bytes: int, block_bytes: int):
        self.extents = extents
        self._extent_bytes = extent_bytes
        self._memory = memoryview(mmap.mmap(-1, extents * extent_bytes))
        self.blocks = np.frombuffer(self._memory, np.uint8).reshape(extents, extent_bytes)[:, :block_bytes]
        self.payloads = [self._memory[i * extent_bytes:][:block_bytes] for i in range(extents)]

    def part(self, start: int, stop: int) -> memoryview:
        """Bytes of extents start..stop-1, padding included."""
        return self._memory[start * self._extent_bytes:stop * self._extent_bytes]


class ArenaStack:
    """Arenas that are lent and come back; a thread that hangs keeps the one it has."""

    MAX_BYTES = 1 << 20  # about one L2 cache: what was read is still there when it is verified and copied

    def __init__(self, extent_bytes: int, block_bytes: int):
        assert extent_bytes % PAGE_BYTES == 0
        self.extents = max(1, self.MAX_BYTES // extent_bytes)
        self._sizes = (extent_bytes, block_bytes)
        self._idle: collections.deque[Arena] = collections.deque()

    @contextlib.contextmanager
    def lend(self) -> Iterator[Arena]:
        try:
            arena = self._idle.pop()
        except IndexError:
            arena = Arena(self.extents, *self._sizes)
        try:
            yield arena
        finally:
            self._idle.append(arena)
