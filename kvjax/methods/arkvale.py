"""ArkVale (Chen et al., "ArkVale: Efficient Generative LLM Inference with Recallable Key-Value Eviction", 2024).

A page has `page` consecutive tokens. A full page is summarised by a bounding volume of its keys (its digest), which
stays in memory when the page itself is evicted. The importance of a page is the largest product a query could have
with a point of the volume; the best pages are attended, and those that are not in memory are recalled:

    sphere   q . c + |q| r              centre c, radius r
    cuboid   q . c + sum_d |q_d| e_d    centre c, half widths e_d

The cuboid is the bounding box of Quest. The sphere takes nearly half the memory and is in general looser. Eviction and
recall are done by `kvjax.Slots`: a page in a slot is a page that was not evicted.

The paper never evicts the newest pages. Here the page that is still being filled comes first in every selection, so it
is attended before it has a digest.

Differences from the paper:
  - The centre of a sphere is the mean key of the page; the paper leaves open how the ball is chosen.
  - Slots evict by `Slots(policy=...)`, LRU by default. The paper evicts the page of the lowest importance.
  - Each KV head ranks pages for itself, by the maximum over its query heads (`aggregation`), as suits an upper bound.
  - Sinks and recent window are tokens, not pages.

Resident: D + 1 (sphere) or 2 D (cuboid) numbers per page, and the keys of one page per KV head. Cost per step: one
(sphere) or two (cuboid) products of size D per page and query head, then the selected pages.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from kvjax.cache.method import HowPlaced, Method, in_pages, in_token_order
from kvjax.cache.types import Selection
from kvjax.errors import ConfigError
from kvjax.ops.attention import NEGATIVE
from kvjax.ops.indexing import with_column
from kvjax.ops.topk import aggregate, top_blocks, vector_products
from kvjax.typing import Array, Bool, Float, pytree

VOLUMES = ("cuboid", "sphere")


@pytree
class Volumes:
    """Bounding volume of each page's keys: E = D half widths of a cuboid, or E = 1 radius of a sphere."""

    centre: Float[Array, "*B_K D NB"]
    extent: Float[Array, "*B_K E NB"]


@pytree
class ArkValeIndex:
    """Digests of all pages, and the keys of the page that is being filled."""

    digest: Volumes
    open_key: Float[Array, "*B K C D"]  # keys of the page that is being filled


@dataclasses.dataclass(frozen=True)
class ArkVale(Method):
    """A cache of pages that are ranked by bounding volumes of their keys.

    Attributes:
      page: tokens of a page.
      volume: shape of the bounding volume, "cuboid" or "sphere".

    Raises:
      ConfigError: the volume is unknown.
    """

    page: int = 32
    volume: str = "cuboid"
    placement: ClassVar[HowPlaced] = "in_order"

    def __post_init__(self):
        super().__post_init__()
        if self.volume not in VOLUMES:
            raise ConfigError(f"volume={self.volume!r} must be one of {', '.join(VOLUMES)}")

    @property
    def name(self):
        return super().name if self.volume == "cuboid" else f"{super().name}_{self.volume}"

    def blocks(self, capacity, rows):
        return in_pages(capacity, self.page, rows)

    def init(self, spec, weights):
        sizes = spec.head_dim, spec.head_dim if self.volume == "cuboid" else 1
        digest = Volumes(*(jnp.zeros((spec.kv_heads, size, spec.num_blocks), jnp.float32) for size in sizes))
        return ArkValeIndex(digest, jnp.zeros((spec.kv_heads, spec.block_rows, spec.head_dim), jnp.float32))

    def build(self, spec, index, context):
        stored = jnp.sum(context.valid, dtype=jnp.int32)
        placement = in_token_order(spec, context)
        head = jnp.arange(spec.kv_heads, dtype=jnp.int32)[:, None]
        pages = jnp.zeros((spec.kv_heads, spec.num_blocks, spec.block_rows, spec.head_dim), jnp.float32)
        pages = pages.at[head, placement.block, placement.row].set(context.key.astype(jnp.float32), mode="drop")
        filled = (jnp.arange(spec.num_blocks * spec.block_rows, dtype=jnp.int32) < stored).reshape(spec.num_blocks, -1)
        digest = bounding_volumes(pages, filled, self.volume)
        opened = jnp.minimum(stored // spec.block_rows, spec.num_blocks - 1)
        return ArkValeIndex(digest, pages[:, opened]), placement

    def select(self, spec, index, view, q):
        """Selects the page that is being filled, then pages by the upper bounds of their volumes."""
        occupied, full = view.count > 0, view.count == spec.block_rows
        scores = promise(index.digest, q) * spec.head_dim**-0.5
        score = aggregate(jnp.where(full[:, None], scores, NEGATIVE), self.aggregation)
        return Selection(top_blocks(jnp.where(full, score, jnp.inf), occupied, spec.max_blocks))

    def append(self, spec, index, view, evicted):
        placement = in_token_order(spec, evicted)
        row = jnp.where(evicted.valid, placement.row[0], spec.block_rows)
        keys = index.open_key.at[:, row].set(evicted.key.astype(jnp.float32), mode="drop")
        new = bounding_volumes(keys[:, None], (jnp.arange(spec.block_rows, dtype=jnp.int32) <= row)[None], self.volume)
        digest = jax.tree.map(
            lambda pages, page: with_column(pages, placement.block, page[..., 0]), index.digest, new
        )
        return ArkValeIndex(digest, keys), placement


def bounding_volumes(keys: Float[Array, "K N C D"], filled: Bool[Array, "N C"], volume: str) -> Volumes:
    """Returns the bounding volume of each page.

    Args:
      keys: [K, N, C, D], keys of N pages.
      filled: bool[N, C], rows that hold a token.
      volume: "cuboid" or "sphere".

    Returns:
      The volumes of the filled rows; a point at 0 for an empty page.
    """
    there, any_row = filled[..., None], jnp.any(filled, axis=-1)[:, None]
    if volume == "cuboid":
        low = jnp.min(keys, axis=2, where=there, initial=jnp.inf)
        high = jnp.max(keys, axis=2, where=there, initial=-jnp.inf)
        return _volumes(*(jnp.where(any_row, x, 0.0) for x in ((low + high) / 2, (high - low) / 2)))
    centre = jnp.sum(keys, axis=2, where=there) / jnp.maximum(jnp.sum(filled, axis=-1, dtype=jnp.int32), 1)[:, None]
    distance = jnp.linalg.norm(keys - centre[:, :, None], axis=-1)
    return _volumes(centre, jnp.max(distance, axis=-1, where=filled, initial=0.0)[..., None])


def _volumes(centre: Float[Array, "K N D"], extent: Float[Array, "K N E"]) -> Volumes:
    return Volumes(centre.swapaxes(1, 2), extent.swapaxes(1, 2))


def promise(digest: Volumes, q: Float[Array, "K G D"]) -> Float[Array, "K G NB"]:
    """Returns the largest product of each query with any point of each volume, not scaled, as [K, G, NB]."""
    q, sphere = q.astype(jnp.float32), digest.extent.shape[-2] == 1
    reach = jnp.linalg.norm(q, axis=-1, keepdims=True) if sphere else jnp.abs(q)
    return vector_products(digest.centre, q) + vector_products(digest.extent, reach)
