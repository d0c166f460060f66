"""The engine with blocking threads: they coalesce, read, verify and decode; the caller copies what has landed."""

import itertools
import queue
import time
from collections.abc import Callable, Iterator

import numpy as np

from kvjax.store.format.codec import Codec
from kvjax.store.format.extents import run_starts
from kvjax.store.format.pages import HEADER_BYTES
from kvjax.store.io.fetch import Fetch, Times, hung
from kvjax.store.io.file import BlockFile, Where
from kvjax.store.io.workers import PIECE_BYTES, Arena, ArenaStack, WorkerPool


class Chunk:
    """A part of a fetch that one thread reads, verifies and decodes; at most one arena long.

    Attributes:
      first: position of its first block in the fetch.
      extents: int32[n] extents to read.
      sums: uint64[n] their checksums.
      arena: where the blocks are once the chunk has landed without error.
      right: bool[n] whether each block matches its checksum.
      requests: reads made; neighbouring extents are one.
      size: bytes of these reads.
      began, ended: when the device was first asked and had answered, `time.perf_counter` seconds.
      error: why it was not read, or None.
    """

    __slots__ = ("arena", "began", "ended", "error", "extents", "first", "requests", "right", "size", "sums")
    arena: Arena
    right: np.ndarray

    def __init__(self, first: int, extents: np.ndarray, sums: np.ndarray):
        self.first, self.extents, self.sums = first, extents, sums
        self.requests = self.size = 0
        self.began = self.ended = 0.0
        self.error: BaseException | None = None


class ThreadedFetch(Fetch):
    """A fetch cut into chunks that threads read, in any order."""

    def __init__(self, engine: "ThreadEngine", extents: np.ndarray, sums: np.ndarray, where: Where):
        super().__init__(extents, sums)
        self._engine = engine
        self._where = where
        self._landed: queue.SimpleQueue[Chunk] = queue.SimpleQueue()
        self._dropped = False
        self._waited = 0.0
        bounds = engine.bounds(extents)
        self._chunks = [Chunk(a, extents[a:z], sums[a:z]) for a, z in itertools.pairwise(bounds)]

    def start(self, urgent: bool) -> "ThreadedFetch":
        for chunk in self._chunks:
            self._engine.pool.put(self._job(chunk), urgent)
        return self

    def _job(self, chunk: Chunk) -> Callable[[], None]:
        def run() -> None:
            if self._dropped:
                return
            try:
                self._engine.read(chunk, self._where)
            except BaseException as cause:
                chunk.error = cause
            self._landed.put(chunk)
            if self._dropped:
                self.drop()
        return run

    def _chunks_as_they_land(self) -> Iterator[Chunk]:
        """Yields chunks in the order in which they land; the arena of one is valid until the next is requested."""
        for _ in self._chunks:
            began = time.perf_counter()
            try:
                chunk = self._landed.get(timeout=self._engine.timeout)
            except queue.Empty:
                self.drop()
                raise hung(self._engine.path, self._engine.timeout) from None
            self._waited += time.perf_counter() - began
            yield chunk
            self._engine.give_back(chunk)

    def collect(self, targets, out):
        lost, error = [], None
        for chunk in self._chunks_as_they_land():
            goals = targets[chunk.first:chunk.first + chunk.sums.size]
            wanted = goals >= 0
            if chunk.error is not None:
                error, sound = error or chunk.error, np.zeros_like(wanted)
            else:
                sound = wanted & chunk.right
                blocks = chunk.arena.blocks[:goals.size]
                if sound.all():
                    out[goals] = blocks
                    continue
                out[goals[sound]] = blocks[sound]
            lost.append(chunk.first + (wanted & ~sound).nonzero()[0])
        return np.sort(np.concatenate(lost)) if lost else np.zeros(0, np.int64), error

    @property
    def requests(self) -> int:
        return sum(chunk.requests for chunk in self._chunks)

    @property
    def size(self) -> int:
        return sum(chunk.size for chunk in self._chunks)

    @property
    def times(self) -> Times:
        began, ended = zip(*((chunk.began, chunk.ended) for chunk in self._chunks), strict=True)
        return Times(min(began), max(ended), self._waited)

    def drop(self) -> None:
        self._dropped = True
        while True:
            try:
                self._engine.give_back(self._landed.get_nowait())
            except queue.Empty:
                return


