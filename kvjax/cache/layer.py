"""One attention layer over a cache: fill it from a prompt, read it for a token, write the token to it.

This is the piece that any model can call. `read` and `write` are the two halves of a decode step:
`read` changes nothing but what happens to be resident, `write` books the token, and only where its
gate is set. A driver reads all layers of a model, and writes them once the whole token has succeeded.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import state as caching
from kvjax.cache.method import Method, Placement, Spec, WindowEviction
from kvjax.cache.pool import FetchStats, MemoryPool, Pool, StoreRef, gated, scatter_prompt
from kvjax.cache.smoothing import learn_smoothing, unknown_smoothing
from kvjax.cache.state import LayerState, NewToken, Rows
from kvjax.errors import PromptError
from kvjax.ops import attention, quantize
from kvjax.ops.barriers import exists
from kvjax.typing import Array, Bool, Float, Int32, Num, PyTree, pytree


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """What is static about a layer's cache."""

    method: Method
    spec: Spec
    follows: bool = False  # placements and choices are those of the layer before (`Method.reuse`)
    filters: bool = False  # attends everything, and selects for those that follow (`Method.dense_filters`)

    @property
    def observes(self) -> bool:
        """Whether the method is shown what is attended; a layer that follows has nothing to learn."""
        return self.method.observes and not self.follows

    @property
    def dense(self) -> bool:
        """Whether every block is attended."""
        return self.method.attends_all or self.filters


@pytree
class LayerCache:
    """One layer's cache for a batch."""

    state: LayerState
    pool: Pool


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
    # attended and not read in place


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


@pytree
class Prompts:
    """What one layer makes of prompts, right-padded to T."""

    key: Float[Array, "B T K D"]
    value: Float[Array, "B T K D"]
    length: Int32[Array, "B"]
    token: Int32[Array, "B T"] | None = None  # token ids; None = not known
    query: Float[Array, "B Q H D"] | None = None  # of each prompt's last Q tokens; None = none, Q = 0


def init(plan: LayerPlan, batch: int, dtype: str = "float32", weights: PyTree | None = None) -> LayerState:
    """An empty state for `batch` sequences; `weights` are the method's for this layer, by default those of layer 0."""
    weights = plan.method.weights(0) if weights is None else weights
    index = () if plan.follows else plan.method.init(plan.spec, weights)
    one = caching.empty_layer(plan.spec, index, quantize.tail_type(dtype))
    if dtype in quantize.BITS and plan.spec.keeps_keys:
        one = dataclasses.replace(one, smoothing=unknown_smoothing(plan.spec))
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (batch, *leaf.shape)), one)


def last_queries(
    query: Float[Array, "B T H D"], length: Int32[Array, "B"], count: int | None
) -> Float[Array, "B Q H D"]:
    """`Prompts.query` from the queries of all tokens: those of each prompt's last min(count, T) tokens; None = all."""
    count = query.shape[1] if count is None else min(count, query.shape[1])
    at = jnp.maximum(length[:, None] - count + jnp.arange(count, dtype=jnp.int32), 0)
    return jnp.take_along_axis(query, at[..., None, None], axis=1)


def check_enough(plan: LayerPlan, length: np.ndarray) -> None:
    """Raises PromptError for prompts of too few tokens to learn from."""
    beside = plan.spec.sinks + plan.spec.ring
    least = plan.method.least_prompt(plan.spec)
    if least and length.min() - beside < least:
        raise PromptError(f"{plan.method.name} learns from the prompt, and needs {least + beside} tokens of it where "
                          f"there are {length.min()}; give it more at once (context or chunk), or another method")


def prefill(plan: LayerPlan, state: LayerState, prompts: Prompts, leader: LayerState | None = None):
    """Fills an empty state from prompts; returns it and where each token's payload goes.

    A layer that follows another takes the placements of the `leader`.
    """
    state, placement = _placed(plan, state, prompts, leader)
    if state.smoothing is not None:
        state = dataclasses.replace(state, smoothing=_smoothing_of(plan.spec, prompts))
    return state, placement


