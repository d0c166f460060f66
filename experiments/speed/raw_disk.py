"""Reads with bare system calls, by threads or asynchronously: the limit that the store is compared with."""

import contextlib
import mmap
import os
import pathlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvjax.store.io.aio import Ring
from kvjax.store.io.libaio import EVENT, IOCB
from kvjax.store.io.system import SystemIO


class RawFile:
    """An open file and threads that read it, each with one request in flight.

    A thread reads every request into the same page-aligned memory: separate memory for each is up to a sixth slower.

    Attributes:
      direct: whether reads bypass the page cache.
    """

    def __init__(self, path, threads: int, direct: bool = True, system: SystemIO | None = None):
        self._system = system or SystemIO()
        self._pool = ThreadPoolExecutor(threads)
        self._arenas = [memoryview(b"")] * threads
        self.direct = direct
        try:
            self._descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        except OSError:
            if not direct:
                raise
            self._descriptor = os.open(path, os.O_RDONLY)
            self.direct = False

    def seconds(self, offsets: Sequence[int], size: int) -> float:
        """Returns the wall time of reading `size` bytes at every offset, with offsets dealt to the threads in turn."""
        threads = len(self._arenas)
        if len(self._arenas[0]) != size:
            self._arenas = [memoryview(mmap.mmap(-1, size)) for _ in range(threads)]
            for arena in self._arenas:
                arena[:] = bytes(size)  # maps the pages before anything is timed
        shares = [offsets[i::threads] for i in range(threads)]
        started = time.perf_counter()
        list(self._pool.map(self._read, self._arenas, shares))
        return time.perf_counter() - started

    def _read(self, arena: memoryview, offsets: Sequence[int]) -> None:
        for offset in offsets:
            if self._system.preadv(self._descriptor, [arena], offset) != len(arena):
                raise OSError(f"short read at offset {offset}")

    def forget_pages(self) -> None:
        """Drops the file's pages from the page cache, so that the next reads are cold."""
        os.fdatasync(self._descriptor)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._descriptor)


class RawRing:
    """An open file and a kernel context that reads all requested blocks at once, bypassing the page cache."""

    def __init__(self, path):
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self._ring: Ring | None = None

    def seconds(self, offsets: Sequence[int], size: int) -> float:
        """Returns the wall time of reading `size` bytes at every offset; every call needs the same number of
        offsets."""
        count = len(offsets)
        ring = self._ring = self._ring or Ring(SystemIO(), count, size, size)
        control = ring.control.view(IOCB)
        control["data"] = np.arange(count)
        control["descriptor"], control["offset"], control["nbytes"] = self._descriptor, offsets, size
        control["buffer"] = ring.arena.address + size * np.arange(count)
        started = time.perf_counter()
        done = ring.submit(0, count)
        while done < count:
            done += ring.submit(done, count)
        landed = ring.wait(count, 60.0)
        taken = time.perf_counter() - started
        results = ring.events.view(EVENT)["result"][:landed]
        if results.size < count or (results != size).any():
            raise OSError(f"{count} reads were submitted, and these landed: {results}")
        return taken

    def close(self) -> None:
        if self._ring is not None:
            self._ring.close(60.0)
        os.close(self._descriptor)


@contextlib.contextmanager
def random_file(directory, size: int) -> Iterator[str]:
    """Yields the path of a temporary file of at least `size` random bytes, synced to the device."""
    with tempfile.NamedTemporaryFile(dir=directory) as file:
        file.write(os.urandom(1 << 20) * -(-size >> 20))
        file.flush()
        os.fsync(file.fileno())
        yield file.name


def read_seconds(
    directory: pathlib.Path, size: int, count: int, threads: int, repeats: int = 9, system: SystemIO | None = None
) -> float:
    """Returns the median seconds of reading `count` random extents of `size` bytes, bypassing the page cache where
    possible."""
    rng, total = np.random.default_rng(0), max(64 << 20, 4 * size * count)
    with random_file(directory, total) as path:
        raw = RawFile(path, threads, system=system)
        times = [raw.seconds(random_offsets(rng, total, size, count), size) for _ in range(repeats)]
        raw.close()
    return float(np.median(times))


def random_offsets(rng: np.random.Generator, total: int, size: int, count: int) -> list[int]:
    """Returns different multiples of `size` below `total`, ascending."""
    return (np.sort(rng.choice(total // size, count, replace=False)) * size).tolist()
