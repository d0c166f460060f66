"""Which of the inserted points are promoted: as many as chance says, those that are far from all parents.

A point keeps the parent it was given, as its row cannot move. In a growing tree half of the parents come with the second
half of the points, too late for what lies near them: promoted by chance alone, they leave nearly half of the clustered
points of a tree that was grown from nothing with a far parent. Hence a promotion that is drawn waits for a point that
no parent is near to, like a facility of Meyerson ("Online Facility Location", 2001), which is opened the likelier the
farther a new demand is from all others. So every level has at most the points that were drawn for it.

What is far is learned: farther than all but a share of recent points, a little more of them than are promoted, so that
promotions do not wait long.
"""

import dataclasses

import jax.numpy as jnp

from kvjax.dci.tree import Shape, Tree
from kvjax.typing import Array, Bool, Float, Int32

_SHARE = 1.15  # far points per promotion
_STEP = 0.05  # of the logarithm of what is far, per point


def promote(
    shape: Shape, tree: Tree, drawn: Int32[Array, ""], distance: Float[Array, "L1"], valid: Bool[Array, ""]
) -> tuple[Tree, Int32[Array, ""]]:
    """The level of a new point, at most one above the highest in use.

    Args:
      drawn: a level by chance (`draw_levels`), of this point or of one that is promoted in its place.
      distance: squared, to the nearest point of levels 2, 3, ...; infinite where a level is empty.
    """
    number = jnp.arange(2, shape.levels + 1)
    waiting = tree.waiting + (valid & (drawn >= number))
    far = distance > tree.far
    climbs = jnp.cumprod(far & (waiting > 0) & (number <= tree.height + (tree.used > 0)) & valid)
    asked = jnp.concatenate([valid[None].astype(climbs.dtype), climbs[:-1]])  # who gets to l asks for l + 1
    learned = jnp.where(tree.far > 0, tree.far * jnp.exp(_STEP * (far - _SHARE * shape.ratio)), distance)
    tree = dataclasses.replace(
        tree, waiting=(waiting - climbs).astype(jnp.int32),
        far=jnp.where((asked > 0) & (distance < jnp.inf), learned, tree.far),
    )
    return tree, 1 + jnp.sum(climbs, dtype=jnp.int32)


def far_from_parents(
    shape: Shape, distance: Float[Array, "T"], level: Int32[Array, "T"], has_parent: Bool[Array, "T"]
) -> Float[Array, "L1"]:
    """What is far at levels 2, 3, ... of a tree built at once, given the squared distance of each point to its parent."""
    among = has_parent & (level == jnp.arange(1, shape.levels)[:, None])
    far = jnp.nanquantile(jnp.where(among, distance, jnp.nan), 1 - _SHARE * shape.ratio, axis=-1)
    return jnp.where(jnp.any(among, axis=-1), far, 0.0)
