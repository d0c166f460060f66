"""What stands for the keys of a block when a query ranks blocks: their bounds, or their mean.

Both take keys in as they come and score all blocks with one or two matrix products.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from kvjax.attention import products
from kvjax.method import Spec
from kvjax.typing import Array, Float, Int32, pytree

_FAR = np.float32(1e30)  # for empty blocks: finite, so that their scores are very low and never NaN


@pytree
class Bounds:
    """Element-wise minimum and maximum: bounds every score (Quest, section 3.3; DynSplit-KV, section 4.2)."""

    low: Float[Array, "*B K NB D"]
    high: Float[Array, "*B K NB D"]

    @classmethod
    def empty(cls, spec: Spec, **fields) -> "Bounds":
        """Of blocks without keys."""
        shape = (spec.kv_heads, spec.num_blocks, spec.head_dim)
        return cls(jnp.full(shape, _FAR), jnp.full(shape, -_FAR), **fields)

    def take(self, block: Int32[Array, "K T"], keys: Float[Array, "K T D"]) -> "Bounds":
        """With keys taken into their blocks (NB = none)."""
        head = jnp.arange(block.shape[0])[:, None]
        return dataclasses.replace(
            self,
            low=self.low.at[head, block].min(keys.astype(self.low.dtype), mode="drop"),
            high=self.high.at[head, block].max(keys.astype(self.high.dtype), mode="drop"),
        )

    def scores(self, q: Float[Array, "K G D"], count: Int32[Array, "K NB"]) -> Float[Array, "K G NB"]:
        """sum_d max(q_d low_d, q_d high_d), scaled as attention scores are."""
        # max(q l, q h) = max(q, 0) h + min(q, 0) l, two matrix products instead of a K G NB D tensor.
        bound = products((self.high, jnp.maximum(q, 0)), (self.low, jnp.minimum(q, 0)))
        return bound * q.shape[-1] ** -0.5


@pytree
class Means:
    """Mean key, kept as a sum (DynSplit-KV, Appendix A.2)."""

    total: Float[Array, "*B K NB D"]

    @classmethod
    def empty(cls, spec: Spec) -> "Means":
        """Of blocks without keys."""
        return cls(jnp.zeros((spec.kv_heads, spec.num_blocks, spec.head_dim)))

    def take(self, block: Int32[Array, "K T"], keys: Float[Array, "K T D"]) -> "Means":
        """With keys taken into their blocks (NB = none)."""
        head = jnp.arange(block.shape[0])[:, None]
        return Means(self.total.at[head, block].add(keys.astype(self.total.dtype), mode="drop"))

    def scores(self, q: Float[Array, "K G D"], count: Int32[Array, "K NB"]) -> Float[Array, "K G NB"]:
        """q . mean key, scaled as attention scores are."""
        scores = products((self.total, q)) * q.shape[-1] ** -0.5
        return jnp.where(count[:, None] > 0, scores / jnp.maximum(count, 1)[:, None], -_FAR)


VECTORS = {"minmax": Bounds, "mean": Means}
