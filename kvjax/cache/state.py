"""The state of one layer's cache for a batch, and the pure functions that read and advance it.

The state is everything except payload blocks: which token is in which row of which block, the tail (sinks, the ring of
the recent window, held rows), and the method's index. Payload blocks live in a `Pool` (`kvjax.cache.pool`), which is
memory or slots over a store.

Functions take one sequence; the caller maps them over the batch.
"""

import dataclasses
from typing import Any

import einops
import jax.numpy as jnp
import numpy as np

from kvjax.cache.method import (
    Context,
    Edits,
    Method,
    Placement,
    Selection,
    Spec,
    View,
    WindowEviction,
    position_in_order,
)
from kvjax.ops import indexing
from kvjax.ops.barriers import computed_once, exists, written_out
from kvjax.ops.quantize import Smoothing
from kvjax.typing import Array, Bool, Float, Int32, Num, UInt, pytree


@pytree
class Tail:
    """The rows that are always attended: S sinks ++ W - 1 ring rows ++ U held rows."""

    key: Float[Array, "*B K R D"]
    value: Float[Array, "*B K R D"]
    pos: Int32[Array, "*B K R"]  # -1 = empty
    held_block: Int32[Array, "*B K U"]  # NB = free
    token: Int32[Array, "*B S_ring"]  # token ids of sinks and ring, -1 = unknown


@pytree
class LayerState:
    """One layer's cache without its payload pool."""

    index: Any  # the method's arrays, [B, ...]
    positions: Int32[Array, "*B KT _ C"]  # position of the token in each row, -1 = empty, _ = NB; if blocks are in
    # token order (`Spec.in_order`), only the positions of the first block's rows, which determine the rest, _ = 1
    counts: UInt[Array, "*B KT NB"]  # valid rows, a prefix of each block, in the smallest type that holds C
    loaded: Int32[Array, "*B K M1"]  # blocks fetched in the newest step
    tail: Tail
    refused: Int32[Array, "*B K"]  # tokens to be held that found no free row (always 0 for a correct method)
    smoothing: Smoothing | None = None  # of keys in blocks; None = keys are stored as floats, or not at all

    @property
    def pos(self) -> Int32[Array, "*B K NB C"]:
        """Positions of every head, whether it has its own table, shares one or needs none."""
        return _for_heads(self.table, self.refused.shape[-1], -3)

    @property
    def count(self) -> Int32[Array, "*B K NB"]:
        """`counts` of every head."""
        return _for_heads(self.counts, self.refused.shape[-1], -2).astype(np.int32)

    @property
    def table(self) -> Int32[Array, "*B KT NB C"]:
        """`positions` of all blocks."""
        blocks, rows = self.counts.shape[-1], self.positions.shape[-1]
        if self.positions.shape[-2] == blocks > 1:
            return self.positions
        # A table with a single block has the same shape as a first block's rows; valid rows are a prefix in both.
        pos = self.positions + np.arange(blocks, dtype=np.int32)[:, None] * rows
        lib = np if isinstance(pos, np.ndarray) else jnp
        return lib.where(np.arange(rows, dtype=np.int32) < self.counts[..., None], pos, -1)


def _for_heads(table: Array, heads: int, axis: int) -> Array:
    """Broadcasts a table with one entry per head, or one for all, to every head; NumPy arrays stay NumPy arrays."""
    shape = list(table.shape)
    shape[axis] = heads
    return (np if isinstance(table, np.ndarray) else jnp).broadcast_to(table, shape)


@pytree
class NewToken:
    """The newest token, as one step adds it to a layer, and the attention weights of its query."""

    key: Float[Array, "*B K D"]
    value: Float[Array, "*B K D"]
    loaded: Int32[Array, "*L K M1"]  # for tokens of a chunk, of which *B has an axis more, the same
    seen_pos: Int32[Array, "*B K N"]  # attended positions, -1 = none; empty unless the method observes
    seen_weight: Float[Array, "*B K N"]
    note: Any = None  # `Selection.note`; always None for tokens of a chunk


@pytree
class Rows:
    """The selected rows, compacted to tokens: where each one is, and whether it fits the budget."""

    rank: Int32[Array, "*B K N"]  # rank of its block in the selection
    row: Int32[Array, "*B K N"]
    valid: Bool[Array, "*B K N"]
    pos: Int32[Array, "*B K N"]


