"""One layer's part of a token that writes: observe, append, adapt; only where the whole token has succeeded."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from kvjax.cache import state as caching
from kvjax.cache.layer import LayerCache, LayerPlan, each_sequence, kept_rows
from kvjax.cache.method import AdaptiveMethod, ObservingMethod
from kvjax.cache.pool import gated
from kvjax.cache.read import smoothed
from kvjax.cache.smoothing import learn_smoothing
from kvjax.cache.state import LayerState, NewToken
from kvjax.cache.types import Placement, Spec, WindowEviction
from kvjax.ops.barriers import exists
from kvjax.typing import Array, Bool, Int32, Num


def write_token(
    plan: LayerPlan, cache: LayerCache, new_token: NewToken, at: Int32[Array, "B"], gate: Bool[Array, "B"], layer, ref,
    token: Int32[Array, "B"] | None = None, leader: Placement | None = None,
) -> tuple[LayerCache, Placement]:
    """Books the newest token where `gate` is set; everything else of the cache stays as it is.

    Also returns where the token that left the window went: a layer that follows this one takes it as its `leader`.
    """
    token = jnp.full(at.shape, -1, jnp.int32) if token is None else token
    state, placement, evicted, value = _advance_all(plan, cache.state, new_token, at, gate, token, leader)
    pool = cache.pool
    if plan.spec.selected_rows or not plan.method.evicts:  # else no block ever holds a row
        block = gated(placement.block, gate, plan.spec.num_blocks)
        key, value = kept_rows(plan, state.smoothing, evicted.key, value, pool.dtype)
        pool = pool.put_row(block, placement.row, key, value, layer, ref)
    cache = LayerCache(state, pool)
    return _adapt_all(plan, cache, gate, layer, ref) if plan.method.adaptive else cache, placement


@functools.partial(jax.jit, static_argnums=0)
def _advance_all(plan: LayerPlan, state: LayerState, new_token: NewToken, at, gate, token, leader):
    """`_advance` of every sequence."""
    if state.smoothing is not None:
        state, gate = _smoothing_known(plan.spec, state, new_token, at, gate)
    return jax.vmap(lambda *args: _advance(plan, *args))(state, new_token, at, gate, token, leader)


def _smoothing_known(spec: Spec, state, new_token: NewToken, at: Int32[Array, "B"], gate: Bool[Array, "B"]):
    """The state with a smoothing of every sequence of which the first token leaves the window in this step, and the
    gate of what is to be written after the window has been read."""
    before = state.smoothing
    first = gate & (at >= spec.sinks + spec.ring) & (before.scale[:, 0, 0] == 0)
    ring = slice(spec.sinks, spec.sinks + spec.ring)

    def learned():
        newest = new_token.key[:, :, None].astype(state.tail.key.dtype)
        key = jnp.concatenate([state.tail.key[:, :, ring], newest], axis=2)
        pos = jnp.concatenate([state.tail.pos[:, 0, ring], at[:, None]], axis=1)
        found = each_sequence(lambda one: learn_smoothing(spec, *one), (key, pos, pos >= 0))
        return jax.tree.map(lambda new, old: jnp.where(first[:, None, None], new, old), found, before)

    known = jax.lax.cond(jnp.any(first), learned, lambda: before)
    return dataclasses.replace(state, smoothing=known), gate & exists(known.scale)


def _advance(plan: LayerPlan, layer: LayerState, new_token: NewToken, at, gate, token, leader):
    """One sequence: observe, push the newest token, give the leaving one its place."""
    spec = plan.spec
    layer = dataclasses.replace(layer, loaded=jnp.where(gate, new_token.loaded, spec.num_blocks))
    tail, evicted, value = caching.push(spec, layer.tail, new_token.key, new_token.value, at, gate, token)
    index, placement = (layer.index, leader) if plan.follows else _place(plan, layer, new_token, evicted, gate)
    layer = dataclasses.replace(layer, index=index, tail=tail)
    layer, placement = caching.place(spec, layer, placement, evicted, value)
    return layer, placement, evicted, value


def _place(plan: LayerPlan, layer: LayerState, new_token: NewToken, evicted: WindowEviction, gate):
    """The method's part: it learns from the attention paid, and finds a place for the leaving token."""
    spec, method, index, view = plan.spec, plan.method, layer.index, caching.view(plan.spec, layer)
    if method.observes and isinstance(method, ObservingMethod):
        pos = jnp.where(gate, new_token.seen_pos, -1)
        index = method.observe(spec, index, view, pos, jnp.where(gate, new_token.seen_weight, 0.0))
    return method.append(spec, index, view, dataclasses.replace(evicted, note=new_token.note))


