"""Reading many extents at once: sort, coalesce, share out, verify, copy."""

import functools
import itertools
from typing import NamedTuple

import numpy as np

from kvjax.errors import ReadFailed
from kvjax.store.base import Geometry, Tally
from kvjax.store.file import BlockFile, Where
from kvjax.store.format import HEADER_BYTES, checksum
from kvjax.store.workers import ArenaStack, Ticket, WorkerPool

REQUESTS_PER_CHUNK = 2  # at least; a single chunk is read by the caller, as waking a thread costs more


class ExtentPlan(NamedTuple):
    """Blocks to fetch, ascending by extent.

    extents: int32[n]; sums: uint64[n], what each block must hash to; targets: int64[n], row of the output.
    """

    extents: np.ndarray
    sums: np.ndarray
    targets: np.ndarray


class Chunk(NamedTuple):
    """A piece of a plan that one thread reads, verifies and copies, at most one arena long.

    first: position of its first block in the plan. begins: block at which each request begins, counted from there, and
    the number of blocks. offsets: of each request in the file. sums[n], targets[n]: as in the plan.
    """

    first: int
    begins: list[int]
    offsets: list[int]
    sums: np.ndarray
    targets: np.ndarray


class Reader:
    """Fetches extents of one file with a pool of threads.

    A caller that reads so little that it does so itself has no timeout: its own system call cannot be left behind.
    """

    def __init__(self, file: BlockFile, geometry: Geometry, threads: int, timeout: float):
        self._file = file
        self._extent_bytes = geometry.extent_bytes
        self._timeout = timeout
        self._arenas = ArenaStack(geometry.extent_bytes, geometry.block_bytes)
        self._pool = WorkerPool(threads)

    def fetch(self, plan: ExtentPlan, out: np.ndarray, where: Where, tally: Tally) -> np.ndarray:
        """Copies verified blocks to out[targets], out[slots, block_bytes]; returns int64 positions in the plan of the
        others, whose output is untouched. Raises ShortRead or ReadFailed; then part of `out` may be written."""
        count = plan.extents.size
        begins = np.ones(count, bool)  # where a request begins: neighbouring extents are read at once
        np.not_equal(plan.extents[1:] - plan.extents[:-1], 1, out=begins[1:])
        bounds = self._bounds(count, int(np.count_nonzero(begins)))
        begins[bounds[:-1]] = True
        chunks = self._chunks(plan, begins.nonzero()[0], bounds)
        jobs = [functools.partial(self._fetch_chunk, chunk, out, where) for chunk in chunks]
        suspects = [jobs[0](Ticket())] if len(jobs) == 1 else self._run(jobs)
        tally.add(reads=sum(len(chunk.offsets) for chunk in chunks), blocks_read=count,
                  bytes_read=count * self._extent_bytes, bytes_useful=count * out.shape[1])
        return np.concatenate(suspects)

    def _bounds(self, blocks: int, requests: int) -> list[int]:
        """Cuts a plan into about one chunk per thread, or more if that does not fit an arena."""
        busy = min(self._pool.threads, requests // REQUESTS_PER_CHUNK)
        chunks = max(busy, -(-blocks // self._arenas.extents), 1)
        return [blocks * i // chunks for i in range(chunks + 1)]

    def _chunks(self, plan: ExtentPlan, begins: np.ndarray, bounds: list[int]) -> list[Chunk]:
        offsets = (HEADER_BYTES + plan.extents[begins].astype(np.int64) * self._extent_bytes).tolist()
        cuts = np.searchsorted(begins, bounds).tolist()
        begins = [*begins.tolist(), plan.extents.size]  # type: ignore[assignment]
        ranges = zip(itertools.pairwise(bounds), itertools.pairwise(cuts), strict=True)
        return [Chunk(first, [begin - first for begin in begins[low:high + 1]], offsets[low:high],
                      plan.sums[first:last], plan.targets[first:last])
                for (first, last), (low, high) in ranges]

    def _run(self, jobs) -> list:
        try:
            return self._pool.run(jobs, self._timeout)
        except TimeoutError as cause:
            raise ReadFailed(f"{self._file.path}: the device did not answer within {self._timeout} s; check it, or "
                             "raise timeout") from cause

    def _fetch_chunk(self, chunk: Chunk, out: np.ndarray, where: Where, ticket: Ticket) -> np.ndarray:
        """Reads a chunk into an arena, verifies it, copies what is right; returns plan positions of the rest."""
        count = chunk.sums.size
        with self._arenas.lend() as arena:
            views = map(arena.part, chunk.begins, chunk.begins[1:])
            self._file.read(zip(views, chunk.offsets, strict=True), where)
            right = np.fromiter(map(checksum, arena.payloads[:count]), np.uint64, count) == chunk.sums
            sound = right.all()
            with ticket.lock:
                if ticket.valid and sound:
                    out[chunk.targets] = arena.blocks[:count]
                elif ticket.valid:
                    out[chunk.targets[right]] = arena.blocks[:count][right]
        return chunk.first + (~right).nonzero()[0]

    def stop(self) -> None:
        """Ends the threads once they are idle."""
        self._pool.stop()
