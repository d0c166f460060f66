"""k-means over fixed-shape arrays: the global clustering of a prompt and the local split of one cluster."""

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.ops.precise import matmul
from kvjax.typing import Array, Bool, Float, Int32, PRNGKey

_CHUNK = 1024  # points assigned at once: the distance matrix is _CHUNK x clusters
_RESEEDS = 64  # empty clusters refilled per iteration
_TRIALS = 8  # candidates per k-means++ draw
_SAMPLE = 4096  # points that a k-means++ start is drawn from, or four per cluster where that is more


def fixed_seeds(seed: int, shape: int | tuple[int, ...]) -> PRNGKey:
    """Returns seeds in the given shape as constants, so that a compiled program need not derive them at each run."""
    with jax.ensure_compile_time_eval():
        return jax.random.split(jax.random.key(seed), shape)


def kmeans(
    points: Float[Array, "T D"], valid: Bool[Array, "T"], clusters: int, active: Int32[Array, ""], seed: PRNGKey,
    iterations: int = 10, cosine: bool = False,
) -> Int32[Array, "T"]:
    """Clusters points by Lloyd's algorithm from a greedy k-means++ start (Arthur and Vassilvitskii, 2007).

    An empty cluster moves to the point farthest from its own centroid, so that no active cluster stays empty while
    distinct points are left. Neither invalid points nor clusters beyond the active ones influence the result.

    Args:
      points: points to cluster.
      valid: which points count.
      clusters: static upper bound on the number of clusters.
      active: number of clusters to use.
      seed: key of the k-means++ draws, which are made among at most max(4096, 4 * active) points.
      iterations: steps of Lloyd's algorithm.
      cosine: whether to cluster directions: points and centroids are scaled to length 1 (spherical k-means).

    Returns:
      The cluster of each point; `clusters` for points that are not valid.
    """
    points = unit(points.astype(jnp.float32)) if cosine else points.astype(jnp.float32)
    centroids = _plus_plus(points, valid, clusters, active, seed)
    usable = jnp.arange(clusters, dtype=jnp.int32) < active

    def lloyd(_, centroids):
        owner, distance = _assign(points, centroids, usable)
        weight = valid.astype(jnp.float32)
        count = jnp.zeros(clusters, jnp.float32).at[owner].add(weight)
        total = jnp.zeros_like(centroids).at[owner].add(points * weight[:, None])
        mean = unit(total) if cosine else total / jnp.maximum(count, 1)[:, None]
        moved = jnp.where(count[:, None] > 0, mean, centroids)
        return _refill(moved, usable & (count == 0), points, jnp.where(valid, distance, -1.0))

    centroids = jax.lax.fori_loop(0, iterations, lloyd, centroids)
    owner, _ = _assign(points, centroids, usable)
    return jnp.where(valid, owner, clusters).astype(jnp.int32)


def unit(x: Float[Array, "*N D"]) -> Float[Array, "*N D"]:
    """Returns vectors scaled to length 1; 0 stays 0."""
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-20)


def _plus_plus(points, valid, clusters, active, seed):
    """Returns initial centroids by greedy k-means++.

    Candidates are drawn with probability proportional to the squared distance to the nearest centroid; the one that
    leaves the smallest sum of squared distances is kept.
    """
    draw, pick = jax.random.split(seed)
    size = min(points.shape[0], max(_SAMPLE, 4 * clusters))
    if points.shape[0] > _SAMPLE:
        noise = jnp.where(valid, jax.random.uniform(pick, valid.shape, jnp.float32), -1.0)
        # Padding raises `clusters` but not `active`: the number of draws must depend on the latter only.
        drawn = jnp.arange(size, dtype=jnp.int32) < jnp.maximum(_SAMPLE, 4 * active)
        # Sorted, so that padding does not permute the draws.
        chosen = jnp.sort(jnp.where(drawn, jax.lax.top_k(noise, size)[1], points.shape[0]))
        valid = jnp.take(valid, chosen, mode="fill", fill_value=False)
        points = jnp.take(points, chosen, axis=0, mode="clip")
    squared = jnp.sum(jnp.square(points), axis=-1)

    def step(i, carry):
        centroids, nearest = carry
        logits = jnp.where(valid, jnp.log(jnp.maximum(nearest, 1e-30)), -jnp.inf)
        noisy = logits + jax.random.gumbel(jax.random.fold_in(draw, i), logits.shape, logits.dtype)
        best, drawn = jax.lax.top_k(noisy, min(_TRIALS, size))
        distance = squared[drawn][:, None] + squared - 2 * matmul(points[drawn], points.T)
        left = jnp.sum(jnp.where(valid, jnp.minimum(nearest, distance), 0), axis=-1)
        winner = drawn[jnp.argmin(jnp.where(best > -jnp.inf, left, jnp.inf)).astype(jnp.int32)]
        distance = jnp.sum(jnp.square(points - points[winner]), axis=-1)  # exact: 0 for a duplicate
        return centroids.at[i].set(points[winner]), jnp.minimum(nearest, distance)

    start = (jnp.zeros((clusters, points.shape[1]), jnp.float32), jnp.full(points.shape[0], 1e30, jnp.float32))
    return jax.lax.fori_loop(np.int32(0), np.int32(clusters), step, start)[0]


