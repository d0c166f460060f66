"""Cost of the flash store's read path beyond bare system calls, by parts.

    python scripts/bench_reads.py [--dir=DIR] [--blocks_kb=16,64,256] [--asked=N] [--engines=aio,threads] [--threads=4]
                                  [--repeats=15] [--profile=native]

One call reads 128 scattered blocks of 16 KB, 64 of 64 KB or 32 of 256 KB, cold: past the page cache with O_DIRECT, or,
if that is refused, after the pages were dropped. Three ways with each engine alternate, each time on other blocks:

    raw     bare system calls: one io_submit and io_getevents for all blocks (aio), or preadv of each by as many
            threads; no checksum, no copy
    store   FlashBranch.read_into: the same system calls, checksums verified, blocks copied to their slots
    staged  the same when every block has one committed row that is not in the file yet

Figures are medians over the repeats after a warm-up. The ratio, the effective bandwidth over the raw one, is given for
the median calls and, less sensitive to other work on the machine, for the fastest ones; the store's target is 0.85. CPU
time is that of the whole process, all threads, per block. "beyond I/O" is the time of a call less the time from the
first request to the last answer of the device. The answer to an asynchronous read is only seen by waiting for one, so
that copying the blocks that arrived before counts as I/O there. With --cprofile the script prints instead where the
time of the calling thread goes.
"""

import cProfile
import functools
import mmap
import os
import pathlib
import pstats
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np
from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from experiments.speed.raw_disk import RawFile, RawRing
from kvjax.store.flash.branch import FlashBranch
from kvjax.store.flash.store import FlashStore
from kvjax.store.format.pages import HEADER_BYTES
from kvjax.store.geometry import Geometry

DIR = flags.DEFINE_string("dir", None, "directory on the device to measure; default: the temporary directory")
SIZES = flags.DEFINE_list("blocks_kb", ["16", "64", "256"], "block sizes, KB")
BLOCKS = flags.DEFINE_integer("asked", None, "blocks per head (of 8) and call, instead of those above", lower_bound=1)
ENGINES = flags.DEFINE_list("engines", ["aio", "threads"], "engines that read, see kvjax/store/io/reader.py")
THREADS = flags.DEFINE_integer("threads", 4, "reading threads, and so requests in flight", lower_bound=1)
REPEATS = flags.DEFINE_integer("repeats", 15, "timed calls of each way", lower_bound=1)
PROFILE = flags.DEFINE_string("profile", "native", "device to emulate, see kvjax/store/io/profiles.py")
CPROFILE = flags.DEFINE_bool("cprofile", False, "profile the calling thread of the store's reads")

HEADS, WIDTH, WARM_UP = 8, 128, 3
STAGING = 4 << 30  # staged blocks stay staged: the writer must not run during the measurement
ASKED = {16: 16, 64: 8, 256: 4}  # blocks per head and call


