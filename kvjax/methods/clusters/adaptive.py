"""Adaptive update (DynaKV, Figure 1c and Algorithm 1): a cluster whose variance exceeds tau_h is split once fetched."""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.cache.types import Edits, Placement
from kvjax.methods.clusters.index import ClusterIndex, replace_clusters, statistics, updated_variance, with_key
from kvjax.methods.clusters.survey import has_room, survey
from kvjax.methods.clusters.update import Update
from kvjax.ops import kmeans
from kvjax.ops.indexing import first, places_of
from kvjax.typing import Array, Float, Int32


@dataclasses.dataclass(frozen=True)
class Adaptive(Update):
    """Update by delayed splits.

    Attributes:
      cluster: target average keys of a cluster.
      threshold: tau_h over the mean cluster variance after prefill; see `limit`.
      gain: how firmly the average cluster size is kept at `cluster`; see `limit`.
      buffer: B_max, buffered keys of one head that trigger a forced load.
      merge: a fetched cluster of at most this many keys is merged into the nearest fetched one, if the variance of both
        together is at most half the limit for a split; 0 = never. Not in the paper, where splits isolate outliers, each
        of which takes a block of its own.
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
        """Returns the variance beyond which a cluster is split: tau_h x (target size / average size)^gain.

        If there are more clusters than the target size implies, splits become rarer. Without a calibrated tau_h, half
        the variance of all keys stands in for the mean variance of the prompt's clusters.

        Args:
          index: statistics of one head.
          keys: keys in all clusters.
          used: clusters that have keys.
        """
        tau = jnp.where(index.tau >= 0, index.tau, 0.5 * self.threshold * index.spread)
        average = keys.astype(jnp.float32) / jnp.maximum(used, 1)
        return tau * (self.cluster / jnp.maximum(average, 1.0)) ** self.gain

    def force(self, spec, view):
        """Returns j-dagger = argmax |Buf_j| if the head's buffers have reached B_max and a split is possible."""
        used = view.held_block < spec.num_blocks
        buffered = jnp.sum(view.held_block[:, None] == view.held_block, axis=-1, dtype=jnp.int32)
        fullest = view.held_block[jnp.argmax(jnp.where(used, buffered, 0)).astype(jnp.int32)]
        full = (jnp.sum(used, dtype=jnp.int32) >= self.buffer) & jnp.any(view.count == 0)
        return jnp.where(full, fullest, spec.num_blocks)

    def append(self, spec, index, view, key, squared, valid):
        """Assigns a key to its nearest cluster: ADDENTRY, or Buf_j and f_j <- SPLIT.

        If no held row is free, as within a chunk that loads one block for all its tokens, the cluster is flagged
        nevertheless, and it or the nearest cluster with room takes the key. If none has room, the key takes a free
        block, if need be one that is reserved for a flagged cluster, which then stays flagged until another block is
        free. This is counted as a refusal, and so is a split that is wanted but not flagged for want of a free block.
        """
        count, index = view.count, _observe_key(index, key, valid)
        seen = survey(squared, count, index.split, spec.block_rows)
        # Each flag reserves a free block for the second half.
        roomy, reserved, free = seen.roomy, seen.flagged, spec.num_blocks - seen.used
        # No cluster has room and every free block is reserved: hold the key for a flagged cluster, whose split makes
        # room.
        crowded = ~has_room(count[roomy], spec.block_rows) & (free <= reserved) & (reserved > 0)
        nearest = jnp.where(crowded, seen.nearest_flagged, seen.nearest)
        # The nearest cluster is not flagged, and its split is refused.
        elsewhere = crowded & ~index.split[seen.nearest]
        # If `roomy` and `nearest` differ, the nearest cluster is full or flagged, and the variance does not matter.
        centroid, variance = with_key(index, roomy, count[roomy], key)
        wide = variance > self.limit(index, seen.keys, seen.used)
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
        """Returns a flagged cluster among those fetched in this step; else a small one and its partner in a merge."""
        none = jnp.int32(spec.num_blocks)
        flagged = (view.loaded < none) & index.split[jnp.minimum(view.loaded, none - 1)] & jnp.any(view.count == 0)
        split = jnp.where(jnp.any(flagged), view.loaded[jnp.argmax(flagged).astype(jnp.int32)], none)
        if not self.merge:
            return split[None]
        return jnp.where(split < none, jnp.stack([split, none]), self._pair(spec, index, view))

    def _pair(self, spec, index, view):
        """Returns the smallest fetched cluster, if it is to be merged, and the nearest fetched one that it fits in;
        NB = none."""
        fetched = jnp.minimum(view.loaded, spec.num_blocks - 1)
        free = (view.loaded < spec.num_blocks) & ~index.split[fetched]
        count = jnp.where(free, view.count[fetched], 0)
        sizes = jnp.where((count > 0) & (count <= self.merge), count, spec.block_rows + 1)
        own = fetched[jnp.argmin(sizes).astype(jnp.int32)]
        squared = kmeans.squared_norm(index.centroid[:, fetched].T - index.centroid[:, own])
        union = _union(view.count[own], index.variance[own], view.count[fetched], index.variance[fetched], squared)
        fits = (count > 0) & (fetched != own) & (count + view.count[own] <= spec.block_rows)
        keys, used = (jnp.sum(count, dtype=jnp.int32) for count in (view.count, view.count > 0))
        limit = self.limit(index, keys, used)
        fits &= (union <= 0.5 * limit) & jnp.any(sizes <= self.merge)
        other = fetched[jnp.argmin(jnp.where(fits, squared, jnp.inf)).astype(jnp.int32)]
        return jnp.where(jnp.any(fits), jnp.stack([own, other]), spec.num_blocks)

    def adapt(self, spec, index, view, block, keys, valid, seed):
        """Splits the due cluster (SPLITCLUSTER), or merges it with a second one."""
        split = self._split(spec, index, view, block[0], keys, valid)
        if not self.merge:
            return split
        merged = self._merged(spec, index, block, keys, valid)
        return jax.tree.map(lambda a, b: jnp.where(block[1] < spec.num_blocks, a, b), merged, split)

    def _merged(self, spec, index, block, keys, valid):
        """Merges both clusters into the second block."""
        _, centroid, variance = statistics(keys, jnp.where(valid, 0, 1).astype(jnp.int32), 1)
        index = replace_clusters(index, block[1:], centroid, variance)
        rows = jnp.stack([jnp.full(spec.block_rows, -1, jnp.int32), places_of(valid, spec.block_rows)])
        return index, Edits(block, rows)

    def _split(self, spec, index, view, block, keys, valid):
        """Runs SPLITCLUSTER(C_j, Buf_j): one half stays in block j, the other takes a free block."""
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
    """Updates the statistics of all keys of the head (Welford)."""
    n = index.seen
    squared = kmeans.squared_norm(key - index.mean)
    return dataclasses.replace(
        index, seen=n + valid, mean=jnp.where(valid, index.mean + (key - index.mean) / (n + 1), index.mean),
        spread=jnp.where(valid, updated_variance(n, index.spread, squared), index.spread),
    )


def _union(n, variance, other_n, other_variance, squared_distance):
    """Returns sigma^2 of the union of two clusters, given the squared distance of their centroids."""
    total = jnp.maximum(n + other_n, 1)
    pairs = (n * other_n).astype(jnp.float32)
    return (n * variance + other_n * other_variance) / total + pairs / total**2 * squared_distance
