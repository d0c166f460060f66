"""Run-length encoded keys: full attention in which consecutive equal keys are stored, and scored, once.

The codec and its scores are in `kvjax.ops.runs`. Every token is attended; blocks, in memory or on flash, hold values
alone. A key that leaves the window is compared with the last run; a prompt is encoded at once, with the same result.

Array sizes are fixed: each head has a slot for every run of the prompts and for every token that may follow, so no key
is ever refused. `llm.prefill` reads the prompts before it sizes the cache. If the slots take more memory than the keys
do in blocks, the method becomes `full` and logs a warning. `kvjax.attend` does not know the prompts beforehand, so it
has as many slots as tokens unless `slots` is set.

Keys are compared and stored in the type in which the cache stores keys, or as floats if that is a type of few bits.

`before_rotation` stores keys as they were before rotation, where equal tokens have more similar keys, and rotates them
when they are used. Rotating back and forth rounds, so it needs a tolerance of about 1e-5 to find equal keys and is not
lossless. With `int8`, keys are stored and compared as 8-bit codes with a mean and a scale per channel, both learned
from the prompt (`kvjax.ops.lowbit`); tolerances are then in steps of the code. Prompts of fewer than 64 tokens are then
refused, because later keys would be clipped to the range of a few tokens.

Resident: D numbers per slot, and 2 or 4 bytes per token. Cost per step: a score per slot, all values.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from kvjax.cache.method import HowPlaced, Method, every_occupied, in_pages, in_token_order
from kvjax.cache.types import Spec
from kvjax.errors import ConfigError
from kvjax.methods.full import Full
from kvjax.ops import lowbit, rotary
from kvjax.ops import runs as rle
from kvjax.ops.runs import Runs, Tolerance
from kvjax.typing import Array, Bool, Float, Int32, Num, pytree


@pytree
class RunIndex:
    """Runs of equal keys, and the codec's parameters."""

    runs: Runs  # [*B, K, ...], runs of the tokens in blocks, in token order
    shift: Float[Array, "*B K D"]  # subtracted from keys before they are coded; 0 where keys are not coded
    scale: Float[Array, "*B K D"]  # step of the codes; 1 where keys are not coded
    stored: Int32[Array, "*B"]  # tokens in blocks


