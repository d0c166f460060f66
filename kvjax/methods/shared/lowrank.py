"""Predicting attention from compressed keys: what KVSwap, InfiniGen and Loki have in common.

Every stored key is kept once more in memory, at a fraction of its size, projected by an adapter A_k of its KV head, if
wanted in few bits (`kvjax.ops.lowbit`). A query projected the same way scores all tokens. Tokens are stored in
groups of consecutive ones, each as important as the best of its tokens. The methods differ in their adapters, and in
whether heads are scored together or each for itself.
"""

import abc
import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.method import Context, Method, Selection, Spec, in_pages, in_token_order, no_force
from kvjax.errors import ConfigError
from kvjax.ops import kernels, lowbit
from kvjax.ops.attention import NEGATIVE
from kvjax.ops.barriers import computed_once
from kvjax.ops.topk import aggregate, top_blocks
from kvjax.typing import Array, Bool, Float, Int32, Num, pytree

_FLOAT = 32  # bits of a number that is kept as it is


@pytree
class CompressedKeys:
    """The index; F = 1 where a token has one projection for all heads together, else F = K.

    Keys lie token by token where they are floats and all query heads meet them (F = 1), which is a product of two
    matrices. Keys of which each head has its own, so that few query heads meet them, lie dimension by dimension, which
    is twice as fast on XLA:CPU, and so do codes, as their kernel has it.
    """

    adapter: Float[Array, "*B K D r"]  # A_k
    key: Num[Array, "*B F N X"] | Num[Array, "*B F X N"]  # K_lr of stored tokens, in their order; N = NB * C; bytes X
    stored: Int32[Array, "*B"]  # tokens in groups
    scale: Float[Array, "*B F r"] | None = None  # what keys are multiples of, as integers; None = floats, and X = r
    centre: Float[Array, "*B F r"] | None = None  # of keys in few bits: the prompt's mean, which is not in their codes

    @property
    def together(self) -> bool:
        """F = 1."""
        return self.key.shape[-3] == 1

    @property
    def by_token(self) -> bool:
        """Whether keys lie token by token."""
        return self.together and self.scale is None

    @property
    def tokens(self) -> int:
        """N."""
        return self.key.shape[-2 if self.by_token else -1]

    @property
    def bits(self) -> int:
        """Of each number of a key that is codes."""
        return 8 * self.key.shape[-2] // self.adapter.shape[-1]


