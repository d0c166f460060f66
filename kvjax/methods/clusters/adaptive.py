"""Adaptive update (Figure 1c, Algorithm 1): a cluster whose variance exceeds tau_h is split when a step has read it."""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.cache.method import Edits, Placement
from kvjax.methods.clusters.index import ClusterIndex, replace_clusters, statistics, updated_variance, with_key
from kvjax.methods.clusters.survey import has_room, survey
from kvjax.methods.clusters.update import Update
from kvjax.ops import kmeans
from kvjax.ops.indexing import first, places_of
from kvjax.typing import Array, Float, Int32


@dataclasses.dataclass(frozen=True)
class Adaptive(Update):
    """Delayed splits.

    Attributes:
      cluster: target average cluster size.
      threshold: see `limit`.
      gain: see `limit`.
      buffer: B_max, buffered keys of one head that trigger a forced load.
      merge: clusters of at most so many keys go into the nearest fetched one, if both together are half as wide as what
        is split; 0 = never. Not in the paper: splits leave outliers alone, and each takes a block of its own.
    """

    cluster: int
    threshold: float
    gain: float
    buffer: int
    merge: int = 0

    @property
    def held(self) -> int:
        return self.buffer + 1

    def limit(self, index: ClusterIndex, keys: Int32[Array, ""], used: Int32[Array, ""]) -> Float[Array, ""]:
        """The variance beyond which a cluster is split, where so many keys are in the clusters that are used.

        tau_h x (target size / average size)^gain: with more clusters than the target asks for, splits
        become rarer. Without a calibrated tau_h, half the variance of all keys stands in for the
        mean variance of the prompt's clusters.
        """
        tau = jnp.where(index.tau >= 0, index.tau, 0.5 * self.threshold * index.spread)
        average = keys.astype(jnp.float32) / jnp.maximum(used, 1)
        return tau * (self.cluster / jnp.maximum(average, 1.0)) ** self.gain

    def force(self, spec, view):
        """j-dagger = argmax |Buf_j| where the buffers of the head have reached B_max and a split is possible."""
        used = view.held_block < spec.num_blocks
        alike = jnp.sum(view.held_block[:, None] == view.held_block, axis=-1, dtype=jnp.int32)
        fullest = view.held_block[jnp.argmax(jnp.where(used, alike, 0)).astype(jnp.int32)]
        full = (jnp.sum(used, dtype=jnp.int32) >= self.buffer) & jnp.any(view.count == 0)
        return jnp.where(full, fullest, spec.num_blocks)

    def append(self, spec, index, view, key, squared, valid):
        """Assigns a key to its nearest cluster: ADDENTRY, or Buf_j and f_j <- SPLIT.

        Where no held row is free, as within a chunk that loads one block for all its tokens, the cluster is flagged all
        the same and takes the key, or the nearest with room does. Where none has room the key takes a free block, if
        need be one that a flagged cluster counted on, which then stays flagged until another is free. That is counted
        as a refusal, as flags are that are not granted.
        """
        count, index = view.count, _observe_key(index, key, valid)
        found = survey(squared, count, index.split, spec.block_rows)
        # A flag reserves a free block for the other half.
        roomy, reserved, free = found.roomy, found.flagged, spec.num_blocks - found.used
        # No cluster with room and every free block reserved: wait with a flagged cluster, whose split makes room.
        crowded = ~has_room(count[roomy], spec.block_rows) & (free <= reserved) & (reserved > 0)
        nearest = jnp.where(crowded, found.nearest_flagged, found.nearest)
        # Its own cluster is not flagged, and is refused its split.
        elsewhere = crowded & ~index.split[found.nearest]
        # If they differ, the nearest one is full or flagged, and no variance has a say.
        centroid, variance = with_key(index, roomy, count[roomy], key)
        wide = variance > self.limit(index, found.keys, found.used)
        wants_split = (wide | (count[nearest] >= spec.block_rows) | index.split[nearest]) & (count[nearest] > 0)
        granted = index.split[nearest] | (free > reserved)
        hold = wants_split & granted & jnp.any(view.held_block == spec.num_blocks)

        target = jnp.where(hold, nearest, roomy)
        block = jnp.where(valid, target, spec.num_blocks).astype(jnp.int32)
        index = replace_clusters(index, jnp.where(hold, spec.num_blocks, block), centroid, variance)
        new = ~hold & (count[target] == 0)
        granted &= index.split[nearest] | (free - new > reserved)
        flagged = jnp.where(valid & wants_split & granted, nearest, spec.num_blocks)
        index = dataclasses.replace(
            index, split=index.split.at[flagged].set(True, mode="drop"),
            refused=index.refused + (valid & ((wants_split & ~granted) | elsewhere | (new & (free <= reserved)))),
        )
        return index, Placement(block, jnp.where(hold, spec.block_rows, count[target]).astype(jnp.int32))

    def due(self, spec, index, view):
        """A flagged cluster among those fetched in this step; else a tiny one and what it can be merged with."""
        none = jnp.int32(spec.num_blocks)
        flagged = (view.loaded < none) & index.split[jnp.minimum(view.loaded, none - 1)] & jnp.any(view.count == 0)
        split = jnp.where(jnp.any(flagged), view.loaded[jnp.argmax(flagged).astype(jnp.int32)], none)
        if not self.merge:
            return split[None]
        return jnp.where(split < none, jnp.stack([split, none]), self._pair(spec, index, view))

    def _pair(self, spec, index, view):
        """The smallest fetched cluster, if it is tiny, and the nearest fetched one it can be merged with; NB = none."""
        at = jnp.minimum(view.loaded, spec.num_blocks - 1)
        free = (view.loaded < spec.num_blocks) & ~index.split[at]
        count = jnp.where(free, view.count[at], 0)
        small = jnp.where((count > 0) & (count <= self.merge), count, spec.block_rows + 1)
        one = at[jnp.argmin(small).astype(jnp.int32)]
        squared = kmeans.squared_norm(index.centroid[:, at].T - index.centroid[:, one])
        width = _union(view.count[one], index.variance[one], view.count[at], index.variance[at], squared)
        fits = (count > 0) & (at != one) & (count + view.count[one] <= spec.block_rows)
        keys, used = (jnp.sum(count, dtype=jnp.int32) for count in (view.count, view.count > 0))
        limit = self.limit(index, keys, used)
        fits &= (width <= 0.5 * limit) & jnp.any(small <= self.merge)
        other = at[jnp.argmin(jnp.where(fits, squared, jnp.inf)).astype(jnp.int32)]
        return jnp.where(jnp.any(fits), jnp.stack([one, other]), spec.num_blocks)

    def adapt(self, spec, index, view, block, keys, valid, seed):
        """SPLITCLUSTER, or a merge of two."""
        split = self._split(spec, index, view, block[0], keys, valid)
        if not self.merge:
            return split
        merged = self._merged(spec, index, block, keys, valid)
        return jax.tree.map(lambda one, two: jnp.where(block[1] < spec.num_blocks, one, two), merged, split)

    def _merged(self, spec, index, block, keys, valid):
        """Everything goes to the second block."""
        _, centroid, variance = statistics(keys, jnp.where(valid, 0, 1).astype(jnp.int32), 1)
        index = replace_clusters(index, block[1:], centroid, variance)
        rows = jnp.stack([jnp.full(spec.block_rows, -1, jnp.int32), places_of(valid, spec.block_rows)])
        return index, Edits(block, rows)

    def _split(self, spec, index, view, block, keys, valid):
        """SPLITCLUSTER(C_j, Buf_j): one half stays in block j, the other takes a free block."""
        stay, move = kmeans.two_means(keys, valid, spec.block_rows)
        free = first(view.count == 0)
        go = (block < spec.num_blocks) & (jnp.sum(valid, dtype=jnp.int32) >= 2) & (view.count[free] == 0)
        dst = jnp.where(go, jnp.stack([block, free]), spec.num_blocks).astype(jnp.int32)
        rows = jnp.stack([places_of(stay, spec.block_rows), places_of(move, spec.block_rows)])
        _, centroid, variance = statistics(keys, jnp.where(stay, 0, jnp.where(move, 1, 2)).astype(jnp.int32), 2)
        index = dataclasses.replace(
            replace_clusters(index, dst, centroid, variance),
            split=index.split.at[block].set(False, mode="drop"), splits=index.splits + go,
        )
        return index, Edits(dst, rows)


def _observe_key(index: ClusterIndex, key, valid) -> ClusterIndex:
    """Welford's update of the statistics of all keys of the head."""
    n = index.seen
    squared = kmeans.squared_norm(key - index.mean)
    return dataclasses.replace(
        index, seen=n + valid, mean=jnp.where(valid, index.mean + (key - index.mean) / (n + 1), index.mean),
        spread=jnp.where(valid, updated_variance(n, index.spread, squared), index.spread),
    )


def _union(n, variance, other_n, other_variance, squared_distance):
    """sigma^2 of two clusters together, their centroids at that distance."""
    total = jnp.maximum(n + other_n, 1)
    pairs = (n * other_n).astype(jnp.float32)
    return (n * variance + other_n * other_variance) / total + pairs / total**2 * squared_distance
