"""Low-rank key scores: the common part of KVSwap, InfiniGen and Loki, which select by compressed keys.

Memory holds a compressed copy of every stored key: its projection by an adapter A_k of its KV head, optionally in few
bits (`kvjax.ops.lowbit`). A query projected the same way scores all tokens. Tokens are stored in groups of consecutive
ones, each as important as its best token. The methods differ in their adapters, and in whether heads are scored
together or separately.
"""

import abc
import dataclasses
import functools
from typing import ClassVar

import einops
import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.method import HowPlaced, Method, in_pages, in_token_order
from kvjax.cache.types import Context, Selection, Spec
from kvjax.errors import ConfigError
from kvjax.ops import kernels, lowbit
from kvjax.ops.attention import NEGATIVE
from kvjax.ops.barriers import computed_once
from kvjax.ops.decompositions import eigenvectors
from kvjax.ops.indexing import with_columns_at, with_rows_at
from kvjax.ops.precise import einsum, matmul
from kvjax.ops.shards import WHOLE, Shards
from kvjax.ops.topk import aggregate, top_blocks
from kvjax.typing import Array, Bool, Float, Int32, Num, pytree

_FLOAT = 32  # bits of a number that is not quantised


@pytree
class CompressedKeys:
    """Adapters and projected keys; F = 1 if a token has one projection for all heads together, else F = K.

    Float keys that all query heads share (F = 1) are stored token by token, so that scoring is a product of two
    matrices. Keys of separate heads, which few query heads share, are stored dimension by dimension, which is twice as
    fast on XLA:CPU. So are codes, as their kernel requires.
    """

    adapter: Float[Array, "*B K D r"]  # A_k
    key: Num[Array, "*B F N X"] | Num[Array, "*B F X N"]  # K_lr of stored tokens, in order; N = NB * C; X: r, or bytes
    stored: Int32[Array, "*B"]  # tokens in groups
    scale: Float[Array, "*B F r"] | None = None  # step of each dimension's codes; None = keys are floats
    centre: Float[Array, "*B F r"] | None = None  # of coded keys: mean of the prompt's, subtracted before coding
    # whether a token has one projection for all heads, those on other devices included
    together: bool = dataclasses.field(default=True, metadata={"static": True})

    @property
    def by_token(self) -> bool:
        """Whether keys are stored token by token."""
        return self.together and self.scale is None

    @property
    def tokens(self) -> int:
        """N, the tokens that there is room for."""
        return self.key.shape[-2 if self.by_token else -1]

    @property
    def bits(self) -> int:
        """Bits of each number of a coded key."""
        return 8 * self.key.shape[-2] // self.adapter.shape[-1]


