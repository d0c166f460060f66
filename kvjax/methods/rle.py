"""Run-length encoded keys: full attention in which consecutive keys that are equal are stored, and scored, once.

The codec and its scores are `kvjax.ops.runs`. Every token is attended; blocks, in memory or on flash, hold values
alone. What leaves the window is compared with the open run; a prompt is encoded at once, to the same runs.

Arrays are fixed: each head has a slot for every run of the prompts, and for every token that may follow them, so that
none is ever refused. `llm.prefill` reads the prompts before it sizes the cache. Where that takes more memory than keys
do in blocks, the codec turns itself off: the method is then `full`, and a warning says so. With `kvjax.attend`, which
does not know the prompts beforehand, there are as many slots as tokens, unless `slots` says otherwise.

Keys are compared, and kept, in the type in which the cache keeps them: as floats, where that is one of few bits.

`before_rotation` keeps keys as they were before they were rotated, where equal tokens have more alike keys, and turns
them as they are used. Turning back and forth rounds, so that it wants a tolerance of some 1e-5 to find what is equal,
and is not lossless. With `int8` keys are kept, and compared, as codes of 8 bits with a mean and a scale per channel,
the prompt's (`kvjax.ops.lowbit`); tolerances then are in steps. Prompts of fewer than 64 tokens are refused then, as
later keys would be clipped to what a few tokens span.

Resident: D numbers per slot, and 2 or 4 bytes per token. Cost per step: a score per slot, all values.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from kvjax.cache.method import Method, Spec, every_occupied, in_pages, in_token_order
from kvjax.errors import ConfigError
from kvjax.methods.full import Full
from kvjax.ops import lowbit, rotary
from kvjax.ops import runs as rle
from kvjax.ops.runs import Runs, Tolerance
from kvjax.typing import Array, Bool, Float, Int32, Num, pytree


@pytree
class RunIndex:
    runs: Runs  # [*B, K, ...], of the tokens in blocks, in their order
    shift: Float[Array, "*B K D"]  # taken off keys before they are codes; 0 where keys are kept as they are
    scale: Float[Array, "*B K D"]  # of codes; 1 where keys are kept as they are
    stored: Int32[Array, "*B"]  # tokens in blocks


@dataclasses.dataclass(frozen=True)
class RLE(Method):
    """Full attention over runs of equal keys.

    Attributes:
      tolerance: how far elements of equal keys may be apart; 0 is lossless.
      relative: the same, as a share of the run's first key's element; the two add up.
      before_rotation: whether keys are compared, and kept, before rotation.
      int8: whether keys are compared, and kept, in 8 bits.
      page: rows of a block of values.
      slots: runs that each KV head has room for; None = as the prompts ask for, where they are not known as many as
        tokens. Outputs are NaN after tokens that found no slot, which only `kvjax.attend` can come to.
    """

    budget: int | None = None
    window: int = 2
    sinks: int = 0
    tolerance: float = 0.0
    relative: float = 0.0
    before_rotation: bool = False
    int8: bool = False
    page: int = 64
    slots: int | None = None
    attends_all: ClassVar[bool] = True
    fits_prompts: ClassVar[bool] = True
    places_alike: ClassVar[bool] = True
    in_order: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        if min(self.tolerance, self.relative) < 0 or (self.slots is not None and self.slots < 1):
            raise ConfigError(f"tolerance={self.tolerance} and relative={self.relative} must be at least 0, "
                              f"slots={self.slots} None or at least 1")

    @property
    def keeps_keys(self):
        return False

    @property
    def equal(self) -> Tolerance:
        """When two keys are equal."""
        return Tolerance(self.tolerance, self.relative)

    def blocks(self, capacity, rows):
        return in_pages(capacity, self.page, capacity)

    def least_prompt(self, spec):
        return lowbit.TOKENS if self.int8 else 0

    # ----------------------------------------------------------------------------- size, by the prompts

    def for_prompts(self, spec, keys, length, key_bytes):
        """With as many slots as these prompts and what may follow them need; `full` where runs take more memory than
        keys, or prompts are not known. ConfigError where there are `slots`, but too few."""
        needed, rows = self._slots(spec, keys[self.dense_layers :], length), _most(spec)
        if self.slots is not None and self.slots < needed:
            raise ConfigError(f"slots={self.slots} of rle cannot hold the {needed} runs that these prompts, and "
                              f"{spec.capacity} tokens in all, may have; leave it out")
        fitted = dataclasses.replace(self, slots=self.slots or needed)
        coded, raw = fitted._key_bytes(spec), rows * key_bytes
        if coded < raw:
            return fitted
        logging.warning("%d runs for %d tokens take %d bytes per KV head, %d without: keys are kept as they are",
                        fitted.slots, rows, coded, raw)
        return Full(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Full)})

    def _slots(self, spec: Spec, keys, length: np.ndarray) -> int:
        """Runs that some head may have at the capacity: those of its prompt, and one for each token after it."""
        most = _most(spec)
        if not keys:
            return most
        stored = np.maximum(length - spec.sinks - spec.ring, 0)
        runs = np.max([_runs_of(self, spec, jnp.asarray(key), jnp.asarray(stored, jnp.int32)) for key in keys], axis=0)
        return max(1, int(np.max(runs + (most - stored)[:, None])))

    def _key_bytes(self, spec: Spec) -> int:
        """Bytes of one KV head's keys."""
        held = jax.eval_shape(lambda: jax.tree.leaves(self._empty(spec)))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in held)

    def _empty(self, spec: Spec) -> Runs:
        """Of one KV head."""
        rows = spec.num_blocks * spec.block_rows
        kind = jnp.int8 if self.int8 else jnp.dtype(spec.key_type)
        return rle.empty(min(self.slots or rows, rows), rows, spec.head_dim, kind)

    # -------------------------------------------------------------------------------------- contract

    def init(self, spec, weights):
        one, heads = self._empty(spec), spec.kv_heads
        runs = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (heads, *leaf.shape)), one)
        shift, scale = jnp.zeros((heads, spec.head_dim), jnp.float32), jnp.ones((heads, spec.head_dim), jnp.float32)
        return RunIndex(runs, shift, scale, jnp.int32(0))

    def build(self, spec, index, context):
        stored = jnp.sum(context.valid, dtype=jnp.int32)
        placement = in_token_order(spec, context)
        rows, slots = index.runs.slot.shape[-1], index.runs.key.shape[-2]
        first, number = jnp.argmax(context.valid).astype(jnp.int32), jnp.arange(rows, dtype=jnp.int32)
        at = jnp.minimum(first + number, context.key.shape[1] - 1)
        key = self._turned(spec, context.key[:, at], context.pos[at])
        shift, scale = self._learned(key, number < stored)
        codes = self._codes(spec, key, shift, scale)
        runs = jax.vmap(lambda one: rle.encode(one, stored, self.equal, slots))(codes)
        return RunIndex(runs, shift, scale, stored), placement

    def select(self, spec, index, view, q):
        return every_occupied(spec, view)

    def score_rows(self, spec, index, q):
        if self.before_rotation:
            freqs = _frequencies(spec)
            # The first row's token is at position S, and the codec counts from 0.
            q = rotary.rotate(q.astype(jnp.float32), jnp.full(q.shape[0], -spec.sinks, jnp.int32), freqs)
            found = jax.vmap(lambda q, runs, shift, scale: rle.scores_unrotated(
                q, runs, scale, freqs, most=index.stored, shift=shift
            ))(q, index.runs, index.shift, index.scale)
        elif self.int8:
            constant = jnp.sum(q.astype(jnp.float32) * index.shift[:, None], axis=-1, keepdims=True)
            found = jax.vmap(rle.scores)(q * index.scale[:, None], index.runs) + constant * spec.head_dim**-0.5
        else:
            found = jax.vmap(rle.scores)(q, index.runs)
        return jnp.where(index.runs.refused[:, None, None] > 0, jnp.nan, found)

    def append(self, spec, index, view, evicted):
        placement = in_token_order(spec, evicted)
        key = self._turned(spec, evicted.key[:, None], evicted.pos[None])
        code = self._codes(spec, key, index.shift, index.scale)[:, 0]
        grown = jax.vmap(lambda runs, one: rle.append(runs, one, self.equal, evicted.valid))(index.runs, code)
        return dataclasses.replace(index, runs=grown, stored=index.stored + evicted.valid), placement

    # --------------------------------------------------------------------- keys as they are compared and kept

    def _turned(self, spec: Spec, key: Float[Array, "K N D"], pos: Int32[Array, "N"]) -> Float[Array, "K N D"]:
        """As the cache keeps them, or turned back from their positions."""
        key = key.astype(spec.key_type).astype(jnp.float32)
        if not self.before_rotation:
            return key
        return rotary.rotate(key.swapaxes(0, 1), -pos, _frequencies(spec)).swapaxes(0, 1)

    def _learned(self, key: Float[Array, "K N D"], valid: Bool[Array, "N"]) -> tuple[Array, Array]:
        """Shift and scale of each head's channels."""
        shift = jnp.zeros((key.shape[0], key.shape[2]), jnp.float32)
        if not self.int8:
            return shift, shift + 1
        shift = jnp.sum(jnp.where(valid[:, None], key, 0.0), axis=1) / jnp.maximum(jnp.sum(valid), 1)
        apart = jnp.where(valid[:, None], key - shift[:, None], 0.0)
        return shift, jax.vmap(lowbit.scale_of)(apart)

    def _codes(self, spec: Spec, key: Float[Array, "K N D"], shift, scale) -> Num[Array, "K N D"]:
        if not self.int8:
            return key.astype(spec.key_type)
        return jax.vmap(lowbit.quantise)(key - shift[:, None], scale)


def _most(spec: Spec) -> int:
    """Tokens that blocks hold at the capacity."""
    return max(1, spec.capacity - spec.sinks - spec.ring)


def _frequencies(spec: Spec) -> np.ndarray:
    """ConfigError where it is not known how keys are rotated."""
    if spec.rope is None:
        raise ConfigError("before_rotation=True has to know how keys are rotated: give kvjax.init_cache rope=, or "
                          "leave it out")
    return rotary.inverse_frequencies(spec.head_dim, spec.rope)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _runs_of(method: RLE, spec: Spec, key: Float[Array, "B T K D"], stored: Int32[Array, "B"]) -> Int32[Array, "B K"]:
    """Runs of so many keys after the sinks."""
    number = jnp.arange(key.shape[1], dtype=jnp.int32)
    at = spec.sinks + number

    def one(key, stored):
        rows = jnp.take(key.swapaxes(0, 1), at, axis=1, mode="clip")
        turned = method._turned(spec, rows, at)
        kept = method._codes(spec, turned, *method._learned(turned, number < stored))
        begins = jax.vmap(lambda head: rle.begins(head, method.equal))(kept)
        return jnp.sum(begins & (number < stored), axis=-1, dtype=jnp.int32)

    return jax.vmap(one)(key, stored)