def _placed(plan: LayerPlan, state: LayerState, prompts: Prompts, leader: LayerState | None):
    """The state and each token's place."""
    spec, (batch, tokens) = plan.spec, prompts.key.shape[:2]
    token = jnp.full((batch, tokens), -1, jnp.int32) if prompts.token is None else prompts.token
    filled = (prompts.key, prompts.value, prompts.length, token)
    if plan.follows:
        placement = jax.vmap(lambda one: caching.placements(spec, one, tokens))(leader)
        return jax.vmap(lambda *args: caching.book(spec, *args))(state, placement, *filled), placement
    query = prompts.query
    if query is None:
        query = jnp.zeros((batch, 0, spec.kv_heads * spec.group, spec.head_dim), prompts.key.dtype)
    return jax.vmap(lambda *args: caching.build(spec, plan.method, *args))(state, *filled, query)


def _smoothing_of(spec: Spec, prompts: Prompts) -> quantize.Smoothing:
    """Learned from each prompt's tokens after the sinks; unknown where none of them has left the window."""
    pos = jnp.arange(prompts.key.shape[1], dtype=jnp.int32)

    def one(args):
        key, length = args
        valid = (pos >= spec.sinks) & (pos < length) & (length > spec.sinks + spec.ring)
        return learn_smoothing(spec, key.swapaxes(0, 1), pos, valid)

    return each_sequence(one, (prompts.key, prompts.length))


def prefill_memory(plan: LayerPlan, state: LayerState, prompts: Prompts, dtype: str = "float32") -> LayerCache:
    """`prefill` into a new memory pool."""
    state, placement = prefill(plan, state, prompts)
    return LayerCache(state, in_memory(plan, state, placement, prompts, dtype))


def in_memory(
    plan: LayerPlan, state: LayerState, placement: Placement, prompts: Prompts, dtype: str = "float32"
) -> MemoryPool:
    """The memory pool of prompts that `prefill` has placed."""
    return _in_memory(plan, state.smoothing, placement, prompts, dtype)


@functools.partial(jax.jit, static_argnums=(0, 4))
def _in_memory(plan: LayerPlan, smoothing, placement: Placement, prompts: Prompts, dtype: str) -> MemoryPool:
    *key, value = (scatter_prompt(plan.spec, placement, rows) for rows in _kept(plan, smoothing, prompts, dtype))
    return MemoryPool(key[0] if key else None, value, dtype)


def stored_rows(
    plan: LayerPlan, state: LayerState, prompts: Prompts, dtype: str = "float32"
) -> Num[Array, "B KB T X2"]:
    """What blocks of a store hold of each token: values beside keys, or alone."""
    return _stored_rows(plan, state.smoothing, prompts, dtype)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _stored_rows(plan: LayerPlan, smoothing, prompts: Prompts, dtype: str) -> Num[Array, "B KB T X2"]:
    kept = [rows.reshape(*rows.shape[:2], plan.spec.block_heads, -1) for rows in _kept(plan, smoothing, prompts, dtype)]
    return jnp.concatenate(kept, axis=-1).swapaxes(1, 2)


def _kept(
    plan: LayerPlan, smoothing: quantize.Smoothing | None, prompts: Prompts, dtype: str
) -> list[Num[Array, "B T K X"]]:
    """What blocks hold of prompts: keys, if they do, and values."""
    key, value = _rows(plan, smoothing, prompts.key.swapaxes(1, 2), prompts.value.swapaxes(1, 2), dtype)
    return [rows.swapaxes(1, 2) for rows in (key, value) if rows is not None]


@functools.partial(jax.jit, static_argnums=(0, 4))
def _rows(plan: LayerPlan, smoothing: quantize.Smoothing | None, key, value, dtype: str):
    """Keys and values `[B, K, *E, D]` as blocks keep them; None for keys that they do not."""
    kept = quantize.pack_keys(key, smoothing, dtype) if plan.spec.keeps_keys else None
    return kept, quantize.pack(value, dtype)


# ------------------------------------------------------------------------------------------- read


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

    return each_sequence(one, (state, _grouped(q, spec)), _together(plan))


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

    return each_sequence(one, (state, _grouped(q, spec)), _together(plan))


