"""Run-length encoding of keys: consecutive keys that are equal within a tolerance are stored once.

A *run* is one physical slot; `Runs.slot` maps logical tokens to slots. A key joins the open run if it equals the run's
first key within the tolerance, element by element. Errors do not add up along a run, one comparison per token decides,
and keys that come one by one give the same runs as all at once. Each physical key is scored once, and the scores are
expanded; values are kept per token.

Keys carry their position once they are rotated, so that equal contents are equal keys only before rotation.
`scores_unrotated` is for runs of such keys, which it turns as they are used.

`kvjax.methods.rle` is the cache method that is made of this.

Functions take one KV head of one sequence; map them over heads and sequences with `jax.vmap`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.errors import ConfigError
from kvjax.ops import attention, rotary
from kvjax.typing import Array, Bool, Float, Int32, Num, UInt, pytree


@pytree
class Tolerance:
    """How far apart elements of equal keys may be: `absolute` + `relative` x |element of the run's first key|."""

    absolute: Float[Array, ""] | float = 0.0
    relative: Float[Array, ""] | float = 0.0

    def equal(self, key: Num[Array, "*N D"], first: Num[Array, "*N D"]) -> Bool[Array, "*N"]:
        """Whether all elements are equal. With no tolerance, and for any type, exactly those that compare equal."""
        apart = _distance(key, first)
        allowed = self.absolute + self.relative * jnp.abs(first.astype(apart.dtype))
        return jnp.all((key == first) | ((allowed > 0) & (apart <= allowed)), axis=-1)


def _distance(key: Num[Array, "*N D"], first: Num[Array, "*N D"]) -> Float[Array, "*N D"]:
    """How far elements are apart; integers are subtracted as such, as floats do not tell large ones apart."""
    if not jnp.issubdtype(key.dtype, jnp.integer):
        return jnp.abs(key.astype(jnp.float32) - first.astype(jnp.float32))
    unsigned = jnp.dtype(f"uint{8 * key.dtype.itemsize}")  # wraps around to what no signed difference can hold
    return (jnp.maximum(key, first).astype(unsigned) - jnp.minimum(key, first).astype(unsigned)).astype(jnp.float32)


@pytree
class Runs:
    """Keys of one head, run by run. Physical slots from `runs` and tokens from `tokens` on are free."""

    key: Num[Array, "*B P D"]  # first key of each run
    count: UInt[Array, "*B P"]  # tokens of each run
    slot: UInt[Array, "*B T"]  # run of each token
    runs: Int32[Array, "*B"]
    tokens: Int32[Array, "*B"]
    refused: Int32[Array, "*B"]  # tokens left out for want of a slot


def index_dtype(slots: int):
    """The narrowest type that numbers so many slots, and none."""
    return jnp.uint16 if slots < 1 << 16 else jnp.uint32


def empty(slots: int, capacity: int, head_dim: int, dtype=jnp.float32) -> Runs:
    """Room for `capacity` tokens in at most `slots` runs. ConfigError if there is no slot."""
    if slots < 1:
        raise ConfigError(f"slots={slots} must be at least 1; as many as tokens are always enough")
    narrow, zero = index_dtype(capacity), jnp.int32(0)
    none = jnp.zeros(capacity, narrow)
    return Runs(jnp.zeros((slots, head_dim), dtype), jnp.zeros(slots, narrow), none, zero, zero, zero)


def append(runs: Runs, key: Num[Array, "D"], tolerance: Tolerance, valid: Bool[Array, ""] | bool = True) -> Runs:
    """With one more token if it is valid; the cost does not depend on how many there are."""
    key = key.astype(runs.key.dtype)
    joins = (runs.runs > 0) & tolerance.equal(key, runs.key[jnp.maximum(runs.runs - 1, 0)])
    return put(runs, key, runs.runs - joins, valid)


def put(runs: Runs, key: Num[Array, "D"], slot: Int32[Array, ""], valid: Bool[Array, ""] | bool = True) -> Runs:
    """With one more token, if it is valid, in a slot in use, or in the next one, which then holds its key."""
    slots, fresh, valid = runs.key.shape[0], slot == runs.runs, jnp.asarray(valid)
    fits = valid & (slot < slots) & (runs.refused == 0)
    into = jnp.where(fits, slot, slots)
    at = jnp.where(fits, runs.tokens, runs.slot.shape[0])
    return Runs(
        key=runs.key.at[jnp.where(fresh, into, slots)].set(key, mode="drop"),
        count=runs.count.at[into].add(1, mode="drop"),
        slot=runs.slot.at[at].set(slot.astype(runs.slot.dtype), mode="drop"),
        runs=runs.runs + (fits & fresh), tokens=runs.tokens + fits, refused=runs.refused + (valid & ~fits),
    )


def encode(key: Num[Array, "T D"], length: Int32[Array, ""], tolerance: Tolerance, slots: int) -> Runs:
    """The first `length` keys at once, with room for T tokens: what `append` one by one would give."""
    first = begins(key, tolerance) & (jnp.arange(key.shape[0], dtype=jnp.int32) < length)
    return collect(key, jnp.cumsum(first, dtype=jnp.int32) - 1, first, length, slots)


