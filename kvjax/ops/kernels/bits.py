"""Floats by their bits, for kernels whose compilers have no operation for them."""

import jax
import jax.numpy as jnp

from kvjax.typing import Array, Float, Int32


def in_bfloat16(x: Float[Array, "*N"]) -> list[Array]:
    """Splits f32 numbers into three of bfloat16 that sum to them."""
    parts = []
    for _ in range(3):
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
        parts.append(jax.lax.bitcast_convert_type(bits, jnp.float32))
        x = x - parts[-1]
    return [part.astype(jnp.bfloat16) for part in parts]


def from_f16(bits: Int32[Array, "*N"]) -> Float[Array, "*N"]:
    """Returns the numbers with these bits as f16; finite ones only."""
    exponent, fraction = bits >> 10 & 31, bits & 1023
    normal = jax.lax.bitcast_convert_type(exponent + 112 << 23 | fraction << 13, jnp.float32)
    size = jnp.where(exponent == 0, fraction.astype(jnp.float32) * 2.0**-24, normal)
    return jnp.where(bits >> 15 == 1, -size, size)
