"""Search from the root to the bottom with a beam of nodes per level (IceCache, Algorithm 4).

The queries of a group (the query heads of one KV head) search together: a node or a point is as good as it is for the
query that likes it best, so that what is visited is the union of what each of them asks for, and is read once.

Pages are read whole, one row of C * D numbers each, and all points of a level are compared by one product. The levels
are unrolled: an upper level has few points, and no more pages are opened there than it can have.
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
from kvjax.typing import Array, Float, Int32, pytree


@dataclasses.dataclass(frozen=True)
class Search:
    """How much of a tree a query looks at.

    Attributes:
      beam: nodes searched per level.
      pages: pages opened per level below the top one; where the beam's nodes have more, the best nodes come first.
      visit: points of the opened pages whose keys are compared with the query, by the priority of P-DCI; None = all.
    """

    beam: int = 64
    pages: int = 96
    visit: int | None = None

    def width(self, shape: Shape, level: int) -> int:
        """Pages opened at a level: no more than its points can fill, of as many nodes as there are points above, and
        all of the top one."""
        points, above = (room_of_level(shape.points, shape.ratio, one) for one in (level, level + 1))
        if level == shape.levels:
            return min(shape.pages, -(-points // shape.rows))
        return min(self.pages, shape.pages, above + -(-points // shape.rows))


@pytree
class Found:
    """What a search opened, level by level from the top, N pages in all."""

    page: Int32[Array, "*B N"]  # NB = none
    count: Int32[Array, "*B N"]  # points in it
    score: Float[Array, "*B G N C"]  # k times q / |q|, or times T_K of an inserted key; -inf = not compared

    @property
    def point(self) -> Int32[Array, "*B N C"]:
        """The points that were compared, page * C + row, and a number beyond all points in the place of others."""
        rows = self.score.shape[-1]
        point = self.page[..., None] * rows + jnp.arange(rows, dtype=jnp.int32)
        return jnp.where(self.score[..., 0, :, :] > -jnp.inf, point, jnp.iinfo(jnp.int32).max)


def query(shape: Shape, search: Search, tree: Tree, unit: Float[Array, "G D1"]) -> Found:
    """Visits the points that are likely to be nearest to queries (QUERY down to the bottom level).

    Args:
      unit: T_Q(q) of a group of queries.
    """
    opened = [found for _, found in descend(shape, search, tree, unit[:, :-1], bottom=1)]  # the last one is zero
    page, count = (jnp.concatenate([getattr(found, name) for found in opened]) for name in ("page", "count"))
    return Found(page, count, jnp.concatenate([found.score for found in opened], axis=1))


def descend(
    shape: Shape, search: Search, tree: Tree, unit: Float[Array, "G _"], bottom: int
) -> Iterator[tuple[int, Found]]:
    """Each level and what is opened there, from the highest that a tree may have down to `bottom`.

    Args:
      unit: points on the unit sphere; D coordinates if the last one is zero.
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
    """Entries of pages in one of the tree's tables, `empty` for page NB."""
    return table.at[page].get(mode="fill", fill_value=empty)


def _open(tree: Tree, nodes: Int32[Array, "B"], count: int) -> Int32[Array, "N"]:
    """The pages of the nodes, the first node's first; NB where there are no more."""
    length = _entry(tree.length, nodes)
    end = jnp.cumsum(length, dtype=jnp.int32)
    nth = jnp.arange(count, dtype=jnp.int32)
    rank = jnp.minimum(jnp.sum(end <= nth[:, None], axis=-1, dtype=jnp.int32), nodes.shape[0] - 1)
    none = tree.length.shape[0]
    page, hops = jnp.where(nth < end[-1], nodes[rank], none), nth - (end - length)[rank]
    for bit in range((count - 1).bit_length()):
        page = computed_once(page)  # or XLA:CPU computes all earlier steps again in each
        page = jnp.where((hops >> bit) & 1 == 1, _entry(tree.jump[bit], page, none), page)
    return page


def _compare(shape: Shape, search: Search, tree: Tree, page, unit) -> Float[Array, "G N C"]:
    """Prioritized-DCI-Query of all opened pages: c times the inner products of their points with the queries."""
    at = jnp.minimum(page, shape.pages - 1)
    valid = jnp.arange(shape.rows, dtype=jnp.int32) < _entry(tree.count, page)[:, None]
    if shape.projections == 0 or search.visit is None or search.visit >= valid.size:
        key = tree.key.reshape(shape.pages, -1)[at].reshape(-1, shape.size)
        score = _products(key, tree.squared[at].reshape(-1), tree.radius, unit)
        return jnp.where(valid, score.reshape(-1, *valid.shape), -jnp.inf)
    first = prioritised(_bounds(tree, at, unit), valid.reshape(-1), search.visit)
    point = jnp.minimum(first, valid.size - 1)
    point = at[point // shape.rows] * shape.rows + point % shape.rows
    key, squared = tree.key.reshape(-1, shape.size)[point], tree.squared.reshape(-1)[point]
    score = jnp.full((unit.shape[0], valid.size), -jnp.inf, jnp.float32)
    score = score.at[:, first].set(_products(key, squared, tree.radius, unit), mode="drop")
    return score.reshape(-1, *valid.shape)


def _products(key, squared, radius, unit) -> Float[Array, "G V"]:
    """Keys are the left operand, which XLA:CPU multiplies twice as fast: the barriers keep them there."""
    size = key.shape[-1]
    score = computed_once(key @ computed_once(unit[:, :size].T)).T
    return score if unit.shape[-1] == size else score + lift(squared, radius) * unit[:, size:]


def _bounds(tree: Tree, page, unit) -> Float[Array, "V"]:
    """Lower bounds of the distances of all points of the pages to the query that is nearest to each."""
    last = lift(tree.squared[page], tree.radius)[..., None] * tree.directions[-1]
    point = (tree.projected[page] + last) / jnp.sqrt(jnp.maximum(tree.radius, 1e-30))
    projected = unit @ tree.directions[: unit.shape[-1]]
    return jnp.min(lower_bounds(point.reshape(-1, projected.shape[-1]), projected), axis=-1)


def _best_nodes(tree: Tree, found: Found, beam: int) -> Int32[Array, "B"]:
    """First pages of the nodes under the best points; NB where there are fewer."""
    none = tree.length.shape[0]
    child = _entry(tree.child, found.page, none).reshape(-1)
    best = functools.reduce(jnp.maximum, list(found.score)).reshape(-1)
    best, at = jax.lax.top_k(jnp.where(child < none, best, -jnp.inf), min(beam, best.shape[0]))
    return jnp.where(best > -jnp.inf, child[at], none)
