"""MagicPIG (Chen et al., "MagicPIG: LSH Sampling for Efficient LLM Generation", 2024): attention as an estimate from
samples.

Keys between sinks and window are hashed by L tables of K bits (SimHash: signs of K random projections), after their
mean was taken off. That changes no attention weight, and spreads keys that would all lie in one direction over the
buckets. A query samples the tokens that share its bucket in at least two tables. With theta_i the angle between query
and centred key, a bit agrees with probability p_i = 1 - theta_i / pi, so that a token is sampled with probability

    u_i = 1 - (1 - p_i^K)^L - L p_i^K (1 - p_i^K)^(L - 1),

and a sampled token counts 1 / u_i times: attention over the sample with scores q . k_i / sqrt(D) - log u_i (Algorithm
1). Every query head draws its own sample and weighs it; a KV head fetches their union. Sinks and window are attended
exactly.

The budget: the paper's samples vary in size and have no limit. Here, if more than fit were drawn, a uniform random part
of them is kept, new in each step, and what is kept counts (drawn / kept) times more. If fewer were drawn, less than the
budget is attended (`samples`). If all stored tokens fit the budget, all are attended, with weight 1.

Other differences from the paper:
  - buckets are found by comparing the codes of all tokens, not by hash tables: the same tokens, at a cost of L
    comparisons per token and query head instead of the sizes of 2 L buckets.
  - the mean is that of the prompt's middle part; 0 without a prompt.
  - keys and values are fetched to where attention is computed; there, that is the CPU, where they lie.
  - the paper keeps two layers dense, 0 and 16; `dense_layers` keeps the first ones.

Resident: 2 L bytes of codes per token and KV head, K L D numbers of projections, the mean. Cost per step: K L D
products and n L comparisons per query head for n tokens, then the sampled tokens.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.method import Method, Selection, in_token_order, no_force
from kvjax.errors import ConfigError
from kvjax.ops.attention import NEGATIVE
from kvjax.ops.kmeans import unit
from kvjax.ops.topk import top_blocks
from kvjax.typing import Array, Float, Int32, UInt, pytree

_TOGETHER = 1 << 16  # vectors times tables that are hashed together, of each head


@pytree
class LSHIndex:
    code: UInt[Array, "*B K L NB"]  # of every stored key, one of each table
    mean: Float[Array, "*B K D"]  # taken off the keys before they are hashed
    stored: Int32[Array, "*B"]  # tokens hashed


@dataclasses.dataclass(frozen=True)
class MagicPIG(Method):
    """Single tokens, sampled by locality-sensitive hashing.

    Attributes:
      bits: K, bits of a code, 1 to 16.
      tables: L, hash tables, at least 2.
      seed: of the projections and of what is kept where too much was drawn.

    `aggregation` has no meaning here. Raises ConfigError for other bits and tables, negative seeds, and for `reuse` and
    `lookahead`.
    """

    samples = True

    bits: int = 10
    tables: int = 150
    seed: int = 0
    places_alike: ClassVar[bool] = True
    in_order: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.bits <= 16 or self.tables < 2:
            raise ConfigError(f"bits={self.bits} must be from 1 to 16 and tables={self.tables} at least 2")

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
        everything = index.stored <= spec.selected_rows
        drawn = (self._collisions(index, q) >= 2) & occupied[:, None]
        drawn = jnp.where(everything, occupied[:, None], drawn)
        union = jnp.any(drawn, axis=1)
        seed = jax.random.fold_in(jax.random.key(self.seed), index.stored)
        chance = jax.random.uniform(seed, union.shape, jnp.float32)
        block = top_blocks(chance, union, spec.max_blocks)
        found = jnp.sum(union, axis=-1, dtype=jnp.int32).astype(jnp.float32)
        more = jnp.maximum(found / max(spec.selected_rows, 1), 1.0)
        mine = jnp.take_along_axis(drawn, jnp.minimum(block, spec.num_blocks - 1)[:, None], axis=-1)
        return Selection(block, no_force(spec), jnp.where(mine, jnp.log(more)[:, None, None], NEGATIVE))

    def weigh(self, spec, index, q, key, bias):
        """-log u_i, of the keys as they were hashed."""
        centred = key.astype(jnp.float32) - index.mean[:, None]
        log_u = jnp.log(jnp.maximum(sampling_probability(agreement(q, centred), self.bits, self.tables), 1e-30))
        return jnp.where(index.stored <= spec.selected_rows, bias, bias - log_u)

    def append(self, spec, index, view, evicted):
        placement = in_token_order(spec, evicted)
        added = self._add(index, placement.block[:1], evicted.key[:, None].astype(jnp.float32))
        return dataclasses.replace(added, stored=index.stored + evicted.valid), placement

    def _collisions(self, index: LSHIndex, q: Float[Array, "K G D"]) -> Int32[Array, "K G NB"]:
        """Tables in which a query head and each token share a bucket."""
        asked = self._codes(q)

        def count(table, total):
            return total + (index.code[:, None, table] == asked[..., table, None])

        shape = (*q.shape[:2], index.code.shape[-1])
        return jax.lax.fori_loop(np.int32(0), np.int32(self.tables), count, jnp.zeros(shape, jnp.int32))

    def _codes(self, x: Float[Array, "K N D"]) -> UInt[Array, "K N L"]:
        return codes(x, projections(self.seed, x.shape[-1], self.tables, self.bits))

    def _add(self, index: LSHIndex, at: Int32[Array, "T"], key: Float[Array, "K T D"]) -> LSHIndex:
        """Hashes keys to the given places; place NB = nowhere."""
        code = self._codes(key - index.mean[:, None]).swapaxes(1, 2)
        return dataclasses.replace(index, code=index.code.at[:, :, at].set(code, mode="drop"))


@functools.cache
def projections(seed: int, size: int, tables: int, bits: int) -> Float[np.ndarray, "L bits D"]:
    """The random directions, the same for all heads; a constant of the compiled program."""
    return np.random.default_rng(seed).normal(size=(tables, bits, size)).astype(np.float32)


def codes(x: Float[Array, "K N D"], directions: Float[np.ndarray, "L bits D"]) -> UInt[Array, "K N L"]:
    """The bucket of each vector in each table: one bit for the side of each direction. Of many vectors a few tables at
    a time, as products with all of them would take many times the memory of the keys."""
    wide, powers = x.astype(jnp.float32), 2 ** jnp.arange(directions.shape[1], dtype=jnp.int32)

    def bucket(table):
        side = jnp.einsum("knd,bd->knb", wide, table) > 0
        return jnp.sum(side * powers, axis=-1, dtype=jnp.int32).astype(jnp.uint16)

    together = max(1, min(len(directions), _TOGETHER // max(1, x.shape[1])))
    return jnp.moveaxis(jax.lax.map(bucket, jnp.asarray(directions), batch_size=together), 0, -1)


def agreement(q: Float[Array, "K G D"], key: Float[Array, "K N D"]) -> Float[Array, "K G N"]:
    """p = 1 - theta / pi: how likely one bit of query and key is the same."""
    cosine = jnp.einsum("kgd,knd->kgn", *(unit(one.astype(jnp.float32)) for one in (q, key)))
    return 1.0 - jnp.arccos(jnp.clip(cosine, -1.0, 1.0)) / jnp.pi


def sampling_probability(p: Float[Array, "*N"], bits: int, tables: int) -> Float[Array, "*N"]:
    """u: the probability of at least two collisions in `tables` tables."""
    hit, others = p**bits, tables - 1
    # 1 - (1 - h)^(L - 1) (1 + (L - 1) h), of which nothing would be left in f32 for a key that is far away.
    return -jnp.expm1(others * jnp.log1p(-hit) + jnp.log1p(others * hit))
