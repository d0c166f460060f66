"""Base of the methods that cluster keys: clusters as blocks, ranked by their centroids, with an `Update`.

A cluster that is larger than a block takes several blocks, each ranked by the mean of its own keys.
"""

import abc
import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from kvjax.cache.method import AdaptiveMethod
from kvjax.cache.types import Placement, Selection
from kvjax.errors import ConfigError
from kvjax.methods.clusters.index import ClusterIndex, empty_index, statistics
from kvjax.methods.clusters.update import Update
from kvjax.ops import kmeans
from kvjax.ops.attention import NEGATIVE
from kvjax.ops.barriers import written_out
from kvjax.ops.topk import aggregate, top_blocks, vector_products
from kvjax.typing import Array, Bool, Float

ALIGNED = 16  # numbers in a cache line: products with centroids are about 5 % faster if each dimension begins one


@dataclasses.dataclass(frozen=True)
class ClusterMethod(AdaptiveMethod):
    """Base of the caches of clusters of keys.

    Attributes:
      cluster: target average keys of a cluster.
      block_rows: most keys of a block; None = 2 * cluster.
      num_blocks: most clusters of one head; None = 1.25 * capacity / cluster, rounded up to a multiple of `ALIGNED`.
        All centroids are read in each step; after long texts heads use about capacity / cluster.
      iterations: rounds of Lloyd's algorithm.
      seed: seed of the k-means++ starts.

    Raises:
      ConfigError: a number is below 1.
    """

    cosine: ClassVar[bool] = False  # whether keys are clustered by direction

    aggregation: str = "softmax_mean"
    cluster: int = 16
    block_rows: int | None = None
    num_blocks: int | None = None
    iterations: int = 10
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        for name in ("block_rows", "num_blocks", "iterations"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")

    @property
    @abc.abstractmethod
    def rule(self) -> Update:
        """The update strategy for keys that leave the recent window."""

    def calibrate(
        self, index: ClusterIndex, count: Float[Array, "K NB"], valid: Bool[Array, "T"]
    ) -> ClusterIndex:
        """Returns the index with what `rule` learns from a prompt.

        Args:
          index: statistics of the prompt's clusters.
          count: [K, NB], keys of each cluster.
          valid: bool[T], tokens of the prompt that were clustered.
        """
        return index

    @property
    def largest(self) -> int:
        """Rows of a block."""
        return 2 * self.cluster if self.block_rows is None else self.block_rows

    @property
    def adaptive(self) -> bool:  # type: ignore[override]  # a class attribute elsewhere
        """Whether blocks are ever rewritten."""
        return self.rule.edits

    def blocks(self, capacity, rows):
        count = self.num_blocks
        if count is None:
            count = -(-5 * capacity // (4 * self.cluster * ALIGNED)) * ALIGNED
        size = min(self.cluster, self.largest)  # on average, at most
        return max(2, count), self.largest, max(1, -(-3 * rows // (2 * size))), self.rule.held

    def init(self, spec, weights):
        return empty_index(spec)

    def build(self, spec, index, context):
        """Clusters the prompt's keys (NEWCLUSTER(K_0)) and computes the statistics of each cluster."""
        keys, valid, size = context.key.astype(jnp.float32), context.valid, context.pos.shape[0]
        most = min(-(-size // self.cluster), spec.num_blocks)
        active = jnp.clip(-(-jnp.sum(valid, dtype=jnp.int32) // self.cluster), 1, most)

        def one_head(args):
            key, seed = args
            owner = kmeans.kmeans(key, valid, most, active, seed, self.iterations, self.cosine)
            return kmeans.pack(owner, valid, most, spec.block_rows, spec.num_blocks)

        block, row, strays = jax.lax.map(one_head, (keys, self._seeds(spec)))
        count, centroid, variance = jax.vmap(statistics, (0, 0, None))(keys, block, spec.num_blocks)
        norm, centroid = kmeans.squared_norm(centroid), centroid.swapaxes(1, 2)
        index = dataclasses.replace(index, centroid=centroid, norm=norm, variance=variance, refused=strays)
        return self.calibrate(index, count, valid), Placement(block, row)

    def select(self, spec, index, view, q):
        """Selects P_req, the clusters whose centroids are most similar to the query.

        The key that leaves the window in this step is multiplied with the centroids together with the queries: reading
        the centroids is most of the cost, so one more vector is nearly free.
        """
        # Copied, because XLA only writes the tail in place if no pending operation still reads it.
        evicted = written_out(view.oldest_key.astype(jnp.float32))
        products = vector_products(index.centroid, jnp.concatenate([q.astype(jnp.float32), evicted[:, None]], axis=1))
        occupied, scores = view.count > 0, products[:, :-1] * spec.head_dim**-0.5
        score = aggregate(jnp.where(occupied[:, None], scores, NEGATIVE), self.aggregation)
        force = jax.vmap(lambda head: self.rule.force(spec, head))(view)
        squared = index.squared_distances(evicted, products[:, -1])
        return Selection(top_blocks(score, occupied, spec.max_blocks), force, note=squared)

    def append(self, spec, index, view, evicted):
        key, squared = evicted.key.astype(jnp.float32), evicted.note
        if squared is None:
            squared = index.squared_distances(key, vector_products(index.centroid, key[:, None])[:, 0])
        return jax.vmap(lambda *head: self.rule.append(spec, *head, evicted.valid))(index, view, key, squared)

    def due(self, spec, index, view):
        return jax.vmap(lambda *head: self.rule.due(spec, *head))(index, view)

    def adapt(self, spec, index, view, block, keys, pos):
        return jax.vmap(lambda *head: self.rule.adapt(spec, *head))(
            index, view, block, keys.astype(jnp.float32), pos >= 0, self._seeds(spec)
        )

    def _seeds(self, spec):
        return spec.shards.own(kmeans.fixed_seeds(self.seed, spec.all_heads))
