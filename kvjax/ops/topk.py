"""Block ranking: products of block vectors with queries, one score per KV head, and the top M blocks."""

import functools

import jax
import jax.numpy as jnp

from kvjax.ops import kernels
from kvjax.ops.barriers import computed_once
from kvjax.typing import Array, Bool, Float, Int32

AGGREGATIONS = ("mean", "max", "softmax_mean", "softmax_max")


def vector_products(vectors: Float[Array, "K D N"], q: Float[Array, "K G D"]) -> Float[Array, "K G N"]:
    """Returns the inner products of each KV head's queries with its vectors, stored dimension by dimension."""
    like = jax.ShapeDtypeStruct((*q.shape[:-1], vectors.shape[-1]), jnp.float32)
    return kernels.on_cpu("vector_products", like, _vector_products, vectors, q.astype(jnp.float32))


def _vector_products(vectors: Float[Array, "K D N"], q: Float[Array, "K G D"]) -> Float[Array, "K G N"]:
    return jnp.einsum("kdn,kgd->kgn", vectors, q, precision="highest")


def vector_of(vectors: Float[Array, "D N"], at: Int32[Array, ""]) -> Float[Array, "D"]:
    """Returns the vector at index `at`.

    Its numbers are far apart in memory: the kernel prefetches them all, where XLA:CPU waits for each in turn.
    """
    return kernels.on_cpu("vector", jax.ShapeDtypeStruct(vectors.shape[:1], jnp.float32), _vector_of, vectors, at)


def _vector_of(vectors: Float[Array, "D N"], at: Int32[Array, ""]) -> Float[Array, "D"]:
    return vectors[:, at]


def aggregate(scores: Float[Array, "K G N"], rule: str) -> Float[Array, "K N"]:
    """Returns one score per KV head and vector from the scores of its query heads.

    Args:
      scores: scores of each query head.
      rule: one of AGGREGATIONS: `mean` and `max` of the raw scores, `softmax_mean` and `softmax_max` of each query
        head's softmax.
    """
    if rule == "softmax_mean":
        like = jax.ShapeDtypeStruct((len(scores), scores.shape[-1]), jnp.float32)
        return kernels.on_cpu("softmax_mean", like, _softmax_mean, scores)
    if rule == "softmax_max":
        weight, share = _softmaxes(scores)
        scores = weight * share[..., None]
    # Query heads one by one: a reduction over the middle axis is several times slower on XLA:CPU.
    heads = [scores[:, g] for g in range(scores.shape[1])]
    return sum(heads[1:], heads[0]) / len(heads) if rule.endswith("mean") else functools.reduce(jnp.maximum, heads)


def _softmax_mean(scores: Float[Array, "K G N"]) -> Float[Array, "K N"]:
    weight, share = _softmaxes(scores)
    return jnp.einsum("kgn,kg->kn", weight, share / scores.shape[1])


def _softmaxes(scores: Float[Array, "K G N"]) -> tuple[Float[Array, "K G N"], Float[Array, "K G"]]:
    """Returns the exponentials of each query head's scores, and the factor that makes them its softmax."""
    weight = computed_once(jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True)))
    return weight, 1 / jnp.sum(weight, axis=-1)


def top_blocks(scores: Float[Array, "K NB"], occupied: Bool[Array, "K NB"], count: int) -> Int32[Array, "K M"]:
    """Returns the `count` occupied blocks with the highest scores, best first.

    Equal scores are ranked by block number. Where fewer than `count` blocks are occupied, NB fills the rest.
    """
    like = jax.ShapeDtypeStruct((len(scores), count), jnp.int32)
    otherwise = functools.partial(_top_blocks, count=count)
    return kernels.on_cpu("best_blocks", like, otherwise, scores, jnp.broadcast_to(occupied, scores.shape))


def _top_blocks(scores: Float[Array, "K NB"], occupied: Bool[Array, "K NB"], count: int) -> Int32[Array, "K M"]:
    ranked, block = jax.lax.top_k(jnp.where(occupied, scores, -jnp.inf), count)
    return jnp.where(ranked > -jnp.inf, block, scores.shape[-1]).astype(jnp.int32)
