"""DynaKV (Wang et al., "DynaKV: Enabling Accurate and Efficient Long-Sequence LLM Decoding on
Smartphones"), section 4 and Algorithm 1: variance-tracked clusters of keys with delayed splits.

The prompt is clustered by k-means per KV head; a cluster is a block. While decoding, each key that
leaves the recent window goes to its nearest cluster j, whose variance is updated from (n_j, r_j,
sigma_j^2) and the new key alone. While sigma_j^2 <= tau_h the key is simply added. Beyond it the
cluster has to be split, which needs its rows in memory: if the step has fetched it (C_j in P_req) it
is split at once, otherwise the key waits in Buf_j and the cluster is flagged, to be split when it is
next retrieved. When the buffers of a head hold B_max keys, the cluster with the most of them is
loaded on purpose. Buffered keys are in the tail, hence attended.

`update` replaces this by one of the two strategies the paper compares with (Figure 1): `static`
adds every key to its nearest cluster, `local` clusters new keys among themselves. Prefill, index and
selection are the same code (`kvjax.clusters`).

Choices the paper leaves open:
  - nearest = smallest Euclidean distance, the one that the variance measures; relevance to a query =
    inner product with the centroid, aggregated over a KV head's queries by `aggregation`.
  - tau_h, "head-specific" without a formula in the paper: `threshold` x the size-weighted mean
    variance of the head's clusters after prefill, the k-means inertia per key. So one knob serves
    heads of any scale, and k-means' target size fixes what is cohesive.
  - the average cluster size is steered back to `cluster` by scaling tau_h (`Adaptive.limit`).
  - a cluster holds at most `block_rows` keys; a full one is split as a too wide one is.
  - no block left for the second half: the key goes to the nearest cluster with room, and the refusal
    is counted (`ClusterIndex.refused`).

Resident: centroid, variance, cluster, size and flag per block; at most B_max + 1 held rows per head.
Cost per step: one score per cluster, then the selected clusters; one distance per cluster to append.
"""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax import clustering
from kvjax.clusters import Adaptive, Local, Static, Update
from kvjax.clusters.index import empty_index, statistics
from kvjax.errors import ConfigError
from kvjax.method import Method, Placement, Selection, aggregate, top_blocks

UPDATES = ("adaptive", "static", "local")


@dataclasses.dataclass(frozen=True)
class DynaKV(Method):
    """Clusters of keys.

    Attributes:
      update: how clusters follow the keys that are decoded (Figure 1 of the paper).
      cluster: target average cluster size.
      block_rows: largest cluster; None = 2 * cluster.
      num_blocks: most clusters of one head; None = 1.5 * capacity / cluster.
      threshold: tau_h over the mean cluster variance of head h after prefill.
      gain: how firmly the average cluster size is kept at `cluster` while decoding; 0 = not at all.
      buffer: B_max, buffered keys of one head that trigger a forced load.
      merge: clusters of at most so many keys are merged with others (`Adaptive.merge`); 0 = never.
      period: keys that `update="local"` clusters together; None = 2 * cluster.
      iterations: of Lloyd's algorithm.
      seed: of the k-means++ starts.
    """

    aggregation: str = "softmax_mean"
    update: str = "adaptive"
    cluster: int = 16
    block_rows: int | None = None
    num_blocks: int | None = None
    threshold: float = 1.2
    gain: float = 2.0
    buffer: int = 8
    merge: int = 0
    period: int | None = None
    iterations: int = 10
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        if self.update not in UPDATES:
            raise ConfigError(f"unknown update {self.update!r}; use one of {', '.join(UPDATES)}")
        if self.update == "adaptive" and self.rule.held > self.largest:
            raise ConfigError(
                f"buffer={self.buffer} must be smaller than block_rows={self.largest}: one split takes them all"
            )

    @property
    def name(self):
        return super().name if self.update == "adaptive" else f"{super().name}_{self.update}"

    @property
    def largest(self) -> int:
        """Rows of a block."""
        return self.block_rows or 2 * self.cluster

    @property
    def rule(self) -> Update:
        """The strategy with its settings."""
        if self.update == "static":
            return Static()
        if self.update == "local":
            return Local(self.cluster, self.largest, self.period or 2 * self.cluster, self.iterations)
        return Adaptive(self.cluster, self.threshold, self.gain, self.buffer, self.merge)

    @property
    def adaptive(self) -> bool:  # type: ignore[override]  # of the class elsewhere, of its `update` here
        """Whether blocks are ever rewritten."""
        return self.rule.edits

    def blocks(self, capacity, rows):
        count = self.num_blocks or -(-3 * capacity // (2 * self.cluster))
        return max(2, count), self.largest, max(1, -(-3 * rows // (2 * self.cluster))), self.rule.held

    def init(self, spec, weights):
        return empty_index(spec)

    def build(self, spec, index, context):
        """NEWCLUSTER(K_0) and the statistics of each cluster."""
        keys, valid, size = context.key.astype(jnp.float32), context.valid, context.pos.shape[0]
        most = min(-(-size // self.cluster), spec.num_blocks)
        while most > 1 and most + size // spec.block_rows > spec.num_blocks:
            most -= 1  # leaves room for clusters that need several blocks
        active = jnp.clip(-(-jnp.sum(valid) // self.cluster), 1, most)

        def one_head(args):
            key, seed = args
            owner = clustering.kmeans(key, valid, most, active, seed, self.iterations)
            return clustering.pack(owner, valid, most, spec.block_rows, spec.num_blocks)

        block, row = jax.lax.map(one_head, (keys, self._seeds(spec)))
        count, centroid, variance = jax.vmap(statistics, (0, 0, None))(keys, block, spec.num_blocks)
        weighted = jnp.sum(variance * count, axis=-1) / jnp.maximum(jnp.sum(count, axis=-1), 1)
        enough = jnp.sum(valid) >= 2 * self.cluster
        tau = jnp.where(enough, self.threshold * weighted, -1.0)
        return dataclasses.replace(index, centroid=centroid, variance=variance, tau=tau), Placement(block, row)

    def select(self, spec, index, view, q):
        """P_req: the clusters whose centroids are most similar to the query."""
        scores = jnp.einsum("knd,kgd->kgn", index.centroid, q) * spec.head_dim**-0.5
        occupied = view.count > 0
        score = aggregate(jnp.where(occupied[:, None], scores, -1e30), self.aggregation)
        force = jax.vmap(lambda head: self.rule.force(spec, head))(view)
        return Selection(top_blocks(score, occupied, spec.max_blocks), force)

    def append(self, spec, index, view, leaving):
        key = leaving.key.astype(jnp.float32)
        return jax.vmap(lambda *head: self.rule.append(spec, *head, leaving.valid))(index, view, key)

    def due(self, spec, index, view):
        return jax.vmap(lambda *head: self.rule.due(spec, *head))(index, view)

    @property
    def pairs(self) -> bool:  # type: ignore[override]  # of the class elsewhere, of its settings here
        """Whether blocks are ever merged."""
        return self.adaptive and self.merge > 0

    def partner(self, spec, index, view, block):
        return jax.vmap(lambda *head: self.rule.partner(spec, *head))(index, view, block)

    def adapt(self, spec, index, view, block, keys, pos):
        return jax.vmap(lambda *head: self.rule.adapt(spec, *head))(
            index, view, block, keys.astype(jnp.float32), pos >= 0, self._seeds(spec)
        )

    def _seeds(self, spec):
        return jax.random.split(jax.random.key(self.seed), spec.kv_heads)
