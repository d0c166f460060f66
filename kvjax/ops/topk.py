"""Block ranking: products of block vectors with queries, one score per KV head, and the top M blocks."""

import functools

import jax
import jax.numpy as jnp

from kvjax.ops import kernels
from kvjax.ops.barriers import computed_once
from kvjax.ops.precise import einsum
from kvjax.typing import Array, Bool, Float, Int32

AGGREGATIONS = ("mean", "max", "softmax_mean", "softmax_max")


def vector_products(vectors: Float[Array, "K D N"], q: Float[Array, "K G D"]) -> Float[Array, "K G N"]:
    """Returns the inner products of each KV head's queries with its vectors, stored dimension by dimension."""
    like = jax.ShapeDtypeStruct((*q.shape[:-1], vectors.shape[-1]), jnp.float32)
    return kernels.on_cpu("vector_products", like, _vector_products, vectors, q.astype(jnp.float32))


def _vector_products(vectors: Float[Array, "K D N"], q: Float[Array, "K G D"]) -> Float[Array, "K G N"]:
    return einsum("kdn,kgd->kgn", vectors, q)


def aggregate(scores: Float[Array, "K G N"], rule: str) -> Float[Array, "K N"]:
    """Returns one score per KV head and vector from the scores of its query heads.

    Args:
      scores: scores of each query head.
      rule: one of AGGREGATIONS: `mean` and `max` of the raw scores, `softmax_mean` and `softmax_max` of each query
        head's softmax.
    """
    if rule == "softmax_mean":
        weight, share = _softmaxes(scores)
        return einsum("kgn,kg->kn", weight, share / scores.shape[1])
    if rule == "softmax_max":
        weight, share = _softmaxes(scores)
        scores = weight * share[..., None]
    # Query heads one by one: a reduction over the middle axis is several times slower on XLA:CPU.
    heads = [scores[:, g] for g in range(scores.shape[1])]
    return sum(heads[1:], heads[0]) / len(heads) if rule.endswith("mean") else functools.reduce(jnp.maximum, heads)


def _softmaxes(scores: Float[Array, "K G N"]) -> tuple[Float[Array, "K G N"], Float[Array, "K G"]]:
    """Returns the exponentials of each query head's scores, and the factor that makes them its softmax."""
    weight = computed_once(jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True)))
    return weight, 1 / jnp.sum(weight, axis=-1)


def top_blocks(scores: Float[Array, "K NB"], occupied: Bool[Array, "K NB"], count: int) -> Int32[Array, "K M"]:
    """Returns the `count` occupied blocks with the highest scores, best first.

    Equal scores are ranked by block number, 0.0 before -0.0. Where fewer than `count` blocks are occupied, NB fills the
    rest.
    """
    ranked, block = jax.lax.top_k(jnp.where(occupied, scores, -jnp.inf), count)
    return jnp.where(ranked > -jnp.inf, block, scores.shape[-1]).astype(jnp.int32)
