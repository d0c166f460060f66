"""Chunked prefill: more text for a filled cache, read a chunk of tokens at a time (DynaKV, Discussion 1).

The tokens of a chunk attend one another and, of everything before them, what the cache would give a decoded token:
sinks, recent window, held rows, and the blocks that one selection for the whole chunk fetches within the budget. They
are then placed one after the other as if they had been decoded, so that clusters grow and split while the text arrives.
Memory is bounded by the chunk and what the cache keeps in memory, whatever the length of the text.

A chunk is one transaction: it is read in all layers before it is written in any.
"""

import functools

import einops
import jax
import jax.numpy as jnp
import numpy as np

from kvjax import _validate
from kvjax.cache import layer, shared_slots
from kvjax.cache import state as caching
from kvjax.cache.layer import LayerCache, LayerPlan
from kvjax.cache.pool import StoreRef
from kvjax.cache.read import Fetched, SelectedRows, choose, chosen_rows, fetched, of_active, scored
from kvjax.cache.state import LayerState, NewToken
from kvjax.cache.types import Placement, Selection, Spec
from kvjax.cache.write import write_token
from kvjax.errors import ConfigError, PromptError
from kvjax.inference import decode, on_mesh, progress
from kvjax.inference.blocks import embed, sink_logits, unembed
from kvjax.inference.commit import drop, forget, settle, uses_store
from kvjax.inference.decode import LayerRead, Pending
from kvjax.inference.layer_offload import LayerLoader
from kvjax.inference.plan import Plan, State
from kvjax.models.transformer import Block
from kvjax.ops import attention, causal, quantize
from kvjax.ops.topk import top_blocks
from kvjax.typing import Array, Bool, Float, Int32, Logits, Num, PyTree

VOTERS = 8  # queries of a chunk that rank blocks for its selection
_ROWS = 2048  # rows that a chunk attends at once


def extend(
    plan: Plan, params: PyTree, state: State, tokens: Int32[Array, "B T"] | Int32[np.ndarray, "B T"],
    length: Int32[Array, "B"] | Int32[np.ndarray, "B"], chunk: int,
) -> tuple[State, Logits]:
    """Reads more tokens into each sequence, a chunk at a time.

    Args:
      plan: static part of the cache.
      params: weights of the model.
      state: state of the cache, which must not be used again.
      tokens: token ids [B, T], right-padded.
      length: tokens to read into each sequence [B], 0 = none.
      chunk: tokens of a chunk.

    Returns:
      (State, logits after each sequence's last token [B, V]). Logits are zero for a sequence that got no token.

    Raises:
      PromptError: the tokens exceed the capacity.
      ConfigError: the method needs single tokens, or `chunk` is not a number of tokens.
      StoreError: the store failed. The error's `state` holds everything before the chunk that failed; it is None if a
        chunk was read but could not be committed.
    """
    counts = np.asarray(length)
    _check(plan, state, counts, chunk)
    chunk = min(chunk, 1 << (max(1, int(counts.max())) - 1).bit_length())  # a short text is not padded to a long chunk
    # In host memory, because each slice of a JAX array would be a program of its own.
    padded = np.pad(np.asarray(tokens, np.int32), ((0, 0), (0, -tokens.shape[1] % chunk)))
    logits = jnp.zeros((plan.batch, plan.config.vocab_size), jnp.float32)
    forget(state)
    with progress.shown("reading", int(counts.max())) as bar:
        for start in range(0, int(counts.max()), chunk):
            count = jnp.asarray(np.clip(counts - start, 0, chunk), jnp.int32)
            state, last, ok = _chunk(plan, params, state, jnp.asarray(padded[:, start : start + chunk]), count)
            if uses_store(state):
                settle(state, bool(ok))
            logits = jnp.where((count > 0)[:, None], last, logits)
            bar.update(min(chunk, int(counts.max()) - start))
    return state, logits


def check_chunk(chunk) -> None:
    """Raises ConfigError unless `chunk` is a number of tokens."""
    if not _validate.whole(chunk, 1):
        raise ConfigError(f"chunk={chunk!r} must be a whole number of at least 1 token")


def reads(plan: Plan) -> bool:
    """Returns whether the method can read chunks; one that learns from single tokens, or draws for them, cannot."""
    return not any(layer.method.observes or layer.method.samples for layer in plan.layers)


def check(plan: Plan, chunk: int) -> None:
    """Raises ConfigError if the method needs single tokens, or `chunk` is not a number of tokens."""
    check_chunk(chunk)
    if not reads(plan):
        raise ConfigError(f"{plan.method.name} learns from the attention of single tokens, or draws for "
                          "single queries; decode the text token by token")


def check_prompt(plan: Plan, chunk: int) -> None:
    """Raises ConfigError as `check` does, and also if the method has to see all of a prompt at once."""
    check(plan, chunk)
    if any(layer.method.whole_prompts for layer in plan.layers):
        raise ConfigError(f"{plan.method.name} decides what to keep when it has seen all of a prompt; leave out chunk")


