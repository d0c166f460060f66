"""One new point: its parent by search, its place in the first page of the parent's node (IceCache, Algorithm 1)."""

import dataclasses

import jax.numpy as jnp

from kvjax.dci.search import Search, query
from kvjax.dci.transform import transform_key
from kvjax.dci.tree import Shape, Tree
from kvjax.typing import Array, Bool, Float, Int32


def insert(
    shape: Shape, search: Search, tree: Tree, key: Float[Array, "D"], level: Int32[Array, ""], valid: Bool[Array, ""]
) -> tuple[Tree, Int32[Array, ""], Int32[Array, ""]]:
    """The tree with a key at its level, and the page and row it went to (page NB where not `valid`).

    A level above the top one makes the tree one level higher: the new point becomes the only one of the new top level,
    and the old root node its node. The tree must have a free row.
    """
    squared = jnp.sum(jnp.square(key))
    tree = dataclasses.replace(tree, radius=jnp.where(valid, jnp.maximum(tree.radius, squared), tree.radius))
    free = tree.used < shape.pages
    grows = (level > tree.height) & (tree.used > 0) & free
    parent = _parent(shape, search, tree, key, level)
    first = tree.child.reshape(-1).at[parent].get(mode="fill", fill_value=shape.pages)
    first = jnp.where(parent == shape.points, tree.root, first)
    first = jnp.where(grows, shape.pages, first)  # a new chain
    room = tree.count.at[first].get(mode="fill", fill_value=shape.rows) < shape.rows
    stray = valid & ~room & ~free
    page = jnp.where(room, first, jnp.where(free, tree.used, jnp.argmax(tree.count < shape.rows)))
    page = jnp.where(valid, page, shape.pages).astype(jnp.int32)
    row = tree.count.at[page].get(mode="fill", fill_value=0)

    opens = valid & ~room & free
    tree = _chain(shape, tree, jnp.where(opens, page, shape.pages), first, parent, grows)
    child = jnp.where(grows, tree.root, shape.pages)
    tree = _write(tree, page, row, key, squared, child)
    tree = dataclasses.replace(
        tree, root=jnp.where(valid & (grows | (opens & (parent == shape.points))), page, tree.root),
        height=tree.height + (valid & grows), used=tree.used + opens, strays=tree.strays + stray,
    )
    return tree, page, row


def _parent(shape: Shape, search: Search, tree: Tree, key, level) -> Int32[Array, ""]:
    """The nearest point of the next higher level; NB * C = the root, for the top level."""
    above = jnp.minimum(level, tree.height) + 1
    found = query(shape, search, tree, transform_key(key[None], tree.radius), above)
    last = jnp.maximum(tree.height - above, 0)
    best = jnp.argmax(found.score[last, :, 0])
    return jnp.where(above <= tree.height, found.point[last, best], shape.points)


def _chain(shape: Shape, tree: Tree, page, first, parent, grows) -> Tree:
    """Puts a new page (NB = none) in front of a node's chain that begins with page `first`."""
    behind = tree.length.at[first].get(mode="fill", fill_value=0)
    owner = jnp.where((page < shape.pages) & ~grows, parent, shape.points)
    child = tree.child.reshape(-1).at[owner].set(page, mode="drop").reshape(tree.child.shape)
    return dataclasses.replace(
        tree, next=tree.next.at[page].set(first, mode="drop"), child=child,
        length=tree.length.at[page].set(behind + 1, mode="drop"),
    )


def _write(tree: Tree, page, row, key, squared, child) -> Tree:
    """Enters a point; page NB enters nothing."""
    return dataclasses.replace(
        tree,
        key=tree.key.at[page, row].set(key, mode="drop"),
        squared=tree.squared.at[page, row].set(squared, mode="drop"),
        projected=tree.projected.at[page, row].set(key @ tree.directions[:-1], mode="drop"),
        child=tree.child.at[page, row].set(child, mode="drop"),
        count=tree.count.at[page].add(1, mode="drop"),
    )
