"""Attention with a cache for any JAX model: one layer, one call per token.

    cache = kvjax.init_cache(kvjax.Quest(budget=256), batch=1, kv_heads=8, group=4, head_dim=64, capacity=8192)
    cache = kvjax.prefill_cache(cache, keys, values, lengths)
    out, cache = kvjax.attend(cache, q, k, v)

Keys and queries come with their position already applied; blocks are kept in memory. All three
functions are pure and may be used under `jax.jit`; they are compiled where they are not. What a method
says of other layers (`dense_layers`, `lookahead`, `reuse`) has no effect here, where there is one.

A cache has no numbers of 64 bits: where `jax_enable_x64` makes such arrays, they enter it in 32.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import _validate
from kvjax.cache.fill import Prompts, check_enough, empty_state, fill_memory, last_queries
from kvjax.cache.layer import LayerCache, LayerPlan
from kvjax.cache.method import Method
from kvjax.cache.pool import MemoryPool, StoreRef
from kvjax.cache.read import read_token
from kvjax.cache.write import write_token
from kvjax.errors import ConfigError, PromptError
from kvjax.inference import arguments
from kvjax.models.config import RopeConfig
from kvjax.ops import barriers, quantize
from kvjax.typing import Array, Float, Int, Int32, pytree


@pytree
class AttentionCache:
    """The cache of one attention layer."""

    layer: LayerCache
    length: Int32[Array, "B"]
    plan: LayerPlan = dataclasses.field(metadata={"static": True})


def init_cache(
    method: Method, *, batch: int, kv_heads: int, group: int, head_dim: int, capacity: int, dtype: str = "float32",
    sliding: int | None = None, rope: RopeConfig | None = None,
) -> AttentionCache:
    """An empty cache; `dtype` is how its blocks keep keys and values (`kvjax.ops.quantize`).

    `rope` says how keys were rotated, for methods that turn them back (ShadowKV, run-length keys before rotation).
    Raises ConfigError where budget, window and capacity do not fit together, or for a type that there is not.
    """
    sizes = {"batch": batch, "kv_heads": kv_heads, "group": group, "head_dim": head_dim, "capacity": capacity}
    if sliding is not None:
        sizes["sliding"] = sliding
    for name, size in sizes.items():
        if not _validate.whole(size, 1):
            raise ConfigError(f"{name}={size!r} must be a whole number of at least 1")
    arguments.check_method_and_slots(method, None)
    if not isinstance(rope, RopeConfig | None):
        raise ConfigError(f"rope={rope!r} must be a RopeConfig, or None for keys that no method turns back")
    quantize.check(dtype, head_dim)
    spec = method.spec(kv_heads=kv_heads, group=group, head_dim=head_dim, capacity=capacity)
    spec = dataclasses.replace(spec, rope=rope, key_type=quantize.tail_type(dtype), sliding=sliding)
    return _empty(LayerPlan(method, spec), batch, dtype)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _empty(plan: LayerPlan, batch: int, dtype: str) -> AttentionCache:
    pool = MemoryPool.zeros(plan.spec, batch, dtype)
    return AttentionCache(LayerCache(empty_state(plan, batch, dtype), pool), jnp.zeros(batch, jnp.int32), plan)


def prefill_cache(
    cache: AttentionCache, key: Float[Array, "B T K D"], value: Float[Array, "B T K D"], length: Int[Array, "B"],
    query: Float[Array, "B T H D"] | None = None, token: Int[Array, "B T"] | None = None,
) -> AttentionCache:
    """A cache that holds prompts of `length[b] <= T` tokens; what the given cache held is dropped.

    `query` is for methods that look at the prompt's queries (`Method.observation`): InfLLM needs them, InfiniGen goes
    by the keys alone without them; `token` has the ids of all tokens, which DynSplit-KV and SentenceKV ask for. Raises
    ConfigError without those, PromptError for lengths beyond T or the capacity, or too short for a method
    that learns from prompts (`Method.least_prompt`). Under `jax.jit`, where nobody knows them, tokens beyond are lost.
    """
    length = jnp.asarray(length)
    if length.ndim != 1:
        raise PromptError(f"length has the shape {list(length.shape)}; give one number for each sequence, [B]")
    _check_shapes(cache, (length.size, key.shape[1]), query, key, value, token)
    if not jnp.issubdtype(length.dtype, jnp.integer):
        raise PromptError(f"lengths are {length.dtype}; give whole numbers")
    length = length.astype(jnp.int32)
    most = min(key.shape[1], cache.plan.spec.capacity)
    if not isinstance(length, jax.core.Tracer):
        if int(jnp.min(length)) < 0:
            raise PromptError(f"length={int(jnp.min(length))} is negative; give 0 for a sequence without a prompt")
        if int(jnp.max(length)) > most:
            raise PromptError(f"length={int(jnp.max(length))} is beyond the {key.shape[1]} given tokens or "
                              f"capacity={cache.plan.spec.capacity}; give all tokens, or raise the capacity")
        check_enough(cache.plan, np.asarray(length))
    _check_token(cache, token)
    return _prefilled(cache, *map(_in_32_bits, (key, value, length, query, token)))


def _check_shapes(cache: AttentionCache, rows: tuple[int, ...], query, key, value, token) -> None:
    """Raises ConfigError for arrays that are not of this cache, of which JAX would make others of the right size."""
    spec = cache.plan.spec
    keys, batch = (spec.kv_heads, spec.head_dim), cache.length.shape
    expected = {"q": (*rows, spec.kv_heads * spec.group, spec.head_dim), "key": (*rows, *keys),
                "value": (*rows, *keys), "token": rows}
    for (name, shape), given in zip(expected.items(), (query, key, value, token), strict=True):
        if given is not None and (given.shape != shape or shape[:1] != batch):
            raise ConfigError(f"{name} is {list(given.shape)}, and this cache wants {[*batch, *shape[1:]]}")


def _in_32_bits(x: Any) -> Any:
    """An array, if there is one, as a cache takes it: float64 as float32, int64 as int32."""
    narrow = {"float64": jnp.float32, "int64": jnp.int32}
    return x.astype(narrow[x.dtype.name]) if x is not None and x.dtype.name in narrow else x


def _check_token(cache: AttentionCache, token) -> None:
    if token is None and cache.plan.method.reads_tokens:
        raise ConfigError(f"{cache.plan.method.name} ends blocks at delimiters; give token=, the ids of the tokens")


@jax.jit
def _prefilled(cache: AttentionCache, key, value, length, query, token) -> AttentionCache:
    dtype = cache.layer.pool.dtype
    state = empty_state(cache.plan, key.shape[0], dtype)
    if query is not None:
        query = last_queries(query, length, cache.plan.method.observation)
    filled = fill_memory(cache.plan, state, Prompts(key, value, length, token, query), dtype)
    return dataclasses.replace(cache, layer=filled, length=length)


@jax.jit
def attend(
    cache: AttentionCache, q: Float[Array, "B H D"], key: Float[Array, "B K D"], value: Float[Array, "B K D"],
    token: Int[Array, "B"] | None = None,
) -> tuple[Float[Array, "B H D"], AttentionCache]:
    """Attention of the newest token over the cache, and the cache with that token in it.

    A cache that is full has no place for it: the output of a token beyond the capacity is NaN. `token` has its id, for
    methods that ask for it; raises ConfigError if one does, and is not given it. The output has the type of `q`.
    """
    _check_shapes(cache, q.shape[:1], q, key, value, token)
    _check_token(cache, token)
    kind, ref = q.dtype, StoreRef(jnp.int32(-1), jnp.int32(0))
    q, key, value, token = map(_in_32_bits, (q, key, value, token))
    at, zero = cache.length, jnp.int32(0)
    out, read, fresh, _, report = read_token(cache.plan, cache.layer, q, key, value, at, zero, ref)
    gate = jnp.ones(at.shape, bool) & barriers.exists(out) & barriers.positions_exist([report.selected])
    written, _ = write_token(cache.plan, read, fresh, at, gate, zero, ref, token)
    fits = (at < cache.plan.spec.capacity)[:, None, None]
    return jnp.where(fits, out, jnp.nan).astype(kind), dataclasses.replace(cache, layer=written, length=at + 1)
