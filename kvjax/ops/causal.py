"""Causal attention of many queries: whole prompts, at once or in chunks, and chunks over a cache."""

import einops
import jax
import jax.numpy as jnp

from kvjax.errors import ConfigError
from kvjax.ops import attention, kernels
from kvjax.ops.kernels import tiles
from kvjax.ops.precise import einsum
from kvjax.typing import Array, Bool, Float, Int32


def in_chunks(
    q: Float[Array, "C K G D"], key: Float[Array, "T K D"], value: Float[Array, "T K D"], start: Int32[Array, ""],
    chunk: int, window: int | None, cap: float | None = None, sink_logits: Float[Array, "K G"] | None = None,
) -> Float[Array, "C K G D"]:
    """Computes dense causal attention, one chunk of keys at a time.

    Scores take C x `chunk` numbers per head, whatever T is. Chunks after the last query, or before its sliding window,
    are not visited.

    Args:
      q: queries at the positions `start` to `start + C - 1`.
      key: keys from position 0 on.
      value: their values.
      start: position of the first query.
      chunk: keys visited at a time; T must be a multiple.
      window: tokens of the sliding window, the query's own included; None for all before it.
      cap: bound of the scaled scores (`kvjax.ops.attention.soft_capped`).
      sink_logits: learned logit of each query head (`kvjax.ops.attention.normalise`).

    Returns:
      The attention output in the type of `q`.

    Raises:
      ConfigError: T is not a multiple of `chunk`.
    """
    if key.shape[0] % chunk:
        raise ConfigError(f"{key.shape[0]} keys are not a multiple of chunk={chunk}; pad keys and values")
    queries = q.shape[0]
    q = einops.rearrange(q, "c k g d -> k (g c) d")
    query_position = start + jnp.arange(queries, dtype=jnp.int32)

    def visit(i, part):
        k = jax.lax.dynamic_slice_in_dim(key, i * chunk, chunk).swapaxes(0, 1)
        v = jax.lax.dynamic_slice_in_dim(value, i * chunk, chunk).swapaxes(0, 1)
        position = i * chunk + jnp.arange(chunk, dtype=jnp.int32)
        seen = position[None, :] <= query_position[:, None]
        if window is not None:
            seen &= position[None, :] > query_position[:, None] - window
        return attention.merge(part, attend_masked(scores_of_many(q, k, cap), v, seen[None]))

    first = 0 if window is None else jnp.maximum(0, start - window + 1) // chunk
    last = (start + queries + chunk - 1) // chunk
    total = jnp.zeros(q.shape[:2], jnp.float32)
    empty = attention.Part(jnp.zeros(q.shape, jnp.float32), jnp.full_like(total, attention.NEGATIVE), total)
    if sink_logits is not None:
        sink_logits = jnp.repeat(sink_logits, queries, axis=-1)
    out = attention.normalise(jax.lax.fori_loop(first, last, visit, empty), q.dtype, sink_logits)
    return einops.rearrange(out, "k (g c) d -> c k g d", c=queries)


def at_once(
    q: Float[Array, "T K G D"], key: Float[Array, "T K D"], value: Float[Array, "T K D"], window: int | None,
    cap: float | None = None, sink_logits: Float[Array, "K G"] | None = None,
) -> Float[Array, "T K G D"] | None:
    """Computes causal attention of a whole prompt where a kernel does it without writing scores to memory.

    Arguments are as those of `in_chunks`.

    Returns:
      The attention output in the type of `q`; None where `in_chunks` is to be used: on CPU, for what cuDNN does not
      compute on a GPU, and for prompts that fill no whole tiles on a TPU.
    """
    if cap is None and sink_logits is None and _by_cudnn(str(q.dtype), q.shape[-1]):
        tokens, heads, group, size = q.shape
        return jax.nn.dot_product_attention(
            q.reshape(tokens, heads * group, size), key.astype(q.dtype), value.astype(q.dtype), is_causal=True,
            local_window_size=None if window is None else (window - 1, 0), implementation="cudnn",
        ).reshape(q.shape)
    if not tiles.wanted():
        return None
    from kvjax.ops.kernels import prompt_attention  # imports Pallas, which takes a while

    if not prompt_attention.serves(q.shape[0]):
        return None
    return prompt_attention.attend(q, key, value, window, cap, sink_logits)


def _by_cudnn(dtype: str, size: int) -> bool:
    """Returns whether cuDNN attends vectors of `size` numbers here: NVIDIA's GPUs from Ampere on, in 16 bits."""
    if jax.default_backend() != "gpu" or dtype not in ("bfloat16", "float16") or size % 8:
        return False
    found = kernels.capability()
    return found >= (8, 0) and size <= (256 if found >= (9, 0) else 128)


def scores_of_many(
    q: Float[Array, "K GC D"], k: Float[Array, "K N D"], cap: float | None = None
) -> Float[Array, "K GC N"]:
    """Returns the scaled dot products of C queries per query head, in the layout that is fastest for many queries."""
    wider = jnp.promote_types(q.dtype, k.dtype)  # keys wider than the queries are not rounded to the queries' type
    scores = einsum("kqd,knd->kqn", q.astype(wider), k.astype(wider))
    return attention.soft_capped(scores * q.shape[-1] ** -0.5, cap)


def attend_masked(
    scores: Float[Array, "K GC N"], v: Float[Array, "K N D"], seen: Bool[Array, "#K C N"]
) -> attention.Part:
    """Attends like `kvjax.ops.attention.attend_scores` for C queries per query head, each with its own mask."""
    seen = jnp.tile(seen, (1, scores.shape[1] // seen.shape[1], 1))
    scores = jnp.where(seen, scores, attention.NEGATIVE)
    top = jnp.max(scores, axis=-1, initial=attention.NEGATIVE)
    weight = jnp.where(seen, jnp.exp(scores - top[..., None]), 0.0)
    return attention.Part(einsum("kqn,knd->kqd", weight, v.astype(jnp.float32)), top, jnp.sum(weight, axis=-1))
