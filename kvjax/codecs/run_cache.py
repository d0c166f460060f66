"""An attention cache in memory whose keys are runs: full attention, computed on physical keys.

    cache = run_cache.prefill(keys, values, lengths, capacity=8192)
    out, cache = run_cache.attend(cache, q, k, v)

One layer, one call per token, as with `kvjax.attend`; `attend` is pure and may be used under `jax.jit`. Where runs
take more memory than they save, the codec turns itself off and logs why: keys are then kept and attended token by
token, and without a tolerance outputs have the same bits either way. With `freqs` keys are kept before rotation, where
equal contents are equal keys, and turned as they are used.

Slots are fixed. `full` says when a head has none left: `decide` then gives more, or turns the codec off; it may be
called between any two steps. Tokens that come to a head without a free slot are counted in `Runs.refused`; their keys
are lost.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from kvjax import attention
from kvjax.attention import Part
from kvjax.codecs import rle
from kvjax.codecs.rle import Plain, Runs, Tolerance
from kvjax.errors import ConfigError
from kvjax.typing import Array, Bool, Float, Int32, pytree


@pytree
class RunCache:
    """Keys of one layer as runs or, with the codec off, as they came; and values token by token."""

    keys: Runs | Plain  # [B, K, ...]
    value: Float[Array, "B K T D"]
    tolerance: Tolerance
    # Angular frequencies of each pair of dimensions where keys are kept before rotation.
    freqs: tuple[float, ...] | None = dataclasses.field(default=None, metadata={"static": True})


def prefill(
    key: Float[Array, "B T K D"], value: Float[Array, "B T K D"], length: Int32[Array, "B"], *, capacity: int,
    slots: int | None = None, tolerance: Tolerance | None = None, freqs: Sequence[float] | np.ndarray | None = None,
) -> RunCache:
    """A cache of prompts of `length[b] <= T` tokens, with room for `capacity` tokens.

    Args:
      slots: runs that each head has room for, whatever they save. None, not under `jax.jit`: as `decide` finds.
      tolerance: nought by default: lossless.
      freqs: of the rotation (`kvjax.models.rope`), if keys come before rotation, here and in `attend`.

    ConfigError if the prompts are longer than the capacity.
    """
    if key.shape[1] > capacity:
        raise ConfigError(f"prompts of {key.shape[1]} tokens do not fit in capacity={capacity}; raise it")
    tolerance = Tolerance(jnp.float32(0), jnp.float32(0)) if tolerance is None else tolerance
    keys, values = _plain(key, value, jnp.asarray(length, jnp.int32), capacity)
    cache = RunCache(keys, values, tolerance, None if freqs is None else tuple(map(float, freqs)))
    return decide(cache) if slots is None else dataclasses.replace(cache, keys=_encoded(keys, tolerance, slots))


@functools.partial(jax.jit, static_argnums=3)
def _plain(key, value, length, capacity: int) -> tuple[Plain, Float[Array, "B K T D"]]:
    more = ((0, 0), (0, 0), (0, capacity - key.shape[1]), (0, 0))
    key, value = (jnp.pad(rows.swapaxes(1, 2), more) for rows in (key, value))
    return Plain(key, jnp.broadcast_to(length[:, None], key.shape[:2])), value


@functools.partial(jax.jit, static_argnums=2)
def _encoded(keys: Plain, tolerance: Tolerance, slots: int) -> Runs:
    encode = jax.vmap(jax.vmap(lambda key, tokens: rle.encode(key, tokens, tolerance, slots)))
    return encode(keys.key, keys.tokens)


def decide(cache: RunCache) -> RunCache:
    """The cache with its codec on or off, whichever takes less memory at its capacity; on the host, between steps."""
    key = jax.vmap(jax.vmap(rle.decode))(cache.keys)
    coded = rle.compress(key, cache.keys.tokens, cache.tolerance)
    if coded.reason:
        logging.info("%s", coded.reason)
    return dataclasses.replace(cache, keys=coded.keys)


def attend(
    cache: RunCache, q: Float[Array, "B H D"], key: Float[Array, "B K D"], value: Float[Array, "B K D"]
) -> tuple[Float[Array, "B H D"], RunCache]:
    """Attention of the newest token over all, itself included, and the cache with it; `q` is rotated."""
    batch, heads = key.shape[:2]
    sequence, head, at = jnp.arange(batch)[:, None], jnp.arange(heads), cache.keys.tokens
    values = cache.value.at[sequence, head, at].set(value.astype(cache.value.dtype), mode="drop")
    cache = dataclasses.replace(cache, keys=append(cache, key), value=values)
    part = _attend(cache, q.reshape(batch, heads, -1, q.shape[-1]))
    return attention.normalise(part, q.dtype).reshape(q.shape), cache


def append(cache: RunCache, key: Float[Array, "B K D"]) -> Runs | Plain:
    """The cache's keys with those of one more token."""
    return jax.vmap(jax.vmap(lambda keys, one: rle.append(keys, one, cache.tolerance)))(cache.keys, key)


def _attend(cache: RunCache, q: Float[Array, "B K G D"]) -> Part:
    one = rle.attend
    if cache.freqs is not None:
        freqs, most = np.asarray(cache.freqs, np.float32), jnp.max(cache.keys.tokens)
        one = functools.partial(rle.attend_unrotated, freqs=freqs, most=most)
    return jax.vmap(jax.vmap(one))(q, cache.keys, cache.value)


def full(cache: RunCache) -> Bool[Array, ""]:
    """Whether some head could refuse the next token for want of a slot: time to `decide`, or to `grow`."""
    if isinstance(cache.keys, Plain):
        return jnp.zeros((), bool)
    return jnp.any(cache.keys.runs >= cache.keys.key.shape[-2])


def grow(cache: RunCache, slots: int) -> RunCache:
    """The cache with room for more runs, if its codec is on; on the host, between steps."""
    if isinstance(cache.keys, Plain):
        return cache
    return dataclasses.replace(cache, keys=rle.resize(cache.keys, slots))
