"""Where the payload of a layer's blocks is while it is being used: the interface and the one in memory.

`MemoryPool` keeps every block in JAX arrays, keys and values apart so that dense attention can read
them in place. `kvjax.cache.slots.SlotPool` keeps a few blocks of a store on disk. Both take batches:
callbacks have no batching rule, so the batch axis is explicit.
"""

import dataclasses
from typing import Protocol, runtime_checkable

import einops
import jax
import jax.numpy as jnp

from kvjax.cache.types import Spec
from kvjax.ops import quantize
from kvjax.ops.barriers import computed_once
from kvjax.typing import Array, Bool, Int32, Num, pytree


@pytree
class StoreRef:
    """Which line of history of which store a step belongs to: operands of every callback."""

    handle: Int32[Array, ""]  # key of the branch in `kvjax.store.interface`, -1 = no store
    generation: Int32[Array, ""]  # tokens committed to it


@pytree
class FetchStats:
    """What one fetch did, per sequence, over all KV heads; nothing where blocks are in memory."""

    requested: Int32[Array, "B"]  # blocks the step needed of a store
    missed: Int32[Array, "B"]  # of these, blocks read from the store
    rows: Int32[Array, "B"]  # valid rows of those that were read: what reading them was good for


@runtime_checkable
class Pool(Protocol):
    """Payload blocks of one layer; every method returns a new value."""

    @property
    def dtype(self) -> str:
        """How keys and values are kept (`kvjax.ops.quantize`)."""

    def fetch(
        self, need: Int32[Array, "B K M1"], count: Int32[Array, "B K NB"], layer: Int32[Array, ""], ref: StoreRef
    ):
        """(pool, slot[B, K, M1] of each needed block, ok[], FetchStats): the only read from outside.

        `count` has the valid rows of every block, which may decide which blocks stay in memory."""

    def submit(self, block: Int32[Array, "B K N"], layer: Int32[Array, ""], ref: StoreRef) -> Int32[Array, ""]:
        """Begins to read blocks that will be needed; the token returned exists once that has begun."""

    def rows_at(self, number: Int32[Array, ""], slot: Int32[Array, "K N"], row: Int32[Array, "K N"]):
        """Keys and values (`packing.Scattered`, `[K, N]`) of single rows of a sequence, given its number in the batch;
        rows of absent blocks are undefined. Here and below keys are None where blocks hold values alone."""

    def block(self, slot: Int32[Array, "B K"]):
        """Keys and values (`packing.Packed`, `[B, K, C, X]`) of one block per head."""

    def everything(self, slot: Int32[Array, "B K NB"]):
        """Keys and values (`packing.Packed`, `[B, K, NB * C, X]`) of all blocks in order, given their slots."""

    def locate(self, block: Int32[Array, "B K *E"]) -> Int32[Array, "B K *E"]:
        """Slot of each block, NS where it is not in memory."""

    def put_row(self, block: Int32[Array, "B K"], row, key: Num[Array, "B K X"] | None, value, layer, ref: StoreRef):
        """Writes one row per head, as it is kept (block NB = nothing)."""

    def put_blocks(
        self, block: Int32[Array, "B K E"], key: Num[Array, "B K E C X"] | None, value, layer, ref: StoreRef
    ):
        """Writes whole blocks (block NB = nothing)."""


@pytree
class MemoryPool:
    """All blocks in memory; the slot of a block is its number."""

    key: Num[Array, "B K NB C X"] | None  # X numbers that keep D, see `kvjax.ops.quantize`; None = not kept
    value: Num[Array, "B K NB C X"]
    dtype: str = dataclasses.field(default="float32", metadata={"static": True})

    @classmethod
    def zeros(cls, spec: Spec, batch: int, dtype: str) -> "MemoryPool":
        shape = (batch, spec.kv_heads, spec.num_blocks, spec.block_rows, quantize.width(dtype, spec.head_dim))
        kept = quantize.array_type(dtype)
        return cls(jnp.zeros(shape, kept) if spec.keeps_keys else None, jnp.zeros(shape, kept), dtype)

    def fetch(self, need, count, layer, ref):
        quiet = jnp.zeros(need.shape[0], jnp.int32)
        return self, need, jnp.bool_(True), FetchStats(quiet, quiet, quiet)

    def submit(self, block, layer, ref):
        return jnp.int32(1)

    def rows_at(self, number, slot, row):
        return self._each(lambda kept: find_rows(kept, self.dtype, number, slot, row, len(slot), parts=1)[0])

    def block(self, slot):
        return self._each(lambda kept: quantize.Packed(take_block(kept, slot), self.dtype))

    def everything(self, slot):
        return self._each(lambda kept: quantize.Packed(kept.reshape(*kept.shape[:2], -1, kept.shape[-1]), self.dtype))

    def locate(self, block):
        return block

    def put_row(self, block, row, key, value, layer, ref):
        return self._put((*batch_and_head(block), block, row), key, value)

    def put_blocks(self, block, key, value, layer, ref):
        return self._put((*batch_and_head(block), block), key, value)

    def _put(self, at, key, value) -> "MemoryPool":
        def put(kept, new):
            return kept.at[at].set(new, mode="drop")

        return MemoryPool(None if self.key is None else put(self.key, key), put(self.value, value), self.dtype)

    def _each(self, taken):
        """Part of the keys and of the values."""
        return jax.tree.map(taken, (self.key, self.value))


