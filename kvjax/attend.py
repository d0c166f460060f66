"""Attention with a cache for any JAX model: one layer, one call per token.

    cache = kvjax.init_cache(kvjax.Quest(budget=256), batch=1, kv_heads=8, group=4, head_dim=64, capacity=8192)
    cache = kvjax.prefill_cache(cache, keys, values, lengths)
    out, cache = kvjax.attend(cache, q, k, v)

A cache is that of one layer: a model has one for each, and settings of a method that concern several layers
(`dense_layers`, `lookahead`, `reuse`) have no effect here. Blocks are kept in memory. A cache is a pytree of arrays and
all three functions are pure, so that they may be used under `jax.jit`, `jax.vmap` and `jax.lax.scan`; outside of
`jax.jit`, they compile themselves. Caches of equal layers may be stacked along a new first axis, for a scan or a vmap
over layers. `examples/attend_linen.py` has a list of layers and a scan over tokens, `examples/attend_nnx.py` a scan
over layers.

What a model must do, and what it must not:

  - rotate keys and queries by their positions before it gives them; the newest token's position is `cache.length`.
  - leave scaling to `attend`: scores are q . k / sqrt(head_dim). For another scale s, multiply q by s * sqrt(head_dim).
    `soft_cap` bounds the scores (Gemma 2), and `sink_logits` are gpt-oss's. Adapters of several layers (KVSwap) need
    the number of each, `init_cache(layer=)`.
  - order heads so that query head h reads KV head h // group, as Hugging Face's models and
    `jax.nn.dot_product_attention` do.
  - compute the attention of the prompt itself: `prefill_cache` stores keys and values, and attends nothing.

A cache holds no 64-bit numbers: arrays of float64 or int64 (`jax_enable_x64`) are converted to 32 bits.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import _validate
from kvjax.cache.fill import Prompts, check_enough, empty_state, fill_memory, last_queries
from kvjax.cache.in_memory import empty_pool
from kvjax.cache.layer import LayerCache, LayerPlan
from kvjax.cache.method import Method
from kvjax.cache.pool import StoreRef
from kvjax.cache.read import read_token
from kvjax.cache.write import write_token
from kvjax.errors import ConfigError, PromptError
from kvjax.inference import arguments
from kvjax.models.config import RopeConfig
from kvjax.ops import barriers, quantize, rotary
from kvjax.typing import Array, Float, Int, Int32, PyTree, pytree


@pytree
class AttentionCache:
    """The cache of one attention layer, an immutable value."""

    layer: LayerCache
    length: Int32[Array, "B"]  # tokens of each sequence
    plan: LayerPlan = dataclasses.field(metadata={"static": True})
    weights: PyTree | None = None  # what was fitted to this layer of the model; None = the method's for layer 0

    def __repr__(self) -> str:
        spec, (batch,) = self.plan.spec, self.length.shape
        mib = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.layer)) / 2**20
        return (f"AttentionCache({self.plan.method.name}, {batch} sequences of up to {spec.capacity:,} tokens, "
                f"{spec.kv_heads} KV heads of {spec.head_dim}, {mib:,.1f} MiB)")


def init_cache(
    method: Method, *, batch: int, kv_heads: int, group: int, head_dim: int, capacity: int, dtype: str = "float32",
    sliding: int | None = None, rope: RopeConfig | None = None, soft_cap: float | None = None, layer: int = 0,
) -> AttentionCache:
    """Creates an empty cache of one layer.

    Args:
      method: cache method.
      batch: number of sequences.
      kv_heads: KV heads.
      group: query heads per KV head; heads `i * group` to `(i + 1) * group - 1` read KV head i.
      head_dim: head size, by whose square root `attend` divides scores.
      capacity: largest number of tokens of a sequence.
      dtype: type of keys and values in blocks: float32, bfloat16, float16, int8 or int4 (`kvjax.ops.quantize`).
      sliding: newest tokens that the model lets a query attend, its own included; None = all.
      rope: how keys were rotated, for methods that rotate them back (ShadowKV, run-length keys before rotation); None =
        unknown, or not at all. Where it depends on the length of the text, give `rope.for_length(tokens, head_dim)`.
      soft_cap: bound of the model's scores s, which become soft_cap * tanh(s / soft_cap); None = no bound.
      layer: number of the layer in the model, for methods with adapters of each layer (KVSwap) or draws of its own
        (Random).

    Returns:
      The cache.

    Raises:
      ConfigError: a size is not a positive integer, `layer` is not a number from 0 on, or the method has no adapters
        for it, budget, window and capacity do not fit together, or `method`,
        `dtype`, `rope` or `soft_cap` is not of its kind, or `rope` depends on the length of the text.
    """
    sizes = {"batch": batch, "kv_heads": kv_heads, "group": group, "head_dim": head_dim, "capacity": capacity}
    if sliding is not None:
        sizes["sliding"] = sliding
    for name, size in sizes.items():
        if not _validate.whole(size, 1):
            raise ConfigError(f"{name}={size!r} must be a whole number of at least 1")
    arguments.check_method_and_slots(method, None)
    if not isinstance(rope, RopeConfig | None):
        raise ConfigError(f"rope={rope!r} must be a RopeConfig, or None for keys that no method rotates back")
    if rope is not None:
        rope.check(head_dim)
        rotary.inverse_frequencies(head_dim, rope)  # raises if they depend on the length
    if soft_cap is not None and not (_validate.number(soft_cap) and soft_cap > 0):
        raise ConfigError(f"soft_cap={soft_cap!r} must be a number above 0, or None for scores without a bound")
    if not _validate.whole(layer, 0):
        raise ConfigError(f"layer={layer!r} must be a whole number of at least 0")
    quantize.check(dtype, head_dim)
    spec = method.spec(kv_heads=kv_heads, group=group, head_dim=head_dim, capacity=capacity)
    spec = dataclasses.replace(spec, rope=rope, key_type=quantize.tail_type(dtype), sliding=sliding, soft_cap=soft_cap)
    return _empty(LayerPlan(method, spec), batch, dtype, jax.tree.map(jnp.asarray, method.weights(layer)))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _empty(plan: LayerPlan, batch: int, dtype: str, weights: PyTree) -> AttentionCache:
    filled = LayerCache(empty_state(plan, batch, dtype, weights), empty_pool(plan.spec, batch, dtype))
    return AttentionCache(filled, jnp.zeros(batch, jnp.int32), plan, weights)


def prefill_cache(
    cache: AttentionCache, key: Float[Array, "B T K D"], value: Float[Array, "B T K D"], length: Int[Array, "B"],
    query: Float[Array, "B T H D"] | None = None, token: Int[Array, "B T"] | None = None,
    sink_logits: Float[Array, "H"] | None = None,
) -> AttentionCache:
    """Fills a cache with prompts, whose own attention is the model's to compute.

    Args:
      cache: cache that gives the settings; its contents are not part of the result.
      key: rotated keys [B, T, K, D] of the prompts, right-padded.
      value: values [B, T, K, D].
      length: tokens of each prompt [B], at most T and the capacity. Under `jax.jit` lengths cannot be checked, and
        tokens beyond these limits are lost.
      query: rotated queries [B, T, H, D], for methods that use the prompt's queries (`Method.observed`): H2O, SnapKV,
        ChunkKV, InfLLM, SentenceKV and, with the weights of each prompt, DynSplit-KV require them, and InfiniGen uses
        the keys alone without them.
      token: token ids [B, T], which DynSplit-KV and SentenceKV require.
      sink_logits: as for `attend`; methods that score a prompt by its queries' attention need them.

    Returns:
      The cache.

    Raises:
      ConfigError: an array has the wrong shape, or the method requires queries or token ids that are missing.
      PromptError: `length` is not an array [B] of integers, or a prompt has too many tokens, or too few for a method
        that learns from prompts (`Method.least_prompt`).
    """
    # With NumPy lengths that are known stay so within a program that is being traced.
    lengths: Any = length if isinstance(length, jax.core.Tracer) else np.asarray(length)
    if lengths.ndim != 1:
        raise PromptError(f"length has the shape {list(lengths.shape)}; give one number for each sequence, [B]")
    _check_shapes(cache, (lengths.size, key.shape[1]), query, key, value, token)
    if not np.issubdtype(lengths.dtype, np.integer):
        raise PromptError(f"lengths are {lengths.dtype}; give whole numbers")
    lengths, most = lengths.astype(np.int32), min(key.shape[1], cache.plan.spec.capacity)
    if isinstance(lengths, np.ndarray):
        if lengths.min() < 0:
            raise PromptError(f"length={lengths.min()} is negative; give 0 for a sequence without a prompt")
        if lengths.max() > most:
            raise PromptError(f"length={lengths.max()} is beyond the {key.shape[1]} given tokens or "
                              f"capacity={cache.plan.spec.capacity}; give all tokens, or raise the capacity")
        check_enough(cache.plan, lengths)
    _check_token(cache, token)
    sink_logits = _of_kv_heads(cache, sink_logits)
    return _prefilled(cache, *map(_in_32_bits, (key, value, lengths, query, token, sink_logits)))


def _check_shapes(cache: AttentionCache, rows: tuple[int, ...], query, key, value, token) -> None:
    """Raises ConfigError for arrays whose shapes do not fit the cache, which JAX might broadcast silently."""
    spec = cache.plan.spec
    keys, batch = (spec.kv_heads, spec.head_dim), cache.length.shape
    expected = {"q": (*rows, spec.kv_heads * spec.group, spec.head_dim), "key": (*rows, *keys),
                "value": (*rows, *keys), "token": rows}
    for (name, shape), given in zip(expected.items(), (query, key, value, token), strict=True):
        if given is not None and (given.shape != shape or shape[:1] != batch):
            raise ConfigError(f"{name} is {list(given.shape)}, but this cache needs {[*batch, *shape[1:]]}; give an "
                              "array of that shape")


def _in_32_bits(x: Any) -> Any:
    """Converts float64 to float32 and int64 to int32; returns anything else, None included, as it is."""
    narrow = {"float64": jnp.float32, "int64": jnp.int32}
    return x.astype(narrow[x.dtype.name]) if x is not None and x.dtype.name in narrow else x


def _check_token(cache: AttentionCache, token) -> None:
    if token is None and cache.plan.method.reads_tokens:
        raise ConfigError(f"{cache.plan.method.name} ends blocks at delimiter tokens; give the token ids as token=")


def _of_kv_heads(cache: AttentionCache, sink_logits: Float[Array, "H"] | None) -> Float[Array, "K G"] | None:
    """Returns the logits of query heads by KV head; raises ConfigError unless there is one for each query head."""
    if sink_logits is None:
        return None
    heads = (cache.plan.spec.kv_heads, cache.plan.spec.group)
    if sink_logits.shape != (heads[0] * heads[1],):
        raise ConfigError(f"sink_logits is {list(sink_logits.shape)}, but this cache needs {[heads[0] * heads[1]]}; "
                          "give one number for each query head")
    return sink_logits.reshape(heads)


@jax.jit
def _prefilled(cache: AttentionCache, key, value, length, query, token, sink_logits) -> AttentionCache:
    dtype = cache.layer.pool.dtype
    state = empty_state(cache.plan, key.shape[0], dtype, cache.weights)
    if query is not None:
        query = last_queries(query, length, cache.plan.method.observed)
    filled = fill_memory(cache.plan, state, Prompts(key, value, length, token, query, sink_logits), dtype)
    return dataclasses.replace(cache, layer=filled, length=length)


@jax.jit
def attend(
    cache: AttentionCache, q: Float[Array, "B H D"], key: Float[Array, "B K D"], value: Float[Array, "B K D"],
    token: Int[Array, "B"] | None = None, sink_logits: Float[Array, "H"] | None = None,
) -> tuple[Float[Array, "B H D"], AttentionCache]:
    """Attends the cache with the newest token of each sequence, and adds that token to the cache.

    The token attends itself, too; it counts among the tokens of the window.

    Args:
      cache: cache before the token.
      q: query [B, H, D], rotated to the position `cache.length` and not scaled.
      key: rotated key [B, K, D].
      value: value [B, K, D].
      token: token id [B], which DynSplit-KV and SentenceKV require.
      sink_logits: learned logit [H] of each query head, which takes a share of its softmax and adds nothing to the
        output; None = the model has none.

    Returns:
      (Output [B, H, D] in the type of `q`, cache with the token). The output is NaN for a sequence that is full.

    Raises:
      ConfigError: an array has the wrong shape, or the method requires token ids and `token` is None.
    """
    _check_shapes(cache, q.shape[:1], q, key, value, token)
    _check_token(cache, token)
    kind, ref = q.dtype, StoreRef(jnp.int32(-1), jnp.int32(0))
    q, key, value, token = map(_in_32_bits, (q, key, value, token))
    at, zero = cache.length, jnp.int32(0)
    sink_logits = _of_kv_heads(cache, sink_logits)
    out, read, fresh, _, report = read_token(cache.plan, cache.layer, q, key, value, at, zero, ref, None, sink_logits)
    gate = jnp.ones(at.shape, bool) & barriers.exists(out) & barriers.positions_exist([report.selected])
    written, _ = write_token(cache.plan, read, fresh, at, gate, zero, ref, token)
    fits = (at < cache.plan.spec.capacity)[:, None, None]
    return jnp.where(fits, out, jnp.nan).astype(kind), dataclasses.replace(cache, layer=written, length=at + 1)
