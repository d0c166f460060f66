"""Search from the root to the bottom with a beam of nodes per level (IceCache, Algorithm 4).

The queries of a group (the query heads of one KV head) search together: a node or point has the score of the query that
scores it highest, so the union of what the queries ask for is visited, and read once.

Pages are read whole, as one row of C * D numbers each, and all points of a level are compared by one product. The loop
over levels is unrolled: an upper level has few points, and no more pages are opened there than it can have.
"""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from kvjax.methods.dci.projections import lower_bounds, prioritised
from kvjax.methods.dci.transform import lift
from kvjax.methods.dci.tree import Shape, Tree, room_of_level
from kvjax.ops.barriers import computed_once
from kvjax.ops.kernels import tiles
from kvjax.ops.precise import matmul
from kvjax.typing import Array, Float, Int32, pytree


@dataclasses.dataclass(frozen=True)
class Search:
    """Limits on the part of a tree that a query visits.

    Attributes:
      beam: nodes searched per level.
      pages: most pages opened per level below the top one; the best nodes come first.
      visit: points of the opened pages whose keys are compared with the query, by the priority of P-DCI; None = all.
    """

    beam: int = 64
    pages: int = 96
    visit: int | None = None

    def width(self, shape: Shape, level: int) -> int:
        """Returns the number of pages opened at a level: no more than its points can fill in as many nodes as there are
        points above, and all pages of the top level."""
        points, above = (room_of_level(shape.points, shape.ratio, number) for number in (level, level + 1))
        if level == shape.levels:
            return min(shape.pages, -(-points // shape.rows))
        return min(self.pages, shape.pages, above + -(-points // shape.rows))


@pytree
class Found:
    """The N pages that a search opened, level by level from the top."""

    page: Int32[Array, "*B N"]  # NB = none
    count: Int32[Array, "*B N"]  # points in each page
    score: Float[Array, "*B G N C"]  # k . q / |q|, or c T_K(k) . T_K of an inserted key; -inf = not compared

    @property
    def point(self) -> Int32[Array, "*B N C"]:
        """The compared points as page * C + row; a number beyond all points in place of others."""
        rows = self.score.shape[-1]
        point = self.page[..., None] * rows + jnp.arange(rows, dtype=jnp.int32)
        return jnp.where(self.score[..., 0, :, :] > -jnp.inf, point, jnp.iinfo(jnp.int32).max)


def query(shape: Shape, search: Search, tree: Tree, unit: Float[Array, "G D1"]) -> Found:
    """Visits the points that are likely to be nearest to queries (QUERY down to the bottom level).

    Args:
      shape: static sizes of the tree.
      search: how much of the tree is visited.
      tree: the tree of one head.
      unit: [G, D + 1], T_Q(q) of a group of queries.

    Returns:
      The opened pages of all levels, and the scores of their points.
    """
    levels = [found for _, found in descend(shape, search, tree, unit[:, :-1], bottom=1)]  # the last coordinate is 0
    page, count = (jnp.concatenate([getattr(found, name) for found in levels]) for name in ("page", "count"))
    return Found(page, count, jnp.concatenate([found.score for found in levels], axis=1))


def descend(
    shape: Shape, search: Search, tree: Tree, unit: Float[Array, "G _"], bottom: int
) -> Iterator[tuple[int, Found]]:
    """Yields each level and the pages opened there, from the highest that a tree may have down to `bottom`.

    Args:
      shape: static sizes of the tree.
      search: how much of the tree is visited.
      tree: the tree of one head.
      unit: points on the unit sphere, [G, D + 1], or [G, D] if the last coordinate is 0.
      bottom: the lowest level to visit.
    """
    nodes = jnp.full(1, shape.pages, jnp.int32)
    for level in range(shape.levels, bottom - 1, -1):  # for i = L to l
        root = jnp.where(jnp.arange(nodes.shape[0], dtype=jnp.int32) == 0, tree.root, shape.pages)
        nodes = jnp.where(level == tree.height, root, nodes)  # if i = L: S = {root node}
        page = _open(tree, nodes, search.width(shape, level))
        found = Found(page, _entry(tree.count, page), _compare(shape, search, tree, page, unit))
        yield level, found
        if level > bottom:
            nodes = _best_nodes(tree, found, search.beam)  # S = S'


def _entry(table: Int32[Array, "NB *_"], page, empty: int = 0):
    """Returns the entries of pages in one of the tree's tables; `empty` for page NB."""
    return table.at[page].get(mode="fill", fill_value=empty)


def _open(tree: Tree, nodes: Int32[Array, "B"], count: int) -> Int32[Array, "N"]:
    """Returns the pages of the nodes, those of the first node first; NB where there are no more."""
    length = _entry(tree.length, nodes)
    end = jnp.cumsum(length, dtype=jnp.int32)
    nth = jnp.arange(count, dtype=jnp.int32)
    rank = jnp.minimum(jnp.sum(end <= nth[:, None], axis=-1, dtype=jnp.int32), nodes.shape[0] - 1)
    none = tree.length.shape[0]
    page, hops = jnp.where(nth < end[-1], nodes[rank], none), nth - (end - length)[rank]
    for bit in range((count - 1).bit_length()):
        page = computed_once(page)  # else XLA:CPU recomputes all earlier steps in each
        page = jnp.where((hops >> bit) & 1 == 1, _entry(tree.jump[bit], page, none), page)
    return page


def _compare(shape: Shape, search: Search, tree: Tree, page, unit) -> Float[Array, "G N C"]:
    """Runs Prioritized-DCI-Query on all opened pages: c times the inner products of their points with the queries."""
    opened = jnp.minimum(page, shape.pages - 1)
    valid = jnp.arange(shape.rows, dtype=jnp.int32) < _entry(tree.count, page)[:, None]
    if shape.projections == 0 or search.visit is None or search.visit >= valid.size:
        # XLA:CPU copies pages faster as rows; for TPUs that is another layout, and all pages would be copied.
        pages = tree.key if tiles.wanted() else tree.key.reshape(shape.pages, -1)
        key = pages[opened].reshape(-1, shape.size)
        score = _products(key, tree.squared[opened].reshape(-1), tree.radius, unit)
        return jnp.where(valid, score.reshape(-1, *valid.shape), -jnp.inf)
    first = prioritised(_bounds(tree, opened, unit), valid.reshape(-1), search.visit)
    point = jnp.minimum(first, valid.size - 1)
    point = opened[point // shape.rows] * shape.rows + point % shape.rows
    key, squared = tree.key.reshape(-1, shape.size)[point], tree.squared.reshape(-1)[point]
    score = jnp.full((unit.shape[0], valid.size), -jnp.inf, jnp.float32)
    score = score.at[:, first].set(_products(key, squared, tree.radius, unit), mode="drop")
    return score.reshape(-1, *valid.shape)


def _products(key, squared, radius, unit) -> Float[Array, "G V"]:
    """Returns c T_K(k) times the queries; keys are the left operand, which is twice as fast on XLA:CPU, and the
    barriers keep them there."""
    size = key.shape[-1]
    score = computed_once(matmul(key, computed_once(unit[:, :size].T))).T
    return score if unit.shape[-1] == size else score + lift(squared, radius) * unit[:, size:]


def _bounds(tree: Tree, page, unit) -> Float[Array, "V"]:
    """Returns lower bounds of the squared distance of each point of the pages to the query nearest to it."""
    last = lift(tree.squared[page], tree.radius)[..., None] * tree.directions[-1]
    point = (tree.projected[page] + last) / jnp.sqrt(jnp.maximum(tree.radius, 1e-30))
    projected = matmul(unit, tree.directions[: unit.shape[-1]])
    return jnp.min(lower_bounds(point.reshape(-1, projected.shape[-1]), projected), axis=-1)


def _best_nodes(tree: Tree, found: Found, beam: int) -> Int32[Array, "B"]:
    """Returns the first pages of the nodes under the best points; NB where there are fewer."""
    none = tree.length.shape[0]
    child = _entry(tree.child, found.page, none).reshape(-1)
    best = functools.reduce(jnp.maximum, list(found.score)).reshape(-1)
    best, point = jax.lax.top_k(jnp.where(child < none, best, -jnp.inf), min(beam, best.shape[0]))
    return jnp.where(best > -jnp.inf, child[point], none)
