"""ClusterKV (Liu et al., "ClusterKV: Manipulating LLM KV Cache in Semantic Space for Recallable Compression", 2024).

The prompt's keys are clustered per KV head by k-means with cosine distance; a cluster is a block, known by the mean of
its keys. While decoding, tokens that leave the window wait, attended, until `period` of them are there, and are then
clustered among themselves; older clusters stay as they are. Clusters are ranked by the product of the query with their
centroids and taken until the budget is full, the last of them in part.

`dynakv(update="local")` is the same code (`kvjax.methods.clusters`) with DynaKV's clusters: there k-means goes by
Euclidean distance, so that a key's length counts, here by direction alone. Keys of one direction and different lengths
are one cluster here, and differ most in their products with a query.

Differences from the paper:
  - sizes: it clusters L / 80 clusters at prefill, and every 320 tokens 4 clusters of them, with 16 sinks and layers 0
    and 1 dense: `clusterkv(cluster=80, period=320, sinks=16, dense_layers=2, budget=1024)`. Smaller ones here by
    default, as the waiting tokens are part of the budget.
  - a cluster larger than `block_rows` takes several blocks, each ranked by the mean of its own keys.
  - k-means starts from k-means++ and runs `iterations` rounds; there from random keys, until it converges.
  - the query heads of a KV head rank together (`aggregation`), which the paper leaves open.
  - its cache of the last steps' clusters in memory is `kvjax.Slots`.
  - if too few blocks are left for a period, its keys go to the nearest cluster with room (Euclidean), and are counted
    (`ClusterIndex.refused`).

Resident: centroid, variance (measured, not used), cluster and size per block, at most `period` waiting rows per head.
Cost per step: one product of size D per cluster and query head, then the selected clusters; k-means of one period now
and then.
"""

import dataclasses
from typing import ClassVar

from kvjax.errors import ConfigError
from kvjax.methods.clusters import Local, Update
from kvjax.methods.clusters.method import ClusterMethod


@dataclasses.dataclass(frozen=True)
class ClusterKV(ClusterMethod):
    """Clusters of directions; see `ClusterMethod` for their sizes.

    Attributes:
      period: keys clustered together while decoding; None = 2 * cluster.
    """

    cosine: ClassVar[bool] = True

    period: int | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.period is not None and self.period < 1:
            raise ConfigError(f"period={self.period} must be at least 1, or None for 2 * cluster")

    @property
    def rule(self) -> Update:
        """Clusters of each period."""
        period = 2 * self.cluster if self.period is None else self.period
        return Local(self.cluster, self.largest, period, self.iterations, self.cosine)