def empty_layer(spec: Spec, index: Any, dtype) -> LayerState:
    """Returns a layer's empty state for one sequence.

    Args:
      spec: sizes of the layer's cache.
      index: the method's empty index.
      dtype: type of keys and values in the tail.

    Returns:
      The state.
    """
    heads, rows = spec.kv_heads, spec.tail_rows
    tail = Tail(
        key=jnp.zeros((heads, rows, spec.head_dim), dtype),
        value=jnp.zeros((heads, rows, spec.head_dim), dtype),
        pos=jnp.full((heads, rows), -1, jnp.int32),
        held_block=jnp.full((heads, spec.held), spec.num_blocks, jnp.int32),
        token=jnp.full((spec.sinks + spec.ring,), -1, jnp.int32),
    )
    if spec.in_order:
        positions = spec.sinks + jnp.arange(spec.block_rows, dtype=jnp.int32)[None, None]
    else:
        positions = jnp.full((spec.tables, spec.num_blocks, spec.block_rows), -1, jnp.int32)
    return LayerState(
        index=index,
        positions=positions,
        counts=jnp.zeros((spec.tables, spec.num_blocks), np.min_scalar_type(spec.block_rows)),
        loaded=jnp.full((heads, spec.max_blocks + 1), spec.num_blocks, jnp.int32),
        tail=tail,
        refused=jnp.zeros((heads,), jnp.int32),
    )


def view(spec: Spec, layer: LayerState) -> View:
    """Returns the part of a layer's state that the method may look at."""
    first, tail = spec.sinks + spec.ring, layer.tail
    oldest = spec.sinks + jnp.argmin(tail.pos[0, spec.sinks : first]).astype(jnp.int32)
    return View(
        pos=layer.pos, count=layer.count, held_pos=tail.pos[:, first:],
        held_block=tail.held_block, loaded=layer.loaded, oldest_key=tail.key[:, oldest],
    )


def within(spec: Spec, layer: LayerState) -> LayerState:
    """Hides the blocks whose tokens have all left the model's sliding window, as the next token sees the layer."""
    if spec.sliding is None:
        return layer
    seen = spec.seen(jnp.max(layer.table, axis=-1), jnp.max(layer.tail.pos) + 1)
    return dataclasses.replace(layer, counts=jnp.where(seen, layer.counts, 0))


# ---------------------------------------------------------------------------------------- prefill


def tail_sources(spec: Spec, length: Int32[Array, ""]) -> Int32[Array, "S_ring"]:
    """Returns the position that belongs in each sink and ring row after `length` tokens, -1 = none.

    Ring row r keeps the newest position p >= S with (p - S) % (W - 1) == r.
    """
    sink = jnp.arange(spec.sinks, dtype=jnp.int32)
    sink = jnp.where(sink < length, sink, -1)
    row = jnp.arange(spec.ring, dtype=jnp.int32)
    turns = (length - 1 - spec.sinks - row) // spec.ring
    ring = jnp.where(turns >= 0, spec.sinks + row + turns * spec.ring, -1)
    return jnp.concatenate([sink, ring])


def build(
    spec: Spec, method: Method, layer: LayerState, key: Float[Array, "T K D"], value, length: Int32[Array, ""],
    token: Int32[Array, "T"], query: Float[Array, "Q H D"], sink_logits: Float[Array, "K G"] | None = None,
) -> tuple[LayerState, Placement]:
    """Fills an empty layer from a prompt.

    Args:
      spec: sizes of the layer's cache.
      method: cache method.
      layer: empty state of one sequence.
      key: keys [T, K, D] of the prompt.
      value: values [T, K, D] of the prompt.
      length: tokens of the prompt; later rows are padding.
      token: token ids [T], -1 = unknown.
      query: queries [Q, H, D] of the prompt's last Q tokens.
      sink_logits: learned logit [K, G] of each query head, if the model has them.

    Returns:
      The state, and the row of each token's payload.
    """
    pos = jnp.arange(key.shape[0], dtype=jnp.int32)
    middle = (pos >= spec.sinks) & (pos < length - spec.ring)
    asked = length - query.shape[0] + jnp.arange(query.shape[0], dtype=jnp.int32)
    context = Context(
        key=key.swapaxes(0, 1), pos=pos, valid=middle, token=token,
        query=einops.rearrange(query, "q (k g) d -> k g q d", k=spec.kv_heads),
        query_pos=jnp.maximum(asked, -1), sink_logits=sink_logits,
    )
    index, placement = method.build(spec, layer.index, context)
    return book(spec, dataclasses.replace(layer, index=index), placement, key, value, length, token), placement


