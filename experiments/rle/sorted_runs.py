"""Runs of keys that were sorted by cluster, so that alike keys are neighbours wherever they stand in the text.

Keys before rotation are sorted by k-means cluster and in it by their distance from its mean, and runs are looked for in
that order. The result is `rle.Runs` whose slots need not rise, so that attention is the same: the slot of each token
says what permutation and counts would, in as many bytes as the permutation takes. For prompts, all at once.
"""

import jax.numpy as jnp

from kvjax.methods.clusters.index import statistics
from kvjax.ops import kmeans, runs
from kvjax.ops.runs import Runs, Tolerance
from kvjax.typing import Array, Float, Int32, PRNGKey


def order(key: Float[Array, "T D"], length: Int32[Array, ""], clusters: int, seed: PRNGKey) -> Int32[Array, "T"]:
    """Tokens in the order in which runs are looked for; those from `length` on come last. Equal keys are neighbours."""
    key = key.astype(jnp.float32)
    valid = jnp.arange(len(key), dtype=jnp.int32) < length
    owner = kmeans.kmeans(key, valid, clusters, jnp.minimum(length, clusters), seed)
    _, mean, _ = statistics(key, owner, clusters + 1)
    # The first number of a key tells apart keys at one distance, which would else interrupt each other's runs.
    distance = jnp.sum(jnp.square(key - mean[owner]), axis=-1)
    return jnp.lexsort((key[:, 0], distance, owner)).astype(jnp.int32)


def encode(
    key: Float[Array, "T D"], length: Int32[Array, ""], tolerance: Tolerance, clusters: int, seed: PRNGKey
) -> Runs:
    """The first `length` keys, with room for T runs."""
    at = order(key, length, clusters, seed)
    begins = runs.begins(key[at], tolerance) & (jnp.arange(len(key), dtype=jnp.int32) < length)
    slot = jnp.zeros_like(at).at[at].set(jnp.cumsum(begins, dtype=jnp.int32) - 1)
    return runs.collect(key, slot, jnp.zeros_like(begins).at[at].set(begins), length, len(key))

