"""What reading blocks from the flash store costs beyond the bare system calls.

    python scripts/bench_store.py [--dir=DIR] [--calls=200] [--threads=4]

One call reads 8 heads x 16 blocks of 16 KB (64 rows of 128 bfloat16). "raw" is os.preadv of the same sorted extents by
the same pool of threads into page-aligned memory: no checksum, no copy to the slots. "staged" reads blocks of which
each has one committed row that is not yet in the file.
"""

import functools
import mmap
import os
import pathlib
import statistics
import sys
import tempfile
import time

import numpy as np
from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from kvjax.store.base import Geometry
from kvjax.store.flash import FlashStore
from kvjax.store.format import HEADER_BYTES
from kvjax.store.workers import WorkerPool

DIR = flags.DEFINE_string("dir", None, "directory on the device to measure; default: the temporary directory")
CALLS = flags.DEFINE_integer("calls", 200, "timed calls per line")
THREADS = flags.DEFINE_integer("threads", 4, "reading threads")

HEADS, BLOCKS, ASKED = 8, 512, 16
GEOMETRY = Geometry(layers=1, batch=1, kv_heads=HEADS, num_blocks=BLOCKS, block_rows=64, width=128, dtype="bfloat16")


def aligned(shape) -> np.ndarray:
    """Slots as XLA would allocate them; a misaligned destination alone would cost several times the copy."""
    size = int(np.prod(shape)) * GEOMETRY.numpy_dtype.itemsize
    return np.frombuffer(mmap.mmap(-1, size), GEOMETRY.numpy_dtype).reshape(shape)


def filled(directory: str, direct: bool):
    """A branch whose every block is full of random bytes, written to the device."""
    branch = FlashStore(directory, direct=direct, threads=THREADS.value).create(GEOMETRY, "bench")
    shape = (1, HEADS, BLOCKS, GEOMETRY.block_rows, GEOMETRY.width)
    blocks = np.random.default_rng(0).integers(0, 1 << 15, shape, np.uint16).view(GEOMETRY.numpy_dtype)
    branch.write_layer(0, blocks, np.full(shape[:3], GEOMETRY.block_rows, np.int32))
    os.sync()
    return branch


def selections(calls: int) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    pick = [np.stack([rng.permutation(BLOCKS)[:ASKED] for _ in range(HEADS)]) for _ in range(calls)]
    return [blocks[None].astype(np.int32) for blocks in pick]


def timed(call, arguments) -> tuple[float, float]:
    """Lowest and median microseconds of call(argument)."""
    times = []
    for argument in arguments:
        started = time.perf_counter()
        call(argument)
        times.append((time.perf_counter() - started) * 1e6)
    return min(times), statistics.median(times)


def measure_store(branch, arguments) -> tuple[float, float]:
    slots = aligned((1, HEADS, ASKED + 1, GEOMETRY.block_rows, GEOMETRY.width))
    slot = np.tile(np.arange(ASKED, dtype=np.int32), (1, HEADS, 1))

    def call(block):
        if not branch.read_into(0, branch.generation, block, slot, slots):
            raise branch.take_error()

    return timed(call, arguments)


def measure_raw(path: str, direct: bool, arguments) -> tuple[float, float]:
    size, count = GEOMETRY.extent_bytes, HEADS * ASKED
    descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    memory = memoryview(mmap.mmap(-1, count * size))
    first = np.arange(HEADS)[None, :, None] * BLOCKS  # prefill laid the extents in the order of heads and blocks

    def read(share, ticket):
        del ticket
        for view, offset in share:
            os.preadv(descriptor, [view], offset)

    def call(block):
        offsets = (HEADER_BYTES + np.sort((block + first).ravel()) * size).tolist()
        requests = [(memory[i * size:(i + 1) * size], offset) for i, offset in enumerate(offsets)]
        pool.run([functools.partial(read, requests[i::THREADS.value]) for i in range(THREADS.value)], 60.0)

    pool = WorkerPool(THREADS.value)
    result = timed(call, arguments)
    pool.stop()
    os.close(descriptor)
    return result


def stage_rows(branch) -> None:
    """Commits one row to every block; the rows of 4096 blocks are too few to be written behind."""
    rows = np.zeros((1, HEADS, GEOMETRY.width), GEOMETRY.numpy_dtype)
    for block in range(BLOCKS):
        index = np.full((1, HEADS), block, np.int32)
        branch.put_rows(0, branch.generation, index, index % GEOMETRY.block_rows, rows, np.ones(1, bool))
    branch.commit(branch.generation)


def report(name: str, store, raw) -> None:
    megabytes = HEADS * ASKED * GEOMETRY.block_bytes / store[1]
    print(f"{name:20} {store[0]:8.0f} {store[1]:8.0f} {raw[0]:8.0f} {raw[1]:8.0f} "
          f"{store[0] - raw[0]:8.0f} {store[1] - raw[1]:8.0f} {megabytes:8.0f}")


def main(argv):
    del argv
    directory = DIR.value or tempfile.gettempdir()
    print(f"{'us per call':20} {'min':>8} {'median':>8} {'raw min':>8} {'raw med':>8} {'over min':>8} {'over med':>8} "
          f"{'MB/s':>8}")
    for direct in (False, True):
        branch = filled(directory, direct)
        warm, arguments = selections(CALLS.value + 5)[:5], selections(CALLS.value)
        measure_store(branch, warm)
        raw = measure_raw(branch.path, direct, arguments)
        report("O_DIRECT" if branch.direct else "page cache", measure_store(branch, arguments), raw)
        stage_rows(branch)
        report("  with staged rows", measure_store(branch, arguments), raw)
        branch.close()


if __name__ == "__main__":
    app.run(main)
