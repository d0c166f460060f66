"""Causal attention of whole prompts on TPUs by JAX's splash attention, which keeps scores on the chip.

Its masks are built from the prompt's length when a program is traced, so that it serves whole prompts, not chunks at a
place that is known later; building one takes time with the square of the length, and is kept.
"""

import contextlib
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

from kvjax.ops.kernels import tiles
from kvjax.typing import Array, Float

_STEP = 512  # most queries, and keys, multiplied at once
_BROUGHT = 1024  # most keys brought to the chip at once


def serves(tokens: int) -> bool:
    """Returns whether prompts of this many tokens can be read: they come in tiles of lanes."""
    return tokens % tiles.LANES == 0


def attend(
    q: Float[Array, "T K G D"], key: Float[Array, "T K D"], value: Float[Array, "T K D"], window: int | None,
    cap: float | None, sink_logits: Float[Array, "K G"] | None,
) -> Float[Array, "T K G D"]:
    """Computes causal attention of a whole prompt; arguments are as those of `kvjax.ops.causal.in_chunks`.

    Scores and sums are f32. In bfloat16 the scaled queries are rounded to it, and weights before they meet values.
    """
    tokens, _, group, size = q.shape
    kernel = _kernel(tokens, group, window, cap)
    q, key, value = jnp.moveaxis(q, 0, 2) * size**-0.5, key.swapaxes(0, 1), value.swapaxes(0, 1)
    exact = jax.default_matmul_precision("highest") if q.dtype == jnp.float32 else contextlib.nullcontext()
    with exact:  # the kernel has no argument for it, and Mosaic takes none for bfloat16
        out = jax.vmap(lambda q, k, v, sinks: kernel(q, k, v, sinks=sinks))(q, key, value, sink_logits)
    return jnp.moveaxis(out, 2, 0)


@functools.cache
def _kernel(tokens: int, group: int, window: int | None, cap: float | None):
    """Returns the kernel for one KV head; masks are arrays, not traced ones, so that programs can share them."""
    shape = (tokens, tokens)
    mask = (splash_attention_mask.CausalMask(shape) if window is None or window >= tokens
            else splash_attention_mask.LocalMask(shape, (window - 1, 0), 0))
    step, brought = math.gcd(_STEP, tokens), math.gcd(_BROUGHT, tokens)
    with jax.ensure_compile_time_eval():
        return splash_attention_kernel.make_splash_mqa_single_device(
            splash_attention_mask.MultiHeadMask([mask] * group),
            block_sizes=splash_attention_kernel.BlockSizes(block_q=step, block_kv=brought, block_kv_compute=step),
            attn_logits_soft_cap=cap, interpret=tiles.interpreted(),
        )
