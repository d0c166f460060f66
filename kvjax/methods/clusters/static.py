"""Static update (DynaKV, Figure 1a; PQCache): a new key is added to its nearest cluster, however wide that becomes.

Clusters never split, so they grow without limit. One that outgrows its block continues in further blocks, which share
one centroid, variance and score.
"""

import dataclasses

import jax.numpy as jnp

from kvjax.cache.types import Placement
from kvjax.methods.clusters.index import ClusterIndex, with_key
from kvjax.methods.clusters.survey import has_room, survey
from kvjax.methods.clusters.update import Update
from kvjax.ops.indexing import first
from kvjax.ops.kmeans import squared_norm


@dataclasses.dataclass(frozen=True)
class Static(Update):
    """Update by greedy appending; if no block is left for a full cluster, the key goes to the nearest block with room.
    """

    held = 0
    edits = False

    def append(self, spec, index, view, key, squared, valid):
        count = view.count
        seen = survey(squared, count, index.split, spec.block_rows)
        cluster = jnp.where(seen.used > 0, index.cluster[seen.nearest], seen.free)
        room = (index.cluster == cluster) & has_room(count, spec.block_rows)
        stays = jnp.any(room) | (seen.used < spec.num_blocks)
        target = jnp.where(jnp.any(room), first(room), seen.free)
        target = jnp.where(stays, target, seen.roomy)
        cluster = jnp.where(stays, cluster, index.cluster[target])
        block = jnp.where(valid, target, spec.num_blocks).astype(jnp.int32)
        grown = _grow(index, count, cluster, block, key)
        return dataclasses.replace(grown, refused=index.refused + (valid & ~stays)), Placement(block, count[target])


def _grow(index: ClusterIndex, count, number, block, key) -> ClusterIndex:
    """Updates the statistics of cluster `number` in all of its blocks after a key was added to one (NB = no change)."""
    cluster = index.cluster.at[block].set(number, mode="drop")
    mine = (cluster == number) & (block < count.shape[0])
    n = jnp.sum(jnp.where(mine, count, 0), dtype=jnp.int32)
    centroid, variance = with_key(index, number, n, key)
    return dataclasses.replace(
        index, cluster=cluster, variance=jnp.where(mine, variance, index.variance),
        norm=jnp.where(mine, squared_norm(centroid), index.norm),
        centroid=jnp.where(mine, centroid[:, None], index.centroid),
    )