def book(spec: Spec, layer: LayerState, placement: Placement, key, value, length, token) -> LayerState:
    """Fills sinks and ring from a prompt, and records where the other tokens were placed.

    Args:
      spec: sizes of the layer's cache.
      layer: state of one sequence, empty except for its index.
      placement: row of each token [K, T].
      key, value, length, token: as for `build`.

    Returns:
      The state.
    """
    source = tail_sources(spec, length)
    pos_kept = jnp.maximum(source, 0)
    kept = slice(0, spec.sinks + spec.ring)
    tail = dataclasses.replace(
        layer.tail,
        key=layer.tail.key.at[:, kept].set(key[pos_kept].swapaxes(0, 1).astype(layer.tail.key.dtype)),
        value=layer.tail.value.at[:, kept].set(value[pos_kept].swapaxes(0, 1).astype(layer.tail.value.dtype)),
        pos=layer.tail.pos.at[:, kept].set(source),
        token=jnp.where(source >= 0, token[pos_kept], -1),
    )
    table, pos = jnp.arange(spec.tables, dtype=jnp.int32)[:, None], jnp.arange(key.shape[0], dtype=jnp.int32)
    block, row = placement.block[: spec.tables], placement.row[: spec.tables]
    if not spec.in_order:
        layer = dataclasses.replace(layer, positions=layer.positions.at[table, block, row].set(pos, mode="drop"))
    counts = layer.counts.at[table, block].add(row < spec.block_rows, mode="drop")
    return dataclasses.replace(layer, tail=tail, counts=counts)


def table_of(spec: Spec) -> Int32[Array, "K"]:
    """Returns the index of each head's table of positions and counts."""
    return jnp.arange(spec.kv_heads, dtype=jnp.int32) % spec.tables


def placements(spec: Spec, layer: LayerState, tokens: int) -> Placement:
    """Returns where the first `tokens` tokens of a sequence are, from a layer's table; block NB = in no block."""
    table, pos = jnp.arange(spec.tables, dtype=jnp.int32)[:, None, None], layer.table
    token = jnp.where(pos >= 0, pos, tokens)
    block, row = (
        jnp.broadcast_to(axis, pos.shape).astype(jnp.int32)
        for axis in (jnp.arange(spec.num_blocks)[:, None], jnp.arange(spec.block_rows))
    )
    nowhere = jnp.full((spec.tables, tokens), spec.num_blocks, jnp.int32)
    block = nowhere.at[table, token].set(block, mode="drop")
    row = (nowhere * 0).at[table, token].set(row, mode="drop")
    return Placement(block[table_of(spec)], row[table_of(spec)])


# ------------------------------------------------------------------------------------ decode: read


def forced(spec: Spec, selection: Selection) -> Int32[Array, "K"]:
    """Returns the block of each head that is fetched for `AdaptiveMethod.adapt` alone; NB = none."""
    return jnp.full(spec.kv_heads, spec.num_blocks, jnp.int32) if selection.force is None else selection.force


def needed_blocks(spec: Spec, layer: LayerState, selection: Selection) -> tuple[Int32[Array, "K M1"], Rows]:
    """Cuts a ranked selection to the rows that fit the budget; the last block that fits may be attended in part.

    Args:
      spec: sizes of the layer's cache.
      layer: state of one sequence.
      selection: blocks, best first.

    Returns:
      Blocks to fetch [K, M + 1] (those with at least one row that fits, then the forced one; NB = none), and the
      compacted rows.
    """
    held = jnp.sum(view(spec, layer).held_pos >= 0, axis=-1, dtype=jnp.int32)
    room = jnp.minimum(spec.selected_rows, spec.budget - spec.sinks - spec.window - held)
    chosen, force = computed_once(selection.block), forced(spec, selection)
    counts = layer.counts.astype(jnp.int32)
    none, room = spec.num_blocks, room[:, None]
    head, table = jnp.arange(spec.kv_heads, dtype=jnp.int32)[:, None], table_of(spec)[:, None]
    count = jnp.where(chosen < none, counts[table, jnp.minimum(chosen, none - 1)], 0)
    end = jnp.cumsum(count, axis=-1, dtype=jnp.int32)
    fits = (end - count < room) & (count > 0)
    need = jnp.where(fits, chosen, none)
    known = jnp.any(need == force[:, None], axis=-1)
    force = jnp.where(known, none, force)[:, None]

    nth = jnp.arange(spec.selected_rows, dtype=jnp.int32)
    # Counts the blocks that end before the nth row; comparing every row with every end would be N x M.
    ends = jnp.zeros((spec.kv_heads, spec.selected_rows), jnp.int32).at[head, end].add(1, mode="drop")
    rank = jnp.minimum(jnp.cumsum(ends, axis=-1, dtype=jnp.int32), spec.max_blocks - 1)
    valid = nth[None] < jnp.minimum(end[:, -1:], room)
    row = jnp.where(valid, nth[None] - jnp.take_along_axis(end - count, rank, axis=-1), 0)
    block = jnp.minimum(jnp.take_along_axis(need, rank, axis=-1), none - 1)
    pos = position_in_order(spec, block, row) if spec.in_order else layer.positions[table, block, row]
    return jnp.concatenate([need, force], axis=-1), Rows(rank, row, valid, jnp.where(valid, pos, -1))


