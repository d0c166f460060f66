"""ArkVale (Chen et al., "ArkVale: Efficient Generative LLM Inference with Recallable Key-Value Eviction", 2024).

Pages of `page` consecutive tokens. A full page is summarised by a bounding volume of its keys (its digest), which
stays in memory when the page itself is evicted. The importance of a page is the largest product a query could have
with a point of the volume, the best pages are attended, and those that are not in memory are recalled:

    sphere   q . c + |q| r              centre c, radius r
    cuboid   q . c + sum_d |q_d| e_d    centre c, half widths e_d

The cuboid is the bounding box of Quest, the sphere is smaller by a factor of nearly two and in general looser. Eviction
and recall are `kvjax.Slots`: a page in a slot is a page that was not evicted.

The newest pages are never evicted there; here the page that is still being filled comes first in every selection, so
that it is attended before it has a digest's worth of tokens.

Differences from the paper:
  - the centre of a sphere is the mean key of the page (the choice of the smallest ball is left open).
  - slots evict by `Slots(policy=...)`, LRU by default; there, the page of the lowest importance.
  - each KV head ranks pages for itself, by the maximum over its query heads (`aggregation`), as an upper bound asks
    for.
  - sinks and recent window are tokens, not pages.

Resident: D + 1 (sphere) or 2 D (cuboid) numbers per page, and the keys of one page per KV head. Cost per step: one
(sphere) or two (cuboid) products of size D per page and query head, then the selected pages.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from kvjax.cache.method import Method, Selection, in_pages, in_token_order, no_force
from kvjax.errors import ConfigError
from kvjax.ops.attention import NEGATIVE
from kvjax.ops.topk import aggregate, top_blocks, vector_products
from kvjax.typing import Array, Bool, Float, pytree

VOLUMES = ("cuboid", "sphere")


@pytree
class Volumes:
    """Centre and extent of each page's keys; E = D half widths of a cuboid, E = 1 radius of a sphere."""

    centre: Float[Array, "*B_K D NB"]
    extent: Float[Array, "*B_K E NB"]


@pytree
class ArkValeIndex:
    digest: Volumes
    open_key: Float[Array, "*B K C D"]  # keys of the page that is being filled


@dataclasses.dataclass(frozen=True)
class ArkVale(Method):
    """Pages of `page` tokens, each known by a `volume` ("cuboid" or "sphere") around its keys."""

    page: int = 32
    volume: str = "cuboid"
    places_alike: ClassVar[bool] = True
    in_order: ClassVar[bool] = True

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
        """The open page, then pages by what their volumes promise."""
        occupied, full = view.count > 0, view.count == spec.block_rows
        scores = promise(index.digest, q) * spec.head_dim**-0.5
        score = aggregate(jnp.where(full[:, None], scores, NEGATIVE), self.aggregation)
        return Selection(top_blocks(jnp.where(full, score, jnp.inf), occupied, spec.max_blocks), no_force(spec))

    def append(self, spec, index, view, evicted):
        placement = in_token_order(spec, evicted)
        row = jnp.where(evicted.valid, placement.row[0], spec.block_rows)
        keys = index.open_key.at[:, row].set(evicted.key.astype(jnp.float32), mode="drop")
        new = bounding_volumes(keys[:, None], (jnp.arange(spec.block_rows, dtype=jnp.int32) <= row)[None], self.volume)
        head = jnp.arange(spec.kv_heads, dtype=jnp.int32)
        digest = jax.tree.map(
            lambda every, one: every.at[head, :, placement.block].set(one[..., 0], mode="drop"), index.digest, new
        )
        return ArkValeIndex(digest, keys), placement


def bounding_volumes(keys: Float[Array, "K N C D"], filled: Bool[Array, "N C"], volume: str) -> Volumes:
    """A volume around the filled rows of each page; a point at 0 for an empty page."""
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
    """The largest product that a query has with any point of each volume."""
    q, sphere = q.astype(jnp.float32), digest.extent.shape[-2] == 1
    reach = jnp.linalg.norm(q, axis=-1, keepdims=True) if sphere else jnp.abs(q)
    return vector_products(digest.centre, q) + vector_products(digest.extent, reach)