@dataclasses.dataclass(frozen=True)
class LowRankMethod(Method):
    """Base of the methods that select groups of consecutive tokens by low-rank key scores.

    A group that is still being filled belongs to the recent tokens: it comes first in every selection, so it stays in
    memory and is attended until it is complete. Together with the window this is KVSwap's rolling buffer. Its rows are
    appended in place, and the store writes them in the background, so no row has to be held and moved later.

    Attributes:
      group: G, tokens of a group, the unit of selection and of reading.
      shared: whether a token has one score over the query heads of all KV heads, so that all heads fetch the same
        groups; if not, each KV head selects for itself.
      rolling_buffer: whether tokens of an unfinished group are attended. Turning it off only serves to measure its
        worth: the newest tokens beyond the window are then missing until their group is complete.
      bits: bits of each number of a compressed key: 32 (floats), or 8, 4 or 2 with one centre and scale per dimension,
        learned from the prompt, and queries of 8 bits. Not in the papers. With 4 bits, eight times as many dimensions
        take the memory of floats.

    Raises:
      ConfigError: `bits` is not supported.
    """

    aggregation: str = "softmax_mean"
    lookahead: bool = True
    group: int = 4
    shared: bool = True
    rolling_buffer: bool = True
    bits: int = _FLOAT
    placement: ClassVar[HowPlaced] = "in_order"

    def __post_init__(self):
        super().__post_init__()
        if self.bits not in (_FLOAT, *lowbit.BITS):
            raise ConfigError(f"bits={self.bits} must be {_FLOAT}, or one of {', '.join(map(str, lowbit.BITS))}")

    @property
    def head_shared(self) -> bool:  # type: ignore[override]  # a class attribute elsewhere
        """Whether KV heads depend on each other: by a shared selection, or by a joint projection of their keys."""
        return self.shared or self.joint

    @property
    def fetches_alike(self) -> bool:  # type: ignore[override]  # a class attribute elsewhere
        """Whether all heads select the same groups."""
        return self.shared

    @property
    def one_query(self) -> bool:
        """Whether one product scores a token for all heads, because the mean of raw products with many queries is the
        product with their mean."""
        return self.shared and self.aggregation == "mean"

    @property
    def scores_shares(self) -> bool:
        """Whether codes are scored by `predict_shares`."""
        return self.bits != _FLOAT and self.aggregation == "softmax_mean" and (self.shared or not self.joint)

    @property
    def selects_together(self) -> bool:
        # Without the kernel, codes are converted to floats first, which take a lot of memory.
        return self.one_query if self.bits == _FLOAT else kernels.COMPILED and (self.one_query or self.scores_shares)

    @property
    @abc.abstractmethod
    def joint(self) -> bool:
        """Whether a token's projections are summed over its heads (F = 1)."""

    @abc.abstractmethod
    def adapter(self, spec: Spec, index: CompressedKeys, context: Context) -> Float[Array, "K D r"]:
        """Returns A_k for a prompt."""

    def empty(self, spec: Spec, adapter: Float[Array, "K D r"]) -> CompressedKeys:
        """Returns an index without tokens."""
        together = self.joint or spec.all_heads == 1
        shape = (1 if together else spec.kv_heads, spec.num_blocks * spec.block_rows, adapter.shape[-1])
        key, scale, centre = jnp.zeros(shape, jnp.float32), None, None
        if self.bits != _FLOAT:
            key = jnp.zeros(lowbit.packed_shape(shape, self.bits), jnp.uint8)
            scale = jnp.ones((shape[0], shape[2]), jnp.float32)
            centre = jnp.zeros_like(scale)
        key = key if together and scale is None else key.swapaxes(1, 2)
        return CompressedKeys(adapter.astype(jnp.float32), key, jnp.int32(0), scale, centre, together)

    def blocks(self, capacity, rows):
        return in_pages(capacity, self.group, rows)

    def stored_tokens(self, length: int) -> int:
        """Returns the tokens that are in groups after `length` tokens: all but the sinks and the W - 1 newest ones."""
        return max(0, length - self.sinks - (self.window - 1))

    def complete_groups(self, length: int) -> int:
        """Returns the number of full groups of one head after `length` tokens."""
        return self.stored_tokens(length) // self.group

    def least_prompt(self, spec):
        return 0 if self.bits == _FLOAT else lowbit.TOKENS

    def build(self, spec, index, context):
        index = dataclasses.replace(index, adapter=self.adapter(spec, index, context))
        offset = jnp.cumsum(context.valid, dtype=jnp.int32) - 1
        count = jnp.sum(context.valid, dtype=jnp.int32)
        low = compress(spec, index, context.key)
        if index.scale is not None:
            centre = jnp.sum(jnp.where(context.valid[:, None], low, 0.0), axis=1) / jnp.maximum(count, 1)
            scale = functools.partial(lowbit.closest_scale, bits=self.bits, valid=context.valid)
            index = dataclasses.replace(index, scale=jax.vmap(scale)(low - centre[:, None]), centre=centre)
        key = store(index, low, jnp.where(context.valid, offset, index.tokens))
        placement = in_token_order(spec, context)
        return dataclasses.replace(index, key=key, stored=count), placement

    def select(self, spec, index, view, q):
        hides = spec.sliding is not None
        seen = jnp.repeat(view.count[0] > 0, spec.block_rows) if hides else None  # counts are the same in all heads
        score = self._importance(index, q, seen)
        score = spec.shards.over_all(score, self.aggregation) if self.shared else score
        best = jnp.max(score.reshape(-1, spec.num_blocks, spec.block_rows), axis=-1)
        count = view.count[: best.shape[0]]  # the same in all heads
        occupied, unfinished = count > 0, (count > 0) & (count < spec.block_rows)
        score = jnp.where(unfinished, jnp.inf, best)
        offered = occupied if self.rolling_buffer else occupied & ~unfinished
        block = top_blocks(score, offered, spec.max_blocks)
        return Selection(jnp.broadcast_to(block, (spec.kv_heads, spec.max_blocks)))

    def _importance(
        self, index: CompressedKeys, q: Float[Array, "K G D"], seen: Bool[Array, "N"] | None = None
    ) -> Float[Array, "S N"]:
        """Returns every token's score, for all heads of this device (S = 1) or for each KV head (S = K).

        Args:
          index: compressed keys.
          q: queries.
          seen: tokens inside the model's sliding window; None = all.
        """
        low, heads = project_mean(index, q) if self.one_query else project(index, q), 1 if self.shared else len(q)
        if self.scores_shares and seen is None:
            return predict_shares(index, low, heads)
        if index.by_token:
            scores = predict_by_token(index, low)
            scores = scores if seen is None else jnp.where(seen[:, None], scores, NEGATIVE)
            if self.shared:
                return aggregate_where_they_lie(scores, self.aggregation)
            scores = scores.swapaxes(1, 2)
        elif self.one_query:
            return predict_mean(index, low)
        else:
            scores = predict_by_dimension(index, low)
            scores = scores if seen is None else jnp.where(seen, scores, NEGATIVE)
        return aggregate(scores.reshape(heads, -1, index.tokens), self.aggregation)

    def append(self, spec, index, view, evicted):
        placement = in_token_order(spec, evicted)
        token = jnp.where(evicted.valid, index.stored, index.tokens)
        key = store(index, compress(spec, index, evicted.key[:, None]), token[None])
        return dataclasses.replace(index, key=key, stored=index.stored + evicted.valid), placement


