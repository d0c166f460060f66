"""Learns by how much keys are shifted and scaled before they are packed in few bits.

A vector's codes share one range (`kvjax.ops.quantize`). Some models add biases to their keys that are a hundred times
as large as what tells keys apart (Qwen2.5), and the codes would spend their bits on these. So keys are kept as
(k - shift) / scale. Attention does not change: a query q meets what is kept as q * scale, and q . shift is added to its
scores (`kvjax.ops.attention.products`). SageAttention (Zhang et al., 2024) smooths keys by their mean in the same way.

Rotated, a bias is no constant: each pair of dimensions goes round. Turned back from their positions, the first tokens
of a sequence tell the bias and the spread of each pair; the shift is the mean of the rotated bias over all positions up
to the capacity, and the scale the root of spread plus variance of the rotated bias. So a pair that has hardly begun to
turn within a short prompt has room for where it will be later. Where the rotation is not known (`Spec.rope`), shift and
scale are mean and spread of the first tokens' keys as they are.

First tokens are those between the sinks and the end when the first of them leaves the window: those of the prompt
(read in chunks: of its first chunk), or, after a shorter one, of the window. What is packed later is packed alike.
"""

import jax.numpy as jnp
import numpy as np

from kvjax.cache.types import Spec
from kvjax.ops import rotary
from kvjax.ops.quantize import Smoothing
from kvjax.typing import Array, Bool, Float, Int32

_PRIOR = 4  # tokens that the mean spread of all channels counts as in the spread of each
_LEAST = 1e-2  # spread of a channel over the size of biases, at least: equal tokens say nothing of others


def unknown_smoothing(spec: Spec) -> Smoothing:
    """Returns the smoothing of a sequence of which no key is packed yet."""
    zeros = jnp.zeros((spec.kv_heads, spec.head_dim), jnp.float32)
    return Smoothing(zeros, zeros)


def learn_smoothing(
    spec: Spec, key: Float[Array, "K N D"], pos: Int32[Array, "N"], valid: Bool[Array, "N"]
) -> Smoothing:
    """Returns the smoothing for a sequence that begins with these keys; unknown where fewer than two are valid."""
    key, count = key.astype(jnp.float32), jnp.sum(valid, dtype=jnp.int32)
    freqs = None if spec.rope is None else rotary.inverse_frequencies(spec.head_dim, spec.rope)
    if freqs is not None:
        key = rotary.rotate(key.swapaxes(0, 1), -pos, freqs).swapaxes(0, 1)
    bias = _mean(key, valid, count)
    variance = _shrunk(_mean(jnp.square(key - bias[:, None]), valid, count), bias, count, paired=freqs is not None)
    shift = bias
    if freqs is not None:
        cos, sin = _mean_turn(freqs, spec.capacity)
        shift = rotary.turn(bias, cos, sin)
        variance += _twice(_pairs(jnp.square(bias)) * (1 - jnp.square(cos) - jnp.square(sin)))
    scale = jnp.where(variance > 0, jnp.sqrt(variance), 1.0)  # where all keys are zero
    return Smoothing(shift, jnp.where(count > 1, scale, 0.0))


def _mean(x: Float[Array, "K N D"], valid: Bool[Array, "N"], count: Int32[Array, ""]) -> Float[Array, "K D"]:
    return jnp.sum(jnp.where(valid[:, None], x, 0.0), axis=1) / jnp.maximum(count, 1)


def _shrunk(
    variance: Float[Array, "K D"], bias: Float[Array, "K D"], count: Int32[Array, ""], paired: bool
) -> Float[Array, "K D"]:
    """The variance of each channel, or pair of channels, nearer to that of all, as few tokens tell little of one."""
    if paired:
        variance = _twice(_pairs(variance))
    of_all = jnp.mean(variance, axis=-1, keepdims=True)
    least = _LEAST**2 * jnp.mean(jnp.square(bias), axis=-1, keepdims=True)
    return jnp.maximum((count * variance + _PRIOR * of_all) / (count + _PRIOR), least)


def _pairs(x: Float[Array, "K D"]) -> Float[Array, "K F"]:
    """The mean over the two dimensions that are turned together."""
    first, second = jnp.split(x, 2, axis=-1)
    return (first + second) / 2


def _twice(x: Float[Array, "K F"]) -> Float[Array, "K D"]:
    return jnp.concatenate([x, x], axis=-1)


def _mean_turn(freqs: np.ndarray, count: int) -> Float[Array, "2 F"]:
    """Mean cosine and sine of each pair's angle over positions 0 to count - 1, as the sum of a geometric series."""
    step = np.exp(1j * freqs.astype(np.float64))
    mean = (1 - step**count) / (1 - step) / count
    return jnp.asarray(np.stack([mean.real, mean.imag]), jnp.float32)
