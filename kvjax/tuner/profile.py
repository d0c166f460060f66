"""What a setting takes on this machine: memory, one layer's reads, one layer's computing, and how often groups recur.

All but the last depend on shapes alone, so they are taken from made-up contents: a layer computes as long on an empty
cache as on a full one, because every shape is fixed.
"""

import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import layer, planning
from kvjax.layer import LayerCache
from kvjax.llm import LLM
from kvjax.method import Method
from kvjax.models.config import ModelConfig
from kvjax.models.transformer import Block
from kvjax.planning import Slots
from kvjax.store.base import Geometry, Store
from kvjax.store.host import HostStore


def memory_bytes(config: ModelConfig, method: Method, slots: Slots, batch: int, capacity: int) -> int:
    """Bytes of everything a cache over a store keeps in memory: index, tables, tail and slots. Allocates nothing."""
    plan = planning.make_plan(config, method, batch, capacity)

    def one_layer():
        pool = planning.slot_pool(plan, len(plan.layers) - 1, slots)
        return jax.tree.leaves((layer.init(plan.layers[-1], batch), pool))

    return config.num_layers * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.eval_shape(one_layer))


def read_seconds(store: Store, config: ModelConfig, group: int, blocks: int, batch: int, repeats: int = 9) -> float:
    """T_io: seconds in which the store reads `blocks` groups, the same for all KV heads, of each of `batch` sequences.

    The median over reads of groups picked at random from four times as many.
    """
    if not blocks:
        return 0.0
    geometry = Geometry(
        layers=1, batch=batch, kv_heads=config.num_kv_heads, num_blocks=4 * blocks, block_rows=group,
        width=2 * config.head_dim, dtype="float32", alike=True,
    )
    branch = store.create(geometry, "tuner")
    try:
        lanes = (batch, config.num_kv_heads)
        written = np.ones((*lanes, 4 * blocks, group, geometry.width), np.float32)
        branch.write_layer(0, written, np.full((*lanes, 4 * blocks), group, np.int32))
        branch.flush()
        slots = np.zeros((*lanes, blocks, group, geometry.width), np.float32)
        slot = np.broadcast_to(np.arange(blocks, dtype=np.int32), (*lanes, blocks))

        def read(seed):
            picked = np.random.default_rng(seed).permutation(4 * blocks)[:blocks].astype(np.int32)
            if not branch.read_into(0, branch.generation, np.broadcast_to(picked, slot.shape).copy(), slot, slots):
                raise branch.take_error()

        return _median_seconds(read, repeats)
    finally:
        branch.close()


def compute_seconds(llm: LLM, method: Method, slots: Slots, batch: int, capacity: int, repeats: int = 9) -> float:
    """T_model: seconds of one layer that has all its groups in memory, with prediction and the slot table's work."""
    plan = planning.make_plan(llm.config, method, batch, capacity)
    last = len(plan.layers) - 1
    cache = LayerCache(layer.init(plan.layers[last], batch), planning.slot_pool(plan, last, slots))
    x, at = jnp.ones((batch, llm.config.hidden_size)), jnp.full(batch, capacity - 1, jnp.int32)

    def compute(_):
        jax.block_until_ready(_one_layer(llm.config, plan.layers[last], llm.params[f"layers_{last}"], cache, x, at))

    return _median_seconds(compute, repeats)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _one_layer(config, layer_plan, params, cache, x, at):
    """A layer of a token without its reads; the query stands for the one that looks ahead."""
    block = Block(config)
    q, key, value = block.apply({"params": params}, x, at, method="project")
    choice = layer.choose(layer_plan, cache.state, q)
    found = cache.pool.plan(choice.need, cache.state.count)
    out, _, _ = layer.answer(layer_plan, cache, choice, q, key, value, found.slot, at)
    return block.apply({"params": params}, x, out, method="finish"), found.success


def reuse_rate(llm: LLM, method: Method, slots: Slots, tokens: list[int], context: int) -> float:
    """Share of needed groups that are in the reuse buffer while tokens[context:] are decoded after the others."""
    cache = llm.prefill(tokens[:context], method=method, store=HostStore(), slots=slots, capacity=len(tokens) + 1)
    try:
        return llm.generate(tokens[context:], cache, max_new_tokens=1).usage.hit_rate
    finally:
        cache.close()


def _median_seconds(function: Callable[[int], None], repeats: int) -> float:
    function(0)
    times = []
    for seed in range(1, repeats + 1):
        started = time.perf_counter()
        function(seed)
        times.append(time.perf_counter() - started)
    return float(np.median(times))
