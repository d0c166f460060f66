"""Run-length encoding of keys: consecutive keys that are equal within a tolerance are stored once.

A *run* is one physical slot; `Runs.slot` maps tokens to slots. A key joins the open run if it equals the run's first
key within the tolerance, element by element. So errors do not add up along a run, one comparison per token decides, and
keys appended one by one give the same runs as keys encoded at once. Each physical key is scored once and its score
expanded to the tokens of its run; values are stored per token.

Rotated keys carry their position, so that equal contents give equal keys only before rotation. `scores_unrotated` takes
runs of unrotated keys and rotates them as they are used.

`kvjax.methods.rle` is the cache method built on this module. Functions take one KV head of one sequence; map them over
heads and sequences with `jax.vmap`.
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
    """Largest difference of elements of equal keys: `absolute` + `relative` * |element of the run's first key|."""

    absolute: Float[Array, ""] | float = 0.0
    relative: Float[Array, ""] | float = 0.0

    def equal(self, key: Num[Array, "*N D"], first: Num[Array, "*N D"]) -> Bool[Array, "*N"]:
        """Returns whether all elements of a key equal those of the run's first key; with no tolerance, exactly."""
        apart = _distance(key, first)
        allowed = self.absolute + self.relative * jnp.abs(first.astype(apart.dtype))
        return jnp.all((key == first) | ((allowed > 0) & (apart <= allowed)), axis=-1)


def _distance(key: Num[Array, "*N D"], first: Num[Array, "*N D"]) -> Float[Array, "*N D"]:
    """Returns the distance of elements; integers are subtracted as such, because f32 rounds large ones."""
    if not jnp.issubdtype(key.dtype, jnp.integer):
        return jnp.abs(key.astype(jnp.float32) - first.astype(jnp.float32))
    unsigned = jnp.dtype(f"uint{8 * key.dtype.itemsize}")  # unsigned, because a difference may exceed the signed range
    return (jnp.maximum(key, first).astype(unsigned) - jnp.minimum(key, first).astype(unsigned)).astype(jnp.float32)


@pytree
class Runs:
    """Keys of one head, run by run; slots from `runs` on and tokens from `tokens` on are free."""

    key: Num[Array, "*B P D"]  # first key of each run
    count: UInt[Array, "*B P"]  # tokens of each run
    slot: UInt[Array, "*B T"]  # run of each token
    runs: Int32[Array, "*B"]  # slots in use
    tokens: Int32[Array, "*B"]  # tokens held
    refused: Int32[Array, "*B"]  # tokens left out because no slot was free


def index_dtype(slots: int):
    """Returns the narrowest unsigned type that holds the numbers 0 to `slots`."""
    return jnp.uint16 if slots < 1 << 16 else jnp.uint32


def empty(slots: int, capacity: int, head_dim: int, dtype=jnp.float32) -> Runs:
    """Returns room for `capacity` tokens in at most `slots` runs. Raises ConfigError if `slots` is below 1."""
    if slots < 1:
        raise ConfigError(f"slots={slots} must be at least 1; one slot per token is always enough")
    narrow, zero = index_dtype(capacity), jnp.int32(0)
    none = jnp.zeros(capacity, narrow)
    return Runs(jnp.zeros((slots, head_dim), dtype), jnp.zeros(slots, narrow), none, zero, zero, zero)


def append(runs: Runs, key: Num[Array, "D"], tolerance: Tolerance, valid: Bool[Array, ""] | bool = True) -> Runs:
    """Returns the runs with one more token, if it is valid, at a cost that does not depend on their number."""
    key = key.astype(runs.key.dtype)
    joins = (runs.runs > 0) & tolerance.equal(key, runs.key[jnp.maximum(runs.runs - 1, 0)])
    return put(runs, key, runs.runs - joins, valid)


def put(runs: Runs, key: Num[Array, "D"], slot: Int32[Array, ""], valid: Bool[Array, ""] | bool = True) -> Runs:
    """Returns the runs with one more token, if it is valid, in the given slot.

    Args:
      runs: runs to extend.
      key: key of the token, held if it opens a run.
      slot: a slot in use, whose run the token joins, or the first free slot, where it opens a run. From the first token
        without a free slot on, tokens are refused.
      valid: whether the token counts.
    """
    slots, fresh, valid = runs.key.shape[0], slot == runs.runs, jnp.asarray(valid)
    fits = valid & (slot < slots) & (runs.refused == 0)
    into = jnp.where(fits, slot, slots)
    token = jnp.where(fits, runs.tokens, runs.slot.shape[0])
    return Runs(
        key=runs.key.at[jnp.where(fresh, into, slots)].set(key, mode="drop"),
        count=runs.count.at[into].add(1, mode="drop"),
        slot=runs.slot.at[token].set(slot.astype(runs.slot.dtype), mode="drop"),
        runs=runs.runs + (fits & fresh), tokens=runs.tokens + fits, refused=runs.refused + (valid & ~fits),
    )


