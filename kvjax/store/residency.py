"""Which blocks stay in memory: a slot table per KV head and a pure plan of what to read and whom to evict.

Slots are write-through, never dirty, so that evicting costs nothing; blocks needed now are pinned.
A policy is a score per slot, and the lowest scores are evicted first.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from kvjax.typing import Array, Int32, pytree


@pytree
class Residency:
    """Slot table of one sequence."""

    block: Int32[Array, "*B K NS"]  # block in each slot, NB = empty
    filled: Int32[Array, "*B K NS"]  # step in which the slot was filled
    used: Int32[Array, "*B K NS"]  # step in which it was last needed
    step: Int32[Array, "*B"]  # fetches so far


@pytree
class ReadPlan:
    """What one fetch has to do, and the tables it leaves behind."""

    slot: Int32[Array, "*B K M1"]  # slot of each needed block (any slot where none is needed)
    read: Int32[Array, "*B K M1"]  # blocks to read into their slots, NB = nothing
    success: Residency
    failure: Residency  # slots that may hold half-read bytes are empty


def fifo(residency: Residency) -> Int32[Array, "K NS"]:
    """The block that came first goes first (KVSwap's reuse buffer)."""
    return residency.filled


def lru(residency: Residency) -> Int32[Array, "K NS"]:
    """The block that was needed longest ago goes first."""
    return residency.used


POLICIES: dict[str, Callable[[Residency], Array]] = {"fifo": fifo, "lru": lru}


def empty(kv_heads: int, slots: int, num_blocks: int) -> Residency:
    """A table with nothing in it, for one sequence."""
    shape = (kv_heads, slots)
    return Residency(
        jnp.full(shape, num_blocks, jnp.int32), jnp.full(shape, -1, jnp.int32), jnp.full(shape, -1, jnp.int32),
        jnp.int32(0),
    )


def locate(residency: Residency, block: Int32[Array, "K *E"]) -> Int32[Array, "K *E"]:
    """Slot of each block, NS where it is not resident."""
    slots = residency.block.shape[-1]
    flat = block.reshape(block.shape[0], -1)
    match = flat[:, :, None] == residency.block[:, None]
    return jnp.where(jnp.any(match, axis=-1), jnp.argmax(match, axis=-1), slots).astype(jnp.int32).reshape(block.shape)


def plan(residency: Residency, need: Int32[Array, "K M1"], num_blocks: int, policy: str) -> ReadPlan:
    """Finds the needed blocks in their slots and gives each missing one a slot. Needs NS >= M1."""
    heads, slots = residency.block.shape
    wanted = need < num_blocks
    found = locate(residency, jnp.where(wanted, need, -1))
    hit = found < slots
    missing = wanted & ~hit

    head = jnp.arange(heads)[:, None]
    pinned = jnp.zeros((heads, slots), bool).at[head, jnp.where(hit, found, slots)].set(True, mode="drop")
    score = jnp.where(residency.block == num_blocks, -2, POLICIES[policy](residency))
    score = jnp.where(pinned, jnp.iinfo(jnp.int32).max, score)
    order = jax.lax.top_k(-score, need.shape[-1])[1].astype(jnp.int32)
    nth = jnp.maximum(jnp.cumsum(missing, axis=-1) - 1, 0)
    slot = jnp.where(hit, found, jnp.take_along_axis(order, nth, axis=-1))

    taken = jnp.where(missing, slot, slots)
    needed = jnp.where(wanted, slot, slots)
    step = residency.step + 1
    success = Residency(
        block=residency.block.at[head, taken].set(need, mode="drop"),
        filled=residency.filled.at[head, taken].set(step, mode="drop"),
        used=residency.used.at[head, needed].set(step, mode="drop"),
        step=step,
    )
    failure = dataclasses.replace(
        residency, block=residency.block.at[head, taken].set(num_blocks, mode="drop"), step=step
    )
    return ReadPlan(slot, jnp.where(missing, need, num_blocks), success, failure)
