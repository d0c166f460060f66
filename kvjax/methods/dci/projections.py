"""Prioritised DCI (Li and Malik, 2017): lower bounds of distances from projections decide which points are visited.

The projection of a distance on a direction is never longer than the distance. There is one composite index of P
orthonormal directions, whose P bounds are aggregated as the root of their sum of squares; this is a lower bound as
well, and tighter than their maximum. The paper pops points off a priority queue. Here the bounds of all points of the
opened nodes are computed at once and the smallest are taken, which suits vector units better.
"""

import jax
import jax.numpy as jnp

from kvjax.ops.decompositions import orthonormal
from kvjax.ops.precise import matmul
from kvjax.typing import Array, Bool, Float, Int32, PRNGKey


def random_directions(seed: PRNGKey, size: int, count: int) -> Float[Array, "D1 P"]:
    """Returns P = `count` orthonormal directions in `size` dimensions, uniformly at random."""
    return orthonormal(jax.random.normal(seed, (size, count), jnp.float32))


def adapted_directions(
    start: Float[Array, "D1 P"], points: Float[Array, "T D1"], valid: Bool[Array, "T"]
) -> Float[Array, "D1 P"]:
    """Returns orthonormal directions rotated from `start` to the spread of the points.

    This is a range finder with one power step: Halko, Martinsson and Tropp (2011), Algorithm 4.3, on the points' second
    moments. Keys of attention heads fill few of their dimensions, so bounds from these directions are far tighter than
    from uniform ones.

    Args:
      start: [D + 1, P], orthonormal directions.
      points: [T, D + 1].
      valid: bool[T], points that count; without any, `start` is returned.
    """
    points = jnp.where(valid[:, None], points, 0.0)
    moment = matmul(points.T, points) / jnp.maximum(jnp.sum(valid, dtype=jnp.int32), 1)
    turned = matmul(moment, matmul(moment, start))
    return jnp.where(jnp.any(valid), orthonormal(turned + 1e-6 * start), start)


def lower_bounds(projected: Float[Array, "N P"], query: Float[Array, "G P"]) -> Float[Array, "N G"]:
    """Returns lower bounds of the squared distances between points and queries, given the projections of both."""
    squared = jnp.sum(jnp.square(projected), axis=-1)[:, None] + jnp.sum(jnp.square(query), axis=-1)
    return jnp.maximum(squared - 2 * matmul(projected, query.T), 0.0)


def prioritised(bound: Float[Array, "N"], valid: Bool[Array, "N"], count: int) -> Int32[Array, "V"]:
    """Returns the V = `count` points with the smallest lower bounds; N in place of missing ones if fewer are valid."""
    best, point = jax.lax.top_k(jnp.where(valid, -bound, -jnp.inf), count)
    return jnp.where(best > -jnp.inf, point, bound.shape[0]).astype(jnp.int32)
