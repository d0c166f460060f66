"""One layer's part of a token that only reads: choose blocks, fetch them, attend their rows.

Nothing of the cache changes here but what happens to be in a pool's slots.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from kvjax.cache import state as caching
from kvjax.cache.layer import LayerCache, LayerPlan, each_sequence
from kvjax.cache.pool import FetchStats, Pool, StoreRef, gated
from kvjax.cache.state import LayerState, NewToken, Rows
from kvjax.cache.types import Spec
from kvjax.ops import attention, quantize
from kvjax.typing import Array, Bool, Float, Int32, PyTree, pytree


@pytree
class SelectedRows:
    """What a query needs: blocks to fetch, and the rows of them that fit the budget."""

    need: Int32[Array, "*B K M1"]
    rows: Rows
    bias: Float[Array, "*B K G N"] | None = None  # of each row, for `Method.weigh`; None = the method has none
    note: PyTree | None = None  # `Selection.note`


@pytree
class Fetched:
    """What a layer attends beside its newest tokens, of a batch or of one of its sequences."""

    number: Int32[Array, "*B"]  # of the sequence in its batch
    state: LayerState
    chosen: SelectedRows
    slot: Int32[Array, "*B K M1"]  # of each block that is needed
    everything: tuple | None  # keys and values (`packing.Packed`, [*B, K, NB * C, X]) of all blocks, where those are


@pytree
class Report:
    """What a step of one layer did; enough to measure the selection against exact attention."""

    attended: Int32[Array, "B K"]  # tokens
    selected: Int32[Array, "B K N"]  # chosen positions beyond sinks and window, -1 = none; those that the model's own
    # window hides are not attended, and a layer that filters chose for its followers; empty if the method attends all
    hidden: Bool[Array, "B K G N"] | None  # from which query heads; None = all of a KV head's attend the same
    q: Float[Array, "B K G D"]
    key: Float[Array, "B K D"]  # of the newest token
    value: Float[Array, "B K D"]
    stats: FetchStats


def _together(plan: LayerPlan) -> bool:
    """Whether all sequences select at once; not in a sliding window, of which kernels know nothing."""
    return plan.method.selects_together and plan.spec.sliding is None


@functools.partial(jax.jit, static_argnums=0)
def choose(plan: LayerPlan, state: LayerState, q: Float[Array, "B H D"]) -> SelectedRows:
    """Selects the blocks for a query."""
    spec, method = plan.spec, plan.method

    def one(args):
        layer, query = caching.within(plan.spec, args[0]), args[1]
        selection = method.select(spec, layer.index, caching.view(spec, layer), query)
        cut = caching.every_block if method.attends_all else caching.needed_blocks
        need, rows = cut(spec, layer, selection)
        bias = selection.bias
        bias = None if bias is None else jnp.take_along_axis(bias, rows.rank[:, None], axis=-1)
        return SelectedRows(need, rows, bias, selection.note)

    return each_sequence(one, (state, grouped(q, spec)), _together(plan))


def of_active(plan: LayerPlan, chosen: SelectedRows, active: Bool[Array, "B"]) -> SelectedRows:
    """The choice, and nothing for sequences that take no part in this step: no store should read for them."""
    need = gated(chosen.need, active, plan.spec.num_blocks)
    rows = dataclasses.replace(chosen.rows, valid=chosen.rows.valid & active[:, None, None])
    return dataclasses.replace(chosen, need=need, rows=rows)


@functools.partial(jax.jit, static_argnums=0)
def runners_up(plan: LayerPlan, state: LayerState, q: Float[Array, "B H D"]) -> Int32[Array, "B K M"]:
    """The blocks ranked just below a selection: the likeliest newcomers of the next step. NB = none."""
    spec = plan.spec
    wide = dataclasses.replace(spec, max_blocks=min(2 * spec.max_blocks, spec.num_blocks))

    def one(args):
        layer, query = caching.within(plan.spec, args[0]), args[1]
        ranked = plan.method.select(wide, layer.index, caching.view(spec, layer), query).block
        return ranked[:, spec.max_blocks :]

    return each_sequence(one, (state, grouped(q, spec)), _together(plan))


@functools.partial(jax.jit, static_argnums=0)
def attend(plan: LayerPlan, cache: LayerCache, chosen: SelectedRows, q, key, value, slot: Int32[Array, "B K M1"], at):
    """Attends tail, chosen rows and the newest token; returns (out[B, H, D], NewToken, how many tokens
    were attended[B, K])."""
    found = fetched(plan, cache, chosen, slot, in_place=_in_place(plan, cache.pool))
    args = (found, grouped(q, plan.spec), key, value, at)
    out, (seen_pos, seen_weight), seen = each_sequence(lambda one: _attend_one(plan, cache.pool, *one), args)
    new_token = NewToken(key, value, chosen.need, seen_pos, seen_weight, chosen.note)
    return out.reshape(out.shape[0], -1, out.shape[-1]), new_token, seen


def fetched(
    plan: LayerPlan, cache: LayerCache, chosen: SelectedRows, slot: Int32[Array, "B K M1"], in_place: bool = False
) -> Fetched:
    """What was fetched for a batch; `in_place`: of all blocks no array is made."""
    at_once = plan.dense and not in_place
    everything = cache.pool.everything(slot[..., : plan.spec.num_blocks]) if at_once else None
    return Fetched(jnp.arange(len(slot), dtype=jnp.int32), cache.state, chosen, slot, everything)


def _in_place(plan: LayerPlan, pool: Pool) -> bool:
    """Whether rows of all blocks are attended where they lie. A layer that filters has no slots of all blocks."""
    return plan.method.attends_all and plan.spec.keeps_keys and attention.reads_in_place(pool.dtype)


def _every_row(spec: Spec, pool: Pool, mine: Fetched):
    """Keys and values (`packing.Scattered`) of all rows of all blocks."""
    slot = jnp.repeat(mine.slot[:, : spec.num_blocks], spec.block_rows, axis=-1)
    row = jnp.arange(slot.shape[1], dtype=jnp.int32) % spec.block_rows
    return pool.rows_at(mine.number, slot, jnp.broadcast_to(row, slot.shape))


def chosen_rows(plan: LayerPlan, pool: Pool, mine: Fetched):
    """Keys and values `[K, N, D]` of one sequence's chosen rows (`packing.Scattered`, or `packing.Packed` of all),
    which are valid, and their positions; no keys where the method has the scores (`scored`)."""
    spec, state, chosen, rows = plan.spec, mine.state, mine.chosen, mine.chosen.rows
    if plan.dense:
        valid = (jnp.arange(spec.block_rows, dtype=jnp.int32) < state.count[..., None]).reshape(spec.kv_heads, -1)
        key, value = _every_row(spec, pool, mine) if mine.everything is None else mine.everything
        return smoothed(state.smoothing, key), value, valid, state.pos.reshape(valid.shape)
    key, value = pool.rows_at(mine.number, jnp.take_along_axis(mine.slot, rows.rank, axis=-1), rows.row)
    key = smoothed(state.smoothing, key)
    if key is None:
        block = jnp.take_along_axis(chosen.need, rows.rank, axis=-1)
        key = plan.method.rebuild(spec, state.index, block, rows.row, rows.pos)
    return key, value, rows.valid, rows.pos


def smoothed(smoothing: quantize.Smoothing | None, key):
    """Keys (`packing.Scattered` or `packing.Packed`) with what they were smoothed by."""
    return key if smoothing is None else dataclasses.replace(key, smoothing=smoothing)


def scored(plan: LayerPlan, mine: Fetched, q: Float[Array, "K G D"]) -> Float[Array, "K G N"] | None:
    """Scores of all rows by a method that attends everything and keeps no keys in blocks; None for most methods."""
    if plan.spec.keeps_keys or not plan.dense:
        return None
    return plan.method.score_rows(plan.spec, mine.state.index, q)


def _attend_one(plan, pool, mine: Fetched, q, new_key, new_value, at):
    """One sequence: log-sum-exp merge of the tail, the selected rows and the newest token."""
    sets = _attended_sets(plan, pool, mine, q, new_key, new_value, at)
    scores = _scores(plan, mine, q, sets)
    part = functools.reduce(attention.merge, (_part(q, *both) for both in zip(sets, scores, strict=True)))
    seen = sum(jnp.sum(valid, axis=-1, dtype=jnp.int32) for _, _, valid, _, _ in sets)
    return attention.normalise(part, q.dtype), _weights(plan, sets, scores), seen


def _attended_sets(plan, pool, mine: Fetched, q, new_key, new_value, at):
    """Keys, values, which are valid, positions and bias (None = none) of the tail, the chosen rows and the newest."""
    key, value, valid, pos = chosen_rows(plan, pool, mine)
    tail, bias = mine.state.tail, mine.chosen.bias
    tail_valid = tail.pos >= 0
    tail_valid &= plan.spec.seen(tail.pos, at)
    valid &= plan.spec.seen(pos, at)
    if bias is not None:
        bias = plan.method.weigh(plan.spec, mine.state.index, q, quantize.all_of(key), bias)
    newest = jnp.ones((new_key.shape[0], 1), bool)
    return (
        (tail.key, tail.value, tail_valid, tail.pos, None), (key, value, valid, pos, bias),
        (new_key[:, None], new_value[:, None], newest, jnp.broadcast_to(at, newest.shape), None),
    )


def _scores(plan, mine: Fetched, q, sets) -> list:
    """Of each set, if the method has them or asks for weights; None where attention is to make them."""
    scores: list = [None] * len(sets)
    made = scored(plan, mine, q)
    if made is not None:
        scores[1] = attention.only_valid(made, sets[1][2])
    if plan.observes:
        return [attention.scores_of(q, key, valid, bias) if found is None else found
                for found, (key, _, valid, _, bias) in zip(scores, sets, strict=True)]
    return scores


def _part(q, attended, scores) -> attention.Part:
    """Attention over one set."""
    key, value, valid, _, bias = attended
    if scores is None:
        return attention.attend_part(q, key, value, valid, bias)
    return attention.attend_scores(scores, value, valid)


def _weights(plan, sets, scores):
    """Attended positions and their weights for `Method.observe`; empty arrays where it does not ask."""
    if not plan.observes:
        return jnp.zeros((plan.spec.kv_heads, 0), jnp.int32), jnp.zeros((plan.spec.kv_heads, 0), jnp.float32)
    pos = jnp.concatenate([jnp.where(valid, pos, -1) for _, _, valid, pos, _ in sets], axis=-1)
    joint = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
    return pos, jnp.sum(jnp.where(pos[:, None] >= 0, joint, 0.0), axis=1)


def read_token(
    plan: LayerPlan, cache: LayerCache, q: Float[Array, "B H D"], key: Float[Array, "B K D"], value,
    at: Int32[Array, "B"], layer, ref: StoreRef, chosen: SelectedRows | None = None,
):
    """Attention of the newest token, over a choice made earlier if one is given.

    Returns (out[B, H, D], cache, NewToken, ok[], Report).
    """
    chosen = choose(plan, cache.state, q) if chosen is None else chosen
    pool, slot, ok, stats = cache.pool.fetch(chosen.need, cache.state.count, layer, ref)
    cache = LayerCache(cache.state, pool)
    out, new_token, seen = attend(plan, cache, chosen, q, key, value, slot, at)
    return out, cache, new_token, ok, report(plan, cache.state, chosen, q, key, value, seen, stats)


def report(plan: LayerPlan, state: LayerState, chosen: SelectedRows, q, key, value, seen, stats: FetchStats) -> Report:
    """What a step did."""
    held = state.tail.pos[..., plan.spec.sinks + plan.spec.ring :]
    rows = chosen.rows.pos
    selected = rows if plan.dense else jnp.concatenate([rows, held], axis=-1)
    return Report(seen, selected, _hidden(chosen, selected), grouped(q, plan.spec), key, value, stats)


def _hidden(chosen: SelectedRows, selected) -> Bool[Array, "B K G N"] | None:
    """What the method's bias takes from a query head; what waits for a block it leaves to all."""
    if chosen.bias is None:
        return None
    hidden = chosen.bias <= attention.NEGATIVE / 2
    waiting = selected.shape[-1] - hidden.shape[-1]
    return jnp.pad(hidden, ((0, 0), (0, 0), (0, 0), (0, waiting)))


def grouped(q, spec):
    return q.reshape(q.shape[0], spec.kv_heads, spec.group, -1)