@functools.partial(jax.jit, static_argnums=0)
def answer(plan: LayerPlan, cache: LayerCache, chosen: SelectedRows, q, key, value, slot: Int32[Array, "B K M1"], at):
    """Attends tail, chosen rows and the newest token; returns (out[B, H, D], NewToken, how many tokens
    were attended[B, K])."""
    found = fetched(plan, cache, chosen, slot, in_place=_in_place(plan, cache.pool))
    args = (found, _grouped(q, plan.spec), key, value, at)
    out, (seen_pos, seen_weight), seen = each_sequence(lambda one: _attend(plan, cache.pool, *one), args)
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
        return _with(state.smoothing, key), value, valid, state.pos.reshape(valid.shape)
    key, value = pool.rows_at(mine.number, jnp.take_along_axis(mine.slot, rows.rank, axis=-1), rows.row)
    key = _with(state.smoothing, key)
    if key is None:
        block = jnp.take_along_axis(chosen.need, rows.rank, axis=-1)
        key = plan.method.rebuild(spec, state.index, block, rows.row, rows.pos)
    return key, value, rows.valid, rows.pos


def _with(smoothing: quantize.Smoothing | None, key):
    """Keys (`packing.Scattered` or `packing.Packed`) with what they were smoothed by."""
    return key if smoothing is None else dataclasses.replace(key, smoothing=smoothing)


def scored(plan: LayerPlan, mine: Fetched, q: Float[Array, "K G D"]) -> Float[Array, "K G N"] | None:
    """Scores of all rows by a method that attends everything and keeps no keys in blocks; None for most methods."""
    if plan.spec.keeps_keys or not plan.dense:
        return None
    return plan.method.score_rows(plan.spec, mine.state.index, q)


def each_sequence(function, args, together: bool = False):
    """Maps over the batch: as one program on accelerators and if `together`, else one sequence after the other on CPU.

    XLA:CPU orders the sums of a softmax by the whole shape, so that a batched one would not be bit-equal to the
    sequence alone, and what is made of one sequence stays in its caches. But it copies the sequence's part of every
    array that meets a product, which takes longer than the product where that gives few numbers.
    """
    if jax.default_backend() == "cpu" and not together:
        return jax.lax.map(function, args)
    return jax.vmap(lambda *one: function(one))(*args)


def _attend(plan, pool, mine: Fetched, q, new_key, new_value, at):
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


def read(
    plan: LayerPlan, cache: LayerCache, q: Float[Array, "B H D"], key: Float[Array, "B K D"], value,
    at: Int32[Array, "B"], layer, ref: StoreRef, chosen: SelectedRows | None = None,
):
    """Attention of the newest token, over a choice made earlier if one is given.

    Returns (out[B, H, D], cache, NewToken, ok[], Report).
    """
    chosen = choose(plan, cache.state, q) if chosen is None else chosen
    pool, slot, ok, stats = cache.pool.fetch(chosen.need, cache.state.count, layer, ref)
    cache = LayerCache(cache.state, pool)
    out, new_token, seen = answer(plan, cache, chosen, q, key, value, slot, at)
    return out, cache, new_token, ok, report(plan, cache.state, chosen, q, key, value, seen, stats)


def report(plan: LayerPlan, state: LayerState, chosen: SelectedRows, q, key, value, seen, stats: FetchStats) -> Report:
    """What a step did."""
    held = state.tail.pos[..., plan.spec.sinks + plan.spec.ring :]
    rows = chosen.rows.pos
    selected = rows if plan.dense else jnp.concatenate([rows, held], axis=-1)
    return Report(seen, selected, _hidden(chosen, selected), _grouped(q, plan.spec), key, value, stats)


def _hidden(chosen: SelectedRows, selected) -> Bool[Array, "B K G N"] | None:
    """What the method's bias takes from a query head; what waits for a block it leaves to all."""
    if chosen.bias is None:
        return None
    hidden = chosen.bias <= attention.NEGATIVE / 2
    waiting = selected.shape[-1] - hidden.shape[-1]
    return jnp.pad(hidden, ((0, 0), (0, 0), (0, 0), (0, waiting)))


def _grouped(q, spec):
    return q.reshape(q.shape[0], spec.kv_heads, spec.group, -1)


# ------------------------------------------------------------------------------------------ write


def write(
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
        key, value = _rows(plan, state.smoothing, evicted.key, value, pool.dtype)
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
    if method.observes:
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
    seen = joined([_with(smoothing, key).unpacked() for key, _ in found], tail.key)
    # As they are kept: rows that move stay the same bytes.
    held_key, held_value = _rows(plan, smoothing, tail.key, tail.value, cache.pool.dtype)
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
