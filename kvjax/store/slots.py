"""A pool of slots over a store: the working set in memory, everything in the file.

The callbacks of a step are here, behind one interface with three backends that give equal bits:
`buffer` reads straight into XLA's own memory (CPU), `io` returns fetched blocks from an
`io_callback` (any platform that has them), and `python` calls the store between compiled parts
(any platform; also the oracle of the other two).
Callbacks never raise and never touch JAX: they save the first error in the branch and return
ok = 0, and the step then changes nothing.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.experimental.buffer_callback import buffer_callback

from kvjax import packing
from kvjax.errors import ConfigError
from kvjax.method import Spec
from kvjax.pool import Line, Traffic, batch_and_head, find_rows, join_heads, row_width, split_heads, take_block
from kvjax.store import base, residency
from kvjax.store.residency import ReadPlan, Residency
from kvjax.typing import Array, Bool, Int32, Num, pytree

BACKENDS = ("buffer", "io", "python")
PREFETCH = ("off", "layer", "step")


def default_backend() -> str:
    """Straight into XLA's buffers where they are host memory, copies elsewhere."""
    return "buffer" if jax.default_backend() == "cpu" else "io"


@pytree
class SlotPool:
    """Slots of packed rows (`kvjax.packing`, key beside value, or values alone) and the table of what is in them.

    What is read ahead (`prefetch`) waits in the store, not in slots: a wrong guess evicts nothing.
    """

    rows: Num[Array, "B KB NS C X2"]  # of a `passing` pool without slots, but from fetch to release
    table: Residency
    queued: Int32[Array, ""]  # writes handed to the store: ready only when the callbacks have run
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
        keep: bool = True, even: bool = False, passing: bool = False,
    ) -> "SlotPool":
        """Slots with nothing in them; of a `passing` pool they exist while its layer is read, and no longer."""
        shape = (batch, spec.block_heads, 0 if passing else slots, spec.block_rows, row_width(spec, dtype))
        table = residency.empty_all(batch, spec.block_heads, slots, spec.num_blocks)
        rows = jnp.zeros(shape, packing.array_type(dtype))
        return cls(
            rows, table, jnp.int32(0), spec.num_blocks, policy, backend, spec.kv_heads, dtype, prefetch, keep, even,
            spec.keeps_keys, passing,
        )

    @property
    def slots(self) -> int:
        """NS, for each head that has blocks of its own."""
        return self.table.block.shape[-1]

    @property
    def passing_bytes(self) -> int:
        """Of the slots that exist while the layer is read, and are not in the state."""
        return self._space().size * self.rows.dtype.itemsize if self.passing else 0

    def _space(self) -> jax.ShapeDtypeStruct:
        """What slots are like."""
        return jax.ShapeDtypeStruct((*self.rows.shape[:2], self.slots, *self.rows.shape[3:]), self.rows.dtype)

    def emptied(self) -> "SlotPool":
        """The same pool with nothing resident: every block will be read again."""
        table = dataclasses.replace(self.table, block=jnp.full_like(self.table.block, self.num_blocks))
        return dataclasses.replace(self, table=table)

    def plan(self, need: Int32[Array, "B K M1"], count: Int32[Array, "B K NB"]) -> ReadPlan:
        """Hits, misses and victims of one fetch; pure."""
        pool = self if self.keep else self.emptied()
        return residency.plan_all(pool.table, self.own(need), self.own(count), self.policy, self.even)

    def own(self, what: Int32[Array, "B K *E"]) -> Int32[Array, "B KB *E"]:
        """Of the heads that have blocks of their own; where they have not, the first one's is everyone's."""
        return what[:, : self.rows.shape[1]]

    def settle(self, plan: ReadPlan, need: Int32[Array, "B K M1"], rows: Array, ok: Bool[Array, ""]):
        """The pool after a fetch, and its traffic."""
        table, traffic = outcome(self.num_blocks, plan, need, ok)
        return dataclasses.replace(self, rows=rows, table=table), traffic

    def fetch(self, need, count, layer, line):
        plan, rows = self.plan(need, count), self.rows
        if self.passing:
            rows = jnp.zeros(self._space().shape, rows.dtype)
        if self.backend == "buffer":
            rows, ok = _read_in_place(rows, line, layer, plan)
        else:
            fetched, ok = read_blocks(rows, line, layer, plan, self.backend)
            rows = filled(self.num_blocks, rows, plan, fetched, ok)
        pool, traffic = self.settle(plan, need, rows, ok)
        return pool, jnp.broadcast_to(plan.slot, need.shape), ok, traffic

    def released(self):
        return dataclasses.replace(self.emptied(), rows=self.rows[:, :, :0]) if self.passing else self

    def submit(self, block, layer, line):
        pool = self if self.keep else self.emptied()
        missing = jnp.where(pool.locate(block) == self.slots, block, self.num_blocks)
        return _effect("submit", self.backend, line, layer, self.own(missing))

    def rows_at(self, number, slot, row):
        found = find_rows(self.rows, self.dtype, number, slot, row, self.kv_heads, self.parts)
        return found if self.keeps_keys else (None, *found)

    def block(self, slot):
        parts = self._parted(take_block(self.rows, self.own(slot)))
        *key, value = (packing.unpack(part, self.dtype) for part in parts)
        return key[0] if key else None, value

    def everything(self, slot):
        slot = self.own(slot)
        rows = self.rows[(*batch_and_head(slot), slot)]
        parts = self._parted(rows.reshape(*slot.shape[:2], -1, rows.shape[-1]))
        *key, value = (packing.Packed(part, self.dtype) for part in parts)
        return key[0] if key else None, value

    def locate(self, block):
        return self.locate_in(self.table, block)

    def locate_in(self, table: Residency, block: Int32[Array, "B K *E"]) -> Int32[Array, "B K *E"]:
        """Slot of each block by a table, as many as it has slots where the block is in none."""
        return jnp.broadcast_to(residency.locate_all(table, self.own(block)), block.shape)

    def put_row(self, block, row, key, value, layer, line):
        block, row, packed = self.own(block), self.own(row), self.packed(key, value)
        queued = _effect("put_rows", self.backend, line, layer, block, row, packed)
        return self._written(queued, block, packed, row)

    def put_blocks(self, block, key, value, layer, line):
        block, packed = self.own(block), self.packed(key, value)
        queued = _effect("put_blocks", self.backend, line, layer, block, packed)
        return self._written(queued, block, packed, None)

    def packed(self, key, value):
        """Rows as they are kept, values beside keys."""
        return _packed(self.dtype, self.rows.shape[1], [key, value] if self.keeps_keys else [value])

    @property
    def parts(self) -> int:
        """Of a row: keys and values, or values alone."""
        return 1 + self.keeps_keys

    def _parted(self, rows):
        return [split_heads(part, self.kv_heads) for part in jnp.split(rows, self.parts, axis=-1)]

    def _written(self, queued, *what) -> "SlotPool":
        if self.passing:
            return dataclasses.replace(self, queued=self.queued + queued)
        rows, table = _put(self.num_blocks, self.rows, self.table, *what)
        return dataclasses.replace(self, rows=rows, table=table, queued=self.queued + queued)


