"""Clusters of keys as blocks: their running statistics, and three strategies to update them while decoding.

`Adaptive`, `Static` and `Local` are the strategies of Figure 1 of the DynaKV paper, one file each. They share the
index, the prefill and the selection, so they differ in nothing else.
"""

from kvjax.methods.clusters.adaptive import Adaptive
from kvjax.methods.clusters.index import ClusterIndex
from kvjax.methods.clusters.local import Local
from kvjax.methods.clusters.static import Static
from kvjax.methods.clusters.update import Update

__all__ = ["Adaptive", "ClusterIndex", "Local", "Static", "Update"]
