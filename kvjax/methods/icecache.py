"""IceCache (Mao et al., "IceCache: Memory-Efficient KV-Cache Management for Long-Sequence LLMs"), Algorithms 1 to 4.

The keys between sinks and window are indexed per KV head in a DCI-tree (`kvjax.methods.dci`) whose nodes are pages:
keys that are near each other, hence asked for together, share a page and are read together. A query descends the tree,
the best tokens it finds name the pages to load, and all tokens of these are attended. While decoding, each token that
leaves the window is inserted into the tree and goes to the page of its node; a full node opens another page.

Layers 0 and 1 are dense, as in the paper (5.1). `reuse=3` is its IceCache(reuse): every third layer has a tree and
searches it, the layers between follow (appendix C).

Choices the paper leaves open:
  - the query heads of a KV head search together (`kvjax.methods.dci.search`), which loads the union of their pages
  (4.2).
  - k, the number of tokens that name pages: all that the search compares with the query. Their pages are ranked by the
    sum of exp(q.k / sqrt(D)) over these tokens, divided by the rows of the page: attention mass per row of the budget.
    With `top`, Algorithm 3 to the letter: the pages of each query head's k best tokens, best first, in union. Pages
    without such a token come last and fill what the others leave of the budget: those that were opened in the order of
    the search, then the others by their numbers.
  - page size, promotion ratio and width of the search are not given. Pages of 8 held most of the true top tokens per
    budget with the reference model's keys. A beam of 64 takes two thirds of the time per token at 16K, and misses one
    passkey in a hundred, which 192 does not.
  - promotions drawn while decoding go to tokens that are far from all parents (`kvjax.methods.dci.promotion`), as rows
  keep
    their pages and a parent that comes late gets later tokens only.
  - tokens leave the window one by one and are inserted as they leave, as with every method here; in Algorithm 1 a page
    of them leaves at once.
  - every token of an opened page is compared with the query. With `projections` and `visit` only those are that P-DCI
    gives priority to: fewer products, but more gathers, which on CPU costs as much.

Resident: all keys (as in the paper, where they are in CPU memory with the index), their projections, and the links. So
blocks hold values alone, and half as much is read, where that fills pages of the device. Keys are in float32, whatever
the cache's `dtype`, which is that of the values.
Cost per step: at most `pages` pages of keys per level of the tree. Only opened pages are ranked, so that nothing grows
with the number of tokens but the number of levels.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from kvjax.cache.method import Method, Placement, Selection, no_force
from kvjax.errors import ConfigError
from kvjax.methods import dci
from kvjax.methods.dci.tree import most_levels
from kvjax.ops import kmeans
from kvjax.ops.barriers import computed_once
from kvjax.ops.topk import aggregate, top_blocks
from kvjax.typing import Array, Float, Int32

_LOW = -1e30  # rank of a page without a found token: finite, so that it still comes before an empty page


@dataclasses.dataclass(frozen=True)
class IceCache(Method):
    """Pages that are nodes of a DCI-tree.

    Attributes:
      page: rows of a page.
      ratio: promotion ratio r.
      num_blocks: pages of one head; None = enough for full pages and three quarters of a page for every parent.
      beam: nodes searched per level.
      pages: most pages opened per level, also for a parent; None = 1.5 times the beam of either.
      projections: P, directions of P-DCI; 0 = none.
      visit: tokens compared per level, by the priority of P-DCI; None = all that are opened.
      top: k of Algorithm 3; None = all that are compared.
      insert_beam: nodes searched per level for the parent of a new token.
      update: whether tokens that leave the window find their place in the tree. Otherwise they fill pages that no
        search opens, only to measure what an index that follows the decode is worth.
      seed: of directions and promotions.

    Raises ConfigError for numbers below 1, a ratio outside (0, 1), and where only one of `projections` and `visit` is
    given.
    """

    aggregation: str = "softmax_mean"
    dense_layers: int = 2
    page: int = 8
    ratio: float = 1 / 8
    num_blocks: int | None = None
    beam: int = 192
    pages: int | None = None
    projections: int = 0
    visit: int | None = None
    top: int | None = None
    insert_beam: int = 16
    update: bool = True
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        for name in ("beam", "pages", "visit", "top", "insert_beam", "num_blocks"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 < self.ratio < 1:
            raise ConfigError(f"ratio={self.ratio} must be above 0 and below 1: the share of tokens of one level that "
                              "are on the next")
        if (self.visit is None) != (self.projections == 0):
            raise ConfigError(f"projections={self.projections} and visit={self.visit} go together: the first rank the "
                              "tokens of which so many are compared; give both or neither")

    @property
    def keeps_keys(self):
        """Only where layers share a selection, as those that follow have no tree: else its keys are those of the pages.
        """
        return self.reuse > 1

    def blocks(self, capacity, rows):
        count = -(-capacity // self.page) + math.ceil(0.75 * capacity * self.ratio) + 1
        return count if self.num_blocks is None else self.num_blocks, self.page, max(1, -(-2 * rows // self.page)), 0

    def init(self, spec, weights):
        return jax.vmap(lambda seed: dci.empty_tree(self.shape(spec), seed))(self._seeds(spec))

    def build(self, spec, index, context):
        shape = self.shape(spec)

        def one_head(args):
            key, seed = args
            level = dci.draw_levels(seed, context.pos, self.ratio, shape.levels)
            return dci.build(shape, seed, key, context.valid, level)

        tree, page, row = jax.lax.map(one_head, (context.key.astype(jnp.float32), self._seeds(spec)))
        return tree, Placement(page, row)

    def select(self, spec, index, view, q):
        """PAGE-SELECT (Algorithm 3) of every KV head."""
        page, score = jax.vmap(lambda *head: self._page_scores(spec, *head))(index, q)
        page = jnp.concatenate([page, jax.vmap(lambda opened: _others(spec, opened))(page)], axis=-1)
        score = jnp.pad(score, ((0, 0), (0, 0), (0, page.shape[-1] - score.shape[-1])), constant_values=_LOW)
        occupied = jnp.take_along_axis(view.count, jnp.minimum(page, spec.num_blocks - 1), axis=-1) > 0
        best = top_blocks(aggregate(score, self.aggregation), occupied & (page < spec.num_blocks), spec.max_blocks)
        page = jnp.pad(page, ((0, 0), (0, 1)), constant_values=spec.num_blocks)
        return Selection(jnp.take_along_axis(page, best, axis=-1), no_force(spec))

    def _page_scores(self, spec, tree, q):
        """The opened pages [N] and how good each is [G, N]: the log of the mean attention weight over its rows, up to a
        constant, or with `top` the score of its best token."""
        q = q.astype(jnp.float32)
        found = dci.query(self.shape(spec), self.search(self.beam), tree, dci.transform_query(q))
        norm = jnp.sqrt(jnp.sum(jnp.square(q), axis=-1)) * spec.head_dim**-0.5
        score = jnp.where(found.score > -jnp.inf, found.score * norm[:, None, None], -jnp.inf)
        if self.top is not None:
            return found.page, _best_of(score, self.top)
        top = jnp.maximum(jnp.max(score, axis=(1, 2), keepdims=True), _LOW)
        mass = computed_once(jnp.exp(score - top)) @ jnp.ones(spec.block_rows, jnp.float32)  # faster than a sum
        density = jnp.log(jnp.maximum(mass, 1e-37)) - jnp.log(jnp.maximum(found.count, 1).astype(jnp.float32))
        return found.page, jnp.where(mass > 0, density, _LOW)

    def rebuild(self, spec, index, block, row, pos):
        head = jnp.arange(spec.kv_heads, dtype=jnp.int32)[:, None]
        return index.key[head, jnp.minimum(block, spec.num_blocks - 1), row]

    def append(self, spec, index, view, evicted):
        shape, search = self.shape(spec), self.search(self.insert_beam)

        def one_head(tree, key, seed):
            if not self.update:
                return dci.put_aside(shape, tree, key, evicted.valid)
            level = dci.draw_levels(seed, evicted.pos, self.ratio, shape.levels)
            return dci.insert(shape, search, tree, key, level, evicted.valid)

        tree, page, row = jax.vmap(one_head)(index, evicted.key.astype(jnp.float32), self._seeds(spec))
        return tree, Placement(page, row)

    def shape(self, spec) -> dci.Shape:
        """Of each head's tree."""
        levels = most_levels(spec.capacity, self.ratio)
        return dci.Shape(spec.num_blocks, spec.block_rows, spec.head_dim, self.ratio, levels, self.projections)

    def search(self, beam: int) -> dci.Search:
        """What a query looks at, with `beam`, or an insert, with `insert_beam`."""
        return dci.Search(beam, -(-3 * beam // 2) if self.pages is None else self.pages, self.visit)

    def _seeds(self, spec):
        return kmeans.fixed_seeds(self.seed, spec.kv_heads)


def _best_of(score: Float[Array, "G N C"], count: int) -> Float[Array, "G N"]:
    """The best score of each page that has one of a query's `count` best tokens, _LOW of the others."""
    flat = score.reshape(score.shape[0], -1)
    # A minimum, and not the last one: XLA:CPU sorts everything for a part of a top-k.
    last = jnp.min(jax.lax.top_k(flat, min(count, flat.shape[1]))[0], axis=-1, keepdims=True)
    best = jnp.max(score, axis=-1)
    return jnp.where((best >= last) & (best > -jnp.inf), best, _LOW)


def _others(spec, opened: Int32[Array, "N"]) -> Int32[Array, "O"]:
    """Enough unopened pages to fill a selection, from the first 2 M, NB in the place of opened ones: where fewer than M
    were opened, at least M of those are left."""
    number = jnp.arange(min(2 * spec.max_blocks, spec.num_blocks), dtype=jnp.int32)
    known = jnp.zeros(number.shape, bool).at[opened].set(True, mode="drop")
    return jnp.where(known, spec.num_blocks, number)