def compress(spec: Spec, index: CompressedKeys, key: Float[Array, "K T D"]) -> Float[Array, "F T r"]:
    """Returns the projected keys: K_lr = Flatten(K) A (F = 1), or K_k A_k of each head (F = K)."""
    key = key.astype(jnp.float32)
    if index.together:
        return spec.shards.sum(einsum("ktd,kdr->tr", key, index.adapter))[None]
    return einsum("ktd,kdr->ktr", key, index.adapter)


def store(index: CompressedKeys, low: Float[Array, "F T r"], at: Int32[Array, "T"]) -> Num[Array, "F _ _"]:
    """Returns the compressed keys with new ones written.

    Args:
      index: compressed keys.
      low: projected keys (`compress`).
      at: token number of each key, counted through the groups; N drops a key.
    """
    if index.scale is not None:
        low = low if index.centre is None else low - index.centre[:, None]
        coded = jax.vmap(lambda low, scale: lowbit.quantise(low, scale, index.bits))(low, index.scale)
        low = lowbit.pack(coded, index.bits)
    if index.by_token:
        return with_rows_at(index.key, at, low)
    return with_columns_at(index.key, at, low.swapaxes(1, 2))


def project(index: CompressedKeys, q: Float[Array, "K G D"]) -> Float[Array, "K G r"]:
    """Returns Q_h A_g(h) of every query head h, scaled by 1 / sqrt(D)."""
    return einsum("kgd,kdr->kgr", q, index.adapter) * q.shape[-1] ** -0.5


def project_mean(index: CompressedKeys, q: Float[Array, "K G D"]) -> Float[Array, "#K 1 r"]:
    """Returns the mean of `project` over the query heads that share keys: all of them, or those of each KV head."""
    mean = jnp.mean(q.astype(jnp.float32), axis=1) * q.shape[-1] ** -0.5
    if index.together:
        return einsum("kd,kdr->r", mean, index.adapter)[None, None] / len(q)
    return einsum("kd,kdr->kr", mean, index.adapter)[:, None]


def predict_by_token(index: CompressedKeys, low: Float[Array, "#K #G r"]) -> Float[Array, "1 N Q"]:
    """Returns Eq. 1 of KVSwap, (Q_h A_g(h)) K_lr^T, for keys that are stored token by token.

    Args:
      index: keys of F = 1.
      low: projected queries (`project`, `project_mean`).

    Returns:
      Scores for the Q queries of all heads; NEGATIVE for tokens that are not stored, as in the functions below.
    """
    # Keys are the left operand, because XLA:CPU then reads them in place.
    low = low.reshape(1, -1, index.adapter.shape[-1])
    scores = einsum("fnr,fqr->fnq", index.key, low)
    return jnp.where(jnp.arange(index.tokens, dtype=jnp.int32)[:, None] < index.stored, scores, NEGATIVE)


def predict_by_dimension(index: CompressedKeys, low: Float[Array, "#K #G r"]) -> Float[Array, "F Q N"]:
    """Returns Eq. 1 of KVSwap for keys that are stored dimension by dimension, over all heads or for each KV head."""
    low = low.reshape(index.key.shape[0], -1, index.adapter.shape[-1])
    if index.scale is not None:
        coded = lowbit.products(index.key, low * index.scale[:, None], index.stored, index.bits)
        return coded if index.centre is None else coded + jnp.sum(low * index.centre[:, None], axis=-1)[..., None]
    scores = einsum("krn,kgr->kgn", index.key, low)
    return jnp.where(jnp.arange(index.tokens, dtype=jnp.int32) < index.stored, scores, NEGATIVE)