def batch_and_head(block: Int32[Array, "B K *E"]):
    """Index arrays that address a block of each sequence and head."""
    ones = (1,) * (block.ndim - 2)
    batch = jnp.arange(block.shape[0], dtype=jnp.int32).reshape(-1, 1, *ones)
    head = jnp.arange(block.shape[1], dtype=jnp.int32).reshape(1, -1, *ones)
    return batch, head


def find_rows(
    pool: Num[Array, "B KB NS C X2"], dtype: str, number: Int32[Array, ""], slot: Int32[Array, "K N"],
    row: Int32[Array, "K N"], heads: int, parts: int,
) -> tuple[quantize.Scattered, ...]:
    """Each part of single rows of a sequence, which hold several, one after the other, of each of `heads`.

    Where all heads share their blocks (KB = 1), the first one's slots count; those out of range are clipped. Rows are
    those of the whole batch's pool, part by part: what is taken of it in two steps is copied in between.
    """
    _, tables, slots, rows, width = pool.shape
    beside = heads // tables
    table = jnp.arange(tables, dtype=jnp.int32)[:, None]
    line = (number * tables + table) * slots + jnp.minimum(slot[:tables], slots - 1)
    first = computed_once(line * rows + row[:tables]) * (parts * beside)
    first += jnp.arange(heads, dtype=jnp.int32)[:, None] % beside
    flat = pool.reshape(-1, width // (parts * beside))
    return tuple(quantize.Scattered(flat, computed_once(first + part * beside), dtype) for part in range(parts))


def take_block(pool: Num[Array, "B K NS C X"], slot: Int32[Array, "B K"]):
    """One block per head, `[B, K, C, X]`; out-of-range slots are clipped."""
    batch, head = batch_and_head(slot)
    return pool[batch, head, jnp.minimum(slot, pool.shape[2] - 1)]


def scatter_prompt(spec: Spec, placement, rows: Num[Array, "B T KB X"]) -> Num[Array, "B KB NB C X"]:
    """Blocks filled with a prompt's rows as the placement says; empty rows are zero. KB is 1 or K."""
    batch, _, heads, width = rows.shape
    block, row = placement.block[:, :heads], placement.row[:, :heads]
    filled = jnp.zeros((batch, heads, spec.num_blocks, spec.block_rows, width), rows.dtype)
    return filled.at[(*batch_and_head(block), block, row)].set(rows.swapaxes(1, 2), mode="drop")


# Where all heads place and fetch alike, a block has the rows of all of them, side by side.


def row_width(spec: Spec, dtype: str) -> int:
    """Numbers of a row in stores and slots."""
    return (1 + spec.keeps_keys) * quantize.width(dtype, spec.head_dim) * (spec.kv_heads // spec.block_heads)


def join_heads(rows: Num[Array, "B K *E X"], heads: int) -> Num[Array, "B KB *E X2"]:
    """Each head's rows, or those of all heads side by side."""
    if rows.shape[1] == heads:
        return rows
    return einops.rearrange(rows, "b k ... x -> b 1 ... (k x)")


def split_heads(rows: Num[Array, "B KB *E X2"], heads: int) -> Num[Array, "B K *E X"]:
    """What `join_heads` joined."""
    if rows.shape[1] == heads:
        return rows
    return einops.rearrange(rows, "b 1 ... (k x) -> b k ... x", k=heads)


def gated(block: Int32[Array, "B K *E"], gate: Bool[Array, "B"], none: int) -> Int32[Array, "B K *E"]:
    """Blocks of the sequences that go ahead; none of the others."""
    return jnp.where(gate.reshape(-1, *(1,) * (block.ndim - 1)), block, none)
