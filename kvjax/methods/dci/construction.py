"""Construction of a tree from all points at once (IceCache, Algorithm 2).

Parents are found level by level, then every node is stored in consecutive pages. The parent of a point is its exact
nearest neighbour one level up, found by blocked matrix products. The paper uses its own search here; at the lengths of
prompts on a CPU the products are as fast, and exact.
"""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.methods.dci.projections import adapted_directions
from kvjax.methods.dci.promotion import far_from_parents
from kvjax.methods.dci.transform import lift, transform_key
from kvjax.methods.dci.tree import Shape, Tree, empty_tree, room_of_level
from kvjax.ops import kmeans
from kvjax.ops.barriers import computed_once
from kvjax.ops.indexing import first
from kvjax.ops.precise import matmul
from kvjax.typing import Array, Bool, Float, Int32, PRNGKey

_PRODUCTS = 1 << 20  # inner products at once, so that they stay in the processor's cache
_CANDIDATES = 1 << 12  # most candidates at once, so that they stay there as well


def build(
    shape: Shape, seed: PRNGKey, key: Float[Array, "T D"], valid: Bool[Array, "T"], level: Int32[Array, "T"]
) -> tuple[Tree, Int32[Array, "T"], Int32[Array, "T"]]:
    """Builds a tree of the valid keys.

    Args:
      shape: static sizes of the tree.
      seed: key of the directions.
      key: float32[T, D], keys of one head.
      valid: bool[T], keys that are stored.
      level: int32[T], drawn level of each point (`draw_levels`). Empty levels are removed, and a level with far more
        points than its share of T is cut to its room (`room_of_level`).

    Returns:
      The tree, and the page and row of each key; page NB for keys that are not valid.
    """
    tree = empty_tree(shape, seed)
    squared = jnp.where(valid, jnp.sum(jnp.square(key), axis=-1), 0.0)
    radius = jnp.max(squared, initial=0.0)
    last = lift(squared, radius)
    level, rank = _limited(shape, level, valid)
    level = _without_gaps(shape, jnp.where(valid, level, 0))
    parent = _parents(shape, key, last, level, rank)
    page, row, strays = _pages(shape, parent, level, valid)
    unit = transform_key(key, radius)
    directions = adapted_directions(tree.directions, unit, valid) if shape.projections else tree.directions
    tree = dataclasses.replace(
        tree, directions=directions, radius=radius, strays=strays, far=_far(shape, key, last, level, parent),
        height=jnp.maximum(jnp.max(level, initial=0), 1).astype(jnp.int32),
        key=tree.key.at[page, row].set(key, mode="drop"),
        squared=tree.squared.at[page, row].set(squared, mode="drop"),
        projected=tree.projected.at[page, row].set(matmul(key, directions[:-1]), mode="drop"),
        count=tree.count.at[page].add(valid, mode="drop"),
    )
    return _chains(shape, tree, parent, page, row), page, row


def _limited(shape: Shape, level, valid):
    """Returns the level of each point and its rank in it; points beyond the room of a level move to the bottom,
    unranked."""
    total, numbers = level.shape[0], range(1, shape.levels + 1)
    rooms = jnp.array([room_of_level(total, shape.ratio, number) for number in numbers], jnp.int32)
    same = (level[:, None] == jnp.arange(1, shape.levels + 1, dtype=jnp.int32)) & valid[:, None]
    rank = jnp.sum(jnp.cumsum(same, axis=0, dtype=jnp.int32) * same, axis=-1, dtype=jnp.int32) - 1
    over = rank >= rooms[level - 1]
    return jnp.where(over, 1, level), jnp.where(over, total, rank)


def _without_gaps(shape: Shape, level):
    """Renumbers levels so that none below the top one is empty; 0 stays 0."""
    present = jnp.any(level[:, None] == jnp.arange(1, shape.levels + 1, dtype=jnp.int32), axis=0)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(present, dtype=jnp.int32)])[level]