class ThreadEngine:
    """The engine that fetches extents of one file with a pool of threads, which the first fetch starts.

    Attributes:
      path: path of the file, for messages.
      timeout: seconds after which an unanswered read becomes an error.
      pool: the threads.
    """

    def __init__(self, file: BlockFile, codec: Codec, threads: int, timeout: float):
        self.path = file.path
        self.timeout = timeout
        self.pool = WorkerPool(threads)
        self._file = file
        self._codec = codec
        self._extent_bytes = codec.geometry.extent_bytes
        self._arenas = ArenaStack(self._extent_bytes, codec.geometry.block_bytes)

    @property
    def held_bytes(self) -> int:
        """Bytes of all arenas."""
        return self._arenas.held_bytes

    def start(self, extents: np.ndarray, sums: np.ndarray, where: Where, urgent: bool = True) -> ThreadedFetch:
        """Begins to read extents[n], ascending, with checksums sums[n]; reads that are not urgent give way to urgent
        ones."""
        return ThreadedFetch(self, extents, sums, where).start(urgent)

    def bounds(self, extents: np.ndarray) -> list[int]:
        """Returns where to cut a fetch of extents[n]: positions from 0 to n.

        There are two chunks per thread if there is enough to read, so that blocks which have landed are copied while
        the rest is read; none is longer than an arena. Runs of neighbours stay whole where possible.
        """
        count = extents.size
        starts = run_starts(extents)
        pieces = max(starts.size // 2, count * self._extent_bytes // PIECE_BYTES)
        chunks = max(min(2 * self.pool.threads, pieces, count), -(-count // self._arenas.extents), 1)
        cuts = count * np.arange(chunks + 1) // chunks
        between_runs = np.unique(np.append(starts, count)[starts.searchsorted(cuts)])
        if np.diff(between_runs).max(initial=0) <= min(self._arenas.extents, 2 * -(-count // chunks)):
            cuts = between_runs
        return cuts.tolist()

    def read(self, chunk: Chunk, where: Where) -> None:
        """Reads a chunk into an arena, verifies and decodes it.

        Args:
          chunk: the chunk; it has no arena after an error.
          where: names the contents at a file offset, for messages.

        Raises:
          ShortRead, ReadFailed: see `BlockFile.read`.
        """
        extents, sizes, count = chunk.extents, self._codec.sizes(chunk.sums), chunk.extents.size
        starts = run_starts(extents, None if self._codec.joins else sizes == self._extent_bytes)
        offsets = (HEADER_BYTES + extents[starts].astype(np.int64) * self._extent_bytes).tolist()
        stops = [*starts[1:].tolist(), count]
        ends = sizes[np.array(stops) - 1]
        parts = zip(starts.tolist(), stops, ends.tolist(), strict=True)
        arena = self._arenas.take()
        chunk.began = time.perf_counter()
        try:
            self._file.read(zip(itertools.starmap(arena.part, parts), offsets, strict=True), where)
        except BaseException:
            self._arenas.give(arena)
            raise
        finally:
            chunk.ended = time.perf_counter()
        chunk.right = self._codec.decode(arena.payloads[:count], chunk.sums)
        chunk.requests = starts.size
        chunk.size = (count - starts.size) * self._extent_bytes + int(ends.sum())
        chunk.arena = arena

    def give_back(self, chunk: Chunk) -> None:
        """Returns a chunk's arena for reuse."""
        if hasattr(chunk, "arena"):
            self._arenas.give(chunk.arena)
            del chunk.arena

    def stop(self) -> None:
        """Ends the threads once they are idle."""
        self.pool.stop()
