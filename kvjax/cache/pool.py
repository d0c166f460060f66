"""Pools, which hold the payload of a layer's blocks while it is in use: the interface, and the pool in memory.

`MemoryPool` keeps every block in JAX arrays, keys and values apart so that dense attention can read them in place;
`kvjax.cache.tiled_pool.TiledPool` has them side by side, as TPUs want them. `kvjax.cache.slots.SlotPool` keeps a few of
a store's blocks. All take batches: callbacks have no batching rule, so the batch axis is explicit.
"""

import abc
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
    """The branch and generation of a store that a step belongs to; operands of every callback."""

    handle: Int32[Array, ""]  # key of the branch in `kvjax.store.interface`, -1 = no store
    generation: Int32[Array, ""]  # tokens committed to the branch


@pytree
class FetchStats:
    """Statistics of one fetch, per sequence, over all KV heads; zeros if all blocks are in memory."""

    requested: Int32[Array, "B"]  # blocks of a store that the step needed
    missed: Int32[Array, "B"]  # of these, blocks that were read from the store
    rows: Int32[Array, "B"]  # valid rows of the blocks that were read


@runtime_checkable
class Pool(Protocol):
    """The payload blocks of one layer, an immutable value: methods that write return a new one."""

    @property
    def dtype(self) -> str:
        """Type of keys and values in blocks (`kvjax.ops.quantize`)."""

    def fetch(
        self, need: Int32[Array, "B K M1"], count: Int32[Array, "B K NB"], layer: Int32[Array, ""], ref: StoreRef
    ):
        """Makes the needed blocks available; no other method reads from the store.

        Args:
          need: needed blocks, NB = none.
          count: valid rows of every block, which may decide which blocks stay in memory.
          layer: number of the layer.
          ref: branch and generation of the store.

        Returns:
          (Pool, slot [B, K, M1] of each needed block, ok, FetchStats). `ok` is False if the store could not be read.
        """

    def submit(self, block: Int32[Array, "B K N"], layer: Int32[Array, ""], ref: StoreRef) -> Int32[Array, ""]:
        """Starts to read blocks that will be needed soon.

        Args:
          block: blocks, NB = none.
          layer: number of the layer.
          ref: branch and generation of the store.

        Returns:
          A scheduling dependency: it is available once the reads are issued.
        """

    def rows_at(self, number: Int32[Array, ""], slot: Int32[Array, "K N"], row: Int32[Array, "K N"]):
        """Returns single rows of one sequence; rows of absent blocks are undefined.

        Args:
          number: index of the sequence in the batch.
          slot: slot of each row's block.
          row: row in its block.

        Returns:
          Keys and values (`quantize.Scattered` or `quantize.Packed`, [K, N]). As below, keys are None if blocks hold
          values alone.
        """

    def lying(self, slot: Int32[Array, "B K M"]):
        """Returns the blocks where `kvjax.ops.attention.attend_blocks` reads them.

        Args:
          slot: slots of blocks.

        Returns:
          (All blocks, [R, C or more, W], and the index [B, K, M] of each asked for), or None if their layout does not
          suit.
        """

    def block(self, slot: Int32[Array, "B K"]):
        """Returns keys and values (`quantize.Packed`, [B, K, C, X]) of one block per head, given its slot."""

    def everything(self, slot: Int32[Array, "B K NB"]):
        """Returns keys and values (`quantize.Packed`, [B, K, NB * C, X]) of all blocks in order, given their slots."""

    def locate(self, block: Int32[Array, "B K *E"]) -> Int32[Array, "B K *E"]:
        """Returns the slot of each block, NS where it is not in memory."""

    def put_row(self, block: Int32[Array, "B K"], row, key: Num[Array, "B K X"] | None, value, layer, ref: StoreRef):
        """Writes one row per head.

        Args:
          block: block of each head, NB = nothing is written.
          row: row in the block [B, K].
          key: key as blocks store it; None if blocks hold values alone.
          value: value [B, K, X] as blocks store it.
          layer: number of the layer.
          ref: branch and generation of the store.

        Returns:
          The pool.
        """

    def put_blocks(
        self, block: Int32[Array, "B K E"], key: Num[Array, "B K E C X"] | None, value, layer, ref: StoreRef
    ):
        """Writes whole blocks.

        Args:
          block: blocks of each head, NB = nothing is written.
          key: keys as blocks store them; None if blocks hold values alone.
          value: values [B, K, E, C, X] as blocks store them.
          layer: number of the layer.
          ref: branch and generation of the store.

        Returns:
          The pool.
        """


class InMemory(abc.ABC):
    """A pool that has all blocks in memory; the slot of a block is its number."""

    def fetch(self, need, count, layer, ref):
        none = jnp.zeros(need.shape[0], jnp.int32)
        return self, need, jnp.bool_(True), FetchStats(none, none, none)

    def submit(self, block, layer, ref):
        return jnp.int32(1)

    def locate(self, block):
        return block

    @abc.abstractmethod
    def apart(self) -> "MemoryPool":
        """Returns the same blocks with keys and values in arrays of their own, the form that caches are saved in."""