def _parents(shape: Shape, key, last, level, rank) -> Int32[Array, "T"]:
    """Returns the nearest point one level up, as its number in the prompt; T = the root."""
    total = key.shape[0]
    point = jnp.concatenate([key, last[:, None]], axis=-1)  # c T_K(k): all of one norm, so nearest = largest product
    number = jnp.arange(total, dtype=jnp.int32)
    below = jnp.where(level == 1, number, total)
    parent = jnp.full(total, total, jnp.int32)
    for upper in range(2, shape.levels + 1):
        room = room_of_level(total, shape.ratio, upper)
        above = jnp.full(room, total, jnp.int32).at[jnp.where(level == upper, rank, room)].set(number, mode="drop")
        parent = parent.at[below].set(_nearest(point, below, above), mode="drop")
        below = above
    return parent


def _far(shape: Shape, key, last, level, parent) -> Float[Array, "L1"]:
    """Returns the far distance of levels 2, 3, ... (`far_from_parents`)."""
    total = key.shape[0]
    own = jnp.minimum(parent, total - 1)
    distance = jnp.sum(jnp.square(key - key[own]), axis=-1) + jnp.square(last - last[own])
    return far_from_parents(shape, distance, level, parent < total)


def _nearest(point, below, above):
    """Returns for each point in `below` the point of `above` with the largest product; T if `above` is empty."""
    total, (size,) = point.shape[0], below.shape
    width = min(above.shape[0], _CANDIDATES)
    rows = min(_PRODUCTS // width, size)
    blocks = jnp.pad(above, (0, -above.shape[0] % width), constant_values=total).reshape(-1, width)

    def chunk(numbers):
        mine = point[jnp.minimum(numbers, total - 1)]
        none = jnp.full(rows, -jnp.inf, jnp.float32), jnp.full(rows, total, jnp.int32)
        return jax.lax.scan(lambda best, block: (_better(point, mine, best, block), None), none, blocks)[0][1]

    padded = jnp.pad(below, (0, -size % rows)).reshape(-1, rows)
    return jax.lax.map(chunk, padded).reshape(-1)[:size]


def _better(point, mine, best, candidates):
    """Updates the largest product of each point of `mine`, and its partner, by those with the candidates."""
    total = point.shape[0]
    product = matmul(mine, point[jnp.minimum(candidates, total - 1)].T)
    product = computed_once(jnp.where(candidates < total, product, -jnp.inf))
    top = jnp.max(product, axis=-1)
    nearest = candidates[jax.vmap(first)(product == top[:, None])]
    return jnp.maximum(top, best[0]), jnp.where(top > best[0], nearest, best[1])


def _pages(shape: Shape, parent, level, valid):
    """Returns the page and row of every point, and the number of strays: nodes are in consecutive pages, the root's
    first, then those of lower levels.

    Points for which no page is left fill free rows of any page and are counted as strays. As long as there are pages
    for all levels above the bottom, strays are bottom points, and no node is under one; the points of a node under a
    stray would not be found.
    """
    total = parent.shape[0]
    first = jnp.argsort(-level, stable=True).astype(jnp.int32)
    rank = jnp.zeros(total + 1, jnp.int32).at[first].set(jnp.arange(1, total + 1, dtype=jnp.int32))  # root: 0
    owner = jnp.where(valid, rank[parent], total + 1)
    return kmeans.pack(owner, valid, total + 1, shape.rows, shape.pages)


def _chains(shape: Shape, tree: Tree, parent, page, row) -> Tree:
    """Links the pages of each node, last page first, and attaches them to their parents."""
    total, none = parent.shape[0], shape.pages
    opener = jnp.where(row == 0, page, none)  # the first point of a page belongs to the page's node
    owner = jnp.full(none, total + 1, jnp.int32).at[opener].set(parent, mode="drop")
    number = jnp.arange(none, dtype=jnp.int32)
    oldest = jnp.full(total + 2, none, jnp.int32).at[owner].min(number)[owner]
    newest = jnp.full(total + 2, -1, jnp.int32).at[owner].max(number)
    newest = jnp.where(newest >= 0, newest, none)
    taken = owner <= total
    further = number - 2 ** jnp.arange(tree.jump.shape[0], dtype=jnp.int32)[:, None]
    return dataclasses.replace(
        tree, jump=jnp.where(taken & (further >= oldest), further, none).astype(jnp.int32),
        length=jnp.where(taken, number - oldest + 1, 0), root=newest[total],
        child=tree.child.at[page, row].set(newest[:total], mode="drop"),
        used=jnp.sum(tree.count > 0, dtype=jnp.int32),
    )
