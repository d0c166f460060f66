"""Runs of keys that were sorted by cluster, so that similar keys are neighbours wherever they stand in the text.

Keys before rotation are sorted by k-means cluster, and within a cluster by their distance from its mean; runs are
searched in that order. The result is `rle.Runs` with slots in any order, so that attention is the same: the slot of
each token encodes permutation and counts, in as many bytes as the permutation takes. For whole prompts only.
"""

import jax.numpy as jnp

from kvjax.methods.clusters.index import statistics
from kvjax.ops import kmeans, runs
from kvjax.ops.runs import Runs, Tolerance
from kvjax.typing import Array, Float, Int32, PRNGKey


def order(key: Float[Array, "T D"], length: Int32[Array, ""], clusters: int, seed: PRNGKey) -> Int32[Array, "T"]:
    """Returns the tokens in the order in which runs are searched, those from `length` on last. Equal keys are
    neighbours."""
    key = key.astype(jnp.float32)
    valid = jnp.arange(len(key), dtype=jnp.int32) < length
    owner = kmeans.kmeans(key, valid, clusters, jnp.minimum(length, clusters), seed)
    _, mean, _ = statistics(key, owner, clusters + 1)
    # The first number of a key separates keys at equal distance, which would otherwise interrupt each other's runs.
    distance = jnp.sum(jnp.square(key - mean[owner]), axis=-1)
    return jnp.lexsort((key[:, 0], distance, owner)).astype(jnp.int32)


def encode(
    key: Float[Array, "T D"], length: Int32[Array, ""], tolerance: Tolerance, clusters: int, seed: PRNGKey
) -> Runs:
    """Returns runs of the first `length` keys, with room for T runs."""
    sorted_tokens = order(key, length, clusters, seed)
    begins = runs.begins(key[sorted_tokens], tolerance) & (jnp.arange(len(key), dtype=jnp.int32) < length)
    slot = jnp.zeros_like(sorted_tokens).at[sorted_tokens].set(jnp.cumsum(begins, dtype=jnp.int32) - 1)
    return runs.collect(key, slot, jnp.zeros_like(begins).at[sorted_tokens].set(begins), length, len(key))

