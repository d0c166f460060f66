"""Cost of splitting clusters in a decode step, and of the mere possibility in a step without a split.

    python scripts/bench_split.py [--steps=50] [--capacity=8192]

One layer of 8 KV heads x 4 query heads x 64, blocks in memory. "write" is the half of a step that places the token and
splits; "never" is the same program without the loop that splits. The cases alternate, each with its own cache, so that
all of them meet the same noise. CPU time is that of all threads, which other programs disturb less. The limit is the
time to copy the bytes of the split blocks once, at the bandwidth of a 64 MB copy.
"""

import dataclasses
import functools
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from kvjax.cache.fill import Prompts, empty_state, fill_memory
from kvjax.cache.layer import LayerCache, LayerPlan
from kvjax.cache.pool import StoreRef
from kvjax.cache.state import NewToken
from kvjax.cache.write import write_token
from kvjax.methods import DynaKV

STEPS = flags.DEFINE_integer("steps", 50, "timed steps of each case")
CAPACITY = flags.DEFINE_integer("capacity", 8192, "capacity of the cache in tokens, half of it filled")

HEADS, GROUP, SIZE = 8, 4, 64
LINE = StoreRef(jnp.int32(-1), jnp.int32(0))


class NeverSplits(DynaKV):
    """DynaKV that appends without `due` and `adapt`."""

    adaptive = False  # type: ignore[assignment]


def make_plan(kind: type[DynaKV]) -> LayerPlan:
    method = kind(budget=512, block_rows=64, threshold=1e9, gain=0.0)  # splits only where a flag is set by hand
    return LayerPlan(method, method.spec(kv_heads=HEADS, group=GROUP, head_dim=SIZE, capacity=CAPACITY.value))


def clumps(length: int) -> np.ndarray:
    """Returns keys in clumps of 16 that are far apart."""
    rng = np.random.default_rng(0)
    centre = np.repeat(10 * rng.normal(size=(1, -(-length // 16), HEADS, SIZE)), 16, axis=1)[:, :length]
    return (centre + rng.normal(size=centre.shape)).astype(np.float32)


def filled(plan: LayerPlan, keys: np.ndarray) -> LayerCache:
    length = jnp.array([keys.shape[1]], jnp.int32)
    return fill_memory(plan, empty_state(plan, 1), Prompts(keys, keys, length))


def flagged(cache: LayerCache, heads: int, clusters: int) -> tuple[LayerCache, jax.Array]:
    """Returns the cache with `clusters` due in each of the first heads, and the blocks that the step fetched."""
    state, loaded = cache.state, np.full(cache.state.loaded.shape, cache.state.count.shape[-1], np.int32)
    split = np.zeros(state.index.split.shape, bool)
    for head in range(HEADS):
        loaded[0, head, :-1] = np.argsort(-np.asarray(state.count[0, head]))[: loaded.shape[-1] - 1]
        split[0, head, loaded[0, head, :clusters]] = head < heads
    index = dataclasses.replace(state.index, split=jnp.asarray(split))
    return dataclasses.replace(cache, state=dataclasses.replace(state, index=index)), jnp.asarray(loaded)


def copy_bandwidth() -> float:
    """Returns the bytes per second that a copy of 64 MB reads."""
    source = np.ones(1 << 24, np.float32)
    target, times = np.empty_like(source), []
    for _ in range(10):
        started = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - started)
    return source.nbytes / statistics.median(times)


CASES = {  # heads with a due cluster, due clusters of each
    "never": (0, 0), "nothing due": (0, 0), "1 head, 1 cluster": (1, 1), "8 heads, 1 cluster": (8, 1),
    "8 heads, 4 clusters": (8, 4),
}


def timed(writes, caches: dict[str, LayerCache], keys: np.ndarray) -> dict[str, list[tuple[float, float]]]:
    """Returns the wall and CPU microseconds of every step of every case; every step appends a key to another clump.

    Raises AssertionError if a step split other clusters than those due.
    """
    length, gate, zero = keys.shape[1], jnp.ones(1, bool), jnp.int32(0)
    empty, times = (jnp.zeros((1, HEADS, 0), jnp.int32), jnp.zeros((1, HEADS, 0))), {name: [] for name in CASES}
    for step in range(STEPS.value + 5):
        for name, (heads, clusters) in CASES.items():
            cache, loaded = flagged(caches[name], heads, clusters)
            key = jnp.asarray(keys[:, 16 * step])
            fresh, at = NewToken(key, key, loaded, *empty), jnp.array([length + step], jnp.int32)
            before = int(np.sum(jax.block_until_ready(cache).state.index.splits))
            wall, cpu = time.perf_counter(), time.process_time()
            caches[name] = jax.block_until_ready(writes[name](cache, fresh, at, gate, zero, LINE))[0]
            if step >= 5:
                times[name].append(((time.perf_counter() - wall) * 1e6, (time.process_time() - cpu) * 1e6))
            splits = int(np.sum(caches[name].state.index.splits)) - before
            assert splits == heads * clusters, f"{name}: {splits} splits"
    return times


def main(argv):
    del argv
    keys, plan = clumps(CAPACITY.value // 2), make_plan(DynaKV)
    base = filled(plan, keys)
    free = int(jnp.min(jnp.sum(base.state.count == 0, axis=-1)))
    if free < (STEPS.value + 5) * max(clusters for _, clusters in CASES.values()):
        raise app.UsageError(f"--steps={STEPS.value}: {free} free blocks per head are too few; raise --capacity")
    write = jax.jit(functools.partial(write_token, plan), donate_argnums=0)
    never = jax.jit(functools.partial(write_token, make_plan(NeverSplits)), donate_argnums=0)
    writes = {name: never if name == "never" else write for name in CASES}
    times = timed(writes, {name: jax.tree.map(jnp.copy, base) for name in CASES}, keys)
    bandwidth = copy_bandwidth()
    print(f"{'write of a step':22} {'wall us':>10} {'CPU us':>10} {'over idle':>10} {'limit us':>9}")
    _, idle = np.median(times["nothing due"], axis=0)
    for name, (heads, clusters) in CASES.items():
        limit = heads * clusters * plan.spec.block_rows * 2 * SIZE * 4 / bandwidth * 1e6
        wall, cpu = np.median(times[name], axis=0)
        print(f"{name:22} {wall:10.0f} {cpu:10.0f} {cpu / idle:10.2f} {limit:9.1f}")


if __name__ == "__main__":
    app.run(main)