def collect(
    key: Num[Array, "T D"], slot: Int32[Array, "T"], first: Bool[Array, "T"], length: Int32[Array, ""], slots: int
) -> Runs:
    """The first `length` tokens, given the slot of each and whether it is the first one in it; as by `put`."""
    valid = jnp.arange(key.shape[0], dtype=jnp.int32) < length
    fits = valid & (jnp.cumsum(valid & (slot >= slots), dtype=jnp.int32) == 0)
    into, fresh = jnp.where(fits, slot, slots), empty(slots, key.shape[0], key.shape[1], key.dtype)
    return Runs(
        key=fresh.key.at[jnp.where(first, into, slots)].set(key, mode="drop"),
        count=fresh.count.at[into].add(1, mode="drop"),
        slot=jnp.where(fits, slot, 0).astype(fresh.slot.dtype),
        runs=jnp.sum(first & fits, dtype=jnp.int32), tokens=jnp.sum(fits, dtype=jnp.int32),
        refused=jnp.sum(valid & ~fits, dtype=jnp.int32),
    )


def begins(key: Num[Array, "T D"], tolerance: Tolerance) -> Bool[Array, "T"]:
    """Whether each key begins a run."""
    def follow(first, key):
        joins = tolerance.equal(key, first)
        return jnp.where(joins, first, key), ~joins

    rest = jax.lax.scan(follow, key[0], key[1:])[1]
    return jnp.concatenate([jnp.ones(1, bool), rest])


def decode(runs: Runs) -> Num[Array, "T D"]:
    """The key of each token; those of free tokens are undefined."""
    return runs.key[runs.slot]


# ----------------------------------------------------------------------------------------- scores


def scores(q: Float[Array, "G D"], runs: Runs) -> Float[Array, "G T"]:
    """Scores of every token: one product with the physical keys, then one gather of numbers. Undefined where free."""
    physical = attention.scores_of(q, runs.key, jnp.arange(runs.key.shape[0], dtype=jnp.int32) < runs.runs)
    # Token by token, as products with keys come: attention then adds in the order in which it does without a codec.
    return jnp.take(physical.swapaxes(0, 1), runs.slot.astype(jnp.int32), axis=0).swapaxes(0, 1)


def scores_unrotated(
    q: Float[Array, "G D"], runs: Runs, scale: Float[Array, "D"], freqs: np.ndarray, block: int = 512,
    most: Int32[Array, ""] | None = None, shift: Float[Array, "D"] | float = 0.0,
) -> Float[Array, "G T"]:
    """Scores of keys before rotation; token t is at position t, and `q` is rotated. NEGATIVE where free.

    A physical key looks different from each position, so keys, times the `scale` of each channel and moved by its
    `shift`, are turned as they are used: a block of tokens at a time, which is all that is ever expanded. Mapped over
    heads and sequences, `most` is the largest number of tokens of any, so that all go through the same blocks.
    """
    q = q.astype(jnp.float32)  # else each turn would round to the query's type
    capacity = len(runs.slot)
    block = min(block, capacity)
    # Only positions within the block turn keys, by angles that are constants; the block's own turns the query back.
    inside = np.outer(np.arange(block), freqs)
    cos, sin = jnp.asarray(np.cos(inside), q.dtype), jnp.asarray(np.sin(inside), q.dtype)

    def visit(i, found):
        at = i * block + jnp.arange(block, dtype=jnp.int32)
        row = jnp.minimum(at, capacity - 1)  # the last block may reach beyond the capacity
        key = rotary.turn(runs.key[runs.slot[row]].astype(q.dtype) * scale + shift, cos, sin)
        some = attention.scores_of(rotary.rotate(q, -i * block, freqs), key, at < runs.tokens)
        return jax.lax.dynamic_update_slice_in_dim(found, some.swapaxes(0, 1), i * block, 0)

    nothing = jnp.full((-(-capacity // block) * block, len(q)), attention.NEGATIVE, jnp.float32)
    found = jax.lax.fori_loop(0, -(-(runs.tokens if most is None else most) // block), visit, nothing)
    return found[:capacity].swapaxes(0, 1)


# ------------------------------------------------------------------------------------------- size


@dataclasses.dataclass(frozen=True)
class Size:
    """Bytes of one head's keys with and without the codec."""

    raw: int
    coded: int

    @property
    def pays(self) -> bool:
        return self.coded < self.raw


_HEADER = 3 * 4  # bytes of `runs`, `tokens` and `refused`


def size(tokens: int, runs: int, head_dim: int, itemsize: int) -> Size:
    """Bytes of so many tokens in so many runs: keys, counts, index and header."""
    narrow = np.dtype(index_dtype(tokens)).itemsize
    return Size(tokens * head_dim * itemsize, runs * (head_dim * itemsize + narrow) + tokens * narrow + _HEADER)


def fewest_tokens(rate: float, head_dim: int, itemsize: int) -> int | None:
    """The length from which the codec pays at so many runs per token; None if it never does."""
    for tokens in (*range(1, 1024), *(1 << power for power in range(10, 24))):
        if size(tokens, max(1, round(rate * tokens)), head_dim, itemsize).pays:
            return tokens
    return None
