"""Keys in one byte per element, with one scale per channel.

Some channels of keys are much larger than others, so that one scale per channel loses less than one per token. Scales
are those of the prompt; later keys beyond them are clipped. Run-length encoding of the result composes: `rle.encode`
takes integers, and `rle.attend(q * scale, ...)` needs no key turned back.
"""

import jax.numpy as jnp

from kvjax.typing import Array, Float, Num

_LARGEST = 127


def scale_of(key: Float[Array, "T D"]) -> Float[Array, "D"]:
    """The step of each channel; 1 for a channel that is all zero."""
    largest = jnp.max(jnp.abs(key), axis=0)
    return jnp.where(largest > 0, largest / _LARGEST, 1.0)


def quantise(key: Float[Array, "*T D"], scale: Float[Array, "D"]) -> Num[Array, "*T D"]:
    """int8 keys, clipped to what the scale can say."""
    return jnp.clip(jnp.round(key / scale), -_LARGEST, _LARGEST).astype(jnp.int8)


def dequantise(key: Num[Array, "*T D"], scale: Float[Array, "D"]) -> Float[Array, "*T D"]:
    """Keys again, each element at most half a step off unless it was clipped."""
    return key.astype(scale.dtype) * scale