def every_block(spec: Spec, layer: LayerState, selection: Selection) -> tuple[Int32[Array, "K M1"], Rows]:
    """Returns all blocks and no rows: `needed_blocks` for a method that attends everything."""
    none = jnp.zeros((spec.kv_heads, 0), jnp.int32)
    need = jnp.concatenate([selection.block, forced(spec, selection)[:, None]], axis=-1)
    return need, Rows(none, none, none > 0, none)


# ----------------------------------------------------------------------------------- decode: write


def push(spec: Spec, tail: Tail, key, value, at: Int32[Array, ""], gate: Bool[Array, ""], token: Int32[Array, ""]):
    """Writes the newest token into its sink or ring row.

    Args:
      spec: sizes of the layer's cache.
      tail: tail of one sequence.
      key: key [K, D] of the token.
      value: value [K, D] of the token.
      at: position of the token.
      gate: False = nothing is written.
      token: id of the token, -1 = unknown.

    Returns:
      The tail, the token that leaves the ring, and its value [K, D].
    """
    row = jnp.where(at < spec.sinks, at, spec.sinks + (at - spec.sinks) % spec.ring)
    left = jnp.where(gate, tail.pos[0, row], -1)
    left_token, left_rows = tail.token[row], written_out(jnp.stack([tail.key[:, row], tail.value[:, row]]))
    left_key, left_value = left_rows
    # The write depends on one number of the read, so it comes after it: else XLA:CPU would copy all keys and values.
    target = jnp.where(gate & exists(left_rows[0, 0, 0]), row, spec.tail_rows)
    tail = dataclasses.replace(
        tail,
        key=tail.key.at[:, target].set(key.astype(tail.key.dtype), mode="drop"),
        value=tail.value.at[:, target].set(value.astype(tail.value.dtype), mode="drop"),
        pos=tail.pos.at[:, target].set(at, mode="drop"),
        token=tail.token.at[target].set(token, mode="drop"),
    )
    following = spec.sinks + (left + 1 + jnp.arange(spec.ring, dtype=jnp.int32) - spec.sinks) % spec.ring
    return tail, WindowEviction(left_key, left, left_token, left >= 0, tail.token[following]), left_value


def place(
    spec: Spec, layer: LayerState, placement: Placement, evicted: WindowEviction, value: Float[Array, "K D"]
) -> tuple[LayerState, Placement]:
    """Records a token that leaves the window in its block (replacing a token in that row) or in a free held row.

    Args:
      spec: sizes of the layer's cache.
      layer: state of one sequence.
      placement: block and row [K] that the method chose.
      evicted: token that leaves the window.
      value: its value [K, D].

    Returns:
      The state, and the placement in which heads that write no row to a block have block NB.
    """
    stored = (placement.block < spec.num_blocks) & (placement.row < spec.block_rows)
    held = (placement.block < spec.num_blocks) & (placement.row == spec.block_rows)
    block = jnp.where(stored, placement.block, spec.num_blocks)
    table, target, row = jnp.arange(spec.tables, dtype=jnp.int32), block[: spec.tables], placement.row[: spec.tables]
    # Valid rows are a prefix. A read of `positions`, which is not ordered before the write, makes XLA:CPU copy it.
    free = row >= layer.counts[table, jnp.minimum(target, spec.num_blocks - 1)]
    if not spec.in_order:
        positions = indexing.with_number(layer.positions, target, row, evicted.pos)
        layer = dataclasses.replace(layer, positions=positions)
    layer = dataclasses.replace(layer, counts=layer.counts.at[table, target].add(free, mode="drop"))
    if spec.held:
        layer = _hold(spec, layer, placement.block, held, evicted, value)
    return layer, Placement(block, placement.row)


