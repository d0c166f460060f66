"""One attention layer over a cache: fill it from a prompt, read it for a token, write the token to it.

This is the piece that any model can call. `read` and `write` are the two halves of a decode step:
`read` changes nothing but what happens to be resident, `write` books the token, and only where its
gate is set. A driver reads all layers of a model, and writes them once the whole token has succeeded.
"""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax import attention
from kvjax import cache as caching
from kvjax.cache import Fresh, LayerState, Rows
from kvjax.method import Method, Spec
from kvjax.pool import Line, MemoryPool, Pool, Traffic, gated, scatter_prompt
from kvjax.typing import Array, Bool, Float, Int32, pytree


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """What is static about a layer's cache."""

    method: Method
    spec: Spec
    sliding: int | None = None  # the model's own sliding window, in tokens


@pytree
class LayerCache:
    """One layer's cache for a batch."""

    state: LayerState
    pool: Pool


@pytree
class Asked:
    """The first part of a read: what the newest token needs."""

    q: Float[Array, "B K G D"]
    key: Float[Array, "B K D"]
    value: Float[Array, "B K D"]
    need: Int32[Array, "B K M1"]
    rows: Rows


@pytree
class Report:
    """What a step of one layer did; enough to measure the selection against exact attention."""

    attended: Int32[Array, "B K"]  # tokens
    selected: Int32[Array, "B K N"]  # attended positions beyond sinks and window, -1 = none; empty if all are
    q: Float[Array, "B K G D"]
    key: Float[Array, "B K D"]  # of the newest token
    traffic: Traffic


def init(plan: LayerPlan, batch: int, dtype=jnp.float32) -> LayerState:
    """An empty state for `batch` sequences."""
    one = caching.empty_layer(plan.spec, plan.method, dtype)
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (batch, *leaf.shape)), one)


def prefill(plan: LayerPlan, state: LayerState, key: Float[Array, "B T K D"], value, length: Int32[Array, "B"]):
    """Fills an empty state from prompts; returns it and where each token's payload goes."""
    return jax.vmap(lambda *args: caching.build(plan.spec, plan.method, *args))(state, key, value, length)


def prefill_memory(plan: LayerPlan, state: LayerState, key, value, length, dtype=jnp.float32) -> LayerCache:
    """`prefill` into a new memory pool."""
    state, placement = prefill(plan, state, key, value, length)
    pool = MemoryPool(
        scatter_prompt(plan.spec, placement, key, dtype), scatter_prompt(plan.spec, placement, value, dtype)
    )
    return LayerCache(state, pool)


def prefill_packed(plan: LayerPlan, state: LayerState, key, value, length, dtype=jnp.float32):
    """`prefill` for a store: the state, the packed blocks `[B, K, NB, C, 2D]` to write, their counts."""
    state, placement = prefill(plan, state, key, value, length)
    return state, scatter_prompt(plan.spec, placement, jnp.concatenate([key, value], axis=-1), dtype)


# ------------------------------------------------------------------------------------------- read


def ask(plan: LayerPlan, state: LayerState, q: Float[Array, "B H D"], key, value, estimate=None) -> Asked:
    """Selects the blocks for a query; `estimate` stands in for `q` where the method looks ahead."""
    spec, method = plan.spec, plan.method

    def one(layer, query):
        selection = method.select(spec, layer.index, caching.view(spec, layer), query)
        cut = caching.every_block if method.attends_all else caching.needed_blocks
        return cut(spec, layer, selection)

    q = _grouped(q, spec)
    need, rows = jax.vmap(one)(state, q if estimate is None else _grouped(estimate, spec))
    return Asked(q, key, value, need, rows)


