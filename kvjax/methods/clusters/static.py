"""Static update (Figure 1a; PQCache): a new key is added to its nearest cluster, whatever becomes of that.

Clusters never split, so they grow without limit. One that outgrows its block goes on in another
block, with one centroid, variance and rank for all of them.
"""

import dataclasses

import jax.numpy as jnp

from kvjax.cache.method import Placement
from kvjax.methods.clusters.index import ClusterIndex, with_key
from kvjax.methods.clusters.survey import has_room, survey
from kvjax.methods.clusters.update import Update
from kvjax.ops.indexing import first
from kvjax.ops.kmeans import squared_norm


@dataclasses.dataclass(frozen=True)
class Static(Update):
    """Greedy appending. No block left for a cluster to go on in: the key goes to the nearest block with room."""

    held = 0
    edits = False

    def append(self, spec, index, view, key, squared, valid):
        count = view.count
        found = survey(squared, count, index.split, spec.block_rows)
        cluster = jnp.where(found.used > 0, index.cluster[found.nearest], found.free)
        room = (index.cluster == cluster) & has_room(count, spec.block_rows)
        stays = jnp.any(room) | (found.used < spec.num_blocks)
        target = jnp.where(jnp.any(room), first(room), found.free)
        target = jnp.where(stays, target, found.roomy)
        cluster = jnp.where(stays, cluster, index.cluster[target])
        block = jnp.where(valid, target, spec.num_blocks).astype(jnp.int32)
        grown = _grow(index, count, cluster, block, key)
        return dataclasses.replace(grown, refused=index.refused + (valid & ~stays)), Placement(block, count[target])


def _grow(index: ClusterIndex, count, number, block, key) -> ClusterIndex:
    """Statistics of cluster `number`, in all of its blocks, with the key added to one of them (NB = nothing)."""
    cluster = index.cluster.at[block].set(number, mode="drop")
    mine = (cluster == number) & (block < count.shape[0])
    n = jnp.sum(jnp.where(mine, count, 0), dtype=jnp.int32)
    centroid, variance = with_key(index, number, n, key)
    return dataclasses.replace(
        index, cluster=cluster, variance=jnp.where(mine, variance, index.variance),
        norm=jnp.where(mine, squared_norm(centroid), index.norm),
        centroid=jnp.where(mine, centroid[:, None], index.centroid),
    )
