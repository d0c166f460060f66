"""What a layer's fetch takes beyond the disk's own time, inside a compiled token.

    python scripts/bench_fetch.py [--blocks=0,1,4,8,32] [--rest_ms=0] [--dir=DIR]

One program fetches for several layers of 8 KV heads x 64, each after the layer before is there, as a token does but for
its computing. Blocks of 16 tokens are drawn anew for every fetch, so that nearly all are read. The disk's time is from
the first request to the last answer. A fetch is what the program takes longer than one that fetches nothing. Beyond the
disk are planning, the callback, finding, verifying and copying blocks. `--rest_ms` is how long the machine
rests between programs, which leaves its caches cold. Beside it are raw reads of as many blocks by four threads.
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
from experiments import raw_disk
from kvjax.method import Spec
from kvjax.pool import Line
from kvjax.store.base import Geometry
from kvjax.store.branch import FlashBranch
from kvjax.store.slots import SlotPool, default_backend

BLOCKS = flags.DEFINE_list("blocks", ["0", "1", "4", "8", "32"], "blocks of each head that a fetch needs")
LAYERS = flags.DEFINE_integer("layers", 4, "fetches in one program")
CONTEXT = flags.DEFINE_integer("context", 16384, "tokens")
REPEATS = flags.DEFINE_integer("repeats", 60, "programs timed for each number of blocks")
REST = flags.DEFINE_float("rest_ms", 0.0, "milliseconds between two programs")
DIR = flags.DEFINE_string("dir", "", "where the file is made; by default the system's temporary directory")

HEADS, SIZE, ROWS = 8, 64, 16


def make_spec() -> Spec:
    method = kvjax.quest(budget=2 * CONTEXT.value, page=ROWS, sinks=0, window=2)
    return method.spec(kv_heads=HEADS, group=1, head_dim=SIZE, capacity=CONTEXT.value)


def filled(directory: str) -> FlashBranch:
    """A store of random blocks, all of them on the device."""
    blocks = make_spec().num_blocks
    geometry = Geometry(LAYERS.value, 1, HEADS, blocks, ROWS, 2 * SIZE, "float32")
    branch, rng = kvjax.FlashStore(directory).create(geometry, "bench_fetch"), np.random.default_rng(0)
    for layer in range(LAYERS.value):
        rows = rng.standard_normal((1, HEADS, blocks, ROWS, 2 * SIZE), dtype=np.float32)
        branch.write_layer(layer, rows, np.full((1, HEADS, blocks), ROWS, np.int32))
    branch.settle()
    return branch


def pools(needed: int) -> list[SlotPool]:
    """One of each layer, with slots for half as many again as a fetch needs."""
    slots = needed + needed // 2 + 1
    return [SlotPool.zeros(make_spec(), 1, slots, "float32", "lru", default_backend()) for _ in range(LAYERS.value)]


def _token(pools, needs, line, fetches: bool):
    """The pools after a fetch for each of them, if it is wanted, each once the one before has come."""
    fetched, fine = [], jnp.bool_(True)
    for layer, pool in enumerate(pools):
        if fetches:
            need = jnp.where(fine, needs[layer], pool.num_blocks)
            count = jnp.full((1, HEADS, pool.num_blocks), ROWS, jnp.int32)
            pool, _, ok, _ = pool.fetch(need, count, jnp.int32(layer), line)
            fine &= ok
        fetched.append(pool)
    return fetched, fine


def timed(branch: FlashBranch, needed: int, fetches: bool) -> tuple[float, float, float]:
    """Milliseconds of one layer: of the program, of the disk, and inside the store's read; medians."""
    token, state = jax.jit(functools.partial(_token, fetches=fetches), donate_argnums=0), pools(max(1, needed))
    line, rng, rows = Line(jnp.int32(branch.handle), jnp.int32(branch.generation)), np.random.default_rng(1), []
    blocks = state[0].num_blocks
    for _ in range(REPEATS.value + 5):
        need = rng.permuted(np.tile(np.arange(blocks, dtype=np.int32), (LAYERS.value, 1, HEADS, 1)), axis=-1)
        need = jnp.asarray(need[..., :needed] if needed else np.full((LAYERS.value, 1, HEADS, 1), blocks, np.int32))
        jax.block_until_ready((need, state))
        time.sleep(1e-3 * REST.value)
        before, started = branch.stats(), time.perf_counter()
        state, fine = jax.block_until_ready(token(state, need, line))
        seconds, after = time.perf_counter() - started, branch.stats()
        assert fine, branch.take_error()
        rows.append((seconds, after.io_seconds - before.io_seconds, after.read_seconds - before.read_seconds))
    return tuple(1e3 * np.median(rows[5:], axis=0) / LAYERS.value)


def main(argv):
    del argv
    with tempfile.TemporaryDirectory(dir=DIR.value or None) as directory:
        branch = filled(directory)
        size = branch.geometry.extent_bytes
        print(f"{'blocks':>6} {'of bytes':>8} {'fetch ms':>9} {'disk ms':>8} {'in store':>9} {'beyond disk us':>15} "
              f"{'raw ms':>7} {'raw MB/s':>9}")
        for needed in map(int, BLOCKS.value):
            program, disk, store = timed(branch, needed, fetches=True)
            fetch = program - timed(branch, needed, fetches=False)[0]
            count, raw = HEADS * needed, 0.0
            if count:
                raw = raw_disk.read_seconds(pathlib.Path(directory), size, count, threads=4)
            speed = 1e-6 * count * size / raw if raw else 0.0
            print(f"{count:6} {size:8} {fetch:9.3f} {disk:8.3f} {store:9.3f} {1e3 * (fetch - disk):15.0f} "
                  f"{1e3 * raw:7.2f} {speed:9.0f}")
        branch.close()


if __name__ == "__main__":
    app.run(main)