@dataclasses.dataclass(frozen=True)
class RLE(Method):
    """Full attention over runs of equal keys.

    Attributes:
      tolerance: largest difference between the elements of equal keys; 0 is lossless.
      relative: a further tolerance, as a share of the element of the run's first key; the two add up.
      before_rotation: whether keys are compared and stored before rotation.
      int8: whether keys are compared and stored in 8 bits.
      page: rows of a block of values.
      slots: runs that each KV head has room for; None = as many as the prompts need, or one per token if the prompts
        are not known. Outputs are NaN after a key found no slot, which can only happen with `kvjax.attend`.

    Raises:
      ConfigError: a tolerance is negative, or `slots` is below 1.
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
    placement: ClassVar[HowPlaced] = "in_order"

    def __post_init__(self):
        super().__post_init__()
        if min(self.tolerance, self.relative) < 0 or (self.slots is not None and self.slots < 1):
            raise ConfigError(f"tolerance={self.tolerance} and relative={self.relative} must be at least 0, and "
                              f"slots={self.slots} must be None or at least 1")

    @property
    def keeps_keys(self):
        return False

    @property
    def equal(self) -> Tolerance:
        """The tolerances within which two keys count as equal."""
        return Tolerance(self.tolerance, self.relative)

    def blocks(self, capacity, rows):
        return in_pages(capacity, self.page, capacity)

    def least_prompt(self, spec):
        return lowbit.TOKENS if self.int8 else 0

    # ----------------------------------------------------------------------------- size, by the prompts

    def for_prompts(self, spec, keys, length, key_bytes):
        """Returns the method with slots for these prompts and the tokens that may follow, or for all tokens if the
        prompts are not known; `full` if that takes more memory than keys. Raises ConfigError if `slots` is too small.
        """
        needed, rows = self._slots(spec, keys[self.dense_layers :], length), _most(spec)
        if self.slots is not None and self.slots < needed:
            raise ConfigError(f"slots={self.slots} of rle cannot hold the {needed} runs that these prompts may reach "
                              f"at a capacity of {spec.capacity} tokens; leave it out")
        fitted = dataclasses.replace(self, slots=self.slots or needed)
        coded, raw = fitted._key_bytes(spec), rows * key_bytes
        if coded < raw:
            return fitted
        logging.warning("%d runs for %d tokens take %d bytes per KV head, and plain keys %d; using `full` instead",
                        fitted.slots, rows, coded, raw)
        return Full(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Full)})

    def for_other_prompts(self):
        return dataclasses.replace(self, slots=None)

    def _slots(self, spec: Spec, keys, length: np.ndarray) -> int:
        """Returns the most runs a head may have at the capacity: those of its prompt plus one per later token."""
        most = _most(spec)
        if not keys:
            return most
        stored = np.maximum(length - spec.sinks - spec.ring, 0)
        runs = np.max([_runs_of(self, spec, jnp.asarray(key), jnp.asarray(stored, jnp.int32)) for key in keys], axis=0)
        return max(1, int(np.max(runs + (most - stored)[:, None])))

    def _key_bytes(self, spec: Spec) -> int:
        """Returns the bytes of one KV head's keys."""
        held = jax.eval_shape(lambda: jax.tree.leaves(self._empty(spec)))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in held)

    def _empty(self, spec: Spec) -> Runs:
        """Returns the empty runs of one KV head."""
        rows = spec.num_blocks * spec.block_rows
        kind = jnp.int8 if self.int8 else jnp.dtype(spec.key_type)
        return rle.empty(min(self.slots or rows, rows), rows, spec.head_dim, kind)

    # -------------------------------------------------------------------------------------- contract

    def init(self, spec, weights):
        head_runs, heads = self._empty(spec), spec.kv_heads
        runs = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (heads, *leaf.shape)), head_runs)
        shift, scale = jnp.zeros((heads, spec.head_dim), jnp.float32), jnp.ones((heads, spec.head_dim), jnp.float32)
        return RunIndex(runs, shift, scale, jnp.int32(0))

    def build(self, spec, index, context):
        stored = jnp.sum(context.valid, dtype=jnp.int32)
        placement = in_token_order(spec, context)
        rows, slots = index.runs.slot.shape[-1], index.runs.key.shape[-2]
        first, number = jnp.argmax(context.valid).astype(jnp.int32), jnp.arange(rows, dtype=jnp.int32)
        token = jnp.minimum(first + number, context.key.shape[1] - 1)
        key = self._turned(spec, context.key[:, token], context.pos[token])
        shift, scale = self._learned(key, number < stored)
        codes = self._codes(spec, key, shift, scale)
        runs = jax.vmap(lambda code: rle.encode(code, stored, self.equal, slots))(codes)
        return RunIndex(runs, shift, scale, stored), placement

    def select(self, spec, index, view, q):
        return every_occupied(spec, view)

    def score_rows(self, spec, index, q):
        if self.before_rotation:
            freqs = _frequencies(spec)
            # The first row's token is at position S, whereas the codec counts positions from 0.
            q = rotary.rotate(q.astype(jnp.float32), jnp.full(q.shape[0], -spec.sinks, jnp.int32), freqs)
            scores = jax.vmap(lambda q, runs, shift, scale: rle.scores_unrotated(
                q, runs, scale, freqs, most=index.stored, shift=shift
            ))(q, index.runs, index.shift, index.scale)
        elif self.int8:
            constant = jnp.sum(q.astype(jnp.float32) * index.shift[:, None], axis=-1, keepdims=True)
            scores = jax.vmap(rle.scores)(q * index.scale[:, None], index.runs) + constant * spec.head_dim**-0.5
        else:
            scores = jax.vmap(rle.scores)(q, index.runs)
        return jnp.where(index.runs.refused[:, None, None] > 0, jnp.nan, scores)

    def append(self, spec, index, view, evicted):
        placement = in_token_order(spec, evicted)
        key = self._turned(spec, evicted.key[:, None], evicted.pos[None])
        code = self._codes(spec, key, index.shift, index.scale)[:, 0]
        grown = jax.vmap(lambda runs, new: rle.append(runs, new, self.equal, evicted.valid))(index.runs, code)
        return dataclasses.replace(index, runs=grown, stored=index.stored + evicted.valid), placement

    # ------------------------------------------------------------------- keys as they are compared and stored

    def _turned(self, spec: Spec, key: Float[Array, "K N D"], pos: Int32[Array, "N"]) -> Float[Array, "K N D"]:
        """Returns keys in the cache's type, rotated back from their positions if `before_rotation`."""
        key = key.astype(spec.key_type).astype(jnp.float32)
        if not self.before_rotation:
            return key
        return rotary.rotate(key.swapaxes(0, 1), -pos, _frequencies(spec)).swapaxes(0, 1)

    def _learned(self, key: Float[Array, "K N D"], valid: Bool[Array, "N"]) -> tuple[Array, Array]:
        """Returns shift and scale of each head's channels."""
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
    """Returns the tokens that blocks hold at the capacity."""
    return max(1, spec.capacity - spec.sinks - spec.ring)


def _frequencies(spec: Spec) -> np.ndarray:
    """Returns the rotation's frequencies; raises ConfigError if it is not known how keys are rotated."""
    if spec.rope is None:
        raise ConfigError("before_rotation=True needs to know how keys are rotated; pass rope= to kvjax.init_cache, or "
                          "leave before_rotation out")
    return rotary.inverse_frequencies(spec.head_dim, spec.rope)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _runs_of(method: RLE, spec: Spec, key: Float[Array, "B T K D"], stored: Int32[Array, "B"]) -> Int32[Array, "B K"]:
    """Returns the number of runs of each head in the first `stored` keys after the sinks."""
    number = jnp.arange(key.shape[1], dtype=jnp.int32)
    position = spec.sinks + number

    def one(key, stored):
        rows = jnp.take(key.swapaxes(0, 1), position, axis=1, mode="clip")
        turned = method._turned(spec, rows, position)
        kept = method._codes(spec, turned, *method._learned(turned, number < stored))
        begins = jax.vmap(lambda head: rle.begins(head, method.equal))(kept)
        return jnp.sum(begins & (number < stored), axis=-1, dtype=jnp.int32)

    return jax.vmap(one)(key, stored)
