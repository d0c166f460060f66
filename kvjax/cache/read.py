"""The reading half of a decode step in one layer: choose blocks, fetch them, attend their rows.

The only part of the cache that changes here is which blocks are in a pool's slots.
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
    """The blocks to fetch for a query, and those of their rows that fit the budget."""

    need: Int32[Array, "*B K M1"]
    rows: Rows
    bias: Float[Array, "*B K G N"] | None = None  # bias of each row, for `Method.weigh`; None = the method has none
    note: PyTree | None = None  # `Selection.note`


@pytree
class Fetched:
    """The rows that a layer attends besides its newest tokens, for a batch or for one of its sequences."""

    number: Int32[Array, "*B"]  # index of the sequence in its batch
    state: LayerState
    chosen: SelectedRows
    slot: Int32[Array, "*B K M1"]  # slot of each needed block
    everything: tuple | None  # keys and values (`quantize.Packed`, [*B, K, NB * C, X]) of all blocks; None = only
    # chosen rows are attended, or all of them where they lie


@pytree
class Report:
    """A record of one layer's step, sufficient to measure the selection against exact attention."""

    attended: Int32[Array, "B K"]  # attended tokens
    selected: Int32[Array, "B K N"]  # chosen positions beyond sinks and window, -1 = none; empty if the method attends
    # all. Positions hidden by the model's own window are not attended; a layer that filters chose for its followers.
    hidden: Bool[Array, "B K G N"] | None  # True = hidden from that query head; None = a KV head's all attend the same
    q: Float[Array, "B K G D"]
    key: Float[Array, "B K D"]  # key of the newest token
    value: Float[Array, "B K D"]
    stats: FetchStats
    sink_logits: Float[Array, "K G"] | None = None  # learned logit of each query head; None = the model has none


def _together(plan: LayerPlan) -> bool:
    """Returns True if all sequences select at once; kernels do not support a sliding window."""
    return plan.method.selects_together and plan.spec.sliding is None


@functools.partial(jax.jit, static_argnums=0)
def choose(plan: LayerPlan, state: LayerState, q: Float[Array, "B H D"]) -> SelectedRows:
    """Selects the blocks for a query.

    Args:
      plan: static part of the layer's cache.
      state: state of the layer's cache.
      q: query [B, H, D] of each sequence.

    Returns:
      The blocks, and the rows that fit the budget.
    """
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
    """Clears the selection of sequences that do not take part in this step, so that no store reads for them.

    Args:
      plan: static part of the layer's cache.
      chosen: selection of every sequence.
      active: True [B] for sequences that take part.

    Returns:
      The selection.
    """
    need = gated(chosen.need, active, plan.spec.num_blocks)
    rows = dataclasses.replace(chosen.rows, valid=chosen.rows.valid & active[:, None, None])
    return dataclasses.replace(chosen, need=need, rows=rows)


@functools.partial(jax.jit, static_argnums=0)
def runners_up(plan: LayerPlan, state: LayerState, q: Float[Array, "B H D"]) -> Int32[Array, "B K M"]:
    """Returns the blocks ranked just below the selection, the most likely new blocks of the next step.

    Args:
      plan: static part of the layer's cache.
      state: state of the layer's cache.
      q: query [B, H, D] of each sequence.

    Returns:
      Blocks [B, K, M] in order of rank; NB = none.
    """
    spec = plan.spec
    wide = dataclasses.replace(spec, max_blocks=min(2 * spec.max_blocks, spec.num_blocks))

    def one(args):
        layer, query = caching.within(plan.spec, args[0]), args[1]
        ranked = plan.method.select(wide, layer.index, caching.view(spec, layer), query).block
        return ranked[:, spec.max_blocks :]

    return each_sequence(one, (state, grouped(q, spec)), _together(plan))


