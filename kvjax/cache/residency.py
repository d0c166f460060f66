"""Residency: which blocks stay in memory, and a pure plan of what to read and what to evict.

There is a slot table per KV head, or one for all heads if they fetch alike. Slots are write-through and never dirty, so
eviction costs nothing; blocks needed now are pinned. A policy is a function from the table to sort keys, one per slot;
the slot with the lowest key is evicted first. `experiments.kvswap.belady` computes the optimum for comparison.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from kvjax.errors import ConfigError
from kvjax.ops import kernels
from kvjax.typing import Array, Bool, Int32, pytree

RESERVED = 4  # `cluster` reserves one slot in this many for recently written blocks


@pytree
class Residency:
    """The slot table of one sequence, with a row for each head that has blocks of its own."""

    block: Int32[Array, "*B KB NS"]  # block in each slot, NB = empty
    filled: Int32[Array, "*B KB NS"]  # step in which the slot was filled
    used: Int32[Array, "*B KB NS"]  # step in which the slot was last needed
    uses: Int32[Array, "*B KB NS"]  # number of steps in which it was needed since it was filled
    written: Int32[Array, "*B KB NS"]  # step in which its block was last written, -1 = not since it was filled
    step: Int32[Array, "*B"]  # fetches so far


@pytree
class ReadPlan:
    """The work of one fetch, and the tables after it."""

    slot: Int32[Array, "*B KB M1"]  # slot of each needed block (any slot where none is needed)
    read: Int32[Array, "*B KB M1"]  # blocks to read into their slots, NB = nothing
    success: Residency
    failure: Residency  # slots that may hold partly read bytes are empty


# ------------------------------------------------------------------------------------- policies
# Each gets the table and the number of valid rows of the block in each slot. Of the returned keys,
# the first decides and the others break ties.

Keys = tuple[Int32[Array, "KB NS"], ...]


def fifo(table: Residency, rows: Int32[Array, "KB NS"]) -> Keys:
    """Evicts the block that was read first (KVSwap's reuse buffer)."""
    return (table.filled,)


def lru(table: Residency, rows: Int32[Array, "KB NS"]) -> Keys:
    """Evicts the block that was needed longest ago."""
    return (table.used,)


def lfu(table: Residency, rows: Int32[Array, "KB NS"]) -> Keys:
    """Evicts the block that was needed in the fewest steps since it was read; of equals, the least recent."""
    return table.uses, table.used


def cluster(table: Residency, rows: Int32[Array, "KB NS"]) -> Keys:
    """Evicts by DynaKV's cluster-aligned replacement (section 6.2), which leaves numbers and order open.

    Principle 2 (updated clusters have dedicated space) comes first: the NS / RESERVED blocks that were written last, by
    an appended row or by a split, stay. Principle 1 (small clusters are kept): of the rest, the block with most rows is
    evicted, of equals the least recent. This differs from the paper in two ways. All slots have the same size, so a
    large cluster takes no more memory than a small one; and the new half of a split has no slot until it is fetched,
    whereas the paper keeps both halves.
    """
    newest = jax.lax.top_k(table.written, max(1, table.written.shape[-1] // RESERVED))[0]
    reserved = (table.written >= 0) & (table.written >= newest[:, -1:])
    return reserved.astype(jnp.int32), -rows, table.used


POLICIES: dict[str, Callable[[Residency, Array], Keys]] = {"fifo": fifo, "lru": lru, "lfu": lfu, "cluster": cluster}


def find_policy(name: str) -> Callable[[Residency, Array], Keys]:
    """Returns the policy of that name; raises ConfigError if there is none."""
    if name not in POLICIES:
        raise ConfigError(f"unknown residency policy {name!r}; use one of {', '.join(POLICIES)}")
    return POLICIES[name]


# ---------------------------------------------------------------------------------------- table


def empty(heads: int, slots: int, num_blocks: int) -> Residency:
    """Returns an empty table for one sequence."""
    never = jnp.full((heads, slots), -1, jnp.int32)
    return Residency(jnp.full_like(never, num_blocks), never, never, jnp.zeros_like(never), never, jnp.int32(0))


def locate(residency: Residency, block: Int32[Array, "KB *E"]) -> Int32[Array, "KB *E"]:
    """Returns the slot of each block, NS where it is not resident."""
    slot = _slot_of(residency.block, block.reshape(block.shape[0], -1))
    return jnp.where(slot < 0, residency.block.shape[-1], slot).reshape(block.shape)


def _slot_of(table: Int32[Array, "KB NS"], block: Int32[Array, "KB E"]) -> Int32[Array, "KB E"]:
    """Returns the slot of each block, -1 = none.

    It is a maximum, over an axis before the last, because XLA:CPU has no fast argmax.
    """
    every = jnp.arange(table.shape[-1], dtype=jnp.int32)[:, None]
    return jnp.max(jnp.where(table[:, :, None] == block[:, None], every, -1), axis=1)


def plan(
    table: Residency, need: Int32[Array, "KB M1"], count: Int32[Array, "KB NB"], policy: str, even: bool = False
) -> ReadPlan:
    """Finds the needed blocks in their slots and assigns a slot to each missing one.

    Args:
      table: slot table of one sequence, with NS >= M1.
      need: needed blocks, NB = none.
      count: valid rows of every block.
      policy: name of the eviction policy (`POLICIES`).
      even: True = every head reuses as many blocks as the head that finds the fewest, namely the first ones that it
        needs, and reads the rest again into their slots (DynSplit-KV, Appendix B.2).

    Returns:
      Slots, blocks to read, and the tables after success and after failure.

    Raises:
      ConfigError: the policy does not exist.
    """
    num_blocks, head = count.shape[-1], jnp.arange(len(need), dtype=jnp.int32)[:, None]
    keys = find_policy(policy)(table, count[head, jnp.minimum(table.block, num_blocks - 1)])
    operands = table.block, jnp.stack(keys, axis=-1), need, jnp.int32(num_blocks)
    if even:
        assigned = _assign(*operands, even=True)
    else:
        results = tuple(jax.ShapeDtypeStruct(like.shape, jnp.int32) for like in (need, need, table.block, table.block))
        assigned = kernels.on_cpu("assign", results, _assign, *operands)
    slot, read, new, pinned = assigned
    taken, step = new >= 0, table.step + 1
    needed = (pinned > 0) | taken
    success = Residency(
        block=jnp.where(taken, new, table.block),
        filled=jnp.where(taken, step, table.filled),
        used=jnp.where(needed, step, table.used),
        uses=jnp.where(taken, 0, table.uses) + needed,
        written=jnp.where(taken, -1, table.written),
        step=step,
    )
    failure = dataclasses.replace(table, block=jnp.where(taken, num_blocks, table.block), step=step)
    return ReadPlan(slot, read, success, failure)


def _assign(
    block: Int32[Array, "KB NS"], keys: Int32[Array, "KB NS P"], need: Int32[Array, "KB M1"],
    num_blocks: Int32[Array, ""], even: bool = False,
) -> tuple[Int32[Array, "KB M1"], Int32[Array, "KB M1"], Int32[Array, "KB NS"], Int32[Array, "KB NS"]]:
    """Returns the slot of each needed block, the blocks to read (NB = none), and for each slot the block that is read
    into it (-1 = none) and 1 if its present block is needed."""
    wanted = need < num_blocks
    resident = jnp.where(wanted, _slot_of(block, need), -1)
    missing, hit = wanted & (resident < 0), wanted & (resident >= 0)
    if even:
        hit &= jnp.cumsum(hit, axis=-1, dtype=jnp.int32) <= jnp.min(jnp.sum(hit, axis=-1, dtype=jnp.int32))
    reads = wanted & ~hit

    match = wanted[:, :, None] & (need[:, :, None] == block[:, None])
    pinned = jnp.max(match.astype(jnp.int32), axis=1)  # XLA:CPU reduces booleans one by one
    order = _eviction_order(block == num_blocks, keys, pinned > 0, need.shape[1])
    nth = jnp.maximum(jnp.cumsum(missing, axis=-1, dtype=jnp.int32) - 1, 0)
    slot = jnp.where(resident < 0, jnp.take_along_axis(order, nth, axis=-1), resident)

    # By slot: the block read into it. Computed densely, as seven scatters cost more than reading a small block.
    mine = slot[:, :, None] == jnp.arange(block.shape[-1], dtype=jnp.int32)
    new = jnp.max(jnp.where(mine & reads[:, :, None], need[:, :, None], -1), axis=1)
    return slot, jnp.where(reads, need, num_blocks), new, pinned


def _eviction_order(
    empty: Bool[Array, "KB NS"], keys: Int32[Array, "KB NS P"], pinned: Bool[Array, "KB NS"], first: int
) -> Int32[Array, "KB M1"]:
    """Returns the first `first` slots to give away, in order: empty ones, then by the policy, pinned ones last."""
    if keys.shape[-1] > 1:
        group = jnp.where(pinned, 2, jnp.where(empty, 0, 1)).astype(jnp.int32)
        last_first = jnp.moveaxis(keys, -1, 0)[::-1]
        return jnp.lexsort((*last_first, group), axis=-1)[:, :first].astype(jnp.int32)
    # With one key, XLA:CPU's fast top-k gives the same order. It is for floats, which hold 16 million steps exactly.
    late = jnp.where(pinned, jnp.inf, jnp.where(empty, -jnp.inf, keys[..., 0].astype(jnp.float32)))
    return jax.lax.top_k(-late, first)[1].astype(jnp.int32)


def note_written(table: Residency, slot: Int32[Array, "KB *E"]) -> Residency:
    """Records that the blocks in these slots were written in the newest step; NS = not resident."""
    head = jnp.arange(slot.shape[0], dtype=jnp.int32).reshape(-1, *(1,) * (slot.ndim - 1))
    return dataclasses.replace(table, written=table.written.at[head, slot].set(table.step, mode="drop"))


def forget(table: Residency, slot: Int32[Array, "KB *E"], num_blocks: int) -> Residency:
    """Empties these slots; NS = none."""
    head = jnp.arange(slot.shape[0], dtype=jnp.int32).reshape(-1, *(1,) * (slot.ndim - 1))
    return dataclasses.replace(table, block=table.block.at[head, slot].set(num_blocks, mode="drop"))


# ---------------------------------------------------------------------------------- whole batches
# Compiled, because the driver that calls the store from Python between compiled parts would otherwise dispatch each
# operation by itself.


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def empty_all(batch: int, heads: int, slots: int, num_blocks: int) -> Residency:
    """Returns `empty` for every sequence."""
    table = empty(heads, slots, num_blocks)
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (batch, *leaf.shape)), table)


@functools.partial(jax.jit, static_argnums=(3, 4))
def plan_all(
    table: Residency, need: Int32[Array, "B KB M1"], count: Int32[Array, "B KB NB"], policy: str, even: bool = False
) -> ReadPlan:
    """Computes `plan` for every sequence."""
    def one(table, need, count):
        return plan(table, need, count, policy, even)

    return jax.vmap(one)(table, need, count)


@jax.jit
def locate_all(table: Residency, block: Int32[Array, "B KB *E"]) -> Int32[Array, "B KB *E"]:
    """Computes `locate` for every sequence."""
    return jax.vmap(locate)(table, block)


@jax.jit
def note_written_all(table: Residency, slot: Int32[Array, "B KB *E"]) -> Residency:
    """Applies `note_written` to every sequence."""
    return jax.vmap(note_written)(table, slot)


@functools.partial(jax.jit, static_argnums=2)
def forget_all(table: Residency, slot: Int32[Array, "B KB *E"], num_blocks: int) -> Residency:
    """Applies `forget` to every sequence."""
    return jax.vmap(lambda table, slot: forget(table, slot, num_blocks))(table, slot)