def _assign(points, centroids, usable):
    """Returns the nearest usable centroid of every point and the squared distance to it, chunk by chunk."""
    offset = jnp.where(usable, jnp.sum(jnp.square(centroids), axis=-1), jnp.inf)

    def nearest(chunk):
        distance = offset - 2 * matmul(chunk, centroids.T)
        owner = jnp.argmin(distance, axis=-1).astype(jnp.int32)
        best = jnp.take_along_axis(distance, owner[:, None], axis=-1)[:, 0]
        return owner, best + jnp.sum(jnp.square(chunk), axis=-1)

    size = points.shape[0]
    padded = jnp.pad(points, ((0, -size % _CHUNK), (0, 0))).reshape(-1, _CHUNK, points.shape[1])
    owner, distance = jax.lax.map(nearest, padded)
    return owner.reshape(-1)[:size], distance.reshape(-1)[:size]


def _refill(centroids, empty, points, distance):
    """Moves the first empty clusters to the points farthest from their centroids."""
    count = min(_RESEEDS, points.shape[0])
    far, point = jax.lax.top_k(distance, count)
    nth = jnp.cumsum(empty, dtype=jnp.int32) - 1
    take = empty & (nth < count) & (far[jnp.clip(nth, 0, count - 1)] > 0)
    return jnp.where(take[:, None], points[point[jnp.clip(nth, 0, count - 1)]], centroids)


def two_means(
    points: Float[Array, "N D"], valid: Bool[Array, "N"], largest: int, iterations: int = 8
) -> tuple[Bool[Array, "N"], Bool[Array, "N"]]:
    """Splits the valid points into two non-empty parts of at most `largest` points each; deterministic.

    Lloyd's algorithm starts from the point farthest from the mean and the point farthest from that one. In the end the
    points are divided by a plane across the line between the two means, off centre where the sizes demand it.

    Args:
      points: points to split.
      valid: which points count: at least 2 and at most 2 * `largest`.
      largest: most points of a part.
      iterations: steps of Lloyd's algorithm.

    Returns:
      The points of the first part, and those of the second.
    """
    points = points.astype(jnp.float32)
    total, whole = jnp.sum(valid, dtype=jnp.int32), matmul(valid.astype(jnp.float32), points)

    def farthest(origin):
        return points[jnp.argmax(jnp.where(valid, squared_norm(points - origin), -1.0)).astype(jnp.int32)]

    def margin(first, second):
        """Returns half the difference of the squared distances to two centres; negative on the side of the first."""
        return matmul(points - (first + second) / 2, second - first)

    def lloyd(_, pair):
        near = (valid & (margin(*pair) < 0)).astype(jnp.float32)
        size, part = jnp.sum(near), matmul(near, points)
        moved = part / jnp.maximum(size, 1), (whole - part) / jnp.maximum(total - size, 1)
        return jnp.where(size > 0, moved[0], pair[0]), jnp.where(size < total, moved[1], pair[1])

    start = farthest(whole / jnp.maximum(total, 1))
    pair = jax.lax.fori_loop(0, iterations, lloyd, (start, farthest(start)))
    difference = jnp.where(valid, margin(*pair), jnp.inf)
    nearer = jnp.sum(difference < 0, dtype=jnp.int32)
    cut = jnp.clip(nearer, jnp.maximum(1, total - largest), jnp.minimum(total - 1, largest))
    first = valid & (_ranks(difference) < cut)
    return first, valid & ~first


def squared_norm(x: Float[Array, "*N D"]) -> Float[Array, "*N"]:
    """Returns the squared norm of each vector.

    A matrix product, because XLA:CPU takes five times as long to sum the rows of several heads.
    """
    return matmul(jnp.square(x), jnp.ones(x.shape[-1], jnp.float32))


def _ranks(x: Float[Array, "N"]) -> Float[Array, "N"]:
    """Returns the rank of each number, equal ones in order; for a few numbers far less work than sorting them."""
    index = jnp.arange(x.shape[0], dtype=jnp.int32)
    before = (x[None] < x[:, None]) | ((x[None] == x[:, None]) & (index[None] < index[:, None]))
    return matmul(before.astype(jnp.float32), jnp.ones(x.shape[0], jnp.float32))


def pack(owner: Int32[Array, "T"], valid: Bool[Array, "T"], clusters: int, rows: int, blocks: int):
    """Lays clusters out in blocks; a cluster of more than `rows` tokens takes several.

    Tokens of a cluster keep their order. Tokens for which no block is left, the strays, fill the free rows of other
    blocks, from the first block on.

    Args:
      owner: cluster of each token.
      valid: which tokens count.
      clusters: number of clusters.
      rows: rows of a block.
      blocks: number of blocks; blocks * rows must be at least T.

    Returns:
      The block `[T]` of each token (`blocks` for tokens that are not valid), its row `[T]`, and the number of strays.
    """
    size = jnp.zeros(clusters + 1, jnp.int32).at[owner].add(valid)
    taken = -(-size // rows)
    first_block = jnp.cumsum(taken, dtype=jnp.int32) - taken
    first_rank = jnp.cumsum(size, dtype=jnp.int32) - size
    order = jnp.argsort(jnp.where(valid, owner, clusters), stable=True).astype(jnp.int32)
    rank = jnp.zeros_like(owner).at[order].set(jnp.arange(owner.shape[0], dtype=owner.dtype)) - first_rank[owner]
    block, row = first_block[owner] + rank // rows, rank % rows

    stray = valid & (block >= blocks)
    used = jnp.zeros(blocks, jnp.int32).at[block].add(valid, mode="drop")
    free, nth = jnp.cumsum(rows - used, dtype=jnp.int32), jnp.cumsum(stray, dtype=jnp.int32) - 1
    spare = jnp.searchsorted(free, nth, side="right")  # the block of the nth free row
    block, row = jnp.where(stray, spare, block), jnp.where(stray, rows - (free[spare] - nth), row)
    return jnp.where(valid, block, blocks).astype(jnp.int32), row.astype(jnp.int32), jnp.sum(stray, dtype=jnp.int32)
