"""Run-length encoded keys: full attention in which consecutive keys that are equal are stored, and scored, once.

The codec and its attention are `kvjax.codecs.rle`. Every token is attended; blocks, in memory or on flash, hold values
alone. What leaves the window is compared with the open run; a prompt is encoded at once, to the same runs.

Arrays are fixed: each head has a slot for every run of the prompts, and for every token that may follow them, so that
none is ever refused. `llm.prefill` reads the prompts before it sizes the cache. Where that takes more memory than keys
do in blocks, the codec turns itself off: the method is then `full`, and the log says why. Without prompts to look at
(`kvjax.attend`, prompts that are read in chunks) there are as many slots as tokens.

`before_rotation` keeps keys as they were before they were rotated, where equal tokens have more alike keys, and turns
them as they are used. Turning back and forth rounds, so that it wants a tolerance of some 1e-5 to find what is equal.

Resident: D numbers per run, and 2 or 4 bytes per token. Cost per step: a score per run, all values.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from kvjax.codecs import rle
from kvjax.codecs.rle import Runs, Tolerance
from kvjax.errors import ConfigError
from kvjax.method import Method, Spec, every_occupied, in_token_order
from kvjax.methods.full import Full
from kvjax.models import rope
from kvjax.typing import Array, Float, Int32, pytree


@pytree
class RunIndex:
    runs: Runs  # [*B, K, ...], of the tokens in blocks, in their order


@dataclasses.dataclass(frozen=True)
class RLE(Method):
    """Full attention over runs of equal keys.

    Attributes:
      tolerance: how far elements of equal keys may be apart; 0 is lossless.
      relative: the same, as a share of the run's first key's element; the two add up.
      before_rotation: whether keys are compared, and kept, before rotation.
      page: rows of a block of values.
      slots: runs that each KV head has room for; None = as the prompts ask for, without prompts as many as tokens.
    """

    budget: int | None = None
    window: int = 2
    sinks: int = 0
    tolerance: float = 0.0
    relative: float = 0.0
    before_rotation: bool = False
    page: int = 64
    slots: int | None = None
    attends_all: ClassVar[bool] = True
    fits_prompts: ClassVar[bool] = True

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
        count = -(-capacity // self.page)
        return count, self.page, count, 0

    def for_prompts(self, spec, keys, length, key_bytes):
        """With as many slots as these prompts and what may follow them need; `full` where runs take more memory than
        keys. ConfigError where there are `slots`, but too few."""
        tokens = np.maximum(length - spec.sinks - spec.ring, 0)
        runs = np.max([self._count(spec, key, tokens) for key in keys[self.dense_layers :]], axis=0)
        needed = max(1, int(np.max(runs + (spec.capacity - tokens)[:, None])))
        if self.slots is not None and self.slots < needed:
            raise ConfigError(f"slots={self.slots} of rle cannot hold the {needed} runs that these prompts, and "
                              f"{spec.capacity} tokens in all, may have; leave it out")
        slots, rows = self.slots or needed, spec.num_blocks * spec.block_rows
        coded, raw = rle.size(rows, slots, spec.head_dim, 4).coded, rows * key_bytes
        if coded < raw:
            return dataclasses.replace(self, slots=slots)
        logging.info("%d runs for %d tokens take %d bytes per KV head, %d without: keys are kept as they are",
                     slots, rows, coded, raw)
        return Full(window=self.window, sinks=self.sinks, page=self.page)

    def _count(self, spec: Spec, key: Float[Array, "B T K D"], tokens: np.ndarray) -> Int32[Array, "B K"]:
        """Runs of the first so many keys after the sinks."""
        return _runs_of(self, spec, jnp.asarray(key[:, spec.sinks :]), jnp.asarray(tokens, jnp.int32))

    def _empty(self, spec: Spec) -> Runs:
        rows = spec.num_blocks * spec.block_rows
        return rle.empty(min(self.slots or rows, rows), rows, spec.head_dim)

    def init(self, spec, weights):
        one = self._empty(spec)
        return RunIndex(jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (spec.kv_heads, *leaf.shape)), one))

    def build(self, spec, index, context):
        stored = jnp.sum(context.valid, dtype=jnp.int32)
        placement = in_token_order(spec, jnp.int32(0), jnp.cumsum(context.valid) - 1, context.valid)
        rows, slots = index.runs.slot.shape[-1], index.runs.key.shape[-2]
        at = jnp.minimum(jnp.argmax(context.valid) + jnp.arange(rows), context.key.shape[1] - 1)
        key = self._kept(spec, context.key[:, at], context.pos[at])
        return RunIndex(jax.vmap(lambda one: rle.encode(one, stored, self.equal, slots))(key)), placement

    def _kept(self, spec: Spec, key: Float[Array, "K N D"], pos: Int32[Array, "N"]) -> Float[Array, "K N D"]:
        """Keys as they are compared and kept: as they come, or turned back from their positions."""
        key = key.astype(jnp.float32)
        if not self.before_rotation:
            return key
        return rope.rotate(key.swapaxes(0, 1), -pos, _frequencies(spec)).swapaxes(0, 1)

    def select(self, spec, index, view, q):
        return every_occupied(spec, view)

    def score_rows(self, spec, index, q):
        if not self.before_rotation:
            return jax.vmap(rle.scores)(q, index.runs)
        freqs = _frequencies(spec)
        # The first row's token is at position S, and the codec counts from 0.
        q = rope.rotate(q, jnp.full(q.shape[0], -spec.sinks), freqs)
        one = functools.partial(rle.scores_unrotated, freqs=freqs, most=jnp.max(index.runs.tokens))
        return jax.vmap(one)(q, index.runs)

    def append(self, spec, index, view, leaving):
        stored = index.runs.tokens[0]
        placement = in_token_order(spec, stored, jnp.int32(0), leaving.valid)
        key = self._kept(spec, leaving.key[:, None], leaving.pos[None])[:, 0]
        grown = jax.vmap(lambda runs, one: rle.append(runs, one, self.equal, leaving.valid))(index.runs, key)
        return RunIndex(grown), placement


def _frequencies(spec: Spec) -> np.ndarray:
    """ConfigError where it is not known how keys are rotated."""
    if spec.rope is None:
        raise ConfigError("before_rotation=True has to know how keys are rotated: give kvjax.init_cache rope=, or "
                          "leave it out")
    return rope.inverse_frequencies(spec.head_dim, spec.rope)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _runs_of(method: RLE, spec: Spec, key: Float[Array, "B T K D"], tokens: Int32[Array, "B"]) -> Int32[Array, "B K"]:
    kept = jax.vmap(lambda one: method._kept(spec, one.swapaxes(0, 1), spec.sinks + jnp.arange(key.shape[1])))(key)
    begins = jax.vmap(jax.vmap(lambda one: rle.begins(one, method.equal)))(kept)
    return jnp.sum(begins & (jnp.arange(key.shape[1]) < tokens[:, None, None]), axis=-1, dtype=jnp.int32)
