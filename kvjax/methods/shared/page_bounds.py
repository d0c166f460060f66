"""What stands for the keys of a block when a query ranks blocks: their bounds, or their mean.

Both take keys in as they come and score all blocks with one matrix product. They lie dimension by dimension, as such
vectors are read fastest where few queries meet them.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from kvjax.cache.method import Spec
from kvjax.ops.topk import vector_products
from kvjax.typing import Array, Float, Int32, pytree

_FAR = np.float32(1e30)  # for empty blocks: finite, so that their scores are very low and never NaN


@pytree
class Bounds:
    """Element-wise minimum and maximum: bounds every score (Quest, section 3.3; DynSplit-KV, section 4.2)."""

    # One array and one sign, so that a key is one maximum to take and all blocks are one product to score.
    far: Float[Array, "*B K D2 NB"]  # greatest of -key, then greatest of key

    @classmethod
    def empty(cls, spec: Spec) -> "Bounds":
        """Of blocks without keys."""
        return cls(jnp.full((spec.kv_heads, 2 * spec.head_dim, spec.num_blocks), -_FAR, jnp.float32))

    @property
    def low(self) -> Float[Array, "*B K D NB"]:
        """Smallest of each block's keys."""
        return -self.far[..., : self.far.shape[-2] // 2, :]

    @property
    def high(self) -> Float[Array, "*B K D NB"]:
        """Greatest of each block's keys."""
        return self.far[..., self.far.shape[-2] // 2 :, :]

    def take(self, block: Int32[Array, "K T"], keys: Float[Array, "K T D"]) -> "Bounds":
        """With keys taken into their blocks (NB = none)."""
        head = jnp.arange(block.shape[0], dtype=jnp.int32)[:, None]
        both = _both_signs(keys).astype(self.far.dtype)
        return dataclasses.replace(self, far=self.far.at[head, :, block].max(both, mode="drop"))

    def scores(self, q: Float[Array, "K G D"], count: Int32[Array, "K NB"]) -> Float[Array, "K G NB"]:
        """sum_d max(q_d low_d, q_d high_d), scaled as attention scores are."""
        # max(q l, q h) = max(-q, 0) (-l) + max(q, 0) h: a matrix product instead of a K G NB D tensor.
        return vector_products(self.far, jnp.maximum(_both_signs(q), 0)) * q.shape[-1] ** -0.5


def _both_signs(x: Float[Array, "*B D"]) -> Float[Array, "*B D2"]:
    return jnp.concatenate([-x, x], axis=-1)


@pytree
class Means:
    """Mean key, kept as a sum (DynSplit-KV, Appendix A.2)."""

    total: Float[Array, "*B K D NB"]

    @classmethod
    def empty(cls, spec: Spec) -> "Means":
        """Of blocks without keys."""
        return cls(jnp.zeros((spec.kv_heads, spec.head_dim, spec.num_blocks), jnp.float32))

    def take(self, block: Int32[Array, "K T"], keys: Float[Array, "K T D"]) -> "Means":
        """With keys taken into their blocks (NB = none)."""
        head = jnp.arange(block.shape[0], dtype=jnp.int32)[:, None]
        return Means(self.total.at[head, :, block].add(keys.astype(self.total.dtype), mode="drop"))

    def scores(self, q: Float[Array, "K G D"], count: Int32[Array, "K NB"]) -> Float[Array, "K G NB"]:
        """q . mean key, scaled as attention scores are."""
        scores = vector_products(self.total, q) * q.shape[-1] ** -0.5
        return jnp.where(count[:, None] > 0, scores / jnp.maximum(count, 1)[:, None], -_FAR)


VECTORS = {"minmax": Bounds, "mean": Means}
