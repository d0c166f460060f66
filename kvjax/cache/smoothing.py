"""Smoothing: the shift and scale that keys get before they are packed in few bits.

The codes of a vector share one range (`kvjax.ops.quantize`). Some models (Qwen2.5) add biases to their keys that are a
hundred times larger than the differences between keys, and the codes would spend their bits on these. So keys are
stored as (k - shift) / scale. Attention does not change: stored keys meet the query q as q * scale, and q . shift is
added to the scores (`kvjax.ops.attention.products`). SageAttention (Zhang et al., 2024) smooths keys by their mean in
the same way.

After rotation a bias is not constant, because each pair of dimensions turns with the position. The first tokens of a
sequence, rotated back from their positions, give the bias and the variance of each pair. The shift is the mean of the
rotated bias over all positions up to the capacity, and the scale is the root of that variance plus the variance of the
rotated bias. Thus a pair that has hardly begun to turn within a short prompt has room for its later values. If the
rotation is unknown (`Spec.rope`), shift and scale are mean and standard deviation of the first tokens' keys as they
are.

The first tokens are those after the sinks that are known when the first of them leaves the window: those of the prompt
(or of its first chunk), or, after a shorter prompt, those of the window. Later keys are packed with the same smoothing.
"""

import jax.numpy as jnp
import numpy as np

from kvjax.cache.types import Spec
from kvjax.ops import rotary
from kvjax.ops.quantize import Smoothing
from kvjax.typing import Array, Bool, Float, Int32

_PRIOR = 4  # weight, in tokens, of the mean variance of all channels in the variance of each
_LEAST = 1e-2  # least ratio of a channel's deviation to the size of biases: equal tokens tell nothing about others


def unknown_smoothing(spec: Spec) -> Smoothing:
    """Returns the smoothing of a sequence without packed keys: zeros, which mean unknown."""
    zeros = jnp.zeros((spec.kv_heads, spec.head_dim), jnp.float32)
    return Smoothing(zeros, zeros)


def learn_smoothing(
    spec: Spec, key: Float[Array, "K N D"], pos: Int32[Array, "N"], valid: Bool[Array, "N"]
) -> Smoothing:
    """Learns the smoothing of a sequence from its first keys.

    Args:
      spec: sizes of the layer's cache.
      key: keys, rotated as `spec.rope` says.
      pos: position of each key.
      valid: True for keys to learn from.

    Returns:
      The smoothing; it is unknown (zero scale) if fewer than two keys are valid.
    """
    key, count = key.astype(jnp.float32), jnp.sum(valid, dtype=jnp.int32)
    freqs = None if spec.rope is None else rotary.inverse_frequencies(spec.head_dim, spec.rope)
    if freqs is not None:
        key = rotary.rotate(key.swapaxes(0, 1), -pos, freqs).swapaxes(0, 1)
    bias = _mean(key, valid, count)
    pairs = 0 if freqs is None else len(freqs)
    variance = _shrunk(_mean(jnp.square(key - bias[:, None]), valid, count), bias, count, pairs)
    shift = bias
    if freqs is not None:
        cos, sin = _mean_turn(freqs, spec.capacity)
        shift = rotary.turn(bias, cos, sin)
        spread = 1 - jnp.square(cos) - jnp.square(sin)
        still = jnp.zeros(spec.head_dim - 2 * pairs, jnp.float32)
        variance += _of_pairs(jnp.square(bias), pairs) * jnp.concatenate([spread, spread, still])
    scale = jnp.where(variance > 0, jnp.sqrt(variance), 1.0)  # 1 if all keys are zero
    return Smoothing(shift, jnp.where(count > 1, scale, 0.0))


def _mean(x: Float[Array, "K N D"], valid: Bool[Array, "N"], count: Int32[Array, ""]) -> Float[Array, "K D"]:
    return jnp.sum(jnp.where(valid[:, None], x, 0.0), axis=1) / jnp.maximum(count, 1)


def _shrunk(
    variance: Float[Array, "K D"], bias: Float[Array, "K D"], count: Int32[Array, ""], pairs: int
) -> Float[Array, "K D"]:
    """Shrinks the variance of each channel, or pair of channels, towards the mean, as few tokens tell little of one."""
    variance = _of_pairs(variance, pairs)
    of_all = jnp.mean(variance, axis=-1, keepdims=True)
    least = _LEAST**2 * jnp.mean(jnp.square(bias), axis=-1, keepdims=True)
    return jnp.maximum((count * variance + _PRIOR * of_all) / (count + _PRIOR), least)


def _of_pairs(x: Float[Array, "K D"], pairs: int) -> Float[Array, "K D"]:
    """Returns the mean of each two dimensions that rotate together, in both; others stay as they are."""
    first, second, rest = rotary.split(x, pairs)
    mean = (first + second) / 2
    return jnp.concatenate([mean, mean, rest], axis=-1)


def _mean_turn(freqs: np.ndarray, count: int) -> Float[Array, "2 F"]:
    """Returns the mean cosine and sine of each pair's angle over positions 0 to count - 1, by a geometric series."""
    step = np.exp(1j * freqs.astype(np.float64))
    mean = (1 - step**count) / (1 - step) / count
    return jnp.asarray(np.stack([mean.real, mean.imag]), jnp.float32)
