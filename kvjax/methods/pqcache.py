"""PQCache (Zhang et al., "PQCache: Product Quantization-based KVCache for Long Context LLM Inference", 2024).

The method treats attention over a long context as maximum inner product search. Each key between sinks and window is
cut into `parts` parts (the paper's m), and each part is stored as the number of its nearest centroid, of which every
part has 2^`bits` (b). The centroids come from k-means over the prompt's keys, per KV head and part. A query multiplies
its parts with the centroids once; the score of token s is a sum of m table entries,

    q . k_s  ~  sum_j <q^(j), c^(j)[code_s^(j)]>,

and the tokens with the best scores are fetched, with their exact keys and values. A token that leaves the window is
coded with the prompt's centroids, which never change (static update). As in the authors' code, each query head of a
group takes the softmax over all candidates, and these are summed (`aggregation="softmax_mean"` gives the same ranking).

Differences from the paper:
  - k-means runs for `iterations` rounds. In the paper a cost model finds how many rounds fit beside the prefill.
  - `kvjax.Slots` caches hot tokens in memory one by one. The paper caches blocks of tokens, by LRU or LFU.
  - A prompt of fewer tokens than centroids has one centroid per distinct token. Without a prompt all codes are equal,
    and the order of tokens is of no use. The paper always has a long prompt.

Resident: m codes of one byte per token and KV head, 2^b D numbers of centroids per KV head. Cost per step: 2^b D
products per query head for the table, m additions per token and query head, then the selected tokens. Prefill:
k-means, of T 2^b D products per KV head and round.
"""

import dataclasses
import functools
from typing import ClassVar

import einops
import jax
import jax.numpy as jnp

from kvjax.cache.method import HowPlaced, Method, in_token_order
from kvjax.cache.types import Selection
from kvjax.errors import ConfigError
from kvjax.methods.clusters.index import statistics
from kvjax.ops import kmeans
from kvjax.ops.attention import NEGATIVE, soft_capped
from kvjax.ops.indexing import with_columns_at
from kvjax.ops.kernels import tiles
from kvjax.ops.precise import einsum, matmul
from kvjax.ops.topk import aggregate, top_blocks
from kvjax.typing import Array, Float, UInt, pytree


@pytree
class PQIndex:
    """Product-quantised keys."""

    codebook: Float[Array, "*B K P V S"]  # V centroids of each of P parts of S = D / P numbers
    code: UInt[Array, "*B K P NB"]  # centroid of each part of every stored key


