"""A pool of slots over a store: the working set is in memory, and all blocks are in the store."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from kvjax.cache import callbacks, residency
from kvjax.cache.pool import FetchStats, batch_and_head, find_rows, join_heads, row_width, split_heads, take_block
from kvjax.cache.residency import ReadPlan, Residency
from kvjax.cache.types import Spec
from kvjax.ops import quantize
from kvjax.typing import Array, Bool, Int32, Num, pytree

PREFETCH = ("off", "layer", "step")


@pytree
class SlotPool:
    """Slots of packed rows and the table of which block is in each.

    A row is a key followed by its value, or a value alone (`kvjax.ops.quantize`). Blocks that are read ahead
    (`prefetch`) stay in the store's own memory until they are needed, so a wrong guess evicts nothing.
    """

    rows: Num[Array, "B KB NS C X2"]  # shared slots if `passing` (`kvjax.cache.shared_slots`)
    table: Residency
    queued: Int32[Array, ""]  # number of writes handed to the store; available only once their callbacks have run
    num_blocks: int = dataclasses.field(metadata={"static": True})
    policy: str = dataclasses.field(metadata={"static": True})
    backend: str = dataclasses.field(metadata={"static": True})
    kv_heads: int = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(default="float32", metadata={"static": True})
    prefetch: str = dataclasses.field(default="off", metadata={"static": True})
    keep: bool = dataclasses.field(default=True, metadata={"static": True})
    even: bool = dataclasses.field(default=False, metadata={"static": True})
    keeps_keys: bool = dataclasses.field(default=True, metadata={"static": True})
    passing: bool = dataclasses.field(default=False, metadata={"static": True})

    @classmethod
    def zeros(
        cls, spec: Spec, batch: int, slots: int, dtype: str, policy: str, backend: str, prefetch: str = "off",
        keep: bool = True, even: bool = False, passing: bool = False, waits: bool = False,
    ) -> "SlotPool":
        """Creates empty slots.

        Args:
          spec: sizes of the layer's cache.
          batch: number of sequences.
          slots: slots per head.
          dtype: type of keys and values (`kvjax.ops.quantize`).
          policy: name of the eviction policy.
          backend: how a compiled step calls the store.
          prefetch: one of `PREFETCH`.
          keep: False = no block stays for the next step.
          even: True = all heads reuse the same number of blocks.
          passing: True = the slots are shared with other layers.
          waits: True = the pool has no slots yet and takes those of another layer.

        Returns:
          The pool.
        """
        shape = (batch, spec.block_heads, 0 if waits else slots, spec.block_rows, row_width(spec, dtype))
        table = residency.empty_all(batch, spec.block_heads, slots, spec.num_blocks)
        rows = jnp.zeros(shape, quantize.array_type(dtype))
        return cls(
            rows, table, jnp.int32(0), spec.num_blocks, policy, backend, spec.kv_heads, dtype, prefetch, keep, even,
            spec.keeps_keys, passing,
        )

    @property
    def slots(self) -> int:
        """NS, the slots of each head that has blocks of its own."""
        return self.table.block.shape[-1]

    @property
    def waits(self) -> bool:
        """True while the pool has no shared slots; a fetch makes them if no other layer has handed any on."""
        return self.rows.shape[2] < self.slots

    @property
    def waits_for_bytes(self) -> int:
        """Bytes of the shared slots that the pool does not have yet."""
        return self._space().size * self.rows.dtype.itemsize if self.waits else 0

    def _space(self) -> jax.ShapeDtypeStruct:
        """Returns shape and type of the slots."""
        return jax.ShapeDtypeStruct((*self.rows.shape[:2], self.slots, *self.rows.shape[3:]), self.rows.dtype)

    @property
    def own_rows(self) -> Num[Array, "B KB NS C X2"]:
        """The slots' contents; new ones, of zeros, while the pool has none."""
        return jnp.zeros(self._space().shape, self.rows.dtype) if self.waits else self.rows

    def emptied(self) -> "SlotPool":
        """Returns the pool with no block resident, so that every block is read again."""
        table = dataclasses.replace(self.table, block=jnp.full_like(self.table.block, self.num_blocks))
        return dataclasses.replace(self, table=table)

    def plan(self, need: Int32[Array, "B K M1"], count: Int32[Array, "B K NB"]) -> ReadPlan:
        """Plans one fetch: hits, misses and evictions.

        Args:
          need: needed blocks, NB = none.
          count: valid rows of every block.

        Returns:
          The plan.
        """
        pool = self if self.keep else self.emptied()
        return residency.plan_all(pool.table, self.own(need), self.own(count), self.policy, self.even)

    def own(self, what: Int32[Array, "B K *E"]) -> Int32[Array, "B KB *E"]:
        """Reduces [B, K, ...] to [B, KB, ...]; with KB = 1, head 0 stands for all."""
        return what[:, : self.rows.shape[1]]

    def settle(
        self, plan: ReadPlan, need: Int32[Array, "B K M1"], count: Int32[Array, "B K NB"], rows, ok: Bool[Array, ""]
    ):
        """Returns the pool after a fetch, and what the fetch read.

        Args:
          plan: plan of the fetch.
          need, count: as for `plan`.
          rows: contents of the slots.
          ok: False = the store could not be read.

        Returns:
          (Pool, FetchStats).
        """
        table, stats = outcome(self.num_blocks, plan, need, self.own(count), ok)
        return dataclasses.replace(self, rows=rows, table=table), stats

    def fetch(self, need, count, layer, ref):
        plan, rows = self.plan(need, count), self.own_rows
        if self.backend == "buffer":
            rows, ok = callbacks.read_in_place(rows, ref, layer, plan.read, plan.slot)
        else:
            fetched, ok = callbacks.read_blocks(rows, ref, layer, plan.read, self.num_blocks)
            rows = filled(self.num_blocks, rows, plan, fetched, ok)
        pool, stats = self.settle(plan, need, count, rows, ok)
        return pool, jnp.broadcast_to(plan.slot, need.shape), ok, stats

    def submit(self, block, layer, ref):
        pool = self if self.keep else self.emptied()
        missing = jnp.where(pool.locate(block) == self.slots, block, self.num_blocks)
        return callbacks.effect("submit", self.backend, ref, layer, self.own(missing))

    def rows_at(self, number, slot, row):
        parts = find_rows(self.rows, self.dtype, number, slot, row, self.kv_heads, self.parts)
        return parts if self.keeps_keys else (None, *parts)

    def lying(self, slot):
        return None

    def block(self, slot):
        parts = self._parted(take_block(self.rows, self.own(slot)))
        *key, value = (quantize.Packed(part, self.dtype) for part in parts)
        return key[0] if key else None, value

    def everything(self, slot):
        slot = self.own(slot)
        rows = self.rows[(*batch_and_head(slot), slot)]
        parts = self._parted(rows.reshape(*slot.shape[:2], -1, rows.shape[-1]))
        *key, value = (quantize.Packed(part, self.dtype) for part in parts)
        return key[0] if key else None, value

    def locate(self, block):
        return self.locate_in(self.table, block)

    def locate_in(self, table: Residency, block: Int32[Array, "B K *E"]) -> Int32[Array, "B K *E"]:
        """Returns the slot of each block by a table, and the table's number of slots for blocks that are in none."""
        return jnp.broadcast_to(residency.locate_all(table, self.own(block)), block.shape)

    def put_row(self, block, row, key, value, layer, ref):
        block, row, rows = self.own(block), self.own(row), self.joined(key, value)
        queued = callbacks.effect("put_rows", self.backend, ref, layer, block, row, rows)
        return self._written(queued, block, rows, row)

    def put_blocks(self, block, key, value, layer, ref):
        block, rows = self.own(block), self.joined(key, value)
        queued = callbacks.effect("put_blocks", self.backend, ref, layer, block, rows)
        return self._written(queued, block, rows, None)

    def joined(self, key, value):
        """Joins keys and values (if keys are kept), and heads that share blocks, to rows."""
        return _joined(self.rows.shape[1], [key, value] if self.keeps_keys else [value])

    @property
    def parts(self) -> int:
        """Parts of a row: 2 for a key and a value, 1 for a value alone."""
        return 1 + self.keeps_keys

    def _parted(self, rows):
        return [split_heads(part, self.kv_heads) for part in jnp.split(rows, self.parts, axis=-1)]

    def _written(self, queued, *what) -> "SlotPool":
        if self.passing:
            return dataclasses.replace(self, queued=self.queued + queued)
        rows, table = _put(self.num_blocks, self.rows, self.table, *what)
        return dataclasses.replace(self, rows=rows, table=table, queued=self.queued + queued)


