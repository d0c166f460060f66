"""An attention cache in memory whose keys are runs: full attention, computed on physical keys.

    cache = run_cache.prefill(keys, values, lengths, capacity=8192, slots=6000)
    out, cache = run_cache.attend(cache, q, k, v)

One layer, one call per token, as with `kvjax.attend`; pure functions that may be used under `jax.jit`. Slots are fixed;
`full` says when a head has none left, and `grow` gives it more between steps. Tokens that come to a head without a free
slot are counted in `runs.refused`, and their keys are not kept.
"""

import functools

import jax
import jax.numpy as jnp

from kvjax import attention
from kvjax.codecs import rle
from kvjax.codecs.rle import Runs, Tolerance
from kvjax.errors import ConfigError
from kvjax.typing import Array, Bool, Float, Int32, pytree


@pytree
class RunCache:
    """Keys of one layer as runs, and values token by token."""

    runs: Runs  # [B, K, ...]
    value: Float[Array, "B K T D"]
    tolerance: Tolerance


@functools.partial(jax.jit, static_argnames=("capacity", "slots"))
def prefill(
    key: Float[Array, "B T K D"], value: Float[Array, "B T K D"], length: Int32[Array, "B"], *, capacity: int,
    slots: int, tolerance: Tolerance | None = None,
) -> RunCache:
    """A cache of prompts of `length[b] <= T` tokens, with room for `capacity` tokens in `slots` runs of each head.

    The tolerance is nought by default: lossless. ConfigError if the prompts are longer than the capacity.
    """
    if key.shape[1] > capacity:
        raise ConfigError(f"prompts of {key.shape[1]} tokens do not fit in capacity={capacity}; raise it")
    tolerance = Tolerance(jnp.float32(0), jnp.float32(0)) if tolerance is None else tolerance
    more = ((0, 0), (0, 0), (0, capacity - key.shape[1]), (0, 0))
    key, value = (jnp.pad(rows.swapaxes(1, 2), more) for rows in (key, value))
    encode = jax.vmap(lambda one, tokens: rle.encode(one, tokens, tolerance, slots), (0, None))
    return RunCache(jax.vmap(encode)(key, jnp.asarray(length, jnp.int32)), value, tolerance)


def attend(
    cache: RunCache, q: Float[Array, "B H D"], key: Float[Array, "B K D"], value: Float[Array, "B K D"]
) -> tuple[Float[Array, "B H D"], RunCache]:
    """Attention of the newest token over all, itself included, and the cache with it."""
    batch, heads = key.shape[:2]
    sequence, head, at = jnp.arange(batch)[:, None], jnp.arange(heads), cache.runs.tokens
    values = cache.value.at[sequence, head, at].set(value.astype(cache.value.dtype), mode="drop")
    append = jax.vmap(jax.vmap(lambda runs, one: rle.append(runs, one, cache.tolerance)))
    cache = RunCache(append(cache.runs, key), values, cache.tolerance)
    part = jax.vmap(jax.vmap(rle.attend))(q.reshape(batch, heads, -1, q.shape[-1]), cache.runs, values)
    return attention.normalise(part, q.dtype).reshape(q.shape), cache


def full(cache: RunCache) -> Bool[Array, ""]:
    """Whether some head could refuse the next token: time to `grow`."""
    return jnp.any(cache.runs.runs >= cache.runs.key.shape[-2])


def grow(cache: RunCache, slots: int) -> RunCache:
    """The cache with room for more runs; on the host, between steps."""
    return RunCache(rle.resize(cache.runs, slots), cache.value, cache.tolerance)