def _hold(spec, layer, block, held, evicted, value):
    """Writes a token into the first free held row of each head that holds it."""
    head, tail = jnp.arange(spec.kv_heads, dtype=jnp.int32), layer.tail
    free = tail.held_block == spec.num_blocks
    slot = jnp.where(held & jnp.any(free, axis=-1), jnp.argmax(free, axis=-1).astype(jnp.int32), spec.held)
    row = jnp.where(slot < spec.held, spec.sinks + spec.ring + slot, spec.tail_rows)
    tail = dataclasses.replace(
        tail,
        key=tail.key.at[head, row].set(evicted.key.astype(tail.key.dtype), mode="drop"),
        value=tail.value.at[head, row].set(value.astype(tail.value.dtype), mode="drop"),
        pos=tail.pos.at[head, row].set(evicted.pos, mode="drop"),
        held_block=tail.held_block.at[head, slot].set(block, mode="drop"),
    )
    return dataclasses.replace(layer, tail=tail, refused=layer.refused + (held & (slot == spec.held)))


def with_held(spec: Spec, blocks: list[Num[Array, "K C X"]], held: Num[Array, "K R X"]) -> Num[Array, "K CU X"]:
    """Concatenates the first due block's rows, the held rows and the other due blocks' rows, as `Edits.rows` indexes.
    """
    held = held[:, spec.sinks + spec.ring :].astype(blocks[0].dtype)
    return jnp.concatenate([blocks[0], held, *blocks[1:]], axis=1)


def due_positions(spec: Spec, layer: LayerState, due: Int32[Array, "K P"]) -> Int32[Array, "K CU"]:
    """Returns the positions of the rows of `with_held`; -1 = empty, or held for a block other than the first."""
    mine = (layer.tail.held_block == due[:, :1]) & (due[:, :1] < spec.num_blocks)
    held = jnp.where(mine, layer.tail.pos[:, spec.sinks + spec.ring :], -1)
    first, *others = [_rows_due(spec, layer, block) for block in due.T]
    return jnp.concatenate([first, held, *others], axis=-1)


def _rows_due(spec: Spec, layer: LayerState, block: Int32[Array, "K"]) -> Int32[Array, "K C"]:
    rows = indexing.row(layer.positions, block)  # adaptive: KT = K
    return jnp.where((block < spec.num_blocks)[:, None], rows, -1)


def apply_edits(spec: Spec, layer: LayerState, edits: Edits, pos: Int32[Array, "K CU"]) -> LayerState:
    """Records rewritten blocks, and frees the held rows that moved into them.

    Args:
      spec: sizes of the layer's cache.
      layer: state of one sequence.
      edits: rewritten blocks.
      pos: positions of the rows that the edits index (`due_positions`).

    Returns:
      The state.
    """
    head = jnp.arange(spec.kv_heads, dtype=jnp.int32)[:, None]
    taken = edits.rows >= 0
    moved = jnp.where(taken, jnp.take_along_axis(pos[:, None], jnp.maximum(edits.rows, 0), axis=-1), -1)
    used = jnp.where((edits.dst < spec.num_blocks)[..., None] & taken, edits.rows - spec.block_rows, -1)
    freed = jnp.any(used[..., None] == jnp.arange(spec.held, dtype=jnp.int32), axis=(1, 2))
    first = spec.sinks + spec.ring
    tail = dataclasses.replace(
        layer.tail,
        pos=layer.tail.pos.at[:, first:].set(jnp.where(freed, -1, layer.tail.pos[:, first:])),
        held_block=jnp.where(freed, spec.num_blocks, layer.tail.held_block),
    )
    return dataclasses.replace(
        layer, tail=tail, positions=indexing.with_rows(layer.positions, edits.dst, moved),
        counts=layer.counts.at[head, edits.dst].set(
            jnp.sum(taken, axis=-1, dtype=layer.counts.dtype), mode="drop"
        ),
    )
