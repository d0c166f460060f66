"""What the disk itself can do: plain threaded positional reads, beside which the store is judged."""

import mmap
import os
import pathlib
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np


def read_seconds(directory: pathlib.Path, size: int, count: int, threads: int, repeats: int = 9) -> float:
    """Median seconds of reading `count` random extents of `size` bytes, past the page cache where possible."""
    rng, total = np.random.default_rng(0), max(64 << 20, 4 * size * count)
    with tempfile.NamedTemporaryFile(dir=directory) as file:
        file.write(os.urandom(1 << 20) * (total >> 20))
        file.flush()
        os.fsync(file.fileno())
        descriptor = _open_direct(file.name)
        arenas = [mmap.mmap(-1, size) for _ in range(threads)]
        try:
            with ThreadPoolExecutor(threads) as pool:
                times = [_one(pool, descriptor, arenas, rng, size, count, total) for _ in range(repeats)]
        finally:
            os.close(descriptor)
    return float(np.median(times))


def _open_direct(name: str) -> int:
    try:
        return os.open(name, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return os.open(name, os.O_RDONLY)


def _one(pool, descriptor, arenas, rng, size, count, total) -> float:
    offsets = np.sort(rng.choice(total // size, count, replace=False)) * size

    def work(i):
        for offset in offsets[i :: len(arenas)]:
            os.preadv(descriptor, [arenas[i]], int(offset))

    started = time.perf_counter()
    list(pool.map(work, range(len(arenas))))
    return time.perf_counter() - started