@functools.partial(jax.jit, static_argnums=0)
def attend(
    plan: LayerPlan, cache: LayerCache, chosen: SelectedRows, q, key, value, slot: Int32[Array, "B K M1"], at,
    sink_logits: Float[Array, "K G"] | None = None,
):
    """Attends the tail, the chosen rows and the newest token.

    Args:
      plan: static part of the layer's cache.
      cache: cache of the layer, with the chosen blocks in its slots.
      chosen: selection.
      q: query [B, H, D] of the newest token.
      key: key [B, K, D] of the newest token.
      value: value [B, K, D] of the newest token.
      slot: slot of each needed block.
      at: position [B] of the newest token.
      sink_logits: learned logit of each query head (`kvjax.ops.attention.normalise`); None = none.

    Returns:
      (Output [B, H, D], new token to write, number of attended tokens [B, K]).
    """
    batch = fetched(plan, cache, chosen, slot, in_place=_in_place(plan, cache.pool))
    queries = grouped(q, plan.spec)
    lying = _attend_lying(plan, cache, chosen, slot, queries, at)
    args, attend_one = (batch, queries, key, value, at, lying), functools.partial(
        _attend_one, plan, cache.pool, sink_logits)
    out, (seen_pos, seen_weight), seen = each_sequence(lambda one: attend_one(*one), args)
    new_token = NewToken(key, value, chosen.need, seen_pos, seen_weight, chosen.note)
    return out.reshape(out.shape[0], -1, out.shape[-1]), new_token, seen


def fetched(
    plan: LayerPlan, cache: LayerCache, chosen: SelectedRows, slot: Int32[Array, "B K M1"], in_place: bool = False
) -> Fetched:
    """Collects what was fetched for a batch.

    Args:
      plan: static part of the layer's cache.
      cache: cache of the layer.
      chosen: selection.
      slot: slot of each needed block.
      in_place: True = rows of all blocks are read where they lie, without an array of their own.

    Returns:
      The rows to attend.
    """
    at_once = plan.dense and not in_place
    everything = cache.pool.everything(slot[..., : plan.spec.num_blocks]) if at_once else None
    return Fetched(jnp.arange(len(slot), dtype=jnp.int32), cache.state, chosen, slot, everything)


def _in_place(plan: LayerPlan, pool: Pool) -> bool:
    """Returns True if all blocks are attended where they lie; a layer that filters does not have slots for all."""
    return plan.method.attends_all and plan.spec.keeps_keys and attention.reads_in_place(pool.dtype, plan.spec.soft_cap)


def _attend_lying(
    plan: LayerPlan, cache: LayerCache, chosen: SelectedRows, slot, q: Float[Array, "B K G D"], at: Int32[Array, "B"]
) -> attention.Part | None:
    """Attends the chosen rows of a batch where they lie; None = the pool's layout does not suit, or the method needs
    keys or weights of single rows, so that rows are gathered."""
    spec, state = plan.spec, cache.state
    found = cache.pool.lying(slot[..., : spec.num_blocks] if plan.dense else slot)
    if found is None or plan.observes or plan.method.samples or not (plan.dense or spec.selected_rows):
        return None
    (pool, block), (count, seen) = found, _counted(plan, state, chosen, at)
    more = pool.shape[1] - spec.block_rows  # rows of padding that a block ends with
    seen = jnp.pad(seen, ((0, 0), (0, 0), (0, 0), (0, more)))
    bias = jnp.where(seen, 0.0, attention.NEGATIVE).reshape(*seen.shape[:2], 1, -1)
    most = spec.num_blocks * spec.block_rows if plan.dense else spec.selected_rows
    return attention.attend_blocks(q, pool, block, count, bias, cache.pool.dtype, most, state.smoothing, spec.soft_cap)


