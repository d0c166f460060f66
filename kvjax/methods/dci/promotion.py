"""Which of the inserted points are promoted: as many as chance says, those that are far from all parents.

A point keeps the parent it was given, as its row cannot move. In a growing tree half of the parents come with the
second half of the points, too late for what lies near them. Promoted by chance alone, they left more than half of the
clustered points of a tree grown from nothing under another parent than the nearest one, in pages with unlike points, so
that new parents for whole pages mend little. Hence a promotion that is drawn waits for a point that no parent is near
to, like a facility of Meyerson ("Online Facility Location", 2001), which is opened the likelier the farther a new
demand is from all others. A level never gets more points than were drawn for it and those it has ahead.

What is far is learned: farther than all but a share of recent points, the promotion ratio or up to twice as many if
promotions wait. Those drawn for the first points come late even so, hence every tree has some in advance (`ahead`).
"""

import dataclasses

import jax.numpy as jnp

from kvjax.methods.dci.tree import Shape, Tree
from kvjax.typing import Array, Bool, Float, Int32

_MANY = 16  # so many waiting promotions double the share of points that are far
_STEP = 0.05  # of the logarithm of what is far, per point


def promote(
    shape: Shape, tree: Tree, drawn: Int32[Array, ""], distance: Float[Array, "L1"], valid: Bool[Array, ""]
) -> tuple[Tree, Int32[Array, ""]]:
    """The level of a new point, at most one above the highest in use.

    Args:
      drawn: a level by chance (`draw_levels`), of this point or of one that is promoted in its place.
      distance: squared, to the nearest point of levels 2, 3, ...; infinite where a level is empty.
    """
    number = jnp.arange(2, shape.levels + 1, dtype=jnp.int32)
    waiting = tree.waiting + (valid & (drawn >= number))
    far = distance > tree.far
    open_to = number <= tree.height + (tree.used > 0)
    climbs = jnp.cumprod(far & (waiting > 0) & open_to & valid, dtype=jnp.int32)
    share = shape.ratio * (1 + jnp.minimum(waiting.astype(jnp.float32) / _MANY, 1))
    asked = jnp.concatenate([valid[None].astype(climbs.dtype), climbs[:-1]])  # who gets to l asks for l + 1
    learned = jnp.where(tree.far > 0, tree.far * jnp.exp(_STEP * (far - share)), distance)
    tree = dataclasses.replace(
        tree, waiting=(waiting - climbs).astype(jnp.int32),
        far=jnp.where((asked > 0) & (distance < jnp.inf), learned, tree.far),
    )
    return tree, 1 + jnp.sum(climbs, dtype=jnp.int32)


def far_from_parents(
    shape: Shape, distance: Float[Array, "T"], level: Int32[Array, "T"], has_parent: Bool[Array, "T"]
) -> Float[Array, "L1"]:
    """What is far at levels 2, 3, ... of a tree built at once; `distance`: squared, of each point to its parent."""
    among = has_parent & (level == jnp.arange(1, shape.levels, dtype=jnp.int32)[:, None])
    far = jnp.nanquantile(jnp.where(among, distance, jnp.nan), jnp.float32(1 - shape.ratio), axis=-1)
    return jnp.where(jnp.any(among, axis=-1), far, 0.0)
