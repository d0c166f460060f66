"""ShadowKV (Sun et al., 2024): chunks of consecutive tokens, ranked by the mean of their keys.

A chunk's landmark is the mean of its rotated keys. Chunks whose landmark describes them badly, by the cosine of the key
that is least like it, are outliers and always attended. Queries of a group are aggregated by the maximum of their
softmax over the landmarks.

What is compared is the selection. The paper also keeps a low-rank copy of the keys before rotation, and reconstructs
the chosen keys from it, so that values alone are fetched. Here a block is fetched with its true keys and values, which
reads twice as much and loses nothing. Outliers are blocks like others and count in the budget; as they are needed in
every step, they stay in their slots. Decoded tokens get landmarks when they leave the window; in the paper they never
leave memory.

Resident: D numbers per chunk. Cost per step: one score per chunk, then the selected chunks.
"""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.attention import products
from kvjax.method import Method, Selection, aggregate, in_token_order, no_force, top_blocks
from kvjax.typing import Array, Bool, Float, Int32, pytree


@pytree
class Landmarks:
    mean: Float[Array, "*B K NB D"]  # of each chunk's keys
    outlier: Bool[Array, "*B K NB"]
    stored: Int32[Array, "*B"]  # tokens in chunks


@dataclasses.dataclass(frozen=True)
class ShadowKV(Method):
    """Chunks of `chunk` consecutive tokens; the `outliers` worst of each KV head's prompt are always attended."""

    aggregation: str = "softmax_max"
    chunk: int = 8
    outliers: int = 2

    def blocks(self, capacity, rows):
        return -(-capacity // self.chunk), self.chunk, max(1, -(-rows // self.chunk)), 0

    def init(self, spec, weights):
        shape = (spec.kv_heads, spec.num_blocks)
        return Landmarks(jnp.zeros((*shape, spec.head_dim)), jnp.zeros(shape, bool), jnp.int32(0))

    def build(self, spec, index, context):
        stored, key = jnp.sum(context.valid, dtype=jnp.int32), context.key.astype(jnp.float32)
        placement = in_token_order(spec, jnp.int32(0), jnp.cumsum(context.valid) - 1, context.valid)
        head, block = jnp.arange(spec.kv_heads)[:, None], placement.block
        count = jnp.zeros((spec.kv_heads, spec.num_blocks)).at[head, block].add(1.0, mode="drop")
        mean = jnp.zeros_like(index.mean).at[head, block].add(key, mode="drop") / jnp.maximum(count, 1.0)[..., None]
        alike = _cosine(key, mean[head, jnp.minimum(block, spec.num_blocks - 1)])
        worst = jnp.full(count.shape, jnp.inf).at[head, block].min(alike, mode="drop")
        return Landmarks(mean, _smallest(worst, self.outliers), stored), placement

    def select(self, spec, index, view, q):
        occupied = view.count > 0
        scores = products((index.mean, q)) * spec.head_dim**-0.5
        score = aggregate(jnp.where(occupied[:, None], scores, -1e30), self.aggregation)
        score = jnp.where(index.outlier, jnp.inf, score)
        return Selection(top_blocks(score, occupied, spec.max_blocks), no_force(spec))

    def append(self, spec, index, view, leaving):
        placement = in_token_order(spec, index.stored, jnp.int32(0), leaving.valid)
        head, block = jnp.arange(spec.kv_heads), placement.block
        mean = index.mean[head, jnp.minimum(block, spec.num_blocks - 1)]
        step = (leaving.key.astype(jnp.float32) - mean) / (placement.row + 1)[:, None]
        mean = index.mean.at[head, block].add(step, mode="drop")
        return dataclasses.replace(index, mean=mean, stored=index.stored + leaving.valid), placement


def _cosine(a: Float[Array, "*N D"], b: Float[Array, "*N D"]) -> Float[Array, "*N"]:
    norms = jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1)
    return jnp.sum(a * b, axis=-1) / jnp.maximum(norms, 1e-9)


def _smallest(x: Float[Array, "K N"], count: int) -> Bool[Array, "K N"]:
    """Marks the `count` smallest finite entries of each row."""
    found, at = jax.lax.top_k(-x, min(count, x.shape[-1]))
    at = jnp.where(found > -jnp.inf, at, x.shape[-1])
    return jnp.zeros(x.shape, bool).at[jnp.arange(x.shape[0])[:, None], at].set(True, mode="drop")
