"""The writing half of a decode step in one layer: observe, append, adapt; only if the whole token has succeeded."""

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
    """Writes the newest token of each sequence and places the token that leaves the window.

    Args:
      plan: static part of the layer's cache.
      cache: cache of the layer.
      new_token: newest token, from `read_token`.
      at: position of the token.
      gate: False = the sequence's cache stays as it is.
      layer: number of the layer.
      ref: branch and generation of the store.
      token: id of the token; None = unknown.
      leader: placement from the layer that this one follows; None = it places tokens itself.

    Returns:
      (Cache, placement of the token that left the window, which is the `leader` of layers that follow this one).
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
    """Applies `_advance` to every sequence."""
    if state.smoothing is not None:
        state, gate = _smoothing_known(plan.spec, state, new_token, at, gate)
    return jax.vmap(lambda *args: _advance(plan, *args))(state, new_token, at, gate, token, leader)


def _smoothing_known(spec: Spec, state, new_token: NewToken, at: Int32[Array, "B"], gate: Bool[Array, "B"]):
    """Learns the smoothing of every sequence whose first token leaves the window in this step.

    Returns the state, and the gate with a dependency that orders the write after this read of the window.
    """
    before = state.smoothing
    first = gate & (at >= spec.sinks + spec.ring) & (before.scale[:, 0, 0] == 0)
    ring = slice(spec.sinks, spec.sinks + spec.ring)

    def learned():
        newest = new_token.key[:, :, None].astype(state.tail.key.dtype)
        key = jnp.concatenate([state.tail.key[:, :, ring], newest], axis=2)
        pos = jnp.concatenate([state.tail.pos[:, 0, ring], at[:, None]], axis=1)
        fresh = each_sequence(lambda one: learn_smoothing(spec, *one), (key, pos, pos >= 0))
        return jax.tree.map(lambda new, old: jnp.where(first[:, None, None], new, old), fresh, before)

    known = jax.lax.cond(jnp.any(first), learned, lambda: before)
    return dataclasses.replace(state, smoothing=known), gate & exists(known.scale)


def _advance(plan: LayerPlan, layer: LayerState, new_token: NewToken, at, gate, token, leader):
    """Observes, pushes the newest token and places the leaving one, for one sequence."""
    spec = plan.spec
    layer = dataclasses.replace(layer, loaded=jnp.where(gate, new_token.loaded, spec.num_blocks))
    tail, evicted, value = caching.push(spec, layer.tail, new_token.key, new_token.value, at, gate, token)
    index, placement = (layer.index, leader) if plan.follows else _place(plan, layer, new_token, evicted, gate)
    layer = dataclasses.replace(layer, index=index, tail=tail)
    layer, placement = caching.place(spec, layer, placement, evicted, value)
    return layer, placement, evicted, value


def _place(plan: LayerPlan, layer: LayerState, new_token: NewToken, evicted: WindowEviction, gate):
    """Lets the method observe the attention weights and place the leaving token; returns its index and placement."""
    spec, method, index, view = plan.spec, plan.method, layer.index, caching.view(plan.spec, layer)
    if method.observes and isinstance(method, ObservingMethod):
        pos = jnp.where(gate, new_token.seen_pos, -1)
        index = method.observe(spec, index, view, pos, jnp.where(gate, new_token.seen_weight, 0.0))
    return method.append(spec, index, view, dataclasses.replace(evicted, note=new_token.note))


def _adapt_all(plan: LayerPlan, cache: LayerCache, gate, layer, ref) -> LayerCache:
    """Adapts fetched blocks while any is due. The loop is outside `vmap`, so an idle step only pays for `due`."""
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
    """Adapts the due block of every head that has one."""
    state, block, key, value = _adapted(plan, cache, due)
    return LayerCache(state, cache.pool.put_blocks(block, key, value, layer, ref))


@functools.partial(jax.jit, static_argnums=0)
def _adapted(plan: LayerPlan, cache: LayerCache, due: Int32[Array, "B K P"]):
    """Returns the state after one round, and the rewritten blocks: ids [B, K, E], keys and values [B, K, E, C, X]."""
    spec, method, tail, smoothing = plan.spec, plan.method, cache.state.tail, cache.state.smoothing
    blocks = [cache.pool.block(cache.pool.locate(block)) for block in jnp.moveaxis(due, -1, 0)]
    joined = jax.vmap(lambda *args: caching.with_held(spec, *args))
    seen = joined([smoothed(smoothing, key).unpacked() for key, _ in blocks], tail.key)
    # Packed rows are moved as they are, so that their bytes do not change.
    held_key, held_value = kept_rows(plan, smoothing, tail.key, tail.value, cache.pool.dtype)
    key = joined([key.vectors for key, _ in blocks], held_key)
    value = joined([value.vectors for _, value in blocks], held_value)

    def one(layer, due, keys):
        pos = caching.due_positions(spec, layer, due)
        index, edits = method.adapt(spec, layer.index, caching.view(spec, layer), due, keys, pos)
        layer = caching.apply_edits(spec, dataclasses.replace(layer, index=index), edits, pos)
        return layer, edits

    state, edits = jax.vmap(one)(cache.state, due, seen)
    return state, edits.dst, _regroup(key, edits), _regroup(value, edits)


def _regroup(rows: Num[Array, "B K CU X"], edits) -> Num[Array, "B K E C X"]:
    """Returns the blocks' contents after the edits; empty rows are zero."""
    index = jnp.maximum(edits.rows, 0)[..., None]
    taken = jnp.take_along_axis(rows[:, :, None], index, axis=3)
    return jnp.where(edits.rows[..., None] >= 0, taken, 0)