@dataclasses.dataclass(frozen=True)
class LowRankMethod(Method):
    """Groups of consecutive tokens, selected by their predicted attention.

    A group that is still being filled belongs to the recent tokens: it comes first in every selection, so that it stays
    in memory and is attended until it is complete. Together with the window this is KVSwap's rolling buffer. Its rows
    are appended in place, and the store writes them behind, so no row has to be held back and moved later.

    Attributes:
      group: G, tokens of a group, the unit of selection and of reading.
      shared: one score per token, over the query heads of all KV heads, so that all heads fetch the same groups; if
        not, each KV head selects for itself.
      rolling_buffer: whether tokens of an unfinished group are attended. Only to measure what that is worth: without it
        the newest tokens beyond the window are missing until their group is complete.
      bits: of each number of a compressed key: 32, floats, or 8, 4 or 2, with one centre and scale per dimension, the
        prompt's.
        No paper has it. With 4 bits, eight times as many dimensions take as much memory. Queries have 8 bits then.
    """

    aggregation: str = "softmax_mean"
    lookahead: bool = True
    group: int = 4
    shared: bool = True
    rolling_buffer: bool = True
    bits: int = _FLOAT
    places_alike: ClassVar[bool] = True
    in_order: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        if self.bits not in (_FLOAT, *lowbit.BITS):
            raise ConfigError(f"bits={self.bits} must be {_FLOAT}, or one of {', '.join(map(str, lowbit.BITS))}")

    @property
    def head_shared(self) -> bool:  # type: ignore[override]  # of the class elsewhere, of its settings here
        """Whether KV heads depend on each other: by one selection, or by one projection of their keys."""
        return self.shared or self.joint

    @property
    def fetches_alike(self) -> bool:  # type: ignore[override]  # of the class elsewhere, of its settings here
        """Whether all heads select the same groups."""
        return self.shared

    @property
    def one_query(self) -> bool:
        """Whether one product scores a token for all heads: the mean of raw products with many queries is the product
        with their mean."""
        return self.shared and self.aggregation == "mean"

    @property
    def scores_shares(self) -> bool:
        """Whether codes are scored by `predict_shares`."""
        return self.bits != _FLOAT and self.aggregation == "softmax_mean" and (self.shared or not self.joint)

    @property
    def selects_together(self) -> bool:
        # Codes become floats first where there is no kernel, which are many.
        return self.one_query if self.bits == _FLOAT else kernels.COMPILED and (self.one_query or self.scores_shares)

    @property
    @abc.abstractmethod
    def joint(self) -> bool:
        """Whether a token's projections are summed over its heads (F = 1)."""

    @abc.abstractmethod
    def adapter(self, spec: Spec, index: CompressedKeys, context: Context) -> Float[Array, "K D r"]:
        """A_k of a prompt."""

    def empty(self, spec: Spec, adapter: Float[Array, "K D r"]) -> CompressedKeys:
        """An index without tokens."""
        shape = (1 if self.joint else spec.kv_heads, spec.num_blocks * spec.block_rows, adapter.shape[-1])
        key, scale, centre = jnp.zeros(shape, jnp.float32), None, None
        if self.bits != _FLOAT:
            key = jnp.zeros(lowbit.packed_shape(shape, self.bits), jnp.uint8)
            scale = jnp.ones((shape[0], shape[2]), jnp.float32)
            centre = jnp.zeros_like(scale)
        key = key if shape[0] == 1 and scale is None else key.swapaxes(1, 2)
        return CompressedKeys(adapter.astype(jnp.float32), key, jnp.int32(0), scale, centre)

    def blocks(self, capacity, rows):
        return in_pages(capacity, self.group, rows)

    def stored_tokens(self, length: int) -> int:
        """Tokens in groups after `length` tokens: all but sinks and window, whose newest comes with the next step."""
        return max(0, length - self.sinks - (self.window - 1))

    def complete_groups(self, length: int) -> int:
        """How many groups of one head are full after `length` tokens."""
        return self.stored_tokens(length) // self.group

    def least_prompt(self, spec):
        return 0 if self.bits == _FLOAT else lowbit.TOKENS

    def build(self, spec, index, context):
        index = dataclasses.replace(index, adapter=self.adapter(spec, index, context))
        offset = jnp.cumsum(context.valid, dtype=jnp.int32) - 1
        count = jnp.sum(context.valid, dtype=jnp.int32)
        low = compress(index, context.key)
        if index.scale is not None:
            centre = jnp.sum(jnp.where(context.valid[:, None], low, 0.0), axis=1) / jnp.maximum(count, 1)
            scale = functools.partial(lowbit.closest_scale, bits=self.bits, valid=context.valid)
            index = dataclasses.replace(index, scale=jax.vmap(scale)(low - centre[:, None]), centre=centre)
        key = store(index, low, jnp.where(context.valid, offset, index.tokens))
        placement = in_token_order(spec, context)
        return dataclasses.replace(index, key=key, stored=count), placement

    def select(self, spec, index, view, q):
        hides = spec.sliding is not None
        seen = jnp.repeat(view.count[0] > 0, spec.block_rows) if hides else None  # counts are alike in all heads
        best = jnp.max(self._importance(index, q, seen).reshape(-1, spec.num_blocks, spec.block_rows), axis=-1)
        count = view.count[: best.shape[0]]  # alike in all heads
        occupied, unfinished = count > 0, (count > 0) & (count < spec.block_rows)
        score = jnp.where(unfinished, jnp.inf, best)
        offered = occupied if self.rolling_buffer else occupied & ~unfinished
        block = top_blocks(score, offered, spec.max_blocks)
        return Selection(jnp.broadcast_to(block, (spec.kv_heads, spec.max_blocks)), no_force(spec))

    def _importance(
        self, index: CompressedKeys, q: Float[Array, "K G D"], seen: Bool[Array, "N"] | None = None
    ) -> Float[Array, "S N"]:
        """Every token's score, for all heads (S = 1) or for each KV head; `seen`: which a sliding window leaves."""
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
        at = jnp.where(evicted.valid, index.stored, index.tokens)
        key = store(index, compress(index, evicted.key[:, None]), at[None])
        return dataclasses.replace(index, key=key, stored=index.stored + evicted.valid), placement


