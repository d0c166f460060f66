"""DynaKV (Wang et al., "DynaKV: Enabling Accurate and Efficient Long-Sequence LLM Decoding on
Smartphones"), section 4 and Algorithm 1: variance-tracked clusters of keys with delayed splits.

The prompt is clustered by k-means per KV head; a cluster is a block. While decoding, each key that
leaves the recent window goes to its nearest cluster j, whose variance is updated from (n_j, r_j,
sigma_j^2) and the new key alone. While sigma_j^2 <= tau_h the key is simply added. Beyond it the
cluster has to be split, which needs its rows in memory: if the step has fetched it (C_j in P_req) it
is split at once, otherwise the key waits in Buf_j and the cluster is flagged, to be split when it is
next retrieved. When the buffers of a head hold B_max keys, the cluster with the most of them is
loaded on purpose. Buffered keys are in the tail, hence attended.

Choices the paper leaves open:
  - nearest = smallest Euclidean distance, the one that the variance measures; relevance to a query =
    inner product with the centroid, aggregated over a KV head's queries by `aggregation`.
  - tau_h = `threshold` x the size-weighted mean variance of the head's clusters after prefill. After
    a prompt too short to cluster, half the variance of all keys seen so far stands in for the mean.
  - a cluster holds at most `block_rows` keys; a full one is split as a too wide one is.
  - no block left for the second half: the key goes to the nearest cluster with room, and the refusal
    is counted (`DynaKVIndex.refused`).

Resident: centroid, variance, size and flag per cluster; at most B_max + 1 held rows per head.
Cost per step: one score per cluster, then the selected clusters; one distance per cluster to append.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from kvjax import clustering
from kvjax.errors import ConfigError
from kvjax.method import Edits, Method, Placement, Selection, aggregate, top_blocks
from kvjax.typing import Array, Bool, Float, Int32, pytree


@pytree
class DynaKVIndex:  # *B_K: [K], [B, K], or [] inside a function of one head
    centroid: Float[Array, "*B_K NB D"]  # r_j, mean key of the rows in the block
    variance: Float[Array, "*B_K NB"]  # sigma_j^2, mean squared distance to r_j
    split: Bool[Array, "*B_K NB"]  # f_j = SPLIT: to be split when next fetched
    tau: Float[Array, "*B_K"]  # tau_h; < 0 = not calibrated by a prompt
    seen: Float[Array, "*B_K"]  # keys appended since init, for the stand-in of tau
    mean: Float[Array, "*B_K D"]  # their mean
    spread: Float[Array, "*B_K"]  # their mean squared distance to it
    splits: Int32[Array, "*B_K"]  # splits done
    refused: Int32[Array, "*B_K"]  # splits refused for want of a free block


@dataclasses.dataclass(frozen=True)
class DynaKV(Method):
    """Adaptive clusters.

    Attributes:
      cluster: target average cluster size at prefill.
      block_rows: largest cluster; None = 2 * cluster.
      num_blocks: most clusters of one head; None = 1.5 * capacity / cluster.
      threshold: tau_h over the mean cluster variance of head h after prefill.
      buffer: B_max, buffered keys of one head that trigger a forced load.
      iterations: of Lloyd's algorithm at prefill.
      seed: of the k-means++ start.
    """

    aggregation: str = "softmax_mean"
    cluster: int = 16
    block_rows: int | None = None
    num_blocks: int | None = None
    threshold: float = 1.5
    buffer: int = 8
    iterations: int = 10
    seed: int = 0

    adaptive: ClassVar[bool] = True

    def blocks(self, capacity, rows):
        cap = self.block_rows or 2 * self.cluster
        held = self.buffer + 1
        if held > cap:
            raise ConfigError(f"buffer={self.buffer} must be smaller than block_rows={cap}: one split takes them all")
        count = self.num_blocks or -(-3 * capacity // (2 * self.cluster))
        return max(2, count), cap, max(1, -(-3 * rows // (2 * self.cluster))), held

    def init(self, spec):
        heads, blocks = spec.kv_heads, spec.num_blocks
        return DynaKVIndex(
            centroid=jnp.zeros((heads, blocks, spec.head_dim)), variance=jnp.zeros((heads, blocks)),
            split=jnp.zeros((heads, blocks), bool), tau=jnp.full(heads, -1.0, jnp.float32), seen=jnp.zeros(heads),
            mean=jnp.zeros((heads, spec.head_dim)), spread=jnp.zeros(heads),
            splits=jnp.zeros(heads, jnp.int32), refused=jnp.zeros(heads, jnp.int32),
        )

    def build(self, spec, index, keys, pos, valid):
        """NEWCLUSTER(K_0) and the statistics of each cluster."""
        most = min(-(-pos.shape[0] // self.cluster), spec.num_blocks)
        while most > 1 and most + pos.shape[0] // spec.block_rows > spec.num_blocks:
            most -= 1  # leaves room for clusters that need several blocks
        active = jnp.clip(-(-jnp.sum(valid) // self.cluster), 1, most)

        def one_head(args):
            key, seed = args
            owner = clustering.kmeans(key, valid, most, active, seed, self.iterations)
            return clustering.pack(owner, valid, most, spec.block_rows, spec.num_blocks)

        seeds = jax.random.split(jax.random.key(self.seed), spec.kv_heads)
        block, row = jax.lax.map(one_head, (keys.astype(jnp.float32), seeds))
        statistics = jax.vmap(_statistics, (0, 0, None))
        count, centroid, variance = statistics(keys.astype(jnp.float32), block, spec.num_blocks)
        weighted = jnp.sum(variance * count, axis=-1) / jnp.maximum(jnp.sum(count, axis=-1), 1)
        enough = jnp.sum(valid) >= 2 * self.cluster
        tau = jnp.where(enough, self.threshold * weighted, -1.0)
        return dataclasses.replace(index, centroid=centroid, variance=variance, tau=tau), Placement(block, row)

    def select(self, spec, index, view, q):
        """P_req: the clusters whose centroids are most similar to the query."""
        scores = jnp.einsum("knd,kgd->kgn", index.centroid, q) * spec.head_dim**-0.5
        occupied = view.count > 0
        score = aggregate(jnp.where(occupied[:, None], scores, -1e30), self.aggregation)
        return Selection(top_blocks(score, occupied, spec.max_blocks), _fullest_buffer(spec, view, self.buffer))

    def append(self, spec, index, view, key, pos, valid):
        """Assigns a key to its nearest cluster: ADDENTRY, or Buf_j and f_j <- SPLIT."""
        return jax.vmap(lambda *head: _append(spec, self.threshold, *head), (0, 0, 0, 0, None))(
            index, view.count, view.held_block, key.astype(jnp.float32), valid
        )

    def due(self, spec, index, view):
        """A flagged cluster among those fetched in this step."""
        head = jnp.arange(spec.kv_heads)[:, None]
        present = view.loaded < spec.num_blocks
        flagged = present & index.split[head, jnp.minimum(view.loaded, spec.num_blocks - 1)]
        first = jnp.argmax(flagged, axis=-1)
        block = jnp.take_along_axis(view.loaded, first[:, None], axis=-1)[:, 0]
        return jnp.where(jnp.any(flagged, axis=-1), block, spec.num_blocks)

    def adapt(self, spec, index, view, block, keys, pos):
        """SPLITCLUSTER(C_j, Buf_j): one half stays in block j, the other takes a free block."""
        return jax.vmap(lambda *head: _split(spec, *head))(
            index, view.count, block, keys.astype(jnp.float32), pos >= 0
        )


def _fullest_buffer(spec, view, limit):
    """j-dagger = argmax |Buf_j| where the buffers of a head have reached B_max, NB elsewhere."""
    used = view.held_block < spec.num_blocks
    alike = jnp.sum(view.held_block[:, :, None] == view.held_block[:, None], axis=-1)
    fullest = jnp.argmax(jnp.where(used, alike, 0), axis=-1)
    block = jnp.take_along_axis(view.held_block, fullest[:, None], axis=-1)[:, 0]
    return jnp.where(jnp.sum(used, axis=-1) >= limit, block, spec.num_blocks)


def _statistics(keys, block, blocks):
    """n_j, r_j and sigma_j^2 of every block from scratch."""
    count = jnp.zeros(blocks).at[block].add(1.0, mode="drop")
    total = jnp.zeros((blocks, keys.shape[-1])).at[block].add(keys, mode="drop")
    centroid = total / jnp.maximum(count, 1)[:, None]
    squared = jnp.sum(jnp.square(keys - centroid[jnp.minimum(block, blocks - 1)]), axis=-1)
    variance = jnp.zeros(blocks).at[block].add(squared, mode="drop") / jnp.maximum(count, 1)
    return count, centroid, variance


def _updated_variance(n, variance, squared_distance):
    """UPDATEVAR of Algorithm 1: sigma^2 after adding a key at that distance from the old centroid."""
    return n / (n + 1) * (variance + squared_distance / (n + 1))


def _append(spec, threshold, index, count, held_block, key, valid):
    """`DynaKV.append` for one head."""
    index = _observe_key(index, key, valid)
    tau = jnp.where(index.tau >= 0, index.tau, 0.5 * threshold * index.spread)
    distance = jnp.sum(jnp.square(index.centroid - key), axis=-1)
    n = count.astype(jnp.float32)
    nearest = jnp.argmin(jnp.where(count > 0, distance, jnp.inf))
    full = count >= spec.block_rows
    wide = _updated_variance(n[nearest], index.variance[nearest], distance[nearest]) > tau
    wants_split = (wide | full[nearest] | index.split[nearest]) & (count[nearest] > 0)
    # A flagged cluster has a free block reserved, so that a due split can never fail.
    spare = jnp.sum(count == 0) > jnp.sum(index.split)
    granted = index.split[nearest] | spare
    start = jnp.all((count == 0) | full)  # no cluster with room
    # With every free block reserved too, the key waits with a flagged cluster, whose split makes room.
    crowded = start & ~granted & jnp.any(index.split)
    nearest = jnp.where(crowded, jnp.argmin(jnp.where(index.split, distance, jnp.inf)), nearest)
    hold = wants_split & (granted | crowded) & jnp.any(held_block == spec.num_blocks)

    roomy = jnp.argmin(jnp.where((count > 0) & ~full, distance, jnp.inf))
    target = jnp.where(hold, nearest, jnp.where(start, jnp.argmax(count == 0), roomy))
    added = jnp.where(valid & ~hold, target, spec.num_blocks)
    flagged = jnp.where(valid & hold, target, spec.num_blocks)
    index = dataclasses.replace(
        index,
        variance=index.variance.at[added].set(
            _updated_variance(n[target], index.variance[target], distance[target]), mode="drop"
        ),
        centroid=index.centroid.at[added].add((key - index.centroid[target]) / (n[target] + 1), mode="drop"),
        split=index.split.at[flagged].set(True, mode="drop"),
        refused=index.refused + (valid & wants_split & ~(hold & granted)),
    )
    row = jnp.where(hold, spec.block_rows, count[target])
    return index, Placement(jnp.where(valid, target, spec.num_blocks).astype(jnp.int32), row.astype(jnp.int32))


def _observe_key(index, key, valid):
    """Welford's update of the statistics of all keys of the head."""
    n = index.seen
    squared = jnp.sum(jnp.square(key - index.mean))
    return dataclasses.replace(
        index,
        seen=n + valid,
        mean=jnp.where(valid, index.mean + (key - index.mean) / (n + 1), index.mean),
        spread=jnp.where(valid, _updated_variance(n, index.spread, squared), index.spread),
    )


def _split(spec, index, count, block, keys, valid):
    """`DynaKV.adapt` for one head: the edits, and the statistics of both halves from their keys."""
    stay, move = clustering.two_means(keys, valid, spec.block_rows)
    free = jnp.argmax(count == 0)
    go = (block < spec.num_blocks) & (jnp.sum(valid) >= 2) & (count[free] == 0)
    dst = jnp.where(go, jnp.stack([block, free]), spec.num_blocks).astype(jnp.int32)
    rows = jnp.stack([_gather_order(stay, spec.block_rows), _gather_order(move, spec.block_rows)])
    part = jnp.where(stay, 0, jnp.where(move, 1, 2))
    _, centroid, variance = _statistics(keys, part, 2)
    index = dataclasses.replace(
        index,
        centroid=index.centroid.at[dst].set(centroid, mode="drop"),
        variance=index.variance.at[dst].set(variance, mode="drop"),
        split=index.split.at[block].set(False, mode="drop"),
        splits=index.splits + go,
    )
    return index, Edits(dst, rows)


def _gather_order(member, rows):
    """Indices of the members in order, padded with -1 to `rows`."""
    order = jnp.argsort(~member, stable=True)[:rows]
    return jnp.where(member[order], order, -1).astype(jnp.int32)
