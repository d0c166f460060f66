"""Insertion of a point: its parent by search, its row in the first page of the parent's node (IceCache, Algorithm 1).

A point stays under its first parent. A nearer parent that is promoted later only gets later points, so points are
promoted where parents are missing (`kvjax.methods.dci.promotion`).
"""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.methods.dci.projections import adapted_directions
from kvjax.methods.dci.promotion import promote
from kvjax.methods.dci.search import Search, descend
from kvjax.methods.dci.transform import transform_key
from kvjax.methods.dci.tree import Shape, Tree
from kvjax.ops.indexing import first, with_column, with_row
from kvjax.ops.kernels import tiles
from kvjax.ops.precise import matmul
from kvjax.typing import Array, Bool, Float, Int32


def insert(
    shape: Shape, search: Search, tree: Tree, key: Float[Array, "D"], level: Int32[Array, ""], valid: Bool[Array, ""]
) -> tuple[Tree, Int32[Array, ""], Int32[Array, ""]]:
    """Inserts a key into the tree.

    A level above the top one makes the tree one level higher: the new point becomes the only point of the new top
    level, with the old root node as its node. The tree must have a free row.

    Args:
      shape: static sizes of the tree.
      search: how much of the tree is searched for the parent.
      tree: the tree of one head.
      key: float32[D].
      level: a drawn level (`draw_levels`), because a search opens no more pages of a level than drawn points fill. The
        new point or a later one is promoted to it (`kvjax.methods.dci.promotion`).
      valid: whether there is a key; if not, the tree does not change.

    Returns:
      The tree, and the page and row of the key; page NB if not `valid`.
    """
    squared = jnp.sum(jnp.square(key))
    tree = dataclasses.replace(tree, radius=jnp.where(valid, jnp.maximum(tree.radius, squared), tree.radius))
    nearest, distance = _nearest(shape, search, tree, key)
    tree, level = promote(shape, tree, level, distance, valid)
    grows = (level > tree.height) & (tree.used < shape.pages)
    parent = jnp.where(level < tree.height, nearest[jnp.minimum(level, shape.levels - 1) - 1], shape.points)
    head = tree.child.reshape(-1).at[parent].get(mode="fill", fill_value=shape.pages)
    head = jnp.where(parent == shape.points, tree.root, head)
    head = jnp.where(grows, shape.pages, head)  # no chain to prepend to
    tree, page, row, opens = _take_row(shape, tree, head, valid)
    tree = _chain(shape, tree, jnp.where(opens, page, shape.pages), head, parent, grows)
    child = jnp.where(grows, tree.root, shape.pages)
    tree = _write(tree, page, row, key, squared, child)
    tree = dataclasses.replace(
        tree, root=jnp.where(valid & (grows | (opens & (parent == shape.points))), page, tree.root),
        height=tree.height + (valid & grows),
    )
    return _turn(shape, tree, opens & (jax.lax.population_count(tree.used) == 1)), page, row


def put_aside(
    shape: Shape, tree: Tree, key: Float[Array, "D"], valid: Bool[Array, ""]
) -> tuple[Tree, Int32[Array, ""], Int32[Array, ""]]:
    """Stores a key outside all nodes, in pages that no search opens and that are filled one after the other.

    Arguments and result are those of `insert`.
    """
    last = jnp.maximum(tree.used - 1, 0)
    head = jnp.where((tree.used > 0) & (tree.length[last] == 0), last, shape.pages)
    tree, page, row, _ = _take_row(shape, tree, head, valid)
    return _write(tree, page, row, key, jnp.sum(jnp.square(key)), shape.pages), page, row


def _take_row(shape: Shape, tree: Tree, head, valid):
    """Returns the tree, a page and row for a valid key, and whether the page is new: `head` if it has room, else a new
    page, else any page with a free row, which counts as a stray."""
    room = tree.count.at[head].get(mode="fill", fill_value=shape.rows) < shape.rows
    opens = valid & ~room & (tree.used < shape.pages)
    stray = valid & ~room & ~opens
    page = jnp.where(room, head, jnp.where(opens, tree.used, _any_room(shape, tree, stray)))
    page = jnp.where(valid, page, shape.pages).astype(jnp.int32)
    row = tree.count.at[page].get(mode="fill", fill_value=0)
    return dataclasses.replace(tree, used=tree.used + opens, strays=tree.strays + stray), page, row, opens


