"""MagicPIG (Chen et al., "MagicPIG: LSH Sampling for Efficient LLM Generation", 2024): attention as an estimate from
samples.

Keys between sinks and window are hashed into L tables by K bits each (SimHash: signs of K random projections) after
their mean was subtracted. Subtracting the mean changes no attention weight, and spreads keys of similar direction over
the buckets. A query samples the tokens that share its bucket in at least two tables. With theta_i the angle between
query and centred key, a bit agrees with probability p_i = 1 - theta_i / pi, so a token is sampled with probability

    u_i = 1 - (1 - p_i^K)^L - L p_i^K (1 - p_i^K)^(L - 1),

and a sampled token counts 1 / u_i times: attention over the sample has scores q . k_i / sqrt(D) - log u_i (Algorithm
1). Every query head draws and weighs its own sample, and a KV head fetches their union. Sinks and window are attended
exactly.

Budget: the paper's samples vary in size and have no limit. Here, if more tokens were drawn than fit, a uniform random
part of them is kept, a new one in each step, and each kept token counts (drawn / kept) times more. If fewer were drawn,
less than the budget is attended (`samples`). If all stored tokens fit, all are attended, with weight 1.

Other differences from the paper:
  - Buckets are found by comparing the codes of all tokens, not by hash tables. This finds the same tokens, at a cost of
    L comparisons per token and query head instead of the sizes of 2 L buckets.
  - The mean is that of the prompt's middle part; without a prompt it is 0.
  - Keys and values are fetched to where attention is computed. In the paper that is the CPU, whose memory holds them.
  - The paper keeps layers 0 and 16 dense. `dense_layers` keeps the first layers dense.

Resident: 2 L bytes of codes per token and KV head, K L D numbers of projections, the mean. Cost per step: K L D
products and n L comparisons per query head for n tokens, then the sampled tokens.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.method import HowPlaced, SamplingMethod, in_token_order
from kvjax.cache.types import Selection
from kvjax.errors import ConfigError
from kvjax.ops.attention import NEGATIVE
from kvjax.ops.kmeans import unit
from kvjax.ops.precise import einsum
from kvjax.ops.topk import top_blocks
from kvjax.typing import Array, Float, Int32, UInt, pytree

_TOGETHER = 1 << 16  # vectors times tables that are hashed at once, per head
_WHOLE = -1.0  # bias of a token that is attended with weight 1; others are at least 0, or NEGATIVE


@pytree
class LSHIndex:
    """Hash codes of the stored keys."""

    code: UInt[Array, "*B K L NB"]  # code of every stored key in each table
    mean: Float[Array, "*B K D"]  # subtracted from keys before they are hashed
    stored: Int32[Array, "*B"]  # tokens hashed


@dataclasses.dataclass(frozen=True)
class MagicPIG(SamplingMethod):
    """A cache that samples single tokens by locality-sensitive hashing; `aggregation` is not used.

    Attributes:
      bits: K, bits of a code, 1 to 16.
      tables: L, hash tables, at least 2.
      seed: seed of the projections, and of the choice among drawn tokens if too many were drawn.

    Raises:
      ConfigError: `bits`, `tables` or `seed` is out of range, or `reuse` or `lookahead` is set.
    """

    bits: int = 10
    tables: int = 150
    seed: int = 0
    placement: ClassVar[HowPlaced] = "in_order"

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.bits <= 16 or self.tables < 2:
            raise ConfigError(f"bits={self.bits} must be from 1 to 16, and tables={self.tables} must be at least 2")

    def blocks(self, capacity, rows):
        return capacity, 1, max(1, rows), 0

    def init(self, spec, weights):
        code = jnp.zeros((spec.kv_heads, self.tables, spec.num_blocks), jnp.uint16)
        return LSHIndex(code, jnp.zeros((spec.kv_heads, spec.head_dim), jnp.float32), jnp.int32(0))

    def build(self, spec, index, context):
        key = jnp.where(context.valid[:, None], context.key.astype(jnp.float32), 0.0)
        stored = jnp.sum(context.valid, dtype=jnp.int32)
        index = dataclasses.replace(index, mean=jnp.sum(key, axis=1) / jnp.maximum(stored, 1), stored=stored)
        placement = in_token_order(spec, context)
        return self._add(index, placement.block[0], key), placement

    def select(self, spec, index, view, q):
        occupied = view.count > 0
        everything = jnp.sum(occupied[0], dtype=jnp.int32) <= spec.selected_rows
        drawn = (self._collisions(index, q) >= 2) & occupied[:, None]
        drawn = jnp.where(everything, occupied[:, None], drawn)
        union = jnp.any(drawn, axis=1)
        seed = jax.random.fold_in(jax.random.key(self.seed), index.stored)
        priority = spec.shards.own(jax.random.uniform(seed, (spec.all_heads, spec.num_blocks), jnp.float32))
        block = top_blocks(priority, union, spec.max_blocks)
        drawn_count = jnp.sum(union, axis=-1, dtype=jnp.int32).astype(jnp.float32)
        oversampling = jnp.maximum(drawn_count / max(spec.selected_rows, 1), 1.0)
        mine = jnp.take_along_axis(drawn, jnp.minimum(block, spec.num_blocks - 1)[:, None], axis=-1)
        weight = jnp.where(everything, _WHOLE, jnp.log(oversampling))
        return Selection(block, bias=jnp.where(mine, weight[:, None, None], NEGATIVE))

    def weigh(self, spec, index, q, key, bias):
        """Adds -log u_i, computed from the centred keys that were hashed."""
        centred = key.astype(jnp.float32) - index.mean[:, None]
        log_u = jnp.log(jnp.maximum(sampling_probability(agreement(q, centred), self.bits, self.tables), 1e-30))
        return jnp.where(bias == _WHOLE, 0.0, bias - log_u)

    def append(self, spec, index, view, evicted):
        placement = in_token_order(spec, evicted)
        added = self._add(index, placement.block[:1], evicted.key[:, None].astype(jnp.float32))
        return dataclasses.replace(added, stored=index.stored + evicted.valid), placement

    def _collisions(self, index: LSHIndex, q: Float[Array, "K G D"]) -> Int32[Array, "K G NB"]:
        """Returns the number of tables in which a query head and each token share a bucket."""
        asked = self._codes(q)

        def count(table, total):
            return total + (index.code[:, None, table] == asked[..., table, None])

        shape = (*q.shape[:2], index.code.shape[-1])
        return jax.lax.fori_loop(np.int32(0), np.int32(self.tables), count, jnp.zeros(shape, jnp.int32))

    def _codes(self, x: Float[Array, "K N D"]) -> UInt[Array, "K N L"]:
        return codes(x, projections(self.seed, x.shape[-1], self.tables, self.bits))

    def _add(self, index: LSHIndex, block: Int32[Array, "T"], key: Float[Array, "K T D"]) -> LSHIndex:
        """Returns the index with keys hashed into the given blocks; block NB drops a key."""
        code = self._codes(key - index.mean[:, None]).swapaxes(1, 2)
        return dataclasses.replace(index, code=index.code.at[:, :, block].set(code, mode="drop"))


@functools.cache
def projections(seed: int, size: int, tables: int, bits: int) -> Float[np.ndarray, "L bits D"]:
    """Returns the random directions, float32[L, bits, D], which all heads share; a constant in compiled programs."""
    return np.random.default_rng(seed).normal(size=(tables, bits, size)).astype(np.float32)


def codes(x: Float[Array, "K N D"], directions: Float[np.ndarray, "L bits D"]) -> UInt[Array, "K N L"]:
    """Returns the bucket of each vector in each table, as uint16[K, N, L]: one bit for the side of each direction.

    Many vectors are hashed a few tables at a time, because the products with all tables would take many times the
    memory of the keys.
    """
    wide, powers = x.astype(jnp.float32), 2 ** jnp.arange(directions.shape[1], dtype=jnp.int32)

    def bucket(table):
        side = einsum("knd,bd->knb", wide, table) > 0
        return jnp.sum(side * powers, axis=-1, dtype=jnp.int32).astype(jnp.uint16)

    together = max(1, min(len(directions), _TOGETHER // max(1, x.shape[1])))
    return jnp.moveaxis(jax.lax.map(bucket, jnp.asarray(directions), batch_size=together), 0, -1)


def agreement(q: Float[Array, "K G D"], key: Float[Array, "K N D"]) -> Float[Array, "K G N"]:
    """Returns p = 1 - theta / pi, the probability that one bit of query and key is the same, as [K, G, N]."""
    cosine = einsum("kgd,knd->kgn", *(unit(vector.astype(jnp.float32)) for vector in (q, key)))
    return 1.0 - jnp.arccos(jnp.clip(cosine, -1.0, 1.0)) / jnp.pi


def sampling_probability(p: Float[Array, "*N"], bits: int, tables: int) -> Float[Array, "*N"]:
    """Returns u, the probability of at least two collisions in `tables` tables.

    Args:
      p: probability that one bit agrees (`agreement`).
      bits: K, bits of a code.
      tables: L, hash tables.
    """
    hit, others = p**bits, tables - 1
    # 1 - (1 - h)^(L - 1) (1 + (L - 1) h), written so that float32 does not cancel to 0 for a distant key.
    return -jnp.expm1(others * jnp.log1p(-hit) + jnp.log1p(others * hit))
