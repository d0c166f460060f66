"""Reading many extents at once: coalesce, share out, verify; whoever asked copies what has landed."""

import itertools
import queue
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from kvjax.errors import ReadFailed
from kvjax.store.base import Geometry
from kvjax.store.extents import run_starts
from kvjax.store.file import BlockFile, Where
from kvjax.store.format import HEADER_BYTES, checksum
from kvjax.store.workers import Arena, ArenaStack, WorkerPool

PIECE_BYTES = 256 << 10  # a long run of neighbouring extents is worth a thread of its own from here on


class Chunk:
    """A piece of a fetch that one thread reads and verifies, at most one arena long.

    Attributes:
      first: position of its first block in the fetch.
      extents, sums: int32[n] and uint64[n], which extents, and what each must hash to.
      arena: where they are once the chunk has landed without error.
      right: bool[n] whether each has its checksum.
      requests: reads it took, neighbouring extents being one.
      began, ended: when the device was asked and had answered, `time.perf_counter` seconds.
      error: why it has not been read, if so.
    """

    __slots__ = ("arena", "began", "ended", "error", "extents", "first", "requests", "right", "sums")
    arena: Arena
    right: np.ndarray

    def __init__(self, first: int, extents: np.ndarray, sums: np.ndarray):
        self.first, self.extents, self.sums = first, extents, sums
        self.requests = 0
        self.began = self.ended = 0.0
        self.error: BaseException | None = None


class Times(NamedTuple):
    """When the device was first asked and had answered all (`time.perf_counter`); seconds the caller was blocked."""

    began: float
    ended: float
    waited: float


class Fetch:
    """Extents on their way into arenas, ascending. A read that hangs touches no memory but its arena.

    Attributes:
      extents, sums: as asked for.
    """

    def __init__(self, reader: "Reader", extents: np.ndarray, sums: np.ndarray, where: Where):
        self.extents, self.sums = extents, sums
        self._reader = reader
        self._where = where
        self._landed: queue.SimpleQueue[Chunk] = queue.SimpleQueue()
        self._dropped = False
        self._waited = 0.0
        bounds = reader.bounds(extents)
        self._chunks = [Chunk(a, extents[a:z], sums[a:z]) for a, z in itertools.pairwise(bounds)]

    def start(self, urgent: bool) -> "Fetch":
        for chunk in self._chunks:
            self._reader.pool.put(self._job(chunk), urgent)
        return self

    def _job(self, chunk: Chunk) -> Callable[[], None]:
        def run() -> None:
            if self._dropped:
                return
            try:
                self._reader.read(chunk, self._where)
            except BaseException as cause:
                chunk.error = cause
            self._landed.put(chunk)
            if self._dropped:
                self.drop()
        return run

    def landed(self) -> Iterator[Chunk]:
        """The chunks in the order in which they land; one's arena is good until the next is asked for. ReadFailed when
        nothing lands for the reader's timeout."""
        for _ in self._chunks:
            began = time.perf_counter()
            try:
                chunk = self._landed.get(timeout=self._reader.timeout)
            except queue.Empty:
                self.drop()
                raise self._reader.hung() from None
            self._waited += time.perf_counter() - began
            yield chunk
            self._reader.give_back(chunk)

    def copy(self, targets: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Copies verified blocks to out[targets], out[slots, block_bytes]; returns int64 positions of the damaged ones.
        Raises the first error once everything has landed; then part of `out` may be written."""
        suspects, error = [], None
        for chunk in self.landed():
            if chunk.error is not None:
                error = error or chunk.error
                continue
            goal, count = targets[chunk.first:chunk.first + chunk.sums.size], chunk.sums.size
            if chunk.right.all():
                out[goal] = chunk.arena.blocks[:count]
            else:
                out[goal[chunk.right]] = chunk.arena.blocks[:count][chunk.right]
                suspects.append(chunk.first + (~chunk.right).nonzero()[0])
        if error is not None:
            raise error
        return np.concatenate(suspects) if suspects else np.zeros(0, np.int64)

    @property
    def requests(self) -> int:
        """Reads made so far."""
        return sum(chunk.requests for chunk in self._chunks)

    @property
    def times(self) -> Times:
        """Meaningful once everything has landed."""
        began, ended = zip(*((chunk.began, chunk.ended) for chunk in self._chunks), strict=True)
        return Times(min(began), max(ended), self._waited)

    def drop(self) -> None:
        """Nobody will wait any more: what has not begun never will, and the arenas go back."""
        self._dropped = True
        while True:
            try:
                self._reader.give_back(self._landed.get_nowait())
            except queue.Empty:
                return


class Reader:
    """Fetches extents of one file with a pool of threads.

    Attributes:
      timeout: seconds after which a device that has not answered is given up.
    """

    def __init__(self, file: BlockFile, geometry: Geometry, threads: int, timeout: float):
        self.timeout = timeout
        self.pool = WorkerPool(threads)
        self._file = file
        self._extent_bytes = geometry.extent_bytes
        self._arenas = ArenaStack(geometry.extent_bytes, geometry.block_bytes)

    def start(self, extents: np.ndarray, sums: np.ndarray, where: Where, urgent: bool = True) -> Fetch:
        """Begins to read extents[n], ascending, whose blocks must hash to sums[n]."""
        return Fetch(self, extents, sums, where).start(urgent)

    def bounds(self, extents: np.ndarray) -> list[int]:
        """Where to cut a fetch: two chunks per thread if there is that much to read, so that what has landed is copied
        while the rest is read, and none longer than an arena. Runs of neighbours stay whole where they can."""
        count = extents.size
        starts = run_starts(extents)
        pieces = max(starts.size // 2, count * self._extent_bytes // PIECE_BYTES)
        chunks = max(min(2 * self.pool.threads, pieces), -(-count // self._arenas.extents), 1)
        cuts = count * np.arange(chunks + 1) // chunks
        between_runs = np.unique(np.append(starts, count)[starts.searchsorted(cuts)])
        if np.diff(between_runs).max(initial=0) <= min(self._arenas.extents, 2 * -(-count // chunks)):
            cuts = between_runs
        return cuts.tolist()

    def read(self, chunk: Chunk, where: Where) -> None:
        """Reads a chunk into an arena and verifies it. Raises ShortRead or ReadFailed, and then it has no arena."""
        extents, count = chunk.extents, chunk.extents.size
        starts = run_starts(extents)
        offsets = (HEADER_BYTES + extents[starts].astype(np.int64) * self._extent_bytes).tolist()
        cuts = itertools.pairwise([*starts.tolist(), count])
        arena = self._arenas.take()
        chunk.began = time.perf_counter()
        try:
            self._file.read(zip(itertools.starmap(arena.part, cuts), offsets, strict=True), where)
        except BaseException:
            self._arenas.give(arena)
            raise
        finally:
            chunk.ended = time.perf_counter()
        chunk.right = np.fromiter(map(checksum, arena.payloads[:count]), np.uint64, count) == chunk.sums
        chunk.requests = starts.size
        chunk.arena = arena

    def give_back(self, chunk: Chunk) -> None:
        """The arena of a chunk may be used again."""
        if hasattr(chunk, "arena"):
            self._arenas.give(chunk.arena)
            del chunk.arena

    def hung(self) -> ReadFailed:
        return ReadFailed(f"{self._file.path}: the device did not answer within {self.timeout} s; check it, or raise "
                          "timeout")

    def stop(self) -> None:
        """Ends the threads once they are idle."""
        self.pool.stop()