def _adapt_all(plan: LayerPlan, cache: LayerCache, gate, layer, ref) -> LayerCache:
    """Adapts fetched blocks while any is due. The loop is outside `vmap`: an idle step pays for `due` alone."""
    def step(carry):
        cache, due = carry
        cache = _adapt(plan, cache, due, layer, ref)
        return cache, _due_blocks(plan, cache.state, gate)

    def unfinished(carry):
        return jnp.any(carry[1][..., 0] < plan.spec.num_blocks)

    carry = (cache, _due_blocks(plan, cache.state, gate))
    return jax.lax.while_loop(unfinished, step, carry)[0]


@functools.partial(jax.jit, static_argnums=0)
def _due_blocks(plan: LayerPlan, state: LayerState, gate) -> Int32[Array, "B K P"]:
    spec, method = plan.spec, plan.method
    assert isinstance(method, AdaptiveMethod)
    due = jax.vmap(lambda one: method.due(spec, one.index, caching.view(spec, one)))(state)
    return gated(due, gate, spec.num_blocks)


def _adapt(plan: LayerPlan, cache: LayerCache, due: Int32[Array, "B K P"], layer, ref) -> LayerCache:
    """One round: the due block of every head that has one."""
    state, block, key, value = _adapted(plan, cache, due)
    return LayerCache(state, cache.pool.put_blocks(block, key, value, layer, ref))


@functools.partial(jax.jit, static_argnums=0)
def _adapted(plan: LayerPlan, cache: LayerCache, due: Int32[Array, "B K P"]):
    """The state after one round, and the blocks it rewrites: numbers[B, K, E], keys and values[B, K, E, C, X]."""
    spec, method, tail, smoothing = plan.spec, plan.method, cache.state.tail, cache.state.smoothing
    found = [cache.pool.block(cache.pool.locate(block)) for block in jnp.moveaxis(due, -1, 0)]
    joined = jax.vmap(lambda *args: caching.with_held(spec, *args))
    seen = joined([smoothed(smoothing, key).unpacked() for key, _ in found], tail.key)
    # As they are kept: rows that move stay the same bytes.
    held_key, held_value = kept_rows(plan, smoothing, tail.key, tail.value, cache.pool.dtype)
    key = joined([key.vectors for key, _ in found], held_key)
    value = joined([value.vectors for _, value in found], held_value)

    def one(layer, due, keys):
        pos = caching.due_positions(spec, layer, due)
        index, edits = method.adapt(spec, layer.index, caching.view(spec, layer), due, keys, pos)
        layer = caching.apply_edits(spec, dataclasses.replace(layer, index=index), edits, pos)
        return layer, edits

    state, edits = jax.vmap(one)(cache.state, due, seen)
    return state, edits.dst, _regroup(key, edits), _regroup(value, edits)


def _regroup(rows: Num[Array, "B K CU X"], edits) -> Num[Array, "B K E C X"]:
    """Block contents after the edits; empty rows are zero."""
    index = jnp.maximum(edits.rows, 0)[..., None]
    taken = jnp.take_along_axis(rows[:, :, None], index, axis=3)
    return jnp.where(edits.rows[..., None] >= 0, taken, 0)