def _counted(
    plan: LayerPlan, state: LayerState, chosen: SelectedRows, at: Int32[Array, "B"]
) -> tuple[Int32[Array, "B K M"], Bool[Array, "B K M C"]]:
    """Returns how many rows of each block are attended, its first ones, and which of all rows are.

    A block that the model's sliding window cuts has fewer attended rows than it has to be read for.
    """
    spec, rows, at = plan.spec, chosen.rows, at.reshape(-1, 1, 1)
    nth = jnp.arange(spec.block_rows, dtype=jnp.int32)
    if plan.dense:
        count = state.count
        return count, (nth < count[..., None]) & spec.seen(state.pos, at[..., None])
    needed = jnp.arange(chosen.need.shape[-1], dtype=jnp.int32)[:, None]
    mine = (rows.rank[..., None, :] == needed) & rows.valid[..., None, :]
    count = jnp.sum(mine, axis=-1, dtype=jnp.int32)
    seen = nth < count[..., None]
    if spec.sliding is not None:  # the chosen rows stand block after block
        place = jnp.cumsum(count, axis=-1, dtype=jnp.int32)[..., None] - count[..., None] + nth
        pos = jnp.take_along_axis(rows.pos, place.reshape(*place.shape[:2], -1), axis=-1, mode="clip")
        seen &= spec.seen(pos.reshape(place.shape), at[..., None])
    return count, seen


def _every_row(spec: Spec, pool: Pool, mine: Fetched):
    """Returns keys and values (`quantize.Scattered`) of all rows of all blocks."""
    slot = jnp.repeat(mine.slot[:, : spec.num_blocks], spec.block_rows, axis=-1)
    row = jnp.arange(slot.shape[1], dtype=jnp.int32) % spec.block_rows
    return pool.rows_at(mine.number, slot, jnp.broadcast_to(row, slot.shape))


def chosen_rows(plan: LayerPlan, pool: Pool, mine: Fetched):
    """Returns the chosen rows of one sequence.

    Args:
      plan: static part of the layer's cache.
      pool: payload of the whole batch.
      mine: what was fetched for this sequence.

    Returns:
      Keys and values [K, N, D] (`quantize.Scattered`, or `quantize.Packed` if all blocks are attended), True [K, N] for
      valid rows, and positions [K, N]. Keys are None if the method computes the scores itself (`scored`).
    """
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
    """Attaches the smoothing, if there is one, to keys (`quantize.Scattered` or `quantize.Packed`)."""
    return key if smoothing is None else dataclasses.replace(key, smoothing=smoothing)


def scored(plan: LayerPlan, mine: Fetched, q: Float[Array, "K G D"]) -> Float[Array, "K G N"] | None:
    """Returns the scores of all rows from a method that attends everything and keeps no keys in blocks; else None."""
    if plan.spec.keeps_keys or not plan.dense:
        return None
    return plan.method.score_rows(plan.spec, mine.state.index, q)


def _attend_one(plan, pool, sink_logits, mine: Fetched, q, new_key, new_value, at, lying: attention.Part | None):
    """Merges the tail, the selected rows and the newest token of one sequence by log-sum-exp.

    The selected rows' part is given if they were attended where they lie; what gathers them is then dropped by XLA.
    """
    sets = _attended_sets(plan, pool, mine, q, new_key, new_value, at)
    scores = _scores(plan, mine, q, sets)
    parts = [_part(plan, q, *both) for both in zip(sets, scores, strict=True)]
    part = functools.reduce(attention.merge, parts if lying is None else [parts[0], lying, parts[2]])
    seen = sum(jnp.sum(valid, axis=-1, dtype=jnp.int32) for _, _, valid, _, _ in sets)
    return attention.normalise(part, q.dtype, sink_logits), _weights(plan, sets, scores, sink_logits), seen


