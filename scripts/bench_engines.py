"""Read times of each engine of the flash store, cold and warm, beside those of the system without a store.

    python scripts/bench_engines.py [--dir=DIR] [--workdir=runs/engines] [--blocks_kb=4,16,64] [--repeats=15]

One call reads 128 scattered blocks of 4 KB, 64 of 16 KB or 32 of 64 KB of one layer, through compiled code if the
engine has it. Each engine has a file of its own. In each repeat all of them read once, one after the other:

    cold    blocks that have not been read since they were written, after the page cache dropped the file
    warm    any blocks of a file that is in the page cache; with O_DIRECT that makes no difference
    limit   cold: one io_submit of as many bare O_DIRECT reads; warm: one thread's preadv of them from the page cache;
            without verifying or copying

Rows are medians over the repeats, with the quartiles around them. "over the limit" is the median of the ratio of a
call's time to the limit's in the same repeat. The table is printed as Markdown and stored in `summary.json` of the
workdir. The rate of sequential reads of the device, in pieces of 1 MB past the page cache, is printed above it.
"""

import json
import mmap
import os
import pathlib
import sys
import tempfile
import time

import numpy as np
from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from experiments import results
from experiments.speed.raw_disk import RawFile, RawRing, random_file
from kvjax import _files
from kvjax.errors import ConfigError
from kvjax.store.flash.branch import FlashBranch
from kvjax.store.flash.store import FlashStore
from kvjax.store.format.pages import HEADER_BYTES
from kvjax.store.geometry import Geometry

DIR = flags.DEFINE_string("dir", None, "directory on the device to measure; default: the temporary directory")
WORKDIR = flags.DEFINE_string("workdir", "runs/engines", "where summary.json goes")
SIZES = flags.DEFINE_list("blocks_kb", ["4", "16", "64"], "block sizes, KB")
REPEATS = flags.DEFINE_integer("repeats", 15, "timed calls of each engine", lower_bound=5)

HEADS, WIDTH, WARM_UP, FILE_BYTES = 8, 128, 2, 256 << 20
ASKED = {4: 16, 16: 8, 64: 4}  # blocks per head and call
ENGINES = {"aio, O_DIRECT": ("aio", True), "threads, O_DIRECT": ("threads", True), "threads": ("threads", False),
           "mmap": ("mmap", False)}


