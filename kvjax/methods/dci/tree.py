"""DCI-tree (IceCache) as arrays of pages.

A node is the group of points that have the same parent; the root node has the points of the top level. A node is stored
in pages of C rows, chained newest first, so only the first page of a chain has room, and an insert is O(1). The chain
behind a page never changes, so each page also links the pages 2, 4, 8, ... further, and any page of a node is found in
a few steps. A point is named page * C + row. It is stored at its own level only, as in Algorithm 4, which therefore
collects results from all levels.
"""

import dataclasses
import math

import jax.numpy as jnp

from kvjax.errors import ConfigError
from kvjax.methods.dci.projections import random_directions
from kvjax.typing import Array, Float, Int32, PRNGKey, pytree

_ROOT = 64  # fewest points that the root node is expected to have


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static sizes of a tree.

    Attributes:
      pages: NB, also the sentinel "no page"; NB * C is the sentinel "no point".
      rows: C, points of a page.
      size: D, dimensions of a key.
      ratio: promotion ratio r.
      levels: L, most levels.
      projections: P, directions of the composite index; 0 = none.

    Raises:
      ConfigError: the ratio is not between 0 and 1, or there are more projections than dimensions.
    """

    pages: int
    rows: int
    size: int
    ratio: float
    levels: int
    projections: int

    def __post_init__(self):
        if not 0 < self.ratio < 1:
            raise ConfigError(f"ratio={self.ratio} must be between 0 and 1; 1 / rows of a page is a good choice")
        if not 0 <= self.projections <= self.size + 1:
            raise ConfigError(f"projections={self.projections} must be from 0 to {self.size + 1}, the key size + 1")

    @property
    def points(self) -> int:
        """Number of points that there is room for."""
        return self.pages * self.rows


def room_of_level(points: int, ratio: float, level: int) -> int:
    """Returns the most points of a level in a tree of `points`: six standard deviations above the expected number."""
    share = points * ratio ** (level - 1)
    return min(points, math.ceil(share + 6 * math.sqrt(share) + 8))


def ahead(points: int, ratio: float, level: int) -> int:
    """Returns the promotions to a level that a tree has in advance: 0.75 of the six standard deviations in
    `room_of_level`."""
    return round(0.75 * math.sqrt(points * ratio ** (level - 1)))


def most_levels(points: int, ratio: float) -> int:
    """Returns the number of levels for `points` points: as many as leave 64 or more points in the root node, which is
    opened whole, and at least two.

    Further levels would have few points, and searching a level takes many small operations, however few points it has.
    """
    return max(2, 1 + math.floor(math.log(max(points, 1) / _ROOT) / -math.log(ratio)))


@pytree
class Tree:
    """The tree of each head; *B_K: [K], [B, K], or [] inside a function of one head."""

    key: Float[Array, "*B_K NB C D"]
    squared: Float[Array, "*B_K NB C"]  # squared norm of each key
    projected: Float[Array, "*B_K NB C P"]  # projections of the keys, without their lifted coordinate
    child: Int32[Array, "*B_K NB C"]  # first page of the node under each point, NB = none
    jump: Int32[Array, "*B_K J NB"]  # page that is 2^j pages further in the same node, NB = none
    length: Int32[Array, "*B_K NB"]  # pages from this one to the end of its node
    count: Int32[Array, "*B_K NB"]  # points in each page
    root: Int32[Array, "*B_K"]  # first page of the root node, NB = empty tree
    height: Int32[Array, "*B_K"]  # levels in use
    used: Int32[Array, "*B_K"]  # pages in use, 0 .. used - 1
    radius: Float[Array, "*B_K"]  # c^2: largest squared norm so far
    directions: Float[Array, "*B_K D1 P"]
    strays: Int32[Array, "*B_K"]  # points in another node's page, as no page was free
    waiting: Int32[Array, "*B_K L1"]  # pending promotions to levels 2 .. L
    far: Float[Array, "*B_K L1"]  # squared distance beyond which a point has no parent near it; 0 = not known


def empty_tree(shape: Shape, seed: PRNGKey) -> Tree:
    """Returns a tree without points; its directions are random until they are adapted to keys."""
    pages, rows, none = shape.pages, shape.rows, jnp.int32(shape.pages)
    waiting = [ahead(shape.points, shape.ratio, level) for level in range(2, shape.levels + 1)]
    return Tree(
        key=jnp.zeros((pages, rows, shape.size), jnp.float32), squared=jnp.zeros((pages, rows), jnp.float32),
        projected=jnp.zeros((pages, rows, shape.projections), jnp.float32), child=jnp.full((pages, rows), none),
        jump=jnp.full((pages.bit_length(), pages), none), length=jnp.zeros(pages, jnp.int32),
        count=jnp.zeros(pages, jnp.int32), root=none, height=jnp.int32(1), used=jnp.int32(0), radius=jnp.float32(0),
        directions=random_directions(seed, shape.size + 1, shape.projections), strays=jnp.int32(0),
        waiting=jnp.array(waiting, jnp.int32), far=jnp.zeros(shape.levels - 1, jnp.float32),
    )


def occupancy(tree: Tree) -> Float[Array, "*B_K"]:
    """Returns the share of rows that hold a point, over the pages in use."""
    points = jnp.sum(tree.count, axis=-1, dtype=jnp.int32).astype(jnp.float32)
    return points / jnp.maximum(tree.used * tree.key.shape[-2], 1)
