"""Vectors that represent the keys of a block when blocks are ranked: element-wise bounds, or the mean.

Both are updated key by key and score all blocks with one matrix product. They are stored dimension by dimension, which
is the fastest layout to read if there are few queries.
"""

import jax.numpy as jnp
import numpy as np

from kvjax.cache.types import Spec
from kvjax.ops.indexing import with_column
from kvjax.ops.topk import vector_products
from kvjax.typing import Array, Float, Int32, pytree

_FAR = np.float32(1e30)  # for empty blocks: finite, so that their scores are very low and never NaN


@pytree
class Bounds:
    """Element-wise minimum and maximum, which bound every score (Quest, section 3.3; DynSplit-KV, section 4.2)."""

    # One array of one sign, so that a key is added by one maximum and all blocks are scored by one product.
    far: Float[Array, "*B K D2 NB"]  # maximum of -key, then maximum of key

    @classmethod
    def empty(cls, spec: Spec) -> "Bounds":
        """Returns the bounds of blocks without keys."""
        return cls(jnp.full((spec.kv_heads, 2 * spec.head_dim, spec.num_blocks), -_FAR, jnp.float32))

    @property
    def low(self) -> Float[Array, "*B K D NB"]:
        """Element-wise minimum of each block's keys."""
        return -self.far[..., : self.far.shape[-2] // 2, :]

    @property
    def high(self) -> Float[Array, "*B K D NB"]:
        """Element-wise maximum of each block's keys."""
        return self.far[..., self.far.shape[-2] // 2 :, :]

    def take(self, block: Int32[Array, "K T"], keys: Float[Array, "K T D"]) -> "Bounds":
        """Returns the bounds with keys added to the given blocks; block NB drops a key."""
        both = _both_signs(keys).astype(self.far.dtype)
        if block.shape[1] == 1:
            return Bounds(with_column(self.far, block[:, 0], both[:, 0], "max"))
        head = jnp.arange(block.shape[0], dtype=jnp.int32)[:, None]
        return Bounds(self.far.at[head, :, block].max(both, mode="drop"))

    def scores(self, q: Float[Array, "K G D"], count: Int32[Array, "K NB"]) -> Float[Array, "K G NB"]:
        """Returns sum_d max(q_d low_d, q_d high_d) of each block, scaled as attention scores are.

        Args:
          q: [K, G, D], queries.
          count: int32[K, NB], keys of each block; unused here, as empty blocks score low by their bounds.

        Returns:
          [K, G, NB].
        """
        # max(q l, q h) = max(-q, 0) (-l) + max(q, 0) h: a matrix product instead of a K G NB D tensor.
        return vector_products(self.far, jnp.maximum(_both_signs(q), 0)) * q.shape[-1] ** -0.5


def _both_signs(x: Float[Array, "*B D"]) -> Float[Array, "*B D2"]:
    return jnp.concatenate([-x, x], axis=-1)


@pytree
class Means:
    """Mean key of each block, stored as a sum (DynSplit-KV, Appendix A.2)."""

    total: Float[Array, "*B K D NB"]

    @classmethod
    def empty(cls, spec: Spec) -> "Means":
        """Returns the sums of blocks without keys."""
        return cls(jnp.zeros((spec.kv_heads, spec.head_dim, spec.num_blocks), jnp.float32))

    def take(self, block: Int32[Array, "K T"], keys: Float[Array, "K T D"]) -> "Means":
        """Returns the sums with keys added to the given blocks; block NB drops a key."""
        if block.shape[1] == 1:
            return Means(with_column(self.total, block[:, 0], keys[:, 0], "add"))
        head = jnp.arange(block.shape[0], dtype=jnp.int32)[:, None]
        return Means(self.total.at[head, :, block].add(keys.astype(self.total.dtype), mode="drop"))

    def scores(self, q: Float[Array, "K G D"], count: Int32[Array, "K NB"]) -> Float[Array, "K G NB"]:
        """Returns q . mean key of each block, scaled as attention scores are.

        Args:
          q: [K, G, D], queries.
          count: int32[K, NB], keys of each block.

        Returns:
          [K, G, NB]; very low for empty blocks.
        """
        scores = vector_products(self.total, q) * q.shape[-1] ** -0.5
        return jnp.where(count[:, None] > 0, scores / jnp.maximum(count, 1)[:, None], -_FAR)


VECTORS = {"minmax": Bounds, "mean": Means}