# ------------------------------------------------------------------------------- parts of a step
# Compiled, so that calls outside a program do not dispatch each operation by itself.


@functools.partial(jax.jit, static_argnums=0)
def outcome(
    num_blocks: int, plan: ReadPlan, need: Int32[Array, "B K M1"], count: Int32[Array, "B KB NB"], ok
) -> tuple[Residency, FetchStats]:
    """Returns the tables after a fetch and what it read.

    Args:
      num_blocks: NB, which stands for no block.
      plan: plan of the fetch.
      need: needed blocks.
      count: valid rows of every block.
      ok: False = the store could not be read.

    Returns:
      (Tables, statistics).
    """
    table = jax.tree.map(lambda good, bad: jnp.where(ok, good, bad), plan.success, plan.failure)
    requested, missed = (jnp.sum(ids < num_blocks, axis=(1, 2), dtype=jnp.int32) for ids in (need, plan.read))
    rows = jnp.take_along_axis(count, plan.read, axis=-1, mode="fill", fill_value=0).sum((1, 2), jnp.int32)
    sharing = need.shape[1] // plan.read.shape[1]  # KV heads with the same blocks
    return table, FetchStats(requested, missed * sharing, rows * sharing)


@functools.partial(jax.jit, static_argnums=0)
def filled(num_blocks: int, rows, plan: ReadPlan, fetched: Num[Array, "B KB M1 C X2"], ok):
    """Writes fetched blocks to their slots if all of them were read (`ok`), and returns the slots' contents."""
    slot = jnp.where(ok & (plan.read < num_blocks), plan.slot, rows.shape[2])
    return rows.at[(*batch_and_head(slot), slot)].set(fetched, mode="drop")


@functools.partial(jax.jit, static_argnums=0)
def _joined(heads: int, parts):
    return jnp.concatenate([join_heads(part, heads) for part in parts], axis=-1)


@functools.partial(jax.jit, static_argnums=0)
def _put(num_blocks: int, rows, table: Residency, block, packed, row):
    """Writes a packed row of each block, or whole blocks if `row` is None, to the slots of resident blocks.

    Block NB = nothing. Returns the slots' contents and the tables.
    """
    slot = jnp.where(block < num_blocks, residency.locate_all(table, block), rows.shape[2])
    target = (*batch_and_head(slot), slot) if row is None else (*batch_and_head(slot), slot, row)
    return rows.at[target].set(packed, mode="drop"), residency.note_written_all(table, slot)