def _nearest(shape: Shape, search: Search, tree: Tree, key) -> tuple[Int32[Array, "L1"], Float[Array, "L1"]]:
    """Returns the nearest points of levels 2, 3, ... (line 34: QUERY with k = 1), and their squared distances."""
    points, scores = [], []
    for _, opened in descend(shape, search, tree, transform_key(key[None], tree.radius), bottom=2):
        score = opened.score.reshape(-1)
        scores.append(jnp.max(score))
        best = first(score == scores[-1])
        points.append(opened.page[best // shape.rows] * shape.rows + best % shape.rows)
    distance = 2 * (tree.radius - jnp.sqrt(tree.radius) * jnp.stack(scores[::-1]))
    return jnp.stack(points[::-1]), jnp.maximum(distance, 0.0)


def _any_room(shape: Shape, tree: Tree, wanted) -> Int32[Array, ""]:
    """Returns the first page with a free row if it is `wanted`, else -1.

    This is a loop of at most one iteration, because under `vmap` a `cond` would look at all pages every time. The
    comparison depends on `page` (-1 in that iteration), so that XLA does not move it out of the loop.
    """
    return jax.lax.while_loop(
        lambda page: wanted & (page < 0), lambda page: first(tree.count < shape.rows + 1 + page), jnp.int32(-1)
    )


def _turn(shape: Shape, tree: Tree, due) -> Tree:
    """Adapts the directions to all keys if `due`, i.e. whenever the pages in use have doubled, which is a constant cost
    per insert. A loop of at most one iteration, as in `_any_room`."""
    if not shape.projections:
        return tree

    def adapted(carry):
        _, directions, _ = carry
        unit = transform_key(tree.key.reshape(-1, shape.size), tree.radius)
        valid = (jnp.arange(shape.rows, dtype=jnp.int32) < tree.count[:, None]).reshape(-1)
        directions = adapted_directions(directions, unit, valid)
        return jnp.bool_(False), directions, matmul(tree.key, directions[:-1])

    start = (jnp.asarray(due), tree.directions, tree.projected)
    _, directions, projected = jax.lax.while_loop(lambda carry: carry[0], adapted, start)
    return dataclasses.replace(tree, directions=directions, projected=projected)


def _chain(shape: Shape, tree: Tree, page, first, parent, grows) -> Tree:
    """Puts a new page (NB = none) in front of the node's chain that begins with page `first`."""
    behind = tree.length.at[first].get(mode="fill", fill_value=0)
    owner = jnp.where((page < shape.pages) & ~grows, parent, shape.points)
    child = tree.child.reshape(-1).at[owner].set(page, mode="drop").reshape(tree.child.shape)
    further = [first]
    for table in tree.jump[:-1]:  # 2^(j + 1) pages further: twice 2^j
        further.append(table.at[further[-1]].get(mode="fill", fill_value=shape.pages))
    return dataclasses.replace(
        tree, jump=with_column(tree.jump, page, jnp.stack(further)), child=child,
        length=tree.length.at[page].set(behind + 1, mode="drop"),
    )


def _with_vector(x: Float[Array, "NB C X"], page, row, new: Float[Array, "X"]) -> Float[Array, "NB C X"]:
    """Returns what each point has with that of one point replaced; page NB is none."""
    if x.size and tiles.wanted() and x.shape[-1] % tiles.LANES == 0:  # else XLA for TPUs keeps the pages last
        return with_row(x.reshape(-1, x.shape[-1]), page * x.shape[1] + row, new).reshape(x.shape)
    return x.at[page, row].set(new, mode="drop")


def _write(tree: Tree, page, row, key, squared, child) -> Tree:
    """Writes a point; page NB writes nothing."""
    return dataclasses.replace(
        tree,
        key=_with_vector(tree.key, page, row, key),
        squared=tree.squared.at[page, row].set(squared, mode="drop"),
        projected=_with_vector(tree.projected, page, row, matmul(key, tree.directions[:-1])),
        child=tree.child.at[page, row].set(child, mode="drop"),
        count=tree.count.at[page].set(row + 1, mode="drop"),  # set, not add(1): XLA then updates it in place
    )
