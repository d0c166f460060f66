"""DynaKV (Wang et al., "DynaKV: Enabling Accurate and Efficient Long-Sequence LLM Decoding on Smartphones"), section 4
and Algorithm 1: variance-tracked clusters of keys with delayed splits.

The prompt is clustered by k-means per KV head; a cluster is a block, and the clusters whose centroids are most similar
to the query are attended. While decoding, each key that leaves the recent window goes to its nearest cluster j, whose
variance is updated from (n_j, r_j, sigma_j^2) and the new key alone. While sigma_j^2 <= tau_h, the key is simply added.
Beyond that the cluster has to be split, which needs its rows in memory: if the step has fetched it (C_j in P_req), it
is split at once; otherwise the key is held in Buf_j, and the cluster is flagged and split when it is next retrieved.
When the buffers of a head hold B_max keys, the cluster with the most buffered keys is loaded on purpose. Buffered keys
are in the tail and hence attended.

`update` replaces this by one of the two strategies that the paper compares with (Figure 1): `static` adds every key to
its nearest cluster, `local` clusters new keys among themselves. Prefill, index and selection are the same code
(`kvjax.methods.clusters`).

Where the paper's text and Algorithm 1 differ, or this code differs from both:
  - A key for a flagged cluster is held however near it is, as in the text. Algorithm 1 would add a key within tau_h.
  - sigma_j^2 with a held key is computed to decide, but not stored: the split computes the variances of both halves
    from their rows.
  - A cluster that is loaded because of B_max comes with the next token's fetch, not in the same step.
  - Clusters are attended in the order of their scores until the budget is full, the last one possibly in part.
  - tau_h is constant in the paper. Here it is scaled while decoding, so that clusters stay as large as after prefill
    (`Adaptive.limit`). With `gain=0` it is constant.

Choices the paper leaves open:
  - The nearest cluster is the one at the smallest Euclidean distance, which is the distance that the variance measures.
    The relevance to a query is the inner product with the centroid, aggregated over a KV head's queries by
    `aggregation`.
  - tau_h is "head-specific" in the paper, without a formula. Here it is `threshold` times the size-weighted mean
    variance of the head's clusters after prefill, i.e. the k-means inertia per key. One setting thus serves heads of
    any scale, and the target size of k-means defines what is cohesive. The first clusters decide; for a prompt that is
    read in chunks these are the clusters of the first chunk.
  - A cluster holds at most `block_rows` keys; a full cluster is split as a too wide one is.
  - If no block is left for the second half, the key goes to the nearest cluster with room, and the refusal is counted
    (`ClusterIndex.refused`).

Resident: centroid, variance, cluster, size and flag per block; at most B_max + 1 held rows per head.
Cost per step: one score per cluster, then the selected clusters; one distance per cluster to append.
"""

import dataclasses

import jax.numpy as jnp

from kvjax.errors import ConfigError
from kvjax.methods.clusters import Adaptive, Local, Static, Update
from kvjax.methods.clusters.method import ClusterMethod

UPDATES = ("adaptive", "static", "local")


@dataclasses.dataclass(frozen=True)
class DynaKV(ClusterMethod):
    """A cache of clusters of keys; see `ClusterMethod` for their sizes.

    Attributes:
      update: how clusters follow the keys that are decoded (Figure 1 of the paper): "adaptive" uses the next four
        settings, "local" uses `period`, "static" uses none.
      threshold: tau_h over the mean cluster variance of head h after prefill.
      gain: how firmly the average cluster size is kept at `cluster` while decoding; 0 = not at all.
      buffer: B_max, buffered keys of one head that trigger a forced load.
      merge: clusters of at most this many keys are merged with others (`Adaptive.merge`); 0 = never.
      period: keys that `update="local"` clusters together; None = 2 * cluster.

    Raises:
      ConfigError: the update is unknown, a setting is out of range, or `buffer` is not smaller than `block_rows`.
    """

    update: str = "adaptive"
    threshold: float = 1.2
    gain: float = 2.0
    buffer: int = 8
    merge: int = 0
    period: int | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.update not in UPDATES:
            raise ConfigError(f"unknown update {self.update!r}; use one of {', '.join(UPDATES)}")
        least = 1 if self.period is None else min(self.period, 1)
        if self.threshold <= 0 or min(self.gain, self.merge) < 0 or min(self.buffer, least) < 1:
            raise ConfigError(f"threshold={self.threshold}, buffer={self.buffer} and period={self.period} must be "
                              f"positive, and gain={self.gain} and merge={self.merge} must not be negative")
        if self.update == "adaptive" and self.rule.held > self.largest:
            raise ConfigError(
                f"buffer={self.buffer} must be smaller than block_rows={self.largest}, because one split takes in all "
                "buffered keys; lower it, or raise block_rows"
            )

    @property
    def name(self):
        return super().name if self.update == "adaptive" else f"{super().name}_{self.update}"

    @property
    def rule(self) -> Update:
        """The update strategy with its settings."""
        if self.update == "static":
            return Static()
        if self.update == "local":
            period = 2 * self.cluster if self.period is None else self.period
            return Local(self.cluster, self.largest, period, self.iterations)
        return Adaptive(self.cluster, self.threshold, self.gain, self.buffer, self.merge)

    def calibrate(self, index, count, valid):
        """Sets tau_h from the size-weighted mean variance of the prompt's clusters, if the prompt is long enough."""
        weighted = jnp.sum(index.variance * count, axis=-1) / jnp.maximum(jnp.sum(count, axis=-1), 1)
        enough = jnp.sum(valid, dtype=jnp.int32) >= 2 * self.cluster
        return dataclasses.replace(index, tau=jnp.where(enough, self.threshold * weighted, -1.0))
