"""Which blocks stay in memory: a slot table per KV head, or one for all that fetch alike, and a pure plan of what to
read and whom to evict.

Slots are write-through, never dirty, so that evicting costs nothing; blocks needed now are pinned.
A policy is a function from the table to sort keys, one per slot; the lowest is evicted first. The best
that any of them could do is `experiments.kvswap.belady`.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from kvjax.errors import ConfigError
from kvjax.ops import kernels
from kvjax.typing import Array, Bool, Int32, pytree

RESERVED = 4  # `cluster` keeps one slot in so many for blocks that were written lately


@pytree
class Residency:
    """Slot table of one sequence, with a row for each head that has blocks of its own."""

    block: Int32[Array, "*B KB NS"]  # block in each slot, NB = empty
    filled: Int32[Array, "*B KB NS"]  # step in which the slot was filled
    used: Int32[Array, "*B KB NS"]  # step in which it was last needed
    uses: Int32[Array, "*B KB NS"]  # steps in which it was needed since it was filled
    written: Int32[Array, "*B KB NS"]  # step in which its block was last written, -1 = not since it was filled
    step: Int32[Array, "*B"]  # fetches so far


@pytree
class ReadPlan:
    """What one fetch has to do, and the tables it leaves behind."""

    slot: Int32[Array, "*B KB M1"]  # slot of each needed block (any slot where none is needed)
    read: Int32[Array, "*B KB M1"]  # blocks to read into their slots, NB = nothing
    success: Residency
    failure: Residency  # slots that may hold half-read bytes are empty


# ------------------------------------------------------------------------------------- policies
# Each gets the table and the valid rows of the block in each slot, and returns keys of which the
# first decides and the next ones break ties.

Keys = tuple[Int32[Array, "KB NS"], ...]


def fifo(table: Residency, rows: Int32[Array, "KB NS"]) -> Keys:
    """The block that came first goes first (KVSwap's reuse buffer)."""
    return (table.filled,)


def lru(table: Residency, rows: Int32[Array, "KB NS"]) -> Keys:
    """The block that was needed longest ago goes first."""
    return (table.used,)


def lfu(table: Residency, rows: Int32[Array, "KB NS"]) -> Keys:
    """The block that was needed in the fewest steps since it came goes first, of equals the least recent."""
    return table.uses, table.used


def cluster(table: Residency, rows: Int32[Array, "KB NS"]) -> Keys:
    """DynaKV's cluster-aligned replacement (section 6.2), where it leaves numbers and order open:

    Principle 2, updated clusters stay in dedicated space whatever else is decided: the NS / RESERVED
    blocks written last, by an appended row or by a split. Principle 1, small clusters are kept: of the
    rest the one with most rows goes first, of equals the least recent. Slots are of one size here, so
    that a large cluster costs no more memory than a small one, as it does in the paper; and the new half
    of a split has no slot before it is fetched, where the paper keeps both halves.
    """
    newest = jax.lax.top_k(table.written, max(1, table.written.shape[-1] // RESERVED))[0]
    reserved = (table.written >= 0) & (table.written >= newest[:, -1:])
    return reserved.astype(jnp.int32), -rows, table.used


POLICIES: dict[str, Callable[[Residency, Array], Keys]] = {"fifo": fifo, "lru": lru, "lfu": lfu, "cluster": cluster}


def find_policy(name: str) -> Callable[[Residency, Array], Keys]:
    """The policy of that name; ConfigError when there is none."""
    if name not in POLICIES:
        raise ConfigError(f"unknown residency policy {name!r}; use one of {', '.join(POLICIES)}")
    return POLICIES[name]


# ---------------------------------------------------------------------------------------- table


def empty(heads: int, slots: int, num_blocks: int) -> Residency:
    """A table with nothing in it, for one sequence."""
    never = jnp.full((heads, slots), -1, jnp.int32)
    return Residency(jnp.full_like(never, num_blocks), never, never, jnp.zeros_like(never), never, jnp.int32(0))


def locate(residency: Residency, block: Int32[Array, "KB *E"]) -> Int32[Array, "KB *E"]:
    """Slot of each block, NS where it is not resident."""
    found = _slot_of(residency.block, block.reshape(block.shape[0], -1))
    return jnp.where(found < 0, residency.block.shape[-1], found).reshape(block.shape)


def _slot_of(table: Int32[Array, "KB NS"], block: Int32[Array, "KB E"]) -> Int32[Array, "KB E"]:
    """Slot of each block, -1 = none. For XLA:CPU a maximum, as it has no fast argmax, over an axis before the last."""
    every = jnp.arange(table.shape[-1], dtype=jnp.int32)[:, None]
    return jnp.max(jnp.where(table[:, :, None] == block[:, None], every, -1), axis=1)


def plan(
    table: Residency, need: Int32[Array, "KB M1"], count: Int32[Array, "KB NB"], policy: str, even: bool = False
) -> ReadPlan:
    """Finds the needed blocks in their slots and gives each missing one a slot. Needs NS >= M1.

    `count` has the valid rows of every block. With `even` every head reuses as many blocks as the head that finds the
    fewest, the first ones that it needs, and reads the rest again into their slots (DynSplit-KV, Appendix B.2). Raises
    ConfigError on an unknown policy.
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
    """Slots of needed blocks, and which of these to read; of each slot the block it takes, -1 = none, and 1 where it
    has one that is needed."""
    wanted = need < num_blocks
    found = jnp.where(wanted, _slot_of(block, need), -1)
    missing, hit = wanted & (found < 0), wanted & (found >= 0)
    if even:
        hit &= jnp.cumsum(hit, axis=-1, dtype=jnp.int32) <= jnp.min(jnp.sum(hit, axis=-1, dtype=jnp.int32))
    reads = wanted & ~hit

    match = wanted[:, :, None] & (need[:, :, None] == block[:, None])
    pinned = jnp.max(match.astype(jnp.int32), axis=1)  # XLA:CPU reduces booleans one by one
    order = _eviction_order(block == num_blocks, keys, pinned > 0, need.shape[1])
    nth = jnp.maximum(jnp.cumsum(missing, axis=-1, dtype=jnp.int32) - 1, 0)
    slot = jnp.where(found < 0, jnp.take_along_axis(order, nth, axis=-1), found)

    # By slot: the block it takes. Dense, as seven scatters cost more than the whole read of a small block.
    mine = slot[:, :, None] == jnp.arange(block.shape[-1], dtype=jnp.int32)
    new = jnp.max(jnp.where(mine & reads[:, :, None], need[:, :, None], -1), axis=1)
    return slot, jnp.where(reads, need, num_blocks), new, pinned


def _eviction_order(
    empty: Bool[Array, "KB NS"], keys: Int32[Array, "KB NS P"], pinned: Bool[Array, "KB NS"], first: int
) -> Int32[Array, "KB M1"]:
    """The `first` slots that are given away, in order: empty ones, those of the policy, pinned ones."""
    if keys.shape[-1] > 1:
        turn = jnp.where(pinned, 2, jnp.where(empty, 0, 1)).astype(jnp.int32)
        last_first = jnp.moveaxis(keys, -1, 0)[::-1]
        return jnp.lexsort((*last_first, turn), axis=-1)[:, :first].astype(jnp.int32)
    # One key: the same order from XLA:CPU's fast top-k, which is for floats. They hold 16 million steps exactly.
    late = jnp.where(pinned, jnp.inf, jnp.where(empty, -jnp.inf, keys[..., 0].astype(jnp.float32)))
    return jax.lax.top_k(-late, first)[1].astype(jnp.int32)


def note_written(table: Residency, slot: Int32[Array, "KB *E"]) -> Residency:
    """Books that the blocks in these slots were written in the newest step; NS = not resident."""
    head = jnp.arange(slot.shape[0], dtype=jnp.int32).reshape(-1, *(1,) * (slot.ndim - 1))
    return dataclasses.replace(table, written=table.written.at[head, slot].set(table.step, mode="drop"))


def forget(table: Residency, slot: Int32[Array, "KB *E"], num_blocks: int) -> Residency:
    """Empties these slots; NS = none."""
    head = jnp.arange(slot.shape[0], dtype=jnp.int32).reshape(-1, *(1,) * (slot.ndim - 1))
    return dataclasses.replace(table, block=table.block.at[head, slot].set(num_blocks, mode="drop"))


# ---------------------------------------------------------------------------------- whole batches
# Compiled, so that a store driven from Python between compiled parts does not compile operation by operation.


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def empty_all(batch: int, heads: int, slots: int, num_blocks: int) -> Residency:
    """`empty` of every sequence."""
    one = empty(heads, slots, num_blocks)
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (batch, *leaf.shape)), one)


@functools.partial(jax.jit, static_argnums=(3, 4))
def plan_all(
    table: Residency, need: Int32[Array, "B KB M1"], count: Int32[Array, "B KB NB"], policy: str, even: bool = False
) -> ReadPlan:
    """`plan` of every sequence."""
    def one(table, need, count):
        return plan(table, need, count, policy, even)

    return jax.vmap(one)(table, need, count)


@jax.jit
def locate_all(table: Residency, block: Int32[Array, "B KB *E"]) -> Int32[Array, "B KB *E"]:
    """`locate` of every sequence."""
    return jax.vmap(locate)(table, block)


@jax.jit
def note_written_all(table: Residency, slot: Int32[Array, "B KB *E"]) -> Residency:
    """`note_written` of every sequence."""
    return jax.vmap(note_written)(table, slot)


@functools.partial(jax.jit, static_argnums=2)
def forget_all(table: Residency, slot: Int32[Array, "B KB *E"], num_blocks: int) -> Residency:
    """`forget` of every sequence."""
    return jax.vmap(lambda table, slot: forget(table, slot, num_blocks))(table, slot)
