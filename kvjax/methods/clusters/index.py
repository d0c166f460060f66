"""The resident statistics of clusters: centroid and variance, updated one key at a time (DynaKV, Algorithm 1)."""

import dataclasses

import jax.numpy as jnp

from kvjax.cache.types import Spec
from kvjax.ops.indexing import column, with_columns
from kvjax.ops.kmeans import squared_norm
from kvjax.typing import Array, Bool, Float, Int32, pytree


@pytree
class ClusterIndex:
    """Statistics of every cluster; *B_K: [K], [B, K], or [] inside a function of one head."""

    # r_j, mean key of the block's cluster; stored dimension by dimension, the fastest layout to read for few keys
    centroid: Float[Array, "*B_K D NB"]
    norm: Float[Array, "*B_K NB"]  # |r_j|^2, so that distances to a key take one product
    variance: Float[Array, "*B_K NB"]  # sigma_j^2, mean squared distance to r_j
    cluster: Int32[Array, "*B_K NB"]  # first block of the cluster; the block itself if the cluster is one block
    split: Bool[Array, "*B_K NB"]  # f_j = SPLIT: to be split when next fetched
    tau: Float[Array, "*B_K"]  # tau_h; < 0 = not calibrated by a prompt
    seen: Float[Array, "*B_K"]  # keys appended since init, for the substitute of tau
    mean: Float[Array, "*B_K D"]  # mean of these keys
    spread: Float[Array, "*B_K"]  # their mean squared distance to `mean`
    splits: Int32[Array, "*B_K"]  # splits done; for `Local`, periods clustered
    refused: Int32[Array, "*B_K"]  # splits, and keys of a period or a prompt, that no free block was left for

    def squared_distances(self, key: Float[Array, "K D"], product: Float[Array, "K NB"]) -> Float[Array, "K NB"]:
        """Returns the squared distances of each head's key to every centroid, given their products.

        The rounding error grows with the lengths of key and centroid; the result is only exact enough for ranking.
        """
        return self.norm - 2 * product + squared_norm(key)[:, None]


def empty_index(spec: Spec) -> ClusterIndex:
    """Returns an index without clusters."""
    heads, blocks = spec.kv_heads, spec.num_blocks
    return ClusterIndex(
        centroid=jnp.zeros((heads, spec.head_dim, blocks), jnp.float32), norm=jnp.zeros((heads, blocks), jnp.float32),
        variance=jnp.zeros((heads, blocks), jnp.float32),
        cluster=jnp.tile(jnp.arange(blocks, dtype=jnp.int32), (heads, 1)), split=jnp.zeros((heads, blocks), bool),
        tau=jnp.full(heads, -1.0, jnp.float32), seen=jnp.zeros(heads, jnp.float32),
        mean=jnp.zeros((heads, spec.head_dim), jnp.float32), spread=jnp.zeros(heads, jnp.float32),
        splits=jnp.zeros(heads, jnp.int32), refused=jnp.zeros(heads, jnp.int32),
    )


def statistics(keys: Float[Array, "T D"], block: Int32[Array, "T"], blocks: int):
    """Computes n_j, r_j and sigma_j^2 of every block from its keys.

    Args:
      keys: [T, D], keys of one head.
      block: int32[T], block of each key; NB = `blocks` leaves a key out.
      blocks: NB, number of blocks.

    Returns:
      Count [NB] (as floats), centroid [NB, D] and variance [NB]; 0 for empty blocks.
    """
    count = jnp.zeros(blocks, jnp.float32).at[block].add(1.0, mode="drop")
    total = jnp.zeros((blocks, keys.shape[-1]), jnp.float32).at[block].add(keys, mode="drop")
    centroid = total / jnp.maximum(count, 1)[:, None]
    squared = squared_norm(keys - centroid[jnp.minimum(block, blocks - 1)])
    variance = jnp.zeros(blocks, jnp.float32).at[block].add(squared, mode="drop") / jnp.maximum(count, 1)
    return count, centroid, variance


def updated_variance(n, variance, squared_distance):
    """Returns UPDATEVAR of Algorithm 1: sigma^2 of n + 1 keys, given the new key's squared distance from the old
    centroid."""
    return n / (n + 1) * (variance + squared_distance / (n + 1))


def with_key(index: ClusterIndex, block: Int32[Array, ""], n: Int32[Array, ""], key: Float[Array, "D"]):
    """Returns UPDATESTATS of Algorithm 1: r_j and sigma_j^2 of one head's cluster of n keys after adding a key."""
    n, centroid = n.astype(jnp.float32), column(index.centroid, block)
    apart = key - centroid
    return centroid + apart / (n + 1), updated_variance(n, index.variance[block], squared_norm(apart))


def add_entry(
    index: ClusterIndex, block: Int32[Array, ""], n: Int32[Array, "NB"], key: Float[Array, "D"]
) -> ClusterIndex:
    """Runs ADDENTRY of Algorithm 1 for one head.

    Args:
      index: statistics of the head.
      block: cluster that takes the key; NB changes nothing.
      n: int32[NB], keys of each cluster.
      key: [D].
    """
    target = jnp.minimum(block, n.shape[0] - 1)
    return replace_clusters(index, block, *with_key(index, target, n[target], key))


def replace_clusters(
    index: ClusterIndex, block: Int32[Array, "*E"], centroid: Float[Array, "*E D"], variance: Float[Array, "*E"]
) -> ClusterIndex:
    """Returns the index of one head with new statistics for the given blocks; block NB changes nothing."""
    return dataclasses.replace(
        index, centroid=with_columns(index.centroid, block, centroid),
        norm=index.norm.at[block].set(squared_norm(centroid), mode="drop"),
        variance=index.variance.at[block].set(variance, mode="drop"),
    )
