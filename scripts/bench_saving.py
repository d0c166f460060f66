"""Cost of forking, saving and opening a store file, and its growth with the number of blocks.

    python scripts/bench_saving.py [--dir=DIR] [--repeats=9]

4 layers of 8 KV heads; blocks of 16 rows of 128 int8, half a page, so that tables are measured and not payload. Before
each fork and save one token is appended, a row in a block of every layer and head, and written. "sync" beside a save is
the bare cost of its two syncs: two single-page writes and fdatasyncs of another file, measured alternately with the
saves. "raw" beside opening is the time to read as many bytes as the log has from the page cache. All figures are
medians, in milliseconds.
"""

import os
import pathlib
import statistics
import sys
import tempfile
import time

import numpy as np
from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from kvjax.store.flash.store import FlashStore
from kvjax.store.geometry import Geometry

DIR = flags.DEFINE_string("dir", None, "directory on the device to measure; default: the temporary directory")
REPEATS = flags.DEFINE_integer("repeats", 9, "timed calls per figure")
LAYERS, HEADS = 4, 8


def geometry(blocks: int) -> Geometry:
    return Geometry(LAYERS, 1, HEADS, blocks // (LAYERS * HEADS), block_rows=16, width=128, dtype="int8")


def filled(path: str, blocks: int):
    branch = FlashStore(file=path, threads=1).create(geometry(blocks), "bench")
    shape = (1, HEADS, branch.geometry.num_blocks, branch.geometry.block_rows, branch.geometry.width)
    payload = np.random.default_rng(0).integers(-99, 99, shape, np.int8)
    for layer in range(LAYERS):
        branch.write_layer(layer, payload, np.full(shape[:3], branch.geometry.block_rows, np.int32))
    return branch


def append_token(branch, step: int) -> None:
    """Appends one row in one block of every layer and head, as decoding a token does, and writes all of it to the
    file."""
    rows = np.ones((1, HEADS, branch.geometry.width), np.int8)
    block = np.full((1, HEADS), step % branch.geometry.num_blocks, np.int32)
    for layer in range(LAYERS):
        branch.put_rows(layer, branch.generation, block, np.zeros_like(block), rows)
    branch.commit(branch.generation)
    branch.flush()


def milliseconds(call) -> float:
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e3


def bare_syncs(descriptor: int) -> None:
    for page in range(2):
        os.pwrite(descriptor, os.urandom(4096), page * 4096)
        os.fdatasync(descriptor)


def measure(directory: str, blocks: int) -> list[float]:
    path = os.path.join(directory, f"bench-{blocks}.kv")
    branch = filled(path, blocks)
    first = milliseconds(branch.save)
    descriptor = os.open(path + ".sync", os.O_RDWR | os.O_CREAT, 0o600)
    forks, saves, syncs = [], [], []
    for step in range(REPEATS.value):
        append_token(branch, step)
        started = time.perf_counter()
        child = branch.fork()
        forks.append((time.perf_counter() - started) * 1e3)
        child.close()
        saves.append(milliseconds(branch.save))
        syncs.append(milliseconds(lambda: bare_syncs(descriptor)))
    branch.close()
    os.close(descriptor)
    store, opens, reads = FlashStore(file=path, threads=1), [], []
    for _ in range(REPEATS.value):
        started = time.perf_counter()
        again = store.open()
        opens.append((time.perf_counter() - started) * 1e3)
        again.close()
        with open(path, "rb") as file:
            reads.append(milliseconds(lambda file=file: file.read(16 * blocks)))
    os.unlink(path)
    os.unlink(path + ".sync")
    return [*map(statistics.median, (forks, saves, syncs)), first, *map(statistics.median, (opens, reads))]


def main(argv):
    del argv
    print(f"{'blocks':>8} {'fork':>8} {'save':>8} {'sync':>8} {'first save':>11} {'open':>8} {'raw':>8}")
    with tempfile.TemporaryDirectory(dir=DIR.value) as directory:
        for blocks in (1 << 10, 1 << 13, 1 << 16):
            fork, save, sync, first, opening, raw = measure(directory, blocks)
            print(f"{blocks:8} {fork:8.3f} {save:8.2f} {sync:8.2f} {first:11.1f} {opening:8.1f} {raw:8.3f}")


if __name__ == "__main__":
    app.run(main)
