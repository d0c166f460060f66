"""ShadowKV (Sun et al., 2024): chunks ranked by the mean of their keys; values are fetched, keys are reconstructed.

A chunk's landmark is the mean of its rotated keys, and the chunks whose landmarks score best are attended. Chunks that
their landmark describes badly, measured by the cosine of the key that is least similar to it, are outliers and always
attended. The scores of a group are aggregated by the maximum of the query heads' softmax over the landmarks.

Keys before rotation are of low rank: the keys of all heads of a token together are stored as K D / sigma numbers, the
coordinates in the leading right singular vectors of the prompt's keys (the paper's online SVD, which stores 160 of
1,024 numbers). The keys of selected rows are reconstructed from these and rotated to their positions, so blocks hold
values alone and half as much is read. The keys of outliers are stored exactly. With `sigma=None` blocks hold keys as
well, and nothing is lost.

Differences from the paper, and choices it leaves open:
  - The values of outliers are in blocks like others and count in the budget. As every step needs them, they stay in
    their slots.
  - Decoded tokens are projected like the prompt's when they leave the window, and get landmarks. In the paper they
    never leave memory.
  - Prompts with fewer tokens than a token has coordinates are refused, because they say too little about later keys.
  - If the rotation is not known (`kvjax.attend`), keys are decomposed as they are.

Resident: K D numbers per chunk, K D / sigma per token, the K D x K D / sigma projection, and the outliers' keys. Cost
per step: one score per chunk, the selected chunks' values, and D x K D / sigma products per selected row.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from kvjax.cache.method import HowPlaced, Method, in_pages, in_token_order
from kvjax.cache.types import Selection, Spec
from kvjax.errors import ConfigError
from kvjax.methods.shared import lowrank
from kvjax.methods.shared.lowrank import CompressedKeys
from kvjax.ops import rotary
from kvjax.ops.attention import NEGATIVE
from kvjax.ops.indexing import with_column
from kvjax.ops.precise import einsum
from kvjax.ops.topk import aggregate, top_blocks, vector_products
from kvjax.typing import Array, Float, Int32, pytree


@pytree
class Shadow:
    """The stored keys: low-rank coordinates of all tokens, and the exact keys of outliers."""

    low: CompressedKeys  # keys of all heads together, before rotation
    outlier_key: Float[Array, "*B K O C D"]  # rotated


@pytree
class Landmarks:
    """The landmark of each chunk, the outliers, and the stored keys."""

    mean: Float[Array, "*B K D NB"]  # mean key of each chunk, stored dimension by dimension
    outlier: Int32[Array, "*B K O"]  # chunks that are always attended, NB = none
    stored: Int32[Array, "*B"]  # tokens in chunks
    shadow: Shadow | None  # None where blocks hold keys


@dataclasses.dataclass(frozen=True)
class ShadowKV(Method):
    """A cache of chunks of consecutive tokens.

    Attributes:
      chunk: tokens of a chunk.
      outliers: chunks of a prompt that each KV head always attends, those that their landmark describes worst; at least
        one. If there are more than `max_blocks`, those with the lowest numbers are attended, and nothing else.
      sigma: compression ratio of the keys; None = keys are not compressed, but fetched with the values.

    Raises:
      ConfigError: `sigma` or `outliers` is below 1.
    """

    aggregation: str = "softmax_max"
    chunk: int = 8
    outliers: int = 2
    sigma: float | int | None = 6.4
    placement: ClassVar[HowPlaced] = "in_order"

    def __post_init__(self):
        super().__post_init__()
        if (self.sigma is not None and self.sigma < 1) or self.outliers < 1:
            raise ConfigError(f"sigma={self.sigma} must be at least 1, or None to fetch keys with the values, and "
                              f"outliers={self.outliers} must be at least 1")

    @property
    def keeps_keys(self):
        return self.sigma is None

    @property
    def head_shared(self) -> bool:  # type: ignore[override]  # a class attribute elsewhere
        """Whether KV heads depend on each other, i.e. the keys of all heads are decomposed together."""
        return self.sigma is not None

    def least_prompt(self, spec):
        return 0 if self.sigma is None else _rank(spec, self.sigma)

    def blocks(self, capacity, rows):
        return in_pages(capacity, self.chunk, rows)

    def init(self, spec, weights):
        outlier = jnp.full((spec.kv_heads, min(self.outliers, spec.num_blocks)), spec.num_blocks, jnp.int32)
        mean = jnp.zeros((spec.kv_heads, spec.head_dim, spec.num_blocks), jnp.float32)
        shadow = None if self.sigma is None else _empty(spec, self.sigma, outlier.shape)
        return Landmarks(mean, outlier, jnp.int32(0), shadow)

    def build(self, spec, index, context):
        stored, key = jnp.sum(context.valid, dtype=jnp.int32), context.key.astype(jnp.float32)
        placement = in_token_order(spec, context)
        head, block = jnp.arange(spec.kv_heads, dtype=jnp.int32)[:, None], placement.block
        count = jnp.zeros((spec.kv_heads, spec.num_blocks), jnp.float32).at[head, block].add(1.0, mode="drop")
        total = jnp.zeros_like(index.mean).at[head, :, block].add(key, mode="drop")
        mean = total / jnp.maximum(count, 1.0)[:, None]
        alike = _cosine(key, mean[head, :, jnp.minimum(block, spec.num_blocks - 1)])
        worst = jnp.full(count.shape, jnp.inf, jnp.float32).at[head, block].min(alike, mode="drop")
        outlier = _smallest(worst, index.outlier.shape[1])
        shadow = index.shadow and _shadow(spec, index.shadow, context, outlier)
        return Landmarks(mean, outlier, stored, shadow), placement

    def select(self, spec, index, view, q):
        occupied = view.count > 0
        scores = vector_products(index.mean, q) * spec.head_dim**-0.5
        score = aggregate(jnp.where(occupied[:, None], scores, NEGATIVE), self.aggregation)
        score = score.at[jnp.arange(spec.kv_heads, dtype=jnp.int32)[:, None], index.outlier].set(jnp.inf, mode="drop")
        return Selection(top_blocks(score, occupied, spec.max_blocks))

    def rebuild(self, spec, index, block, row, pos):
        low, head = index.shadow.low, jnp.arange(spec.kv_heads, dtype=jnp.int32)[:, None]
        code = jnp.take(low.key[0], block * spec.block_rows + row, axis=0, mode="clip")
        key = einsum("knr,kdr->knd", code, low.adapter)
        key = _turn(spec, key, pos)
        match = block[..., None] == index.outlier[:, None]
        exact = index.shadow.outlier_key[head, jnp.argmax(match, axis=-1).astype(jnp.int32), row]
        return jnp.where(jnp.any(match, axis=-1)[..., None], exact, key)

    def append(self, spec, index, view, evicted):
        placement = in_token_order(spec, evicted)
        head, block = jnp.arange(spec.kv_heads, dtype=jnp.int32), placement.block
        mean = index.mean[head, :, jnp.minimum(block, spec.num_blocks - 1)]
        step = (evicted.key.astype(jnp.float32) - mean) / (placement.row + 1)[:, None]
        mean = with_column(index.mean, block, step, "add")
        shadow = index.shadow and _appended(spec, index.shadow, index, evicted, placement)
        return dataclasses.replace(index, mean=mean, stored=index.stored + evicted.valid, shadow=shadow), placement


def _empty(spec: Spec, sigma: float | int, outliers: tuple[int, ...]) -> Shadow:
    rank = _rank(spec, sigma)
    leading = lowrank.unknown_directions(spec, rank, True)
    low = CompressedKeys(leading, jnp.zeros((1, spec.num_blocks * spec.block_rows, rank), jnp.float32), jnp.int32(0))
    return Shadow(low, jnp.zeros((*outliers, spec.block_rows, spec.head_dim), jnp.float32))


def _rank(spec: Spec, sigma: float | int) -> int:
    """Returns the number of coordinates that are stored of a token's keys."""
    return max(1, round(spec.all_heads * spec.head_dim / sigma))


