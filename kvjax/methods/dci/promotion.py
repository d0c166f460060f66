"""Promotion of inserted points: their number is drawn by chance, and points far from all parents are preferred.

A point keeps its first parent, because its row cannot move. In a growing tree half of the parents come with the second
half of the points, too late for the points near them. With promotion by chance alone, more than half of the clustered
points of a tree grown from nothing were under another parent than the nearest one, in pages with dissimilar points, and
new parents for whole pages helped little. Therefore a drawn promotion is deferred until a point comes that has no
parent near it, as in Meyerson ("Online Facility Location", 2001), where a facility is opened with a probability that
grows with the distance of a new demand from all others. A level never gets more points than were drawn for it, plus
those it has in advance.

The distance that counts as far is learned: it is exceeded by a share of recent points equal to the promotion ratio, or
up to twice that if promotions are pending. The promotions drawn for the first points would still come late, so every
tree has some in advance (`ahead`).
"""

import dataclasses

import jax.numpy as jnp

from kvjax.methods.dci.tree import Shape, Tree
from kvjax.typing import Array, Bool, Float, Int32

_MANY = 16  # pending promotions that double the share of points that are far
_STEP = 0.05  # step of the logarithm of the far distance, per point


def promote(
    shape: Shape, tree: Tree, drawn: Int32[Array, ""], distance: Float[Array, "L1"], valid: Bool[Array, ""]
) -> tuple[Tree, Int32[Array, ""]]:
    """Decides the level of a new point.

    Args:
      shape: static sizes of the tree.
      tree: the tree of one head.
      drawn: the drawn level (`draw_levels`), which this point or a later one gets.
      distance: squared distances to the nearest points of levels 2, 3, ...; infinite for an empty level.
      valid: whether there is a point.

    Returns:
      The tree with its pending promotions updated, and the level, at most one above the highest in use.
    """
    number = jnp.arange(2, shape.levels + 1, dtype=jnp.int32)
    waiting = tree.waiting + (valid & (drawn >= number))
    far = distance > tree.far
    open_to = number <= tree.height + (tree.used > 0)
    climbs = jnp.cumprod(far & (waiting > 0) & open_to & valid, dtype=jnp.int32)
    share = shape.ratio * (1 + jnp.minimum(waiting.astype(jnp.float32) / _MANY, 1))
    asked = jnp.concatenate([valid[None].astype(climbs.dtype), climbs[:-1]])  # a point that gets to l asks for l + 1
    learned = jnp.where(tree.far > 0, tree.far * jnp.exp(_STEP * (far - share)), distance)
    tree = dataclasses.replace(
        tree, waiting=(waiting - climbs).astype(jnp.int32),
        far=jnp.where((asked > 0) & (distance < jnp.inf), learned, tree.far),
    )
    return tree, 1 + jnp.sum(climbs, dtype=jnp.int32)


def far_from_parents(
    shape: Shape, distance: Float[Array, "T"], level: Int32[Array, "T"], has_parent: Bool[Array, "T"]
) -> Float[Array, "L1"]:
    """Returns the far distance of levels 2, 3, ... of a tree built at once.

    Args:
      shape: static sizes of the tree.
      distance: [T], squared distance of each point to its parent.
      level: int32[T], level of each point.
      has_parent: bool[T], points that are not in the root node.

    Returns:
      Squared distance of each level, as in `Tree.far`; 0 where nothing is known.
    """
    among = has_parent & (level == jnp.arange(1, shape.levels, dtype=jnp.int32)[:, None])
    far = jnp.nanquantile(jnp.where(among, distance, jnp.nan), jnp.float32(1 - shape.ratio), axis=-1)
    return jnp.where(jnp.any(among, axis=-1), far, 0.0)