@dataclasses.dataclass(frozen=True)
class PQCache(Method):
    """A cache that ranks single tokens by product-quantised keys.

    Attributes:
      parts: m, parts that a key is cut into; must divide the head size.
      bits: b, bits of the code of one part, 1 to 8.
      iterations: rounds of Lloyd's algorithm.
      seed: seed of the k-means++ starts.

    Raises:
      ConfigError: `parts` or `bits` is out of range, or `iterations` is negative.
    """

    aggregation: str = "softmax_mean"
    parts: int = 2
    bits: int = 6
    iterations: int = 10
    seed: int = 0
    placement: ClassVar[HowPlaced] = "in_order"

    def __post_init__(self):
        super().__post_init__()
        if self.parts < 1 or not 1 <= self.bits <= 8 or self.iterations < 0:
            raise ConfigError(f"parts={self.parts} must be at least 1, bits={self.bits} from 1 to 8 and "
                              f"iterations={self.iterations} not negative")

    def blocks(self, capacity, rows):
        return capacity, 1, max(1, rows), 0

    def init(self, spec, weights):
        if spec.head_dim % self.parts:
            raise ConfigError(f"parts={self.parts} must divide the head size {spec.head_dim}; choose another")
        codebook = jnp.zeros((spec.kv_heads, self.parts, 2**self.bits, spec.head_dim // self.parts), jnp.float32)
        code = jnp.zeros((spec.kv_heads, self.parts, spec.num_blocks), jnp.uint8)
        return PQIndex(codebook, code)

    def build(self, spec, index, context):
        parts = split(context.key, self.parts)
        seeds = spec.shards.own(kmeans.fixed_seeds(self.seed, (spec.all_heads, self.parts)))
        learn = functools.partial(centroids_of, count=2**self.bits, iterations=self.iterations)

        def one_part(args):
            part, seed = args
            codebook = learn(part, context.valid, seed)
            return codebook, nearest(codebook, part)

        each_head = functools.partial(jax.lax.map, functools.partial(jax.lax.map, one_part))
        codebook, code = each_head((parts, seeds))
        placement = in_token_order(spec, context)
        return PQIndex(codebook, with_columns_at(index.code, placement.block[0], code)), placement

    def select(self, spec, index, view, q):
        scores = soft_capped(lookup(index.codebook, index.code, q) * spec.head_dim**-0.5, spec.soft_cap)
        occupied = view.count > 0
        best = aggregate(jnp.where(occupied[:, None], scores, NEGATIVE), self.aggregation)
        return Selection(top_blocks(best, occupied, spec.max_blocks))

    def append(self, spec, index, view, evicted):
        placement = in_token_order(spec, evicted)
        code = jax.vmap(jax.vmap(nearest))(index.codebook, split(evicted.key[:, None], self.parts))
        return dataclasses.replace(index, code=with_columns_at(index.code, placement.block[:1], code)), placement


def split(keys: Float[Array, "K T D"], parts: int) -> Float[Array, "K P T S"]:
    """Returns each key cut into parts of S = D / P consecutive numbers."""
    return einops.rearrange(keys.astype(jnp.float32), "k t (p s) -> k p t s", p=parts)


def centroids_of(points: Float[Array, "T S"], valid, seed, count: int, iterations: int) -> Float[Array, "V S"]:
    """Returns the centroids of k-means over the valid points.

    Args:
      points: [T, S].
      valid: bool[T].
      seed: key of the k-means++ start.
      count: V, number of centroids.
      iterations: rounds of Lloyd's algorithm.

    Returns:
      [V, S]; the centroid of an empty cluster repeats that of the largest cluster.
    """
    active = jnp.clip(jnp.sum(valid, dtype=jnp.int32), 1, count)
    owner = kmeans.kmeans(points, valid, count, active, seed, iterations)
    size, mean, _ = statistics(points, owner, count)
    return jnp.where((size > 0)[:, None], mean, mean[jnp.argmax(size).astype(jnp.int32)])


def nearest(codebook: Float[Array, "V S"], points: Float[Array, "T S"]) -> UInt[Array, "T"]:
    """Returns the number of the centroid nearest to each point."""
    distance = jnp.sum(jnp.square(codebook), axis=-1) - 2 * matmul(points, codebook.T)
    return jnp.argmin(distance, axis=-1).astype(jnp.uint8)


def lookup(
    codebook: Float[Array, "K P V S"], code: UInt[Array, "K P N"], q: Float[Array, "K G D"]
) -> Float[Array, "K G N"]:
    """Returns the product of each query head with every coded key.

    Args:
      codebook: [K, P, V, S], centroids of each part.
      code: uint8[K, P, N], centroid of each part of every key.
      q: [K, G, D], queries.

    Returns:
      [K, G, N], approximate q . k, not scaled.
    """
    kv_heads, parts, _, size = codebook.shape
    q = q.reshape(kv_heads, -1, parts, size)
    if tiles.wanted():
        from kvjax.ops.kernels import code_scores  # imports Pallas, which takes a while

        return code_scores.score(einsum("kpvs,kgps->kpgv", codebook, q), code)
    table = einsum("kpvs,kgps->pkgv", codebook, q)
    centroid = code.astype(jnp.int32).swapaxes(0, 1)[:, :, None]
    return jnp.sum(jnp.take_along_axis(table, centroid, axis=-1), axis=0)
