"""Matrix products whose precision does not depend on a device's default."""

import jax
import jax.numpy as jnp

from kvjax.typing import Array, Float, Num

# By default a TPU rounds the factors of a product of f32 numbers to bfloat16, and an NVIDIA GPU may round them to TF32.
EXACT = jax.lax.Precision.HIGHEST


def einsum(equation: str, *operands: Num[Array, "..."]) -> Float[Array, "..."]:
    """Contracts arrays as `jax.numpy.einsum` does, and sums in f32.

    Products of f32 numbers are those of f32, on every device; products of two bfloat16 numbers are exact in f32 anyway.

    Returns:
      float32, whatever the operands' types; float64 if one of them is.
    """
    return jnp.einsum(equation, *operands, precision=_precision(operands), preferred_element_type=_sums(operands))


def matmul(left: Num[Array, "..."], right: Num[Array, "..."]) -> Float[Array, "..."]:
    """Multiplies matrices as `jax.numpy.matmul` does, with products and sums as in `einsum`."""
    both = (left, right)
    return jnp.matmul(left, right, precision=_precision(both), preferred_element_type=_sums(both))


def _precision(operands):
    return EXACT if _type(operands).itemsize >= 4 else None


def _sums(operands):
    return jnp.promote_types(_type(operands), jnp.float32)


def _type(operands):
    return jnp.result_type(*operands)
