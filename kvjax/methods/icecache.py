"""IceCache (Mao et al., "IceCache: Memory-Efficient KV-Cache Management for Long-Sequence LLMs"), Algorithms 1 to 4.

The keys between sinks and window are indexed per KV head in a DCI-tree (`kvjax.methods.dci`) whose nodes are stored in
pages: keys that are near each other, and hence needed together, share a page and are read together. A query descends
the tree, the best tokens it finds name the pages to load, and all tokens of these pages are attended. While decoding,
each token that leaves the window is inserted into the tree and goes to a page of its node; a full node opens another
page.

Layers 0 and 1 are dense, as in the paper (section 5.1). `reuse=3` is the paper's IceCache(reuse): every third layer has
a tree and searches it, and the layers in between reuse its selection (appendix C).

Choices the paper leaves open:
  - The query heads of a KV head search together (`kvjax.methods.dci.search`), which loads the union of their pages
    (section 4.2).
  - k, the number of tokens that name pages, is the number of tokens that the search compares with the query. Their
    pages are ranked by the sum of exp(q.k / sqrt(D)) over these tokens, divided by the rows of the page: attention mass
    per row of the budget. With `top` set, Algorithm 3 is followed to the letter: the union of the pages of each query
    head's k best tokens, best first. Pages without such a token come last and fill the rest of the budget: first the
    opened ones in the order of the search, then the others by number.
  - Page size, promotion ratio and search width are not given. Pages of 8 rows held most of the true top tokens per
    budget with the reference model's keys. A beam of 64 takes two thirds of the time per token of a beam of 192 at 16K
    tokens, but misses one passkey in a hundred, which a beam of 192 does not.
  - Promotions drawn while decoding go to tokens that are far from all parents (`kvjax.methods.dci.promotion`), because
    rows stay in their pages and a late parent only gets later tokens.
  - Tokens leave the window one by one and are inserted as they leave, as in every method here. In Algorithm 1 a whole
    page of tokens leaves at once.
  - Every token of an opened page is compared with the query. With `projections` and `visit` only the tokens that P-DCI
    prioritises are compared: fewer products but more gathers, which cost as much on CPU.

Resident: all keys (as in the paper, which keeps them in CPU memory with the index), their projections, and the tree's
links. Blocks therefore hold values alone, and half as much is read, provided that this still fills pages of the device.
Keys are float32, whatever the cache's `dtype`, which only applies to the values.
Cost per step: at most `pages` pages of keys per level of the tree. Only opened pages are ranked, so the cost grows with
the number of tokens only through the number of levels.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from kvjax.cache.method import Method
from kvjax.cache.types import Placement, Selection
from kvjax.errors import ConfigError
from kvjax.methods import dci
from kvjax.methods.dci.tree import most_levels
from kvjax.ops import kmeans
from kvjax.ops.barriers import computed_once
from kvjax.ops.precise import matmul
from kvjax.ops.topk import aggregate, top_blocks
from kvjax.typing import Array, Float, Int32

_LOW = -1e30  # score of a page without a found token: finite, so that it still ranks before an empty page


@dataclasses.dataclass(frozen=True)
class IceCache(Method):
    """A cache whose pages are found through a DCI-tree.

    Attributes:
      page: rows of a page.
      ratio: promotion ratio r.
      num_blocks: pages of one head; None = enough for full pages plus three quarters of a page for every parent.
      beam: nodes searched per level.
      pages: most pages opened per level, by a query or an insert; None = 1.5 times the beam of each.
      projections: P, directions of P-DCI; 0 = none.
      visit: tokens compared per level, by the priority of P-DCI; None = all tokens of the opened pages.
      top: k of Algorithm 3; None = all compared tokens.
      insert_beam: nodes searched per level for the parent of a new token.
      update: whether tokens that leave the window are inserted into the tree. If not, they fill pages that no search
        opens; this only serves to measure what updating the index while decoding is worth.
      seed: seed of directions and promotions.

    Raises:
      ConfigError: a number is below 1, the ratio is outside (0, 1), or only one of `projections` and `visit` is given.
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
            raise ConfigError(f"ratio={self.ratio} must be above 0 and below 1: it is the share of one level's tokens "
                              "that are promoted to the next")
        if (self.visit is None) != (self.projections == 0):
            raise ConfigError(f"projections={self.projections} and visit={self.visit} only work together: projections "
                              "rank the tokens, and `visit` of them are compared; give both or neither")

    @property
    def keeps_keys(self):
        """Whether blocks hold keys: only if layers share a selection, because the layers that reuse one have no tree
        to take keys from."""
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
        """Runs PAGE-SELECT (Algorithm 3) for every KV head."""
        page, score = jax.vmap(lambda *head: self._page_scores(spec, *head))(index, q)
        page = jnp.concatenate([page, jax.vmap(lambda opened: _others(spec, opened))(page)], axis=-1)
        score = jnp.pad(score, ((0, 0), (0, 0), (0, page.shape[-1] - score.shape[-1])), constant_values=_LOW)
        occupied = jnp.take_along_axis(view.count, jnp.minimum(page, spec.num_blocks - 1), axis=-1) > 0
        best = top_blocks(aggregate(score, self.aggregation), occupied & (page < spec.num_blocks), spec.max_blocks)
        page = jnp.pad(page, ((0, 0), (0, 1)), constant_values=spec.num_blocks)
        return Selection(jnp.take_along_axis(page, best, axis=-1))

    def _page_scores(self, spec, tree, q):
        """Returns the opened pages [N] and their scores [G, N]: the log of the mean attention weight over a page's
        rows, up to a constant, or with `top` the score of its best token."""
        q = q.astype(jnp.float32)
        found = dci.query(self.shape(spec), self.search(self.beam), tree, dci.transform_query(q))
        norm = jnp.sqrt(jnp.sum(jnp.square(q), axis=-1)) * spec.head_dim**-0.5
        score = jnp.where(found.score > -jnp.inf, found.score * norm[:, None, None], -jnp.inf)
        if self.top is not None:
            return found.page, _best_of(score, self.top)
        top = jnp.maximum(jnp.max(score, axis=(1, 2), keepdims=True), _LOW)
        # A product, which is faster than a sum.
        mass = matmul(computed_once(jnp.exp(score - top)), jnp.ones(spec.block_rows, jnp.float32))
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
        """Returns the static sizes of each head's tree."""
        levels = most_levels(spec.capacity, self.ratio)
        return dci.Shape(spec.num_blocks, spec.block_rows, spec.head_dim, self.ratio, levels, self.projections)

    def search(self, beam: int) -> dci.Search:
        """Returns the search settings of a query (`beam`) or of an insert (`insert_beam`)."""
        return dci.Search(beam, -(-3 * beam // 2) if self.pages is None else self.pages, self.visit)

    def _seeds(self, spec):
        return spec.shards.own(kmeans.fixed_seeds(self.seed, spec.all_heads))


def _best_of(score: Float[Array, "G N C"], count: int) -> Float[Array, "G N"]:
    """Returns the best score of each page that has one of a query's `count` best tokens, and _LOW for other pages."""
    flat = score.reshape(score.shape[0], -1)
    # A minimum instead of the last entry: XLA:CPU sorts everything if only a part of a top-k is used.
    last = jnp.min(jax.lax.top_k(flat, min(count, flat.shape[1]))[0], axis=-1, keepdims=True)
    best = jnp.max(score, axis=-1)
    return jnp.where((best >= last) & (best > -jnp.inf), best, _LOW)


def _others(spec, opened: Int32[Array, "N"]) -> Int32[Array, "O"]:
    """Returns unopened pages to fill up a selection: the first 2 M page numbers, with NB in place of opened pages. If
    fewer than M pages were opened, at least M unopened ones remain."""
    number = jnp.arange(min(2 * spec.max_blocks, spec.num_blocks), dtype=jnp.int32)
    known = jnp.zeros(number.shape, bool).at[opened].set(True, mode="drop")
    return jnp.where(known, spec.num_blocks, number)
