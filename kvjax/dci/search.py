"""Search from the root to the bottom with a beam of nodes per level (IceCache, Algorithm 4).

The queries of a group (the query heads of one KV head) search together: a node or a point is as good as it is for the
query that likes it best, so that what is visited is the union of what each of them asks for, and is read once.
"""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.dci.projections import lower_bounds, prioritised
from kvjax.dci.transform import lift
from kvjax.dci.tree import Shape, Tree
from kvjax.typing import Array, Float, Int32, pytree


@dataclasses.dataclass(frozen=True)
class Search:
    """How much of a tree a query looks at.

    Attributes:
      beam: nodes searched per level.
      pages: pages opened per level; where the beam's nodes have more, the best nodes come first.
      visit: points of the opened pages whose keys are compared with the query, by the priority of P-DCI; None = all.
    """

    beam: int = 64
    pages: int = 96
    visit: int | None = None

    def visits(self, shape: Shape) -> int:
        """V: keys compared per level."""
        every = self.pages * shape.rows
        return every if self.visit is None or shape.projections == 0 else min(self.visit, every)


@pytree
class Found:
    """What a search visited, level by level from the top."""

    point: Int32[Array, "*B L V"]  # NB * C = none
    score: Float[Array, "*B L V G"]  # c times the inner product of the two transforms: q.k / |q| for a query
    opened: Int32[Array, "*B L"]  # points in the opened pages: lower bounds computed


def query(
    shape: Shape, search: Search, tree: Tree, unit: Float[Array, "G D1"], bottom: Int32[Array, ""] | None = None
) -> Found:
    """Visits the points that are likely to be nearest to transformed vectors, from the root down.

    Args:
      unit: T_Q(q) of a group of queries, or T_K(k) to find the parent of a key.
      bottom: last level to be searched; None = all.
    """
    levels, visits = shape.levels, search.visits(shape)
    projected = unit @ tree.directions
    found = Found(
        jnp.full((levels, visits), shape.points, jnp.int32), jnp.full((levels, visits, unit.shape[0]), -jnp.inf),
        jnp.zeros(levels, jnp.int32),
    )

    def descend(carry):
        step, nodes, found = carry
        page = _open(tree, nodes, search.pages)
        point = _prioritise(shape, search, tree, page, projected)
        score = _score(tree, point, unit)
        found = Found(
            found.point.at[step].set(point), found.score.at[step].set(score),
            found.opened.at[step].set(jnp.sum(_count(tree, page))),
        )
        return step + 1, _best_nodes(tree, point, jnp.max(score, axis=-1), search.beam), found

    def unfinished(carry):
        step, nodes, _ = carry
        return (step < steps) & jnp.any(nodes < shape.pages)

    # Nodes, not the height, end a full search: one under a point that strayed to a lower page is a level deeper.
    steps = levels if bottom is None else tree.height - bottom + 1
    nodes = jnp.full(search.beam, shape.pages, jnp.int32).at[0].set(tree.root)
    return jax.lax.while_loop(unfinished, descend, (jnp.int32(0), nodes, found))[2]


def _open(tree: Tree, nodes: Int32[Array, "B"], count: int) -> Int32[Array, "P"]:
    """The pages of the nodes, the first node's first; NB where there are no more."""
    length = tree.length.at[nodes].get(mode="fill", fill_value=0)
    end = jnp.cumsum(length)
    nth = jnp.arange(count, dtype=jnp.int32)
    rank = jnp.minimum(jnp.searchsorted(end, nth, side="right", method="compare_all"), nodes.shape[0] - 1)
    hops = jnp.where(nth < end[-1], nth - (end - length)[rank], 0)
    page = jnp.where(nth < end[-1], nodes[rank], tree.next.shape[0])

    def hop(step, page):
        following = tree.next.at[page].get(mode="fill", fill_value=tree.next.shape[0])
        return jnp.where(step < hops, following, page)

    return jax.lax.fori_loop(0, jnp.max(hops), hop, page)


def _count(tree: Tree, page):
    return tree.count.at[page].get(mode="fill", fill_value=0)


def _prioritise(shape: Shape, search: Search, tree: Tree, page, projected) -> Int32[Array, "V"]:
    """The points of the opened pages that are visited."""
    row = jnp.arange(shape.rows, dtype=jnp.int32)
    valid = (row < _count(tree, page)[:, None]).reshape(-1)
    point = jnp.where(valid, (page[:, None] * shape.rows + row).reshape(-1), shape.points)
    if search.visits(shape) == point.shape[0]:
        return point
    at = jnp.minimum(page, shape.pages - 1)
    last = lift(tree.squared[at], tree.radius)[..., None] * tree.directions[-1]
    unit = (tree.projected[at] + last) / jnp.sqrt(jnp.maximum(tree.radius, 1e-30))
    bound = jnp.min(lower_bounds(unit.reshape(-1, shape.projections), projected), axis=-1)
    return point.at[prioritised(bound, valid, search.visits(shape))].get(mode="fill", fill_value=shape.points)


def _score(tree: Tree, point, unit):
    """c times the inner product of the points' transforms with a transformed vector; -inf for no point."""
    key, squared = tree.key.reshape(-1, tree.key.shape[-1]), tree.squared.reshape(-1)
    at = jnp.minimum(point, squared.shape[0] - 1)
    score = key[at] @ unit[:, :-1].T + lift(squared[at], tree.radius)[:, None] * unit[:, -1]
    return jnp.where((point < squared.shape[0])[:, None], score, -jnp.inf)


def _best_nodes(tree: Tree, point, score, beam: int) -> Int32[Array, "B"]:
    """First pages of the nodes under the best points; NB where there are fewer."""
    none = tree.next.shape[0]
    child = tree.child.reshape(-1).at[point].get(mode="fill", fill_value=none)
    best, at = jax.lax.top_k(jnp.where(child < none, score, -jnp.inf), min(beam, point.shape[0]))
    nodes = jnp.where(best > -jnp.inf, child[at], none)
    return jnp.pad(nodes, (0, beam - nodes.shape[0]), constant_values=none)
