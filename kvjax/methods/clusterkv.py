"""ClusterKV (Liu et al., "ClusterKV: Manipulating LLM KV Cache in Semantic Space for Recallable Compression", 2024).

The prompt's keys are clustered per KV head by k-means with cosine distance; a cluster is a block, represented by the
mean of its keys. While decoding, tokens that leave the window are held, and attended, until there are `period` of them;
then they are clustered among themselves, and older clusters stay unchanged. Clusters are ranked by the product of the
query with their centroids and taken until the budget is full, the last one in part.

`dynakv(update="local")` is the same code (`kvjax.methods.clusters`) with DynaKV's clusters. There k-means uses the
Euclidean distance, to which a key's length matters; here it uses the direction alone. Keys of the same direction and
different lengths thus share a cluster here, although their products with a query differ most.

Differences from the paper:
  - Sizes: the paper makes L / 80 clusters at prefill and 4 clusters of every 320 decoded tokens, with 16 sinks and
    layers 0 and 1 dense: `clusterkv(cluster=80, period=320, sinks=16, dense_layers=2, budget=1024)`. The defaults here
    are smaller, because held tokens are part of the budget.
  - A cluster larger than `block_rows` takes several blocks, each ranked by the mean of its own keys.
  - k-means starts from k-means++ and runs for `iterations` rounds. In the paper it starts from random keys and runs
    until it converges.
  - The query heads of a KV head rank together (`aggregation`), which the paper leaves open.
  - `kvjax.Slots` replaces the paper's cache of the last steps' clusters in memory.
  - If too few blocks are left for a period, its keys go to the nearest cluster with room (Euclidean), and are counted
    (`ClusterIndex.refused`).

Resident: centroid, variance (measured, not used), cluster and size per block, and at most `period` held rows per head.
Cost per step: one product of size D per cluster and query head, then the selected clusters; once per period, k-means of
its keys.
"""

import dataclasses
from typing import ClassVar

from kvjax.errors import ConfigError
from kvjax.methods.clusters import Local, Update
from kvjax.methods.clusters.method import ClusterMethod


@dataclasses.dataclass(frozen=True)
class ClusterKV(ClusterMethod):
    """A cache of clusters of key directions; see `ClusterMethod` for their sizes.

    Attributes:
      period: keys clustered together while decoding; None = 2 * cluster.

    Raises:
      ConfigError: `period` is below 1.
    """

    cosine: ClassVar[bool] = True

    period: int | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.period is not None and self.period < 1:
            raise ConfigError(f"period={self.period} must be at least 1, or None for 2 * cluster")

    @property
    def rule(self) -> Update:
        """The update strategy: `Local`, by direction."""
        period = 2 * self.cluster if self.period is None else self.period
        return Local(self.cluster, self.largest, period, self.iterations, self.cosine)