def _check(plan: Plan, state: State, length: np.ndarray, chunk: int) -> None:
    check(plan, chunk)
    longest = int((np.asarray(state.length) + length).max())
    if longest > plan.capacity:
        raise PromptError(f"with the text a sequence has {longest} tokens but capacity={plan.capacity}; raise the "
                          "capacity")


def _chunk(plan: Plan, params, state: State, tokens, count):
    """Reads one chunk, of which the first `count[b]` tokens are valid; returns (State, logits of their last, ok)."""
    if plan.layout is not None:
        return _chunk_on_mesh(plan, params, state, tokens, count)
    loader = LayerLoader(state.layers)
    try:
        return _layer_by_layer(plan, params, state, loader, tokens, count)
    except BaseException as error:  # such as Ctrl-C, or an offloaded layer that cannot be read
        drop(state, loader, error)
        raise


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _chunk_on_mesh(plan: Plan, params, state: State, tokens, count):
    """Reads one chunk as one program, which each device of the mesh runs on its own heads and sequences."""
    layout, own = plan.layout, plan.of_one
    assert layout is not None
    cache, each = on_mesh.specs_of_state(plan), layout.by_sequence

    def read(params, state, tokens, count):
        return _layer_by_layer(own, params, state, LayerLoader(state.layers), tokens, count)

    run = layout.run(read, (layout.params(plan.config, params), cache, each, each), (cache, each, layout.everywhere))
    return run(params, state, tokens, count)