def answer(plan: LayerPlan, cache: LayerCache, asked: Asked, slot: Int32[Array, "B K M1"], at: Int32[Array, "B"]):
    """Attends tail, selected rows and the newest token; returns (out[B, H, D], Fresh, attended[B, K])."""
    if plan.method.attends_all:
        key, value = cache.pool.everything(slot[..., : plan.spec.num_blocks])
        valid = (jnp.arange(plan.spec.block_rows) < cache.state.count[..., None]).reshape(key.shape[:3])
        pos = cache.state.pos.reshape(key.shape[:3])
    else:
        taken = jnp.take_along_axis(slot, asked.rows.rank, axis=-1)
        key, value = cache.pool.gather(taken, asked.rows.row)
        valid, pos = asked.rows.valid, asked.rows.pos
    args = (cache.state.tail, asked.q, asked.key, asked.value, key, value, valid, pos, at)
    out, weights, seen = _each_sequence(lambda one: _attend(plan, *one), args)
    fresh = Fresh(asked.key, asked.value, asked.need, *weights)
    return out.reshape(out.shape[0], -1, out.shape[-1]), fresh, seen


def _each_sequence(function, args):
    """Maps over the batch: as one program on accelerators, one sequence after the other on CPU.

    XLA:CPU orders the sums of a product by its whole shape, so that a batched product would not be
    bit-equal to the sequence alone; its threads share the work inside a sequence anyway.
    """
    if jax.default_backend() == "cpu":
        return jax.lax.map(function, args)
    return jax.vmap(lambda *one: function(one))(*args)


def _attend(plan, tail, q, new_key, new_value, key, value, valid, pos, at):
    """One sequence: log-sum-exp merge of the tail, the selected rows and the newest token."""
    tail_valid = tail.pos >= 0
    if plan.sliding is not None:
        oldest = at - plan.sliding
        tail_valid &= tail.pos > oldest
        valid &= pos > oldest
    newest = jnp.ones((new_key.shape[0], 1), bool)
    sets = [
        (tail.key, tail.value, tail_valid, tail.pos), (key, value, valid, pos),
        (new_key[:, None], new_value[:, None], newest, jnp.broadcast_to(at, newest.shape)),
    ]
    tail_part, selected, own = (attention.attend_part(q, k, v, ok) for k, v, ok, _ in sets)
    part = attention.merge(attention.merge(tail_part, selected), own)
    seen = sum(jnp.sum(ok, axis=-1, dtype=jnp.int32) for _, _, ok, _ in sets)
    return attention.normalise(part, q.dtype), _weights(plan, q, sets), seen


def _weights(plan, q, sets):
    """Attended positions and their weights for `Method.observe`; empty arrays where it does not ask."""
    if not plan.method.observes:
        return jnp.zeros((q.shape[0], 0), jnp.int32), jnp.zeros((q.shape[0], 0))
    scores = [attention.scores_of(q, k, ok) for k, _, ok, _ in sets]
    pos = jnp.concatenate([jnp.where(ok, p, -1) for _, _, ok, p in sets], axis=-1)
    joint = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
    return pos, jnp.sum(jnp.where(pos[:, None] >= 0, joint, 0.0), axis=1)


def read(plan: LayerPlan, cache: LayerCache, q, key, value, at: Int32[Array, "B"], layer, line: Line, estimate=None):
    """Attention of the newest token. Returns (out[B, H, D], cache, Fresh, ok[], Report)."""
    asked = ask(plan, cache.state, q, key, value, estimate)
    pool, slot, ok, traffic = cache.pool.fetch(asked.need, cache.state.count, layer, line)
    cache = LayerCache(cache.state, pool)
    out, fresh, seen = answer(plan, cache, asked, slot, at)
    held = cache.state.tail.pos[..., plan.spec.sinks + plan.spec.ring :]
    selected = asked.rows.pos if plan.method.attends_all else jnp.concatenate([asked.rows.pos, held], axis=-1)
    return out, cache, fresh, ok, Report(seen, selected, asked.q, asked.key, traffic)


def _grouped(q, spec):
    return q.reshape(q.shape[0], spec.kv_heads, spec.group, -1)