class Bench:
    """A file whose every block is full, and one timed call of each way to read it."""

    def __init__(self, directory: str, block_kb: int, engine: str):
        self.asked = BLOCKS.value or ASKED.get(block_kb, 4)
        rounds = 3 * (REPEATS.value + WARM_UP)
        blocks = 2 * self.asked * rounds  # no block is read twice, and no two of a call are neighbours
        self.geometry = Geometry(layers=1, batch=1, kv_heads=HEADS, num_blocks=blocks, width=WIDTH, dtype="bfloat16",
                                 block_rows=block_kb * 1024 // (2 * WIDTH))
        store = FlashStore(directory=directory, engine=engine, threads=THREADS.value, profile=PROFILE.value,
                           staging_bytes=STAGING)
        self.branch: FlashBranch = filled(store, self.geometry)
        path, system = self.branch.path, store.system
        self.raw = RawRing(path) if engine == "aio" else RawFile(path, THREADS.value, self.branch.direct, system)
        order = [2 * np.random.default_rng(head).permutation(blocks // 2) for head in range(HEADS)]
        self._picks = iter(np.stack(order, axis=0).reshape(HEADS, rounds, self.asked).swapaxes(0, 1).astype(np.int32))
        self._slot = np.tile(np.arange(self.asked, dtype=np.int32), (1, HEADS, 1))
        shape = (1, HEADS, self.asked + 1, self.geometry.block_rows, WIDTH)
        memory = mmap.mmap(-1, int(np.prod(shape)) * 2)  # page-aligned, as XLA would allocate it
        memory.write(bytes(len(memory)))
        self._slots = np.frombuffer(memory, np.uint16).reshape(shape)  # bfloat16, as programs hand it over

    def _pick(self) -> np.ndarray:
        if isinstance(self.raw, RawFile) and not self.branch.direct:
            self.raw.forget_pages()
        return np.ascontiguousarray(next(self._picks))

    def read_raw(self) -> tuple[float, float, float]:
        """Returns the wall and CPU seconds of one call; NaN for the seconds beyond I/O, which are unknown here."""
        first = np.arange(HEADS)[:, None] * self.geometry.num_blocks  # prefill writes heads and blocks in order
        extents = np.sort((self._pick() + first).ravel()).astype(np.int64)
        offsets = (HEADER_BYTES + extents * self.geometry.extent_bytes).tolist()
        cpu = time.process_time()
        wall = self.raw.seconds(offsets, self.geometry.extent_bytes)
        return wall, time.process_time() - cpu, np.nan

    def read_store(self, staged: bool = False) -> tuple[float, float, float]:
        """Returns the wall and CPU seconds of one call and the wall seconds beyond I/O; if `staged`, of blocks with a
        row in memory."""
        block = self._pick()[None]
        if staged:
            self._stage(block)
        before, cpu, started = self.branch.stats().io_seconds, time.process_time(), time.perf_counter()
        if not self.branch.read_into(0, self.branch.generation, block, self._slot, self._slots):
            raise self.branch.failure("a block")
        wall, cpu = time.perf_counter() - started, time.process_time() - cpu
        return wall, cpu, wall - (self.branch.stats().io_seconds - before)

    def _stage(self, block: np.ndarray) -> None:
        """Commits a row to each block."""
        rows = np.zeros((1, HEADS, WIDTH), self.geometry.numpy_dtype)
        for column in block[0].T:
            index = np.ascontiguousarray(column[None])
            self.branch.put_rows(0, self.branch.generation, index, index * 0 + 3, rows)
        self.branch.commit(self.branch.generation)

    def close(self) -> None:
        self.raw.close()
        self.branch.close()


def filled(store: FlashStore, geometry: Geometry) -> FlashBranch:
    """Returns a branch whose every block is full of random bytes, written to the device."""
    branch = store.create(geometry, "bench")
    shape = (1, HEADS, geometry.num_blocks, geometry.block_rows, WIDTH)
    blocks = np.random.default_rng(0).integers(0, 1 << 15, shape, np.uint16).view(geometry.numpy_dtype)
    branch.write_layer(0, blocks, np.full(shape[:3], geometry.block_rows, np.int32))
    os.sync()
    return branch


def measure(benches: dict[str, Bench]) -> dict[tuple[str, str], np.ndarray]:
    """Returns wall, CPU and beyond-I/O seconds, [repeats, 3], of each engine and way, measured alternately."""
    ways: dict[tuple[str, str], Callable] = {}
    for engine, bench in benches.items():
        ways[engine, "raw"] = bench.read_raw
        ways[engine, "store"] = bench.read_store
        ways[engine, "staged"] = functools.partial(bench.read_store, staged=True)
    taken: dict[tuple[str, str], list] = {name: [] for name in ways}
    for turn in range(WARM_UP + REPEATS.value):
        for i in range(len(ways)):
            name = list(ways)[(turn + i) % len(ways)]
            figures = ways[name]()
            if turn >= WARM_UP:
                taken[name].append(figures)
    return {name: np.array(figures) for name, figures in taken.items()}


def report(count: int, block_kb: int, seconds: dict[tuple[str, str], np.ndarray]) -> None:
    for (engine, way), figures in seconds.items():
        raw, raw_least = np.median(seconds[engine, "raw"][:, 0]), seconds[engine, "raw"][:, 0].min()
        (wall, cpu, beyond), least = np.median(figures, axis=0), figures[:, 0].min()
        print(f"{block_kb:8} {engine:>8} {way:>8} {1e3 * wall:9.2f} {1e3 * least:9.2f} "
              f"{count * block_kb * 1.024e-3 / wall:9.0f} {raw / wall:7.2f} {raw_least / least:12.2f} "
              f"{1e6 * cpu / count:12.1f} {1e6 * beyond:13.0f}", flush=True)


def profile_reads(bench: Bench) -> None:
    """Prints the functions of the calling thread by the time spent in each."""
    profiler = cProfile.Profile()
    for turn in range(WARM_UP + REPEATS.value):
        if turn >= WARM_UP:
            profiler.enable()
        bench.read_store()
        profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(12)


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    device = PROFILE.value if PROFILE.value == "native" else f"{PROFILE.value} (emulated)"
    for i, block_kb in enumerate(map(int, SIZES.value)):
        benches = {engine: Bench(DIR.value or tempfile.gettempdir(), block_kb, engine) for engine in ENGINES.value}
        bench = next(iter(benches.values()))
        if i == 0:
            how = "O_DIRECT" if bench.branch.direct else "page cache, dropped before each call"
            print(f"device {device}, {how}, {THREADS.value} threads, medians of {REPEATS.value} calls")
            print(f"{'block KB':>8} {'engine':>8} {'way':>8} {'ms':>9} {'fastest':>9} {'MB/s':>9} {'ratio':>7} "
                  f"{'of fastest':>12} {'CPU us/block':>12} {'beyond I/O us':>13}")
        if CPROFILE.value:
            for bench in benches.values():
                profile_reads(bench)
        else:
            report(HEADS * bench.asked, block_kb, measure(benches))
        for bench in benches.values():
            bench.close()


if __name__ == "__main__":
    app.run(main)
