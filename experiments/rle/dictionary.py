"""Codecs of equal keys: a key that recurs anywhere is stored once, and so is a stretch of such keys that repeats.

In layer 0 a key before rotation depends on its token alone, so that a dictionary by token id loses nothing there.
Elsewhere `by_content` finds keys that are equal bit for bit. Both give `rle.Runs`, with slots in any order, so that
attention is the same. A repeated paragraph is a repeated stretch of slots: `Segments` stores each once (hierarchical
encoding).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.errors import ConfigError
from kvjax.ops import runs as rle
from kvjax.ops.runs import Runs
from kvjax.typing import Array, Bool, Int32, Num, UInt, pytree


def first_equal(rows: Num[Array, "T X"]) -> Int32[Array, "T"]:
    """Returns for each row the first one that has the same bits.

    Rows are sorted by a hash and compared with their neighbours. Rows whose hashes merely collide stay apart; at worst
    some equal rows do, too.
    """
    bits = jax.lax.bitcast_convert_type(rows, jnp.dtype(f"uint{8 * rows.dtype.itemsize}")).astype(jnp.uint32)
    factors = np.random.default_rng(0).integers(0, 1 << 32, (2, rows.shape[1]), np.uint32) | np.uint32(1)
    mixed = (bits ^ (bits >> 15)) * np.uint32(0x2C1B3C6D)
    hashes = tuple(jnp.sum(mixed * factor, axis=1, dtype=jnp.uint32) for factor in factors)
    order = jnp.lexsort(hashes).astype(jnp.int32)
    same = jnp.all(bits[order][1:] == bits[order][:-1], axis=1)
    position = jnp.arange(len(rows), dtype=jnp.int32)
    leader = jax.lax.cummax(jnp.where(jnp.pad(same, (1, 0)), 0, position))
    return jnp.zeros_like(position).at[order].set(order[leader].astype(jnp.int32))


def numbered(rows: Num[Array, "T X"]) -> tuple[Int32[Array, "T"], Bool[Array, "T"]]:
    """Returns a number for each distinct row, in order of appearance, and whether a row is the first with its
    number."""
    leader = first_equal(rows)
    first = leader == jnp.arange(len(rows), dtype=jnp.int32)
    return (jnp.cumsum(first, dtype=jnp.int32) - 1)[leader], first


def by_content(key: Num[Array, "T D"], length: Int32[Array, ""], slots: int) -> Runs:
    """Returns runs of the first `length` keys, one slot for each distinct key."""
    return rle.collect(key, *numbered(key), length, slots)


def by_token(key: Num[Array, "T D"], token: Int32[Array, "T"], length: Int32[Array, ""], slots: int) -> Runs:
    """Returns runs of the first `length` keys, one slot for each distinct token id: exact where the id determines the
    key."""
    return rle.collect(key, *numbered(token[:, None]), length, slots)


@pytree
class Dictionary:
    """The runs of `by_token`, which grow token by token."""

    runs: Runs
    slot_of: Int32[Array, "*B V"]  # slot of each token id, -1 = not seen


def empty(slots: int, capacity: int, head_dim: int, vocab_size: int, dtype=jnp.float32) -> Dictionary:
    """Returns room for `capacity` tokens, at most `slots` of them different."""
    return Dictionary(rle.empty(slots, capacity, head_dim, dtype), jnp.full(vocab_size, -1, jnp.int32))


def append(dictionary: Dictionary, key: Num[Array, "D"], token: Int32[Array, ""]) -> Dictionary:
    """Returns the dictionary with one more token, at the cost of one look-up."""
    known = dictionary.slot_of[token]
    slot = jnp.where(known < 0, dictionary.runs.runs, known)
    runs = rle.put(dictionary.runs, key.astype(dictionary.runs.key.dtype), slot)
    stored = runs.tokens > dictionary.runs.tokens
    slot_of = dictionary.slot_of.at[jnp.where(stored, token, len(dictionary.slot_of))].set(slot, mode="drop")
    return Dictionary(runs, slot_of)


# --------------------------------------------------------------------------------------- segments


@pytree
class Segments:
    """An index of T slots in stretches of `span`, each different stretch stored once."""

    slots: UInt[Array, "N span"]  # the different stretches
    segment: UInt[Array, "N"]  # number of each stretch among them
    count: Int32[Array, ""]  # different stretches


def segments(slot: UInt[Array, "T"], span: int) -> Segments:
    """Finds stretches that repeat at multiples of `span`; raises ConfigError if T is not a multiple of it."""
    if len(slot) % span:
        raise ConfigError(f"{len(slot)} tokens are not whole segments of {span}; choose another span or pad them")
    rows = slot.reshape(-1, span)
    number, first = numbered(rows)
    kept = jnp.zeros_like(rows).at[jnp.where(first, number, len(rows))].set(rows, mode="drop")
    return Segments(kept, number.astype(rle.index_dtype(len(rows))), jnp.sum(first, dtype=jnp.int32))


def expand(found: Segments) -> UInt[Array, "T"]:
    """Returns the index of the segments."""
    return found.slots[found.segment].reshape(-1)


@dataclasses.dataclass(frozen=True)
class IndexSize:
    """Bytes of an index of slots, and of its segments."""

    raw: int
    coded: int


def index_size(tokens: int, different: int, span: int) -> IndexSize:
    """Returns the bytes for `different` segments of `tokens` tokens."""
    narrow, numbers = np.dtype(rle.index_dtype(tokens)).itemsize, np.dtype(rle.index_dtype(tokens // span)).itemsize
    return IndexSize(tokens * narrow, different * span * narrow + tokens // span * numbers)