def compress(index: CompressedKeys, key: Float[Array, "K T D"]) -> Float[Array, "F T r"]:
    """K_lr = Flatten(K) A, or K_k A_k of each head."""
    key = key.astype(jnp.float32)
    if index.together:
        return jnp.einsum("ktd,kdr->tr", key, index.adapter)[None]
    return jnp.einsum("ktd,kdr->ktr", key, index.adapter)


def store(index: CompressedKeys, low: Float[Array, "F T r"], at: Int32[Array, "T"]) -> Num[Array, "F _ _"]:
    """The compressed keys with more of them at the given places; place N = nowhere."""
    if index.scale is not None:
        low = low if index.centre is None else low - index.centre[:, None]
        coded = jax.vmap(lambda low, scale: lowbit.quantise(low, scale, index.bits))(low, index.scale)
        low = lowbit.pack(coded, index.bits)
    if index.by_token:
        return index.key.at[:, at].set(low, mode="drop")
    return index.key.at[:, :, at].set(low.swapaxes(1, 2), mode="drop")


def project(index: CompressedKeys, q: Float[Array, "K G D"]) -> Float[Array, "K G r"]:
    """Q_h A_g(h) of every query head h, scaled."""
    return jnp.einsum("kgd,kdr->kgr", q, index.adapter) * q.shape[-1] ** -0.5


def project_mean(index: CompressedKeys, q: Float[Array, "K G D"]) -> Float[Array, "#K 1 r"]:
    """The mean of `project` over the query heads that meet the same keys: all of them, or those of each KV head."""
    mean = jnp.mean(q.astype(jnp.float32), axis=1) * q.shape[-1] ** -0.5
    if index.together:
        return jnp.einsum("kd,kdr->r", mean, index.adapter)[None, None] / len(q)
    return jnp.einsum("kd,kdr->kr", mean, index.adapter)[:, None]


def predict_by_token(index: CompressedKeys, low: Float[Array, "#K #G r"]) -> Float[Array, "1 N Q"]:
    """Eq. 1 of KVSwap: (Q_h A_g(h)) K_lr^T for every projected query, of keys that lie token by token; of all heads,
    Q = K * G. A token that is not stored has NEGATIVE, here and below."""
    # Keys as the left operand: XLA:CPU then reads them in place.
    low = low.reshape(1, -1, index.adapter.shape[-1])
    scores = jnp.einsum("fnr,fqr->fnq", index.key, low, preferred_element_type=jnp.float32)
    return jnp.where(jnp.arange(index.tokens, dtype=jnp.int32)[:, None] < index.stored, scores, NEGATIVE)


def predict_by_dimension(index: CompressedKeys, low: Float[Array, "#K #G r"]) -> Float[Array, "F Q N"]:
    """The same of keys that lie dimension by dimension; of all heads, or of each KV head."""
    low = low.reshape(index.key.shape[0], -1, index.adapter.shape[-1])
    if index.scale is not None:
        found = lowbit.products(index.key, low * index.scale[:, None], index.stored, index.bits)
        return found if index.centre is None else found + jnp.sum(low * index.centre[:, None], axis=-1)[..., None]
    scores = jnp.einsum("krn,kgr->kgn", index.key, low, preferred_element_type=jnp.float32)
    return jnp.where(jnp.arange(index.tokens, dtype=jnp.int32) < index.stored, scores, NEGATIVE)