def _shadow(spec: Spec, empty: Shadow, context, outlier) -> Shadow:
    """Stores a prompt's keys: leading directions, the coordinates of each token, and the exact keys of outliers."""
    raw, rank = _turn(spec, context.key.astype(jnp.float32), -context.pos), empty.low.key.shape[-1]
    leading = lowrank.leading_directions(raw, context.valid, rank, True, spec.shards)
    low = dataclasses.replace(empty.low, adapter=leading)
    position = jnp.where(context.valid, jnp.cumsum(context.valid, dtype=jnp.int32) - 1, low.tokens)
    low = dataclasses.replace(low, key=lowrank.store(low, lowrank.compress(spec, low, raw), position))
    first, row = jnp.argmax(context.valid).astype(jnp.int32), jnp.arange(spec.block_rows, dtype=jnp.int32)
    token = first + outlier[..., None] * spec.block_rows + row
    head = jnp.arange(spec.kv_heads, dtype=jnp.int32)[:, None, None]
    return Shadow(low, context.key[head, jnp.minimum(token, context.key.shape[1] - 1)].astype(jnp.float32))


def _appended(spec: Spec, shadow: Shadow, index: Landmarks, evicted, placement) -> Shadow:
    """Stores the key of the token that leaves the window, and its exact key as well if its chunk is an outlier."""
    low, key = shadow.low, evicted.key.astype(jnp.float32)
    raw = _turn(spec, key[:, None], -evicted.pos[None])
    position = jnp.where(evicted.valid, index.stored, low.tokens)
    low = dataclasses.replace(low, key=lowrank.store(low, lowrank.compress(spec, low, raw), position[None]))
    head, match = jnp.arange(spec.kv_heads, dtype=jnp.int32), index.outlier == placement.block[:, None]
    which = jnp.argmax(match, axis=-1).astype(jnp.int32)
    which = jnp.where(jnp.any(match, axis=-1) & evicted.valid, which, match.shape[1])
    return Shadow(low, shadow.outlier_key.at[head, which, placement.row].set(key, mode="drop"))


def _turn(spec: Spec, key: Float[Array, "K N D"], pos: Int32[Array, "*#K N"]) -> Float[Array, "K N D"]:
    """Returns keys rotated to their positions, or back with -pos; unchanged if the rotation is not known."""
    if spec.rope is None:
        return key
    freqs = rotary.inverse_frequencies(spec.head_dim, spec.rope)
    return rotary.rotate(key[:, :, None], jnp.broadcast_to(pos, key.shape[:2]), freqs)[:, :, 0]


def _cosine(a: Float[Array, "*N D"], b: Float[Array, "*N D"]) -> Float[Array, "*N"]:
    norms = jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1)
    return jnp.sum(a * b, axis=-1) / jnp.maximum(norms, 1e-9)


def _smallest(x: Float[Array, "K N"], count: int) -> Int32[Array, "K O"]:
    """Returns the indices of the `count` smallest finite entries of each row; N where there are fewer."""
    negated, index = jax.lax.top_k(-x, count)
    return jnp.where(negated > -jnp.inf, index, x.shape[-1]).astype(jnp.int32)
