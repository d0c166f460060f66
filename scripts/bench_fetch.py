"""Time of a layer's fetch beyond the disk's own, inside a compiled token.

    python scripts/bench_fetch.py [--blocks=0,1,4,8,32] [--dir=DIR]

Two programs fetch once and twice for each of a few layers of 8 KV heads x 64, each fetch after the one before has
finished, as in a token without its computing. The time of a fetch is that of an additional one, so that calling a
program and passing its arrays is not included. Blocks of 16 tokens are drawn anew for every fetch, so that nearly all
are read. The disk's time is from the first request to the last answer. The time beyond the disk goes to planning, the
callback, and finding, verifying and copying blocks. Beside it are the times of verifying and copying as many blocks
that lie in memory, outside the CPU's caches, and of raw reads of them by four threads.
"""

import functools
import pathlib
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import kvjax
from experiments.speed import raw_disk
from kvjax.cache.callbacks import default_backend
from kvjax.cache.pool import StoreRef
from kvjax.cache.slots import SlotPool
from kvjax.cache.types import Spec
from kvjax.store.flash.branch import FlashBranch
from kvjax.store.format.pages import checksum
from kvjax.store.geometry import PAGE_BYTES, Geometry
from kvjax.store.io.aio import XXH3, native
from kvjax.store.io.libaio import EVENT, IOCB

BLOCKS = flags.DEFINE_list("blocks", ["0", "1", "4", "8", "32"], "blocks of each head that a fetch needs")
LAYERS = flags.DEFINE_integer("layers", 4, "layers whose blocks a program fetches")
CONTEXT = flags.DEFINE_integer("context", 16384, "tokens")
REPEATS = flags.DEFINE_integer("repeats", 60, "programs timed for each number of blocks")
DIR = flags.DEFINE_string("dir", "", "where the file is made; default: the temporary directory")

HEADS, SIZE, ROWS = 8, 64, 16


def make_spec() -> Spec:
    method = kvjax.Quest(budget=2 * CONTEXT.value, page=ROWS, sinks=0, window=2)
    return method.spec(kv_heads=HEADS, group=1, head_dim=SIZE, capacity=CONTEXT.value)


def filled(directory: str) -> FlashBranch:
    """Returns a branch of a store with random blocks, all of them on the device."""
    blocks = make_spec().num_blocks
    geometry = Geometry(LAYERS.value, 1, HEADS, blocks, ROWS, 2 * SIZE, "float32")
    branch, rng = kvjax.FlashStore(directory=directory).create(geometry, "bench_fetch"), np.random.default_rng(0)
    for layer in range(geometry.layers):
        rows = rng.standard_normal((1, HEADS, blocks, ROWS, 2 * SIZE), dtype=np.float32)
        branch.write_layer(layer, rows, np.full((1, HEADS, blocks), ROWS, np.int32))
    branch.settle()
    return branch


def pools(needed: int) -> list[SlotPool]:
    """Returns a pool for each layer, with slots for one and a half times the blocks of a fetch."""
    slots = needed + needed // 2 + 1
    return [SlotPool.zeros(make_spec(), 1, slots, "float32", "lru", default_backend()) for _ in range(LAYERS.value)]


@functools.partial(jax.jit, donate_argnums=0)
def _token(pools, needs, line):
    """Returns the pools after the fetches of `needs`, each issued once the one before has finished."""
    pools, fine = list(pools), jnp.bool_(True)
    for i, need in enumerate(needs):
        layer = i % len(pools)
        pool = pools[layer]
        count = jnp.full((1, HEADS, pool.num_blocks), ROWS, jnp.int32)
        pools[layer], _, ok, _ = pool.fetch(jnp.where(fine, need, pool.num_blocks), count, jnp.int32(layer), line)
        fine &= ok
    return pools, fine


def timed(branch: FlashBranch, state, times: int, needed: int, rng: np.random.Generator):
    """Runs a program that fetches `times` times for each pool; returns the pools, and the seconds of the program, of
    the disk, and inside the store's reads."""
    line, blocks = StoreRef(jnp.int32(branch.handle), jnp.int32(branch.generation)), state[0].num_blocks
    shape = (times * LAYERS.value, 1, HEADS, 1)
    need = rng.permuted(np.tile(np.arange(blocks, dtype=np.int32), shape), axis=-1)[..., :needed]
    need = jnp.asarray(need if needed else np.full(shape, blocks, np.int32))
    jax.block_until_ready((need, state))
    before, started = branch.stats(), time.perf_counter()
    state, fine = jax.block_until_ready(_token(state, need, line))
    seconds, after = time.perf_counter() - started, branch.stats()
    assert fine, branch.take_error()
    return state, (seconds, after.io_seconds - before.io_seconds, after.read_seconds - before.read_seconds)


def one_more(branch: FlashBranch, needed: int) -> np.ndarray:
    """Returns the milliseconds of an additional fetch, of the disk in it, and inside the store's read: medians of
    differences between two programs that alternate."""
    state, rng, rows = pools(max(1, needed)), np.random.default_rng(1), []
    for _ in range(REPEATS.value + 5):
        state, once = timed(branch, state, 1, needed, rng)
        state, twice = timed(branch, state, 2, needed, rng)
        rows.append(np.subtract(twice, once))
    return 1e3 * np.median(rows[5:], axis=0) / LAYERS.value


def land_seconds(size: int, count: int, repeats: int = 25) -> float:
    """Returns the median seconds of a call of `native.land` for `count` blocks, with everything out of the CPU's
    caches: for many blocks limited by memory, for few mostly the call itself."""
    rng, order = np.random.default_rng(2), np.arange(count)
    payloads, out = rng.integers(0, 256, (count, size), np.uint8), np.ones((count, size), np.uint8)
    sums = np.array([checksum(payload) & ~0xFFFF for payload in payloads], np.uint64)
    control, events, results = np.zeros(count, IOCB), np.zeros(count, EVENT), np.zeros(count, np.int64)
    control["nbytes"], events["data"], events["result"] = size, order, size
    targets, times = rng.permutation(count), []
    for _ in range(repeats):
        np.ones(8 << 20).sum()  # evicts the caches
        done, started = np.zeros(count, np.uint8), time.perf_counter()
        landed = native.land(events.view(np.uint8), control.view(np.uint8), order, sums, targets, results, done, out,
                             count, count, payloads.ctypes.data, count, size, size, PAGE_BYTES, XXH3)
        times.append(time.perf_counter() - started)
        assert landed == count
    return float(np.median(times))


def main(argv):
    del argv
    with tempfile.TemporaryDirectory(dir=DIR.value or None) as directory:
        branch = filled(directory)
        size = branch.geometry.extent_bytes
        print(f"{'blocks':>6} {'of bytes':>8} {'fetch ms':>9} {'disk ms':>8} {'in store':>9} {'beyond disk us':>15} "
              f"{'memory us':>10} {'raw ms':>7} {'raw MB/s':>9}")
        for needed in map(int, BLOCKS.value):
            fetch, disk, store = one_more(branch, needed)
            count, raw, landing = HEADS * needed, 0.0, 0.0
            if count:
                landing = land_seconds(size, count)
                raw = raw_disk.read_seconds(pathlib.Path(directory), size, count, threads=4)
            speed = 1e-6 * count * size / raw if raw else 0.0
            print(f"{count:6} {size:8} {fetch:9.3f} {disk:8.3f} {store:9.3f} {1e3 * (fetch - disk):15.0f} "
                  f"{1e6 * landing:10.0f} {1e3 * raw:7.2f} {speed:9.0f}")
        branch.close()


if __name__ == "__main__":
    app.run(main)
