"""Local update (DynaKV, Figure 1b; ClusterKV): new keys are clustered among themselves, `period` of them at a time.

New keys are held in the tail, and attended, until a head has `period` of them. Then k-means makes new clusters of them;
older clusters stay unchanged. ClusterKV (`kvjax.methods.clusterkv`) makes 4 clusters of 320 keys.
"""

import dataclasses

import jax.numpy as jnp

from kvjax.cache.types import Edits, Placement
from kvjax.methods.clusters.index import add_entry, replace_clusters, statistics
from kvjax.methods.clusters.survey import survey
from kvjax.methods.clusters.update import Update
from kvjax.ops import kmeans
from kvjax.ops.indexing import places_of


@dataclasses.dataclass(frozen=True)
class Local(Update):
    """Update by periodic clustering of the newest keys; if too few blocks are left, keys go to the nearest cluster with
    room.

    Attributes:
      cluster: target average keys of a cluster.
      block_rows: rows of a block; a larger cluster takes several blocks.
      period: keys clustered together.
      iterations: rounds of Lloyd's algorithm.
      cosine: whether keys are clustered by direction.
    """

    cluster: int
    block_rows: int
    period: int
    iterations: int
    cosine: bool = False

    @property
    def held(self) -> int:
        return self.period

    @property
    def clusters(self) -> int:
        """Number of clusters of one period."""
        return -(-self.period // self.cluster)

    @property
    def most_blocks(self) -> int:
        """E: most blocks that these clusters may take, as one larger than `block_rows` takes several."""
        return self.clusters + self.period // self.block_rows

    def append(self, spec, index, view, key, squared, valid):
        count = view.count
        seen = survey(squared, count, index.split, spec.block_rows)
        enough = spec.num_blocks - seen.used >= self.most_blocks  # stays so until the period is full
        target = jnp.where(enough, seen.free, seen.roomy)
        block = jnp.where(valid, target, spec.num_blocks).astype(jnp.int32)
        added = jnp.where(enough, spec.num_blocks, block)
        index = add_entry(index, added, count, key)
        row = jnp.where(enough, spec.block_rows, count[target]).astype(jnp.int32)
        return dataclasses.replace(index, refused=index.refused + (valid & ~enough)), Placement(block, row)

    def due(self, spec, index, view):
        """Returns the free block for which a full period is held; it is empty and need not be fetched."""
        return jnp.where(jnp.all(view.held_block < spec.num_blocks), view.held_block[:1], spec.num_blocks)

    def adapt(self, spec, index, view, block, keys, valid, seed):
        waiting, valid = keys[spec.block_rows :], valid[spec.block_rows :]
        active = jnp.int32(self.clusters)
        owner = kmeans.kmeans(waiting, valid, self.clusters, active, seed, self.iterations, self.cosine)
        part, row, _ = kmeans.pack(owner, valid, self.clusters, spec.block_rows, self.most_blocks)
        n, centroid, variance = statistics(waiting, part, self.most_blocks)
        free = places_of(view.count == 0, self.most_blocks)
        dst = jnp.where(n > 0, free, spec.num_blocks).astype(jnp.int32)
        rows = jnp.full((self.most_blocks, spec.block_rows), -1, jnp.int32)
        rows = rows.at[part, row].set(spec.block_rows + jnp.arange(self.period, dtype=jnp.int32), mode="drop")
        index = replace_clusters(index, dst, centroid, variance)
        return dataclasses.replace(index, splits=index.splits + (block[0] < spec.num_blocks)), Edits(dst, rows)