def predict_shares(index: CompressedKeys, low: Float[Array, "K G r"], groups: int) -> Float[Array, "groups N"]:
    """Returns the mean over query heads of the softmax of `predict_by_dimension`, for coded keys, in one pass.

    The centre is left out, as it adds a constant to each query's scores, which does not change its softmax.

    Args:
      index: coded keys.
      low: projected queries (`project`).
      groups: 1 = mean over all query heads, K = over those of each KV head.
    """
    low = low.reshape(index.key.shape[0], -1, index.adapter.shape[-1]) * index.scale[:, None]  # type: ignore[index]
    return lowbit.softmax_mean(index.key, low, index.stored, index.bits, groups)


def predict_mean(index: CompressedKeys, low: Float[Array, "#K 1 r"]) -> Float[Array, "1 N"]:
    """Returns the mean of `predict_by_dimension` over KV heads, by one product over the dimensions of all heads."""
    q, key = low.reshape(1, 1, -1) / len(low), index.key.reshape(1, -1, index.tokens)
    if index.scale is not None:
        coded = lowbit.products(key, q * index.scale.reshape(1, 1, -1), index.stored, index.bits)[0]
        return coded if index.centre is None else coded + jnp.sum(q * index.centre.reshape(1, 1, -1))
    scores = einsum("xn,x->n", key[0], q.reshape(-1))
    return jnp.where(jnp.arange(index.tokens, dtype=jnp.int32) < index.stored, scores, NEGATIVE)[None]


def aggregate_where_they_lie(scores: Float[Array, "F N Q"], rule: str) -> Float[Array, "F N"]:
    """Returns `kvjax.ops.topk.aggregate` of scores stored token by token, the faster layout for many queries on
    XLA:CPU.

    Args:
      scores: [F, N, Q], scores of each token for each query.
      rule: one of `kvjax.ops.topk.AGGREGATIONS`.

    Returns:
      [F, N].
    """
    if not rule.startswith("softmax"):
        return jnp.mean(scores, axis=-1) if rule.endswith("mean") else jnp.max(scores, axis=-1)
    weight = computed_once(jnp.exp(scores - jnp.max(scores, axis=1, keepdims=True)))
    share = 1 / jnp.sum(weight, axis=1)
    if rule.endswith("mean"):
        return einsum("fnq,fq->fn", weight, share / scores.shape[-1])
    return jnp.max(weight * share[:, None], axis=-1)


def leading_directions(
    key: Float[Array, "K T D"], valid: Bool[Array, "T"], rank: int, joint: bool, shards: Shards = WHOLE
) -> Float[Array, "K D r"]:
    """Returns the leading right singular vectors of the valid keys.

    Joint directions of heads on several devices are computed on each of them, from the keys of all.

    Args:
      key: [K, T, D], keys of a prompt.
      valid: bool[T], keys that count.
      rank: r, number of directions.
      joint: whether the keys of all heads are decomposed together, or each head's separately.
      shards: devices that share the heads.

    Returns:
      float32[K, D, r], the largest singular value first.
    """
    key = jnp.where(valid[:, None], key.astype(jnp.float32), 0.0)
    leading = functools.partial(_leading, rank=rank)
    if joint:
        rows = einops.rearrange(shards.gather(key), "k t d -> t (k d)")
        return shards.own(einops.rearrange(leading(rows), "(k d) r -> k d r", d=key.shape[-1]))
    return jax.vmap(leading)(key)


def _leading(rows: Float[Array, "T N"], rank: int) -> Float[Array, "N r"]:
    gram, spread = matmul(rows.T, rows), _spread(rows.shape[1])
    # Few rows leave some directions undetermined. Noise decides those, and is too small to change the others.
    noise = jnp.maximum(1e-6 * jnp.trace(gram) / rows.shape[1], 1e-12)
    return eigenvectors(gram + noise * spread)[:, ::-1][:, :rank]


def unknown_directions(spec: Spec, rank: int, joint: bool) -> Float[Array, "K D r"]:
    """Returns `leading_directions` of no keys: random directions, which favour no head and no dimension."""
    nothing = jnp.zeros((spec.kv_heads, 1, spec.head_dim), jnp.float32)
    return leading_directions(nothing, jnp.zeros(1, bool), rank, joint, spec.shards)


@functools.cache
def _spread(size: int) -> np.ndarray:
    """Returns a matrix `[size, size]` with distinct eigenvalues in [1, 2] and random eigenvectors."""
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(size, size)))[0]
    return (basis * np.linspace(1, 2, size) @ basis.T).astype(np.float32)