@pytree
class MemoryPool(InMemory):
    """A pool in memory with keys and values apart."""

    key: Num[Array, "B K NB C X"] | None  # X numbers encode D dimensions (`kvjax.ops.quantize`); None = not kept
    value: Num[Array, "B K NB C X"]
    dtype: str = dataclasses.field(default="float32", metadata={"static": True})

    @classmethod
    def zeros(cls, spec: Spec, batch: int, dtype: str) -> "MemoryPool":
        shape = (batch, spec.kv_heads, spec.num_blocks, spec.block_rows, quantize.width(dtype, spec.head_dim))
        kept = quantize.array_type(dtype)
        return cls(jnp.zeros(shape, kept) if spec.keeps_keys else None, jnp.zeros(shape, kept), dtype)

    def apart(self):
        return self

    def rows_at(self, number, slot, row):
        return self._each(lambda kept: find_rows(kept, self.dtype, number, slot, row, len(slot), parts=1)[0])

    def lying(self, slot):
        return None

    def block(self, slot):
        return self._each(lambda kept: quantize.Packed(take_block(kept, slot), self.dtype))

    def everything(self, slot):
        return self._each(lambda kept: quantize.Packed(kept.reshape(*kept.shape[:2], -1, kept.shape[-1]), self.dtype))

    def put_row(self, block, row, key, value, layer, ref):
        return self._put((*batch_and_head(block), block, row), key, value)

    def put_blocks(self, block, key, value, layer, ref):
        return self._put((*batch_and_head(block), block), key, value)

    def _put(self, target, key, value) -> "MemoryPool":
        def put(kept, new):
            return kept.at[target].set(new, mode="drop")

        return MemoryPool(None if self.key is None else put(self.key, key), put(self.value, value), self.dtype)

    def _each(self, taken):
        """Applies a function to the keys and to the values."""
        return jax.tree.map(taken, (self.key, self.value))


def batch_and_head(block: Int32[Array, "B K *E"]):
    """Returns the index arrays of batch and head that address a block of each sequence and head."""
    ones = (1,) * (block.ndim - 2)
    batch = jnp.arange(block.shape[0], dtype=jnp.int32).reshape(-1, 1, *ones)
    head = jnp.arange(block.shape[1], dtype=jnp.int32).reshape(1, -1, *ones)
    return batch, head


def find_rows(
    pool: Num[Array, "B KB NS C X2"], dtype: str, number: Int32[Array, ""], slot: Int32[Array, "K N"],
    row: Int32[Array, "K N"], heads: int, parts: int,
) -> tuple[quantize.Scattered, ...]:
    """Returns single rows of one sequence, split into their parts (keys and values).

    Rows are addressed in the flattened pool of the whole batch, because taking the sequence first would copy it.

    Args:
      pool: rows of all slots.
      dtype: type of keys and values (`kvjax.ops.quantize`).
      number: index of the sequence in the batch.
      slot: slot of each row; those out of range are clipped. With KB = 1, head 0's slots count for all.
      row: row in its slot.
      heads: KV heads.
      parts: parts of a row, each of which holds all heads that share the row.

    Returns:
      Each part, [K, N].
    """
    _, tables, slots, rows, width = pool.shape
    beside = heads // tables
    table = jnp.arange(tables, dtype=jnp.int32)[:, None]
    flat_slot = (number * tables + table) * slots + jnp.minimum(slot[:tables], slots - 1)
    first = computed_once(flat_slot * rows + row[:tables]) * (parts * beside)
    first += jnp.arange(heads, dtype=jnp.int32)[:, None] % beside
    flat = pool.reshape(-1, width // (parts * beside))
    return tuple(quantize.Scattered(flat, computed_once(first + part * beside), dtype) for part in range(parts))


def take_block(pool: Num[Array, "B K NS C X"], slot: Int32[Array, "B K"]):
    """Returns one block per head, [B, K, C, X]; out-of-range slots are clipped."""
    batch, head = batch_and_head(slot)
    return pool[batch, head, jnp.minimum(slot, pool.shape[2] - 1)]


def scatter_prompt(spec: Spec, placement, rows: Num[Array, "B T KB X"]) -> Num[Array, "B KB NB C X"]:
    """Fills blocks with a prompt's rows.

    Args:
      spec: sizes of the layer's cache.
      placement: block and row of each token.
      rows: row of each token; KB is 1 or K.

    Returns:
      All blocks; empty rows are zero.
    """
    batch, _, heads, width = rows.shape
    block, row = placement.block[:, :heads], placement.row[:, :heads]
    filled = jnp.zeros((batch, heads, spec.num_blocks, spec.block_rows, width), rows.dtype)
    return filled.at[(*batch_and_head(block), block, row)].set(rows.swapaxes(1, 2), mode="drop")


# If all heads place and fetch alike, a row of a block holds the rows of all heads side by side.


def row_width(spec: Spec, dtype: str) -> int:
    """Returns how many numbers a row has in stores and slots (X2)."""
    return (1 + spec.keeps_keys) * quantize.width(dtype, spec.head_dim) * (spec.kv_heads // spec.block_heads)


def join_heads(rows: Num[Array, "B K *E X"], heads: int) -> Num[Array, "B KB *E X2"]:
    """Joins the rows of all heads side by side if `heads` is 1; returns them as they are if it is K."""
    if rows.shape[1] == heads:
        return rows
    return einops.rearrange(rows, "b k ... x -> b 1 ... (k x)")


def split_heads(rows: Num[Array, "B KB *E X2"], heads: int) -> Num[Array, "B K *E X"]:
    """Splits rows into those of each of `heads`; the inverse of `join_heads`."""
    if rows.shape[1] == heads:
        return rows
    return einops.rearrange(rows, "b 1 ... (k x) -> b k ... x", k=heads)


def gated(block: Int32[Array, "B K *E"], gate: Bool[Array, "B"], none: int) -> Int32[Array, "B K *E"]:
    """Replaces the blocks of sequences whose gate is False by `none`."""
    return jnp.where(gate.reshape(-1, *(1,) * (block.ndim - 1)), block, none)
