"""What a setting takes on this machine: memory, one layer's reads, one layer's computing, and how often groups recur.

All but the last depend on shapes alone, so they are taken from made-up contents: a layer computes as long on an empty
cache as on a full one, because every shape is fixed.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import decode, layer, planning, prefill
from kvjax.layer import LayerCache
from kvjax.llm import LLM
from kvjax.method import Method
from kvjax.models.config import ModelConfig
from kvjax.planning import Plan, Slots, State
from kvjax.pool import Line
from kvjax.store.base import Branch, Geometry, Store
from kvjax.store.host import HostStore


def memory_bytes(config: ModelConfig, method: Method, slots: Slots, batch: int, capacity: int) -> int:
    """Bytes of everything a cache over a store keeps in memory: index, tables, tail and slots. Allocates nothing."""
    plan = planning.make_plan(config, method, batch, capacity)

    def one_layer():
        pool = planning.slot_pool(plan, len(plan.layers) - 1, slots)
        return jax.tree.leaves((layer.init(plan.layers[-1], batch), pool))

    return config.num_layers * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.eval_shape(one_layer))


class Reading(NamedTuple):
    """Seconds of one layer's reads: all of them, and what they take of the caller if they were begun early enough."""

    whole: float
    busy: float


def read_seconds(
    store: Store, config: ModelConfig, group: int, blocks: int, batch: int, context: int, repeats: int = 9
) -> Reading:
    """T_io: the store reads `blocks` groups, the same for all KV heads, of each of `batch` sequences.

    Medians over reads of groups picked at random, none twice while there are others, from a layer of `context` tokens:
    of a small file, or of what was read before, a device may keep a copy.
    """
    if not blocks:
        return Reading(0.0, 0.0)
    count = max(blocks, -(-context // group))
    geometry = Geometry(
        layers=1, batch=batch, kv_heads=config.num_kv_heads, num_blocks=count, block_rows=group,
        width=2 * config.head_dim, dtype="float32", alike=True,
    )
    branch = store.create(geometry, "tuner")
    try:
        _fill(branch)
        lanes, picked = (batch, config.num_kv_heads), _picks(count, blocks)
        slots = np.zeros((*lanes, blocks, group, geometry.width), np.float32)
        slot = np.broadcast_to(np.arange(blocks, dtype=np.int32), (*lanes, blocks))

        def read(nth):
            block = np.broadcast_to(picked(nth), slot.shape).copy()
            if not branch.read_into(0, branch.generation, block, slot, slots):
                raise branch.take_error()

        def begin(nth):
            branch.submit(0, branch.generation, np.broadcast_to(picked(nth), slot.shape).copy())

        def read_ahead(nth):
            began = _seconds(begin, nth)
            time.sleep(2 * whole)
            return began + _seconds(read, nth)

        whole = _median_seconds(read, repeats)
        busy = [read_ahead(nth) for nth in range(repeats + 1, 2 * repeats + 1)]
        return Reading(whole, min(whole, float(np.median(busy))))
    finally:
        branch.close()


def _fill(branch: Branch) -> None:
    """Writes every block of a branch's only layer."""
    geometry = branch.geometry
    lanes = (geometry.batch, geometry.kv_heads, geometry.num_blocks)
    ones = np.broadcast_to(np.float32(1), (*lanes, geometry.block_rows, geometry.width))
    branch.write_layer(0, ones, np.full(lanes, geometry.block_rows, np.int32))
    branch.settle()


def _picks(count: int, size: int) -> Callable[[int], np.ndarray]:
    """nth -> int32[size] of range(count), different ones until all were there."""
    order = np.random.default_rng(0).permutation(count).astype(np.int32)
    return lambda nth: order[np.arange(nth * size, (nth + 1) * size) % count]


def compute_seconds(llm: LLM, method: Method, slots: Slots, batch: int, capacity: int, repeats: int = 9) -> float:
    """T_model: seconds of one layer of a token that reads nothing, prediction, slot table and writes included.

    Two layers decode, as each looks at the next one; the model's output layer is taken off.
    """
    layers = min(2, llm.config.num_layers)
    config = dataclasses.replace(llm.config, num_layers=layers, windows=llm.config.windows[:layers])
    plan = planning.make_plan(config, method, batch, capacity)
    branch, tokens = HostStore().create(planning.geometry(plan), "tuner"), jnp.zeros(batch, jnp.int32)
    state = _empty_state(plan, slots, branch, max(0, capacity - repeats - 1))
    hidden = jnp.ones((batch, config.hidden_size))

    def decode_token(_):
        nonlocal state
        done = decode.step(plan, llm.params, state, tokens, driver="fused", donate=True)
        state = jax.block_until_ready((done.state, done.logits))[0]

    try:
        whole = _median_seconds(decode_token, repeats)
    finally:
        branch.close()
    output = _median_seconds(lambda _: jax.block_until_ready(prefill.unembed(config, llm.params, hidden)), repeats)
    return max(0.0, whole - output) / config.num_layers


def _empty_state(plan: Plan, slots: Slots, branch: Branch, length: int) -> State:
    """A cache that says it has `length` tokens and holds none."""
    layers = tuple(
        LayerCache(layer.init(one, plan.batch), planning.slot_pool(plan, i, slots)) for i, one in enumerate(plan.layers)
    )
    return State(layers, jnp.full(plan.batch, length, jnp.int32), Line(jnp.int32(branch.handle), jnp.int32(0)))


def reuse_rate(llm: LLM, method: Method, slots: Slots, tokens: list[int], context: int) -> float:
    """Share of needed groups that are in the reuse buffer while tokens[context:] are decoded after the others."""
    cache = llm.prefill(tokens[:context], method=method, store=HostStore(), slots=slots, capacity=len(tokens) + 1)
    try:
        return llm.generate(tokens[context:], cache, max_new_tokens=1).usage.hit_rate
    finally:
        cache.close()


def _median_seconds(function: Callable[[int], None], repeats: int) -> float:
    """Of `repeats` calls after a first one."""
    function(0)
    return float(np.median([_seconds(function, nth) for nth in range(1, repeats + 1)]))


def _seconds(function: Callable[[int], None], nth: int) -> float:
    started = time.perf_counter()
    function(nth)
    return time.perf_counter() - started