def _attended_sets(plan, pool, mine: Fetched, q, new_key, new_value, at):
    """Returns (keys, values, validity, positions, bias or None) of the tail, the chosen rows and the newest token."""
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
    """Returns each set's scores if the method has them or asks for weights; None where attention computes them."""
    scores: list = [None] * len(sets)
    made = scored(plan, mine, q)
    if made is not None:
        scores[1] = attention.only_valid(attention.soft_capped(made, plan.spec.soft_cap), sets[1][2])
    if plan.observes:
        return [attention.scores_of(q, key, valid, bias, plan.spec.soft_cap) if given is None else given
                for given, (key, _, valid, _, bias) in zip(scores, sets, strict=True)]
    return scores


def _part(plan, q, attended, scores) -> attention.Part:
    """Computes attention over one set."""
    key, value, valid, _, bias = attended
    if scores is None:
        return attention.attend_part(q, key, value, valid, bias, plan.spec.soft_cap)
    return attention.attend_scores(scores, value, valid)


def _weights(plan, sets, scores, sink_logits):
    """Returns attended positions and their weights for `Method.observe`; empty arrays if the method does not observe.
    """
    if not plan.observes:
        return jnp.zeros((plan.spec.kv_heads, 0), jnp.int32), jnp.zeros((plan.spec.kv_heads, 0), jnp.float32)
    pos = jnp.concatenate([jnp.where(valid, pos, -1) for _, _, valid, pos, _ in sets], axis=-1)
    joint = attention.softmax(jnp.concatenate(scores, axis=-1), sink_logits)
    return pos, jnp.sum(jnp.where(pos[:, None] >= 0, joint, 0.0), axis=1)


def read_token(
    plan: LayerPlan, cache: LayerCache, q: Float[Array, "B H D"], key: Float[Array, "B K D"], value,
    at: Int32[Array, "B"], layer, ref: StoreRef, chosen: SelectedRows | None = None,
    sink_logits: Float[Array, "K G"] | None = None,
):
    """Computes the attention of the newest token in one layer.

    Args:
      plan: static part of the layer's cache.
      cache: cache of the layer.
      q: query [B, H, D] of the newest token.
      key: key [B, K, D] of the newest token.
      value: value [B, K, D] of the newest token.
      at: position [B] of the newest token.
      layer: number of the layer.
      ref: branch and generation of the store.
      chosen: selection made earlier; None = blocks are selected here.
      sink_logits: learned logit of each query head (`kvjax.ops.attention.normalise`); None = none.

    Returns:
      (Output [B, H, D], cache, new token to write, ok, report). `ok` is False if the store could not be read.
    """
    chosen = choose(plan, cache.state, q) if chosen is None else chosen
    pool, slot, ok, stats = cache.pool.fetch(chosen.need, cache.state.count, layer, ref)
    cache = LayerCache(cache.state, pool)
    out, new_token, seen = attend(plan, cache, chosen, q, key, value, slot, at, sink_logits)
    return out, cache, new_token, ok, report(plan, cache.state, chosen, q, key, value, seen, stats, sink_logits)


def report(
    plan: LayerPlan, state: LayerState, chosen: SelectedRows, q, key, value, seen, stats: FetchStats,
    sink_logits: Float[Array, "K G"] | None = None,
) -> Report:
    """Creates the report of a step."""
    held = state.tail.pos[..., plan.spec.sinks + plan.spec.ring :]
    rows = chosen.rows.pos
    selected = rows if plan.dense else jnp.concatenate([rows, held], axis=-1)
    return Report(seen, selected, _hidden(chosen, selected), grouped(q, plan.spec), key, value, stats, sink_logits)


def _hidden(chosen: SelectedRows, selected) -> Bool[Array, "B K G N"] | None:
    """Returns True for selected rows that the method's bias hides from a query head; held rows are hidden from none."""
    if chosen.bias is None:
        return None
    hidden = chosen.bias <= attention.NEGATIVE / 2
    held = selected.shape[-1] - hidden.shape[-1]
    return jnp.pad(hidden, ((0, 0), (0, 0), (0, 0), (0, held)))


def grouped(q, spec):
    return q.reshape(q.shape[0], spec.kv_heads, spec.group, -1)