def encode(key: Num[Array, "T D"], length: Int32[Array, ""], tolerance: Tolerance, slots: int) -> Runs:
    """Encodes the first `length` keys at once, as `append` would one by one, with room for T tokens.

    Args:
      key: keys of consecutive tokens.
      length: number of tokens that count.
      tolerance: largest difference of equal keys.
      slots: most runs; tokens from the first without a slot on are refused.
    """
    first = begins(key, tolerance) & (jnp.arange(key.shape[0], dtype=jnp.int32) < length)
    return collect(key, jnp.cumsum(first, dtype=jnp.int32) - 1, first, length, slots)


def collect(
    key: Num[Array, "T D"], slot: Int32[Array, "T"], first: Bool[Array, "T"], length: Int32[Array, ""], slots: int
) -> Runs:
    """Returns the runs of the first `length` tokens, as `put` would build them one by one.

    Args:
      key: keys of consecutive tokens.
      slot: slot of each token.
      first: which tokens open the run of their slot.
      length: number of tokens that count.
      slots: most runs; tokens from the first without a slot on are refused.
    """
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
    """Returns which keys open a run."""
    def follow(first, key):
        joins = tolerance.equal(key, first)
        return jnp.where(joins, first, key), ~joins

    rest = jax.lax.scan(follow, key[0], key[1:])[1]
    return jnp.concatenate([jnp.ones(1, bool), rest])


def decode(runs: Runs) -> Num[Array, "T D"]:
    """Returns the key of each token; keys of free tokens are undefined."""
    return runs.key[runs.slot]


# ----------------------------------------------------------------------------------------- scores


def scores(q: Float[Array, "G D"], runs: Runs) -> Float[Array, "G T"]:
    """Returns scores by one product per physical key and one gather of numbers; scores of free tokens are undefined."""
    physical = attention.scores_of(q, runs.key, jnp.arange(runs.key.shape[0], dtype=jnp.int32) < runs.runs)
    # Gathered token by token, the layout of products with keys: attention then sums in the order it does without runs.
    return jnp.take(physical.swapaxes(0, 1), runs.slot.astype(jnp.int32), axis=0).swapaxes(0, 1)


def scores_unrotated(
    q: Float[Array, "G D"], runs: Runs, scale: Float[Array, "D"], freqs: np.ndarray, block: int = 512,
    most: Int32[Array, ""] | None = None, shift: Float[Array, "D"] | float = 0.0,
) -> Float[Array, "G T"]:
    """Returns the scores of unrotated keys; token t is at position t.

    A physical key is rotated by a different angle for each of its tokens, so keys are expanded and rotated one block of
    tokens at a time.

    Args:
      q: rotated queries of the KV head.
      runs: runs of unrotated keys.
      scale: factor of each channel of the keys.
      freqs: angular frequency of each pair of dimensions.
      block: tokens expanded at a time.
      most: largest number of tokens of any head or sequence, for use under `jax.vmap`, so that all visit the same
        blocks; None for the tokens of `runs`.
      shift: number added to each channel of the scaled keys.

    Returns:
      Scaled scores in f32; NEGATIVE for free tokens.
    """
    q = q.astype(jnp.float32)  # in f32, because each rotation rounds to the query's type
    capacity = len(runs.slot)
    block = min(block, capacity)
    # Keys are rotated by their position within the block, by constant angles; the query is rotated back by the block's.
    inside = np.outer(np.arange(block), freqs)
    cos, sin = jnp.asarray(np.cos(inside), q.dtype), jnp.asarray(np.sin(inside), q.dtype)

    def visit(i, expanded):
        position = i * block + jnp.arange(block, dtype=jnp.int32)
        row = jnp.minimum(position, capacity - 1)  # the last block may reach beyond the capacity
        key = rotary.turn(runs.key[runs.slot[row]].astype(q.dtype) * scale + shift, cos, sin)
        some = attention.scores_of(rotary.rotate(q, -i * block, freqs), key, position < runs.tokens)
        return jax.lax.dynamic_update_slice_in_dim(expanded, some.swapaxes(0, 1), i * block, 0)

    nothing = jnp.full((-(-capacity // block) * block, len(q)), attention.NEGATIVE, jnp.float32)
    expanded = jax.lax.fori_loop(0, -(-(runs.tokens if most is None else most) // block), visit, nothing)
    return expanded[:capacity].swapaxes(0, 1)


# ------------------------------------------------------------------------------------------- size


@dataclasses.dataclass(frozen=True)
class Size:
    """Bytes of one head's keys: `raw` without runs, `coded` with them."""

    raw: int
    coded: int

    @property
    def pays(self) -> bool:
        return self.coded < self.raw


_HEADER = 3 * 4  # bytes of `runs`, `tokens` and `refused`


def size(tokens: int, runs: int, head_dim: int, itemsize: int) -> Size:
    """Returns the bytes of a head's keys: raw, and coded as keys, counts, index and header; `itemsize` is in bytes."""
    narrow = np.dtype(index_dtype(tokens)).itemsize
    return Size(tokens * head_dim * itemsize, runs * (head_dim * itemsize + narrow) + tokens * narrow + _HEADER)


def fewest_tokens(rate: float, head_dim: int, itemsize: int) -> int | None:
    """Returns the fewest tokens for which coding saves memory at `rate` runs per token; None if it never does."""
    for tokens in (*range(1, 1024), *(1 << power for power in range(10, 24))):
        if size(tokens, max(1, round(rate * tokens)), head_dim, itemsize).pays:
            return tokens
    return None
