"""Time of one layer of a token by parts: selecting, reading, attending, and committing."""

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from experiments.speed.timing import median_ms
from kvjax.cache import shared_slots
from kvjax.cache.layer import LayerCache
from kvjax.cache.pool import StoreRef
from kvjax.cache.read import attend, choose, read_token
from kvjax.cache.slots import SlotPool
from kvjax.cache.state import NewToken
from kvjax.cache.write import write_token
from kvjax.inference.plan import State

COMMITS = 26  # tokens with which a layer's commit is timed; the first compiles


@jax.jit
def _fetch(pool, need, count, number, ref):
    return pool.fetch(need, count, number, ref)


@functools.partial(jax.jit, static_argnums=0)
def _whole_read(layer_plan, cache, q, key, value, at, number, ref):
    return read_token(layer_plan, cache, q, key, value, at, number, ref)[0]


def parts(llm, plan, state: State, branch) -> dict[str, float]:
    """Returns the milliseconds of one layer's select, fetch, attend and commit; the store must not be used
    afterwards."""
    last = max(i for i, layer in enumerate(plan.layers) if not layer.follows)  # followers do not select
    rng, layer_plan = np.random.default_rng(0), plan.layers[last]
    layer = shared_slots.take(state.layers[last], shared_slots.between_steps(state.layers))
    config, number = llm.config, jnp.int32(last)
    q = jnp.asarray(rng.standard_normal((plan.batch, config.num_heads, config.head_dim), np.float32))
    key = jnp.asarray(rng.standard_normal((plan.batch, config.num_kv_heads, config.head_dim), np.float32))
    ref, position = state.ref, state.length
    chosen = choose(layer_plan, layer.state, q)
    pool, slot, _, _ = _fetch(layer.pool, chosen.need, layer.state.count, number, ref)
    cache = dataclasses.replace(layer, pool=pool)
    figures = {
        "select_ms": median_ms(choose, layer_plan, layer.state, q),
        "attend_ms": median_ms(attend, layer_plan, cache, chosen, q, key, key, slot, position),
        "layer_read_ms": median_ms(_whole_read, layer_plan, cache, q, key, key, position, number, ref),
    }
    if isinstance(pool, SlotPool):
        figures["plan_ms"] = median_ms(jax.jit(SlotPool.plan), pool, chosen.need, layer.state.count)
    if branch is not None:
        figures["fetch_ms"] = cold_fetch_ms(layer, chosen.need, number, ref, branch)
    new_token = read_token(layer_plan, cache, q, key, key, position, number, ref, chosen)[2]
    return figures | {"commit_ms": commit_ms(layer_plan, cache, new_token, position, number, ref, branch)}


def commit_ms(layer_plan, cache: LayerCache, new_token: NewToken, at, number, ref: StoreRef, branch) -> float:
    """Returns the median milliseconds of one layer's end of a token, over consecutive tokens: its key is placed,
    clusters are adapted, the store commits."""
    write = jax.jit(write_token, static_argnums=0, donate_argnums=1)
    cache, gate, times = jax.tree.map(jnp.copy, cache), jnp.ones(at.shape, bool), []
    for i in range(COMMITS):
        started, now = time.perf_counter(), dataclasses.replace(ref, generation=ref.generation + i)
        cache = jax.block_until_ready(write(layer_plan, cache, new_token, at + i, gate, number, now))[0]
        if branch is not None:
            branch.commit(int(now.generation))
        times.append(1e3 * (time.perf_counter() - started))
    return float(np.median(times[1:]))


def cold_fetch_ms(cache: LayerCache, need, number, ref, branch, repeats: int = 15) -> dict[str, float]:
    """Returns one layer's fetch with no block resident: milliseconds of the call and inside the store's read, blocks,
    and bytes per block."""
    empty, count = cache.pool.emptied(), cache.state.count
    donated = jax.jit(lambda pool, need: pool.fetch(need, count, number, ref)[:3], donate_argnums=0)
    jax.block_until_ready(donated(jax.tree.map(jnp.copy, empty), need))
    calls, inside = [], []
    for _ in range(repeats):
        new_token = jax.block_until_ready(jax.tree.map(jnp.copy, empty))
        before, started = branch.stats(), time.perf_counter()
        jax.block_until_ready(donated(new_token, need))
        calls.append(1e3 * (time.perf_counter() - started))
        after = branch.stats()
        inside.append(1e3 * (after.read_seconds - before.read_seconds))
    blocks = int(jnp.sum(cache.pool.own(need) < count.shape[-1]))  # of the store: one if heads share it
    size = (after.bytes_read - before.bytes_read) / max(1, blocks)
    return {"call": float(np.median(calls)), "store": float(np.median(inside)), "blocks": blocks, "block_bytes": size}