# ------------------------------------------------------------------------------- parts of a step
# Compiled, so that backend `python` does not go through them operation by operation.


@functools.partial(jax.jit, static_argnums=0)
def outcome(num_blocks: int, plan: ReadPlan, need, ok) -> tuple[Residency, Traffic]:
    """The tables after a fetch, and what it did."""
    table = jax.tree.map(lambda good, bad: jnp.where(ok, good, bad), plan.success, plan.failure)
    requested, missed = (jnp.sum(ids < num_blocks, axis=(1, 2), dtype=jnp.int32) for ids in (need, plan.read))
    return table, Traffic(requested, missed * (need.shape[1] // plan.read.shape[1]))


@functools.partial(jax.jit, static_argnums=0)
def filled(num_blocks: int, rows, plan: ReadPlan, fetched: Num[Array, "B KB M1 C X2"], ok):
    """Slot contents with fetched blocks put in place, if all of them came."""
    slot = jnp.where(ok & (plan.read < num_blocks), plan.slot, rows.shape[2])
    return rows.at[(*batch_and_head(slot), slot)].set(fetched, mode="drop")


@functools.partial(jax.jit, static_argnums=(0, 1))
def _packed(dtype: str, heads: int, parts):
    return jnp.concatenate([join_heads(packing.pack(one, dtype), heads) for one in parts], axis=-1)


@functools.partial(jax.jit, static_argnums=0)
def _put(num_blocks: int, rows, table: Residency, block, packed, row):
    """Slot contents and tables with a packed row of each block, or whole blocks where `row` is None, in the slots that
    have them; block NB = nothing."""
    slot = jnp.where(block < num_blocks, residency.locate_all(table, block), rows.shape[2])
    at = (*batch_and_head(slot), slot) if row is None else (*batch_and_head(slot), slot, row)
    return rows.at[at].set(packed, mode="drop"), residency.note_written_all(table, slot)


# ------------------------------------------------------------------------------------- callbacks
# Module-level functions: a callback's identity is part of the compiled program, and a fresh
# closure per call would compile again.


def _branch_call(name: str, handle, *args) -> bool:
    branch = base.lookup(int(np.asarray(handle)))
    return branch is not None and getattr(branch, name)(*args)


def _scalars(*arrays):
    return [int(np.asarray(array)) for array in arrays]


def _in_buffers(callback: Callable[..., None], result, **options) -> Callable[..., Any]:
    """A callback on XLA's own memory. It has side effects and is not declared so: JAX dispatches each call of a program
    with declared effects in Python, which takes some 20 us for each array that goes in or out. What keeps XLA from
    leaving a call out, merging two or changing their order is data alone: each has operands of its own, its result is
    part of what the step returns, and a write takes what depends on the reads (`kvjax.order`)."""
    return buffer_callback(callback, result, has_side_effect=False, **options)


def _buffer_read(ctx, outs, slots, handle, generation, layer, block, slot):
    """Reads into the output buffer, which is the input's memory."""
    rows, ok = outs
    ok_view, rows = np.asarray(ok), packing.as_stored(np.asarray(rows))
    ok_view[...] = _branch_call(
        "read_into", handle, *_scalars(layer, generation), np.asarray(block), np.asarray(slot), rows
    )


def _read_in_place(rows, line: Line, layer, plan: ReadPlan):
    result = (jax.ShapeDtypeStruct(rows.shape, rows.dtype), jax.ShapeDtypeStruct((), jnp.int32))
    call = _in_buffers(_buffer_read, result, input_output_aliases={0: 0})
    rows, ok = call(rows, line.handle, line.generation, layer, plan.read, plan.slot)
    return rows, ok > 0


def _io_read(shape_like, handle, generation, layer, block):
    fetched = np.zeros((*block.shape, *shape_like.shape[-2:]), shape_like.dtype)
    order = np.tile(np.arange(block.shape[-1], dtype=np.int32), (*block.shape[:-1], 1))
    rows = packing.as_stored(fetched)
    ok = _branch_call("read_into", handle, *_scalars(layer, generation), np.asarray(block), order, rows)
    return fetched, np.int32(ok)


def read_blocks(rows, line: Line, layer, plan: ReadPlan, backend: str):
    """The missing blocks `[B, KB, M1, C, X2]` of a plan, in order, and whether all came; `rows` tells their shape."""
    shape = (*plan.read.shape, *rows.shape[-2:])
    result = (jax.ShapeDtypeStruct(shape, rows.dtype), jax.ShapeDtypeStruct((), jnp.int32))
    like = jnp.zeros((1, *rows.shape[-2:]), rows.dtype)
    operands = (like, line.handle, line.generation, layer, plan.read)
    fetched, ok = _in_python(_io_read, operands) if backend == "python" else io_callback(_io_read, result, *operands)
    return fetched, ok > 0


def _buffer_put_rows(ctx, ok, handle, generation, layer, block, row, packed):
    np.asarray(ok)[...] = _io_put_rows(handle, generation, layer, block, row, packed)


def _buffer_put_blocks(ctx, ok, handle, generation, layer, block, packed):
    np.asarray(ok)[...] = _io_put_blocks(handle, generation, layer, block, packed)


def _io_put_rows(handle, generation, layer, block, row, packed):
    block = np.asarray(block)
    gate = np.ones(block.shape[0], bool)
    args = (block, np.asarray(row), packing.as_stored(np.asarray(packed)), gate)
    return np.int32(_branch_call("put_rows", handle, *_scalars(layer, generation), *args))


def _io_put_blocks(handle, generation, layer, block, packed):
    args = (np.asarray(block), packing.as_stored(np.asarray(packed)))
    return np.int32(_branch_call("put_blocks", handle, *_scalars(layer, generation), *args))


def _buffer_submit(ctx, ok, handle, generation, layer, block):
    np.asarray(ok)[...] = _io_submit(handle, generation, layer, block)


def _io_submit(handle, generation, layer, block):
    return np.int32(_branch_call("submit", handle, *_scalars(layer, generation), np.asarray(block)))


_EFFECTS: dict[tuple[str, bool], Callable[..., Any]] = {
    ("submit", True): _buffer_submit, ("submit", False): _io_submit,
    ("put_rows", True): _buffer_put_rows, ("put_rows", False): _io_put_rows,
    ("put_blocks", True): _buffer_put_blocks, ("put_blocks", False): _io_put_blocks,
}


def _effect(name: str, backend: str, line: Line, layer, *args) -> Int32[Array, ""]:
    """Hands something to the branch; 1 if it was taken, else the branch keeps the reason."""
    result = jax.ShapeDtypeStruct((), jnp.int32)
    operands = (line.handle, line.generation, layer, *args)
    if backend == "buffer":
        return _in_buffers(_EFFECTS[name, True], result)(*operands)
    if backend == "python":
        return _in_python(_EFFECTS[name, False], operands)
    return io_callback(_EFFECTS[name, False], result, *operands)


def _in_python(call: Callable[..., Any], operands):
    """Runs a callback here and now; its operands must be values, not parts of a program."""
    if any(isinstance(one, jax.core.Tracer) for one in operands):
        raise ConfigError("backend 'python' cannot run inside jit; use the staged driver, or backend 'io'")
    return jax.tree.map(jnp.asarray, call(*map(np.asarray, operands)))