def predict_shares(index: CompressedKeys, low: Float[Array, "K G r"], groups: int) -> Float[Array, "groups N"]:
    """The mean of the softmaxes of `predict_by_dimension` over all query heads, or over those of each KV head that has
    codes of its own, without scores in between; to each query's softmax the centre is a constant."""
    low = low.reshape(index.key.shape[0], -1, index.adapter.shape[-1]) * index.scale[:, None]  # type: ignore[index]
    return lowbit.softmax_mean(index.key, low, index.stored, index.bits, groups)


def predict_mean(index: CompressedKeys, low: Float[Array, "#K 1 r"]) -> Float[Array, "1 N"]:
    """The mean of `predict_by_dimension` over KV heads: one product of all heads' dimensions."""
    q, key = low.reshape(1, 1, -1) / len(low), index.key.reshape(1, -1, index.tokens)
    if index.scale is not None:
        found = lowbit.products(key, q * index.scale.reshape(1, 1, -1), index.stored, index.bits)[0]
        return found if index.centre is None else found + jnp.sum(q * index.centre.reshape(1, 1, -1))
    scores = jnp.einsum("xn,x->n", key[0], q.reshape(-1), preferred_element_type=jnp.float32)
    return jnp.where(jnp.arange(index.tokens, dtype=jnp.int32) < index.stored, scores, NEGATIVE)[None]


def aggregate_where_they_lie(scores: Float[Array, "F N Q"], rule: str) -> Float[Array, "F N"]:
    """`kvjax.ops.topk.aggregate` of scores that lie token by token; of many queries the faster way round on XLA:CPU."""
    if not rule.startswith("softmax"):
        return jnp.mean(scores, axis=-1) if rule.endswith("mean") else jnp.max(scores, axis=-1)
    weight = computed_once(jnp.exp(scores - jnp.max(scores, axis=1, keepdims=True)))
    share = 1 / jnp.sum(weight, axis=1)
    if rule.endswith("mean"):
        return jnp.einsum("fnq,fq->fn", weight, share / scores.shape[-1])
    return jnp.max(weight * share[:, None], axis=-1)


def leading_directions(
    key: Float[Array, "K T D"], valid: Bool[Array, "T"], rank: int, joint: bool
) -> Float[Array, "K D r"]:
    """The `rank` leading right singular vectors of the valid keys: of all heads together, or of each head."""
    key = jnp.where(valid[:, None], key.astype(jnp.float32), 0.0)
    leading = functools.partial(_leading, rank=rank)
    if joint:
        return leading(key.swapaxes(0, 1).reshape(key.shape[1], -1)).reshape(key.shape[0], -1, rank)
    return jax.vmap(leading)(key)


def _leading(rows: Float[Array, "T N"], rank: int) -> Float[Array, "N r"]:
    gram, spread = rows.T @ rows, _spread(rows.shape[1])
    # Directions that the rows, where they are few, say nothing of come from noise that is too small to change others.
    noise = jnp.maximum(1e-6 * jnp.trace(gram) / rows.shape[1], 1e-12)
    return jnp.linalg.eigh(gram + noise * spread)[1][:, ::-1][:, :rank]


def unknown_directions(heads: int, head_dim: int, rank: int, joint: bool) -> Float[Array, "K D r"]:
    """`leading_directions` of no key at all: random ones, which favour no head and no dimension."""
    return leading_directions(jnp.zeros((heads, 1, head_dim), jnp.float32), jnp.zeros(1, bool), rank, joint)


@functools.cache
def _spread(size: int) -> np.ndarray:
    """A matrix `[size, size]` of distinct eigenvalues in [1, 2] and random eigenvectors."""
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(size, size)))[0]
    return (basis * np.linspace(1, 2, size) @ basis.T).astype(np.float32)