# ------------------------------------------------------------------------------------------ write


def write(plan: LayerPlan, cache: LayerCache, fresh: Fresh, at: Int32[Array, "B"], gate: Bool[Array, "B"], layer, line):
    """Books the newest token where `gate` is set; everything else of the cache stays as it is."""
    none = plan.spec.num_blocks
    state, placement, leaving = jax.vmap(lambda *args: _advance(plan, *args))(cache.state, fresh, at, gate)
    pool = cache.pool
    if not plan.method.evicts:
        block = gated(placement.block, gate, none)
        pool = pool.put_row(block, placement.row, leaving[0], leaving[1], layer, line)
    cache = LayerCache(state, pool)
    return _adapt_all(plan, cache, gate, layer, line) if plan.method.adaptive else cache


def _advance(plan: LayerPlan, layer: LayerState, fresh: Fresh, at, gate):
    """One sequence: observe, push the newest token, give the leaving one its place."""
    spec, method = plan.spec, plan.method
    layer = dataclasses.replace(layer, loaded=jnp.where(gate, fresh.loaded, spec.num_blocks))
    index = layer.index
    if method.observes:
        pos = jnp.where(gate, fresh.seen_pos, -1)
        index = method.observe(spec, index, caching.view(spec, layer), pos, jnp.where(gate, fresh.seen_weight, 0.0))
    tail, leaving = caching.push(spec, layer.tail, fresh.key, fresh.value, at, gate)
    key, _, left = leaving
    index, placement = method.append(spec, index, caching.view(spec, layer), key, left, left >= 0)
    layer, placement = caching.place(spec, dataclasses.replace(layer, index=index, tail=tail), placement, leaving)
    return layer, placement, leaving


def _adapt_all(plan: LayerPlan, cache: LayerCache, gate, layer, line) -> LayerCache:
    """Adapts fetched blocks while any is due. The loop is outside `vmap`: an idle step pays for `due` alone."""
    spec, method = plan.spec, plan.method

    def due_blocks(cache):
        due = jax.vmap(lambda one: method.due(spec, one.index, caching.view(spec, one)))(cache.state)
        return gated(due, gate, spec.num_blocks)

    def step(carry):
        cache, due = carry
        cache = _adapt(plan, cache, due, layer, line)
        return cache, due_blocks(cache)

    start = (cache, due_blocks(cache))
    return jax.lax.while_loop(lambda carry: jnp.any(carry[1] < spec.num_blocks), step, start)[0]


def _adapt(plan: LayerPlan, cache: LayerCache, due: Int32[Array, "B K"], layer, line) -> LayerCache:
    """One round: the due block of every head that has one."""
    spec, method = plan.spec, plan.method
    joined = jax.vmap(lambda *args: caching.with_held(spec, *args))
    key, value = cache.pool.block(cache.pool.locate(due))
    key = joined(cache.state, key, cache.state.tail.key)
    value = joined(cache.state, value, cache.state.tail.value)

    def one(layer, due, keys):
        pos = caching.due_positions(spec, layer, due)
        index, edits = method.adapt(spec, layer.index, caching.view(spec, layer), due, keys, pos)
        layer = caching.apply_edits(spec, dataclasses.replace(layer, index=index), edits, pos)
        return layer, edits

    state, edits = jax.vmap(one)(cache.state, due, key)
    pool = cache.pool.put_blocks(edits.dst, _regroup(key, edits), _regroup(value, edits), layer, line)
    return LayerCache(state, pool)


def _regroup(rows: Float[Array, "B K CU D"], edits) -> Float[Array, "B K E C D"]:
    """Block contents after the edits; empty rows are zero."""
    index = jnp.maximum(edits.rows, 0)[..., None]
    taken = jnp.take_along_axis(rows[:, :, None], index, axis=3)
    return jnp.where(edits.rows[..., None] >= 0, taken, 0)