class Bench:
    """A store file full of random bytes, and a timed call that reads some of its blocks."""

    def __init__(self, directory: str, block_kb: int, engine: str, direct: bool):
        self.asked = ASKED.get(block_kb, 4)
        self.rounds = REPEATS.value + WARM_UP
        geometry = self.geometry = Geometry(
            layers=1, batch=1, kv_heads=HEADS, num_blocks=2 * self.asked * self.rounds, width=WIDTH, dtype="bfloat16",
            block_rows=block_kb * 1024 // (2 * WIDTH))
        self.branch: FlashBranch = FlashStore(directory=directory, engine=engine, direct=direct).create(geometry,
                                                                                                        "bench")
        shape = (1, HEADS, geometry.num_blocks, geometry.block_rows, WIDTH)
        blocks = np.random.default_rng(0).integers(0, 1 << 15, shape, np.uint16).view(geometry.numpy_dtype)
        self.branch.write_layer(0, blocks, np.full(shape[:3], geometry.block_rows, np.int32))
        self.branch.settle()
        self.pages = RawFile(self.branch.path, threads=1, direct=False)
        self._slot = np.tile(np.arange(self.asked, dtype=np.int32), (1, HEADS, 1))
        slots = (1, HEADS, self.asked + 1, geometry.block_rows, WIDTH)
        memory = mmap.mmap(-1, int(np.prod(slots)) * 2)  # page-aligned, as XLA would allocate it
        memory.write(bytes(len(memory)))
        self._slots = np.frombuffer(memory, np.uint16).reshape(slots)  # bfloat16, as programs hand it over

    def picks(self, seed: int) -> np.ndarray:
        """Returns the blocks of each call, int32[rounds, 1, HEADS, asked]: none twice, and no two neighbours."""
        rng = np.random.default_rng(seed)
        order = [2 * rng.permutation(self.geometry.num_blocks // 2) for _ in range(HEADS)]
        chosen = np.stack(order).reshape(HEADS, self.rounds, 1, self.asked).astype(np.int32)
        return np.ascontiguousarray(np.moveaxis(chosen, 0, 2))

    def offsets(self, block: np.ndarray) -> list[int]:
        """Returns the offsets of blocks in the file, ascending: prefill writes heads and blocks in order."""
        extents = np.sort((block[0] + np.arange(HEADS)[:, None] * self.geometry.num_blocks).ravel())
        return (HEADER_BYTES + extents.astype(np.int64) * self.geometry.extent_bytes).tolist()

    def seconds(self, block: np.ndarray) -> float:
        """Returns the wall time of reading int32 block[1, HEADS, asked] to slots."""
        started = time.perf_counter()
        if not self.branch.read_into(0, self.branch.generation, block, self._slot, self._slots):
            raise self.branch.failure("a block")
        return time.perf_counter() - started

    def fill_page_cache(self) -> None:
        size = os.path.getsize(self.branch.path)
        self.pages.seconds(list(range(0, size - (1 << 20), 1 << 20)), 1 << 20)

    def close(self) -> None:
        self.pages.close()
        self.branch.close()


def measure(benches: dict[str, Bench], limit: Bench, warm: bool) -> dict[str, np.ndarray]:
    """Returns seconds[repeats] of each engine and of the limit, measured alternately."""
    raw, taken = RawRing(limit.branch.path), {name: [] for name in [*benches, "limit"]}
    picks = limit.picks(seed=int(warm))
    everyone = [*benches.values(), limit]
    for turn in range(limit.rounds):
        for bench in everyone:
            if not warm:
                bench.pages.forget_pages()
            elif turn == 0:
                bench.fill_page_cache()
        names = list(taken)
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            if name != "limit":
                taken[name].append(benches[name].seconds(picks[turn]))
                continue
            source = limit.pages if warm else raw
            taken[name].append(source.seconds(limit.offsets(picks[turn]), limit.geometry.extent_bytes))
    raw.close()
    return {name: np.array(seconds[WARM_UP:]) for name, seconds in taken.items()}


def rows_of(block_kb: int, warm: bool, found: dict[str, np.ndarray]) -> list[dict]:
    """Returns the rows of one block size, cold or warm."""
    count, rows = HEADS * ASKED.get(block_kb, 4), []
    for name, seconds in found.items():
        low, middle, high = np.quantile(seconds, (0.25, 0.5, 0.75))
        rows.append({
            "method": name, "block_kb": block_kb, "page_cache": "warm" if warm else "cold", "blocks": count,
            "repeats": seconds.size, "fetch_ms": 1e3 * middle, "fetch_ms_quartiles": [1e3 * low, 1e3 * high],
            "effective_bandwidth": count * block_kb * 1024 / middle,
            "over_limit": float(np.median(seconds / found["limit"])),
        })
    return rows


def table(rows: list[dict]) -> str:
    """Returns the rows as a Markdown table."""
    lines = ["| block | page cache | engine | ms (quartiles) | MB/s | over the limit |", "|---|---|---|---|---|---|"]
    for row in rows:
        low, high = row["fetch_ms_quartiles"]
        lines.append(f"| {row['block_kb']} KB | {row['page_cache']} | {row['method']} | {row['fetch_ms']:.2f} "
                     f"({low:.2f}, {high:.2f}) | {row['effective_bandwidth'] / 1e6:,.0f} | {row['over_limit']:.2f} |")
    return "\n".join(lines)


def sequential_bandwidth(directory: str) -> float:
    """Returns the bytes per second of one thread that reads a file from beginning to end, past the page cache."""
    with random_file(directory, FILE_BYTES) as path:
        raw = RawFile(path, threads=1)
        offsets = list(range(0, FILE_BYTES, 1 << 20))
        seconds = np.median([raw.seconds(offsets, 1 << 20) for _ in range(5)])
        raw.close()
    return FILE_BYTES / float(seconds)


def available(directory: str, block_kb: int) -> dict[str, Bench]:
    """Returns benches of the engines that work here, and prints why others do not."""
    benches = {}
    for name, (engine, direct) in ENGINES.items():
        try:
            benches[name] = Bench(directory, block_kb, engine, direct)
        except ConfigError as cause:
            print(f"{name} is left out: {cause}")
    return benches


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    directory = DIR.value or tempfile.gettempdir()
    sequential, rows = sequential_bandwidth(directory), []
    print(f"{results.processor()}; sequential reads of the device: {sequential / 1e6:,.0f} MB/s")
    for block_kb in map(int, SIZES.value):
        benches, limit = available(directory, block_kb), Bench(directory, block_kb, "threads", False)
        for warm in (False, True):
            rows += rows_of(block_kb, warm, measure(benches, limit, warm))
        for bench in (*benches.values(), limit):
            bench.close()
    print(table(rows))
    config = {"blocks_kb": SIZES.value, "repeats": REPEATS.value, "sequential_bandwidth": sequential}
    workdir = pathlib.Path(WORKDIR.value)
    workdir.mkdir(parents=True, exist_ok=True)
    with _files.replacing(workdir / "summary.json") as fresh:
        summary = {"experiment": "engines", "config": config, **results.machine(), "rows": rows}
        fresh.write_text(json.dumps(summary, indent=2) + "\n")
    print(f"results in {workdir / 'summary.json'}")


if __name__ == "__main__":
    app.run(main)