def _layer_by_layer(plan: Plan, params, state: State, loader: LayerLoader, tokens, count):
    at = state.length

    def read(i, cache, x, selected):
        layer_plan = plan.layers[i]
        return _read(
            plan.config.layers[i], layer_plan, params[f"layers_{i}"], cache, x, at, count, jnp.int32(i), state.ref,
            selected if layer_plan.follows else None,
        )

    def write(i, cache, leader):
        return _write(
            plan.layers[i], cache, pending[i].new_token, tokens, at, count, ok, jnp.int32(i), state.ref, leader
        )

    x, pending = decode.read_layers(plan, loader, embed(plan.config, params, tokens), read)
    ok = functools.reduce(jnp.logical_and, [layer.ok for layer in pending])
    last = jnp.take_along_axis(x, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
    decode.write_layers(plan, loader, write)
    ref = StoreRef(state.ref.handle, state.ref.generation + ok)
    return State(loader.layers, jnp.where(ok, at + count, at), ref), unembed(plan.config, params, last), ok


# ------------------------------------------------------------------------------------------- read


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _read(config, plan: LayerPlan, params, cache: LayerCache, x, at, count, number, ref, chosen) -> LayerRead:
    """Reads one layer for a chunk."""
    block, size = Block(config), x.shape[1]
    pos = at[:, None] + jnp.arange(size, dtype=jnp.int32)
    q, key, value = block.apply({"params": params}, x, pos, method="project")
    if chosen is None:
        chosen = of_active(plan, _choose(plan, cache.state, q, count), count > 0)
    pool, slot, ok, _ = cache.pool.fetch(chosen.need, cache.state.count, number, ref)
    cache = LayerCache(cache.state, pool)
    learned = sink_logits(config, params)
    args = (fetched(plan, cache, chosen, slot), _folded(plan.spec, q), key, value, at, count)
    out = _unfolded(layer.each_sequence(lambda one: _attend(plan, cache.pool, learned, *one), args), size)
    x = block.apply({"params": params}, x, out, method="finish")
    seen = jnp.zeros((size, *chosen.need.shape[:2], 0), jnp.float32)
    # All tokens have loaded the same blocks, which stand here once.
    new_token = NewToken(key.swapaxes(0, 1), value.swapaxes(0, 1), chosen.need, seen.astype(jnp.int32), seen)
    cache, slots = shared_slots.leave(cache)
    return LayerRead(x, cache, Pending(new_token, ok), chosen, slots)


def _choose(plan: LayerPlan, state: LayerState, q: Float[Array, "B Q H D"], count: Int32[Array, "B"]) -> SelectedRows:
    """Makes one selection for a chunk: evenly spaced queries rank the blocks, and their rankings elect the best."""
    spec, method = plan.spec, plan.method
    if method.attends_all:
        return choose(plan, state, q[:, 0])

    def one(state, q, count):
        state = caching.within(plan.spec, state)
        view = caching.view(spec, state)
        voters = q[(jnp.arange(VOTERS, dtype=jnp.int32) * jnp.maximum(count, 1)) // VOTERS]
        voters = voters.reshape(VOTERS, spec.kv_heads, spec.group, spec.head_dim)
        ranked = jax.lax.map(lambda voter: method.select(spec, state.index, view, voter).block, voters)
        force = method.select(spec, state.index, view, voters[0]).force
        return SelectedRows(*caching.needed_blocks(spec, state, Selection(_elect(spec, ranked), force)))

    return jax.vmap(one)(state, q, count)


def _elect(spec, ranked: Int32[Array, "V K M"]) -> Int32[Array, "K M"]:
    """Returns the blocks with most points, which are M for a first rank down to 1 for the last (Borda)."""
    points = jnp.arange(spec.max_blocks, 0, -1, dtype=jnp.float32)
    head = jnp.arange(spec.kv_heads, dtype=jnp.int32)[:, None]
    total = jnp.zeros((spec.kv_heads, spec.num_blocks), jnp.float32).at[head, ranked].add(points, mode="drop")
    return top_blocks(total, total > 0, spec.max_blocks)


def _folded(spec: Spec, q: Float[Array, "B Q H D"]) -> Float[Array, "B K GQ D"]:
    """Concatenates all queries of a KV head's group."""
    return einops.rearrange(q, "b q (k g) d -> b k (g q) d", k=spec.kv_heads)


def _unfolded(out: Float[Array, "B K GQ D"], queries: int) -> Float[Array, "B Q H D"]:
    """Separates the heads again; the inverse of `_folded`."""
    return einops.rearrange(out, "b k (g q) d -> b q (k g) d", q=queries)


def _attend(
    plan: LayerPlan, pool, learned: Float[Array, "K G"] | None, found: Fetched, q: Float[Array, "K GQ D"],
    key: Float[Array, "Q K D"], value, at, count,
) -> Float[Array, "K GQ D"]:
    """Merges the tail, the chosen rows and, causally, the chunk itself by log-sum-exp, for one sequence."""
    size = key.shape[0]
    mine = at + jnp.arange(size, dtype=jnp.int32)
    own = jnp.broadcast_to(jnp.where(jnp.arange(size, dtype=jnp.int32) < count, mine, -1), (plan.spec.kv_heads, size))
    rows, rows_value, valid, pos = chosen_rows(plan, pool, found)

    def part(key, value, pos, scores=None):
        scores = causal.scores_of_many(q, key, plan.spec.soft_cap) if scores is None else scores
        return causal.attend_masked(scores, value, _seen(plan, pos, mine))

    tail, made = found.state.tail, scored(plan, found, q)
    chosen = quantize.all_of(rows_value), jnp.where(valid, pos, -1)
    parts = [part(tail.key, tail.value, tail.pos), part(key.swapaxes(0, 1), value.swapaxes(0, 1), own),
             _in_steps(part, quantize.all_of(rows), *chosen) if made is None
             else part(None, *chosen, attention.soft_capped(made, plan.spec.soft_cap))]
    learned = None if learned is None else jnp.repeat(learned, size, axis=-1)
    return attention.normalise(functools.reduce(attention.merge, parts), q.dtype, learned)


def _in_steps(part, key: Num[Array, "K N D"], value, pos: Int32[Array, "K N"]) -> attention.Part:
    """Returns the part over many rows, of which no more than `_ROWS` have scores in memory at once."""
    rows = pos.shape[1]
    if rows <= _ROWS:
        return part(key, value, pos)

    def step(i, merged):
        start = jnp.minimum(i * _ROWS, rows - _ROWS)  # the last step begins earlier, and leaves out what was seen
        one, its_value, its_pos = (jax.lax.dynamic_slice_in_dim(x, start, _ROWS, axis=1) for x in (key, value, pos))
        fresh = start + jnp.arange(_ROWS, dtype=jnp.int32) >= i * _ROWS
        return attention.merge(merged, part(one, its_value, jnp.where(fresh, its_pos, -1)))

    first = part(*(x[:, :_ROWS] for x in (key, value, pos)))
    return jax.lax.fori_loop(1, -(-rows // _ROWS), step, first)


def _seen(plan: LayerPlan, pos: Int32[Array, "K N"], mine: Int32[Array, "Q"]) -> Bool[Array, "K Q N"]:
    """Returns True for tokens that a query may attend: itself and earlier ones, inside the model's sliding window."""
    seen = (pos[:, None] >= 0) & (pos[:, None] <= mine[:, None])
    return seen & plan.spec.seen(pos[:, None], mine[:, None])


# ------------------------------------------------------------------------------------------ write


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _write(plan: LayerPlan, cache: LayerCache, new_token: NewToken, tokens, at, count, ok, number, ref, leader):
    """Writes the chunk's tokens one after the other; also returns their placements, for layers that follow this one."""

    def one(cache, step) -> tuple[LayerCache, Placement]:
        j, (key, value), seen, token, placement = step
        new = NewToken(key, value, new_token.loaded, *seen)
        return write_token(plan, cache, new, at + j, ok & (j < count), number, ref, token, placement)

    rows, seen = (new_token.key, new_token.value), (new_token.seen_pos, new_token.seen_weight)
    steps = (jnp.arange(tokens.shape[1], dtype=jnp.int32), rows, seen, tokens.swapaxes(0, 1), leader)
    return jax.lax.scan(one, cache, steps)
