"""Attention over disjoint parts of a cache, merged exactly by their log-sum-exp.

Softmax attention over the union of disjoint token sets follows from each set's unnormalised output, maximum and
normaliser (the online softmax of Milakov and Gimelshein, 2018). Scores and sums are f32, whatever the stored type.

Some models bound their scores (`soft_capped`, Gemma 2), or give a share of each query head's softmax to a learned logit
without key and value (`sink_logits` of `normalise`, gpt-oss). Other scales than 1 / sqrt(D) are in the queries.
"""

import functools
from typing import TypeGuard

import jax
import jax.numpy as jnp

from kvjax.ops import kernels
from kvjax.ops.barriers import computed_once
from kvjax.ops.precise import einsum
from kvjax.ops.quantize import BITS, Packed, Scattered, Smoothing, pack, unpack
from kvjax.typing import Array, Bool, Float, Int32, Num, pytree

_FOUR = 4  # queries that the kernel takes at a time: it needs a multiple of them per KV head
_SEGMENT = 4096  # tokens of a KV head that one thread of the kernel attends
NEGATIVE = kernels.NEGATIVE  # finite, so that a part without a valid token merges with weight 0 instead of NaN


@pytree
class Part:
    """Attention over one set of tokens, not normalised yet."""

    out: Float[Array, "*N D"]  # sum of exp(score - top) * value
    top: Float[Array, "*N"]  # largest score
    total: Float[Array, "*N"]  # sum of exp(score - top)


def products(*pairs: tuple[Array | Packed | Scattered, Array]) -> Float[Array, "*K G N"]:
    """Returns the products of each query with each key of its KV head, summed over the pairs.

    Args:
      pairs: keys `[*K, N, D]`, as an array or as they are stored, and the queries `[*K, G, D]` for them.

    Returns:
      Unscaled scores `[*K, G, N]` in f32.
    """
    scores = [_products(key, q) for key, q in pairs]
    return computed_once(sum(scores[1:], scores[0])).swapaxes(-1, -2)


def _products(key: Array | Packed | Scattered, q: Float[Array, "*K G D"]) -> Float[Array, "*K N G"]:
    """Returns the products of one pair. Smoothed keys are not restored: the query is transformed instead."""
    if isinstance(key, Packed | Scattered) and key.smoothing is not None:
        rows, q = key.gathered() if isinstance(key, Scattered) else key, q.astype(jnp.float32)
        if jax.default_backend() != "cpu":
            return _products_of_smoothed(rows, key.smoothing, q)
        return jax.lax.map(lambda head: _products_of_smoothed(*head), (rows, key.smoothing, q))
    # Keys as the left operand: XLA:CPU then reads them in place, about 3x faster than as the right one.
    return _contract("...nd,...gd->...ng", key, q)


def _products_of_smoothed(key: Packed, smoothing: Smoothing, q: Float[Array, "*K G D"]) -> Float[Array, "*K N G"]:
    """Returns products with smoothed keys as packed: q . (scale * k + shift) = (q * scale) . k + q . shift."""
    shift, scale = smoothing.shift[..., None, :], smoothing.scale[..., None, :]
    # A sum, because accelerators round matrix products: the constant is large and must agree with the scores of floats.
    constant = jnp.sum(q * shift, axis=-1)[..., None, :]
    scores = _contract("...nd,...gd->...ng", unpack(key.vectors, key.dtype), q * scale)
    return scores + jnp.where(key.shifted[..., None], constant, 0.0)


def _weighted(
    value: Float[Array, "*K N D"] | Packed | Scattered, weight: Float[Array, "*K G N"]
) -> Float[Array, "*K G D"]:
    """Returns the sum over each KV head's rows, weighted for each query."""
    return _contract("...nd,...gn->...gd", value, weight)


def _contract(
    equation: str, rows: Num[Array, "*K N D"] | Packed | Scattered, vectors: Float[Array, "*K G M"]
) -> Float[Array, "*K _ _"]:
    """Contracts stored rows with the vectors of a few queries (axis `g`) in f32.

    bfloat16 rows are not widened to meet f32 vectors: each vector is split into three bfloat16 vectors that sum to it.
    XLA:CPU would write all rows to memory as f32 first and take two to four times as long.
    """
    if isinstance(rows, Scattered):
        rows = rows.unpacked()
    if isinstance(rows, Packed):
        return _contract_packed(equation, rows, vectors)
    if rows.dtype != jnp.bfloat16 or vectors.dtype != jnp.float32:
        return einsum(equation, rows, vectors)
    parts = jnp.concatenate(in_bfloat16(vectors), axis=-2)
    sums = einsum(equation, rows, parts)
    first, second, third = jnp.split(sums, 3, axis=equation.index("g", equation.index(">")) - len(equation))
    return first + (second + third)


def _contract_packed(equation: str, rows: Packed, vectors: Float[Array, "K G M"]) -> Float[Array, "K _ _"]:
    """Contracts packed rows, on CPU one head at a time, so that the unpacked rows stay in the processor's caches."""
    if jax.default_backend() != "cpu" or rows.dtype == "float32":
        return _contract(equation, rows.unpacked(), vectors)
    return jax.lax.map(lambda head: _contract(equation, head[0].unpacked(), head[1]), (rows, vectors))


def in_bfloat16(x: Float[Array, "*N"]) -> list[Array]:
    """Splits f32 numbers into three bfloat16 arrays that sum to `x`; each holds eight of its 24 significant bits."""
    parts = []
    for _ in range(3):
        # XLA may elide a conversion and its inverse (xla_allow_excess_precision), but not reduce_precision.
        parts.append(jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7))
        x = x - parts[-1]
    return [part.astype(jnp.bfloat16) for part in parts]


def scores_of(
    q: Float[Array, "*K G D"], key: Num[Array, "*K N D"] | Packed | Scattered, valid: Bool[Array, "*K N"],
    bias: Float[Array, "*K G N"] | None = None, cap: float | None = None,
):
    """Returns the scaled dot products of queries and keys.

    Args:
      q: queries of each KV head.
      key: its keys, as an array or as they are stored.
      valid: which keys count.
      bias: added to the scaled products, if given.
      cap: bound of the scaled products (`soft_capped`).

    Returns:
      Scores `[*K, G, N]` in f32; NEGATIVE for keys that are not valid.
    """
    scores = soft_capped(products((key, q)) * q.shape[-1] ** -0.5, cap)
    return only_valid(scores if bias is None else scores + bias, valid)


def soft_capped(scores: Float[Array, "*N"], cap: float | None) -> Float[Array, "*N"]:
    """Returns the scores bent to stay between -cap and cap, as they are where there is no cap."""
    return scores if cap is None else cap * jnp.tanh(scores / cap)


def only_valid(scores: Float[Array, "*K G N"], valid: Bool[Array, "*K N"]) -> Float[Array, "*K G N"]:
    """Returns the scores, with NEGATIVE for keys that are not valid."""
    return computed_once(jnp.where(valid[..., None, :], scores, NEGATIVE))


def attend_part(
    q: Float[Array, "*K G D"], key: Float[Array, "*K N D"] | Packed | Scattered, value, valid: Bool[Array, "*K N"],
    bias: Float[Array, "*K G N"] | None = None, cap: float | None = None,
) -> Part:
    """Attends from each query head to the valid rows of its KV head.

    Args:
      q: queries of each KV head.
      key: its keys, as an array or as they are stored.
      value: its values `[*K, N, D]`, in any of the forms of `key`.
      valid: which rows count.
      bias: added to the scaled scores, if given.
      cap: bound of the scaled scores (`soft_capped`).

    Returns:
      The part `[*K, G]`, to be merged with others and normalised.
    """
    # The kernel needs one type for both; keys computed by a method may be wider than values.
    alike = str(key.dtype) == str(value.dtype) and valid.ndim == 2
    alike &= reads_in_place(str(value.dtype), cap)
    if alike and _by_triton():
        if _in_reach(key) and _in_reach(value):
            return attend_scattered(q, key, value, valid, bias, cap)
    elif alike and not isinstance(key, Packed) and not isinstance(value, Packed):
        return _attend_in_place(q, _where_it_lies(key), _where_it_lies(value), valid, bias)
    return attend_scores(scores_of(q, key, valid, bias, cap), value, valid)


def attend_scores(
    scores: Float[Array, "*K G N"], value: Float[Array, "*K N D"] | Packed | Scattered, valid: Bool[Array, "*K N"]
) -> Part:
    """Attends like `attend_part`, given scores that are NEGATIVE for rows that are not valid."""
    top = jnp.max(scores, axis=-1, initial=NEGATIVE)
    weight = computed_once(jnp.where(valid[..., None, :], jnp.exp(scores - top[..., None]), 0.0))
    return Part(_weighted(value, weight), top, jnp.sum(weight, axis=-1))


def attend_blocks(
    q: Float[Array, "*K G D"], pool: Num[Array, "R C W"], block: Int32[Array, "*K M"], count: Int32[Array, "*K M"],
    bias: Float[Array, "*K _ MC"], dtype: str, most_rows: int, smoothing: Smoothing | None = None,
    cap: float | None = None,
) -> Part:
    """Attends from each query head to the first rows of selected blocks, which are read where they lie.

    This is `kvjax.ops.kernels.selected_attention`, compiled for a TPU and interpreted elsewhere, for tests.

    Args:
      q: queries of each KV head, of one sequence or several.
      pool: all blocks, of rows of a key beside a value, padded to whole tiles.
      block: selected blocks of each KV head.
      count: how many of each block's rows to read; 0 = the block is not read.
      bias: added to the scaled scores of rows in the order of the blocks, for all queries of a KV head or each (an axis
        of 1 or G); NEGATIVE for rows that do not count.
      dtype: type of keys and values (`kvjax.ops.kernels.tiles.TYPES`).
      most_rows: rows that `count` adds up to at most for a KV head.
      smoothing: of keys in few bits.
      cap: bound of the scaled products (`soft_capped`).

    Returns:
      The part `[*K, G]`, to be merged with others and normalised.
    """
    from kvjax.ops.kernels import selected_attention  # takes a while to import, and others than TPUs do without

    heads = q.shape[:-2]
    q, block, count, bias, smoothing = jax.tree.map(
        lambda x: x.reshape(-1, *x.shape[len(heads) :]), (q, block, count, bias, smoothing)
    )
    found = selected_attention.attend(q, pool, block, count, bias, dtype, smoothing, cap, most_rows)
    return Part(*(x.reshape(*heads, *x.shape[1:]) for x in found))


def attend_scattered(
    q: Float[Array, "K G D"], key: Scattered, value: Scattered, valid: Bool[Array, "K N"],
    bias: Float[Array, "K G N"] | None = None, cap: float | None = None,
) -> Part:
    """Attends like `attend_part`, reading each row once from its place in the pool.

    This is `kvjax.ops.kernels.scattered_attention`, compiled for a GPU and interpreted elsewhere, for tests.
    """
    from kvjax.ops.kernels import scattered_attention  # takes a while to import, and others than GPUs do without

    bias = jnp.where(valid[:, None], 0.0 if bias is None else bias, NEGATIVE)
    out, tops, totals = scattered_attention.attend(q, key, value, bias, cap)
    top = jnp.max(tops, axis=1)
    weight = jnp.exp(tops - top[:, None])
    return Part(jnp.sum(out * weight[..., None], axis=1), top, jnp.sum(totals * weight, axis=1))


def reads_in_place(dtype: str, cap: float | None = None) -> bool:
    """Returns whether a kernel reads scattered rows of this type in place: one for GPUs, or a compiled one on CPU,
    which caps no scores."""
    if _by_triton():
        return dtype in ("float32", "bfloat16", *BITS)
    return cap is None and kernels.COMPILED and dtype in ("float32", "bfloat16") and jax.default_backend() == "cpu"


def _by_triton() -> bool:
    return jax.default_backend() == "gpu"


def _in_reach(rows: Array | Packed | Scattered) -> TypeGuard[Scattered]:
    """Returns whether a kernel by Triton reads rows in place: those of a pool, if there are any and it finds all of it.
    Pallas takes signed offsets of 32 bits for arrays of up to 4 GiB (0.10.2), too short for so many numbers of a byte.
    """
    if not isinstance(rows, Scattered) or rows.index.shape[-1] == 0:
        return False
    return rows.dtype not in BITS or not 2**31 < rows.pool.size <= 2**32


def _where_it_lies(rows: Num[Array, "K N D"] | Scattered) -> Scattered:
    """Returns an array as a pool whose rows are all selected, in order."""
    if isinstance(rows, Scattered):
        return rows
    heads, tokens, size = rows.shape
    index = jnp.arange(heads * tokens, dtype=jnp.int32).reshape(heads, tokens)
    return Scattered(pack(rows.reshape(-1, size), str(rows.dtype)), index, str(rows.dtype))


def _attend_in_place(
    q: Float[Array, "K G D"], key: Scattered, value: Scattered, valid: Bool[Array, "K N"],
    bias: Float[Array, "K G N"] | None,
) -> Part:
    """Attends like `attend_part`, reading each row once from its place in the pool."""
    (heads, group, size), tokens = q.shape, valid.shape[-1]
    segments, more = max(1, -(-tokens // _SEGMENT)), ((0, 0), (0, -group % _FOUR), (0, 0))
    bias = jnp.zeros((heads, group, 0), jnp.float32) if bias is None else bias
    results = [jax.ShapeDtypeStruct((heads, segments, group + more[1][1], *rest), jnp.float32)
               for rest in ((size,), (), ())]
    segment_parts = kernels.call("row_attention", results, key.pool, key.index, value.pool, value.index, valid,
                         jnp.pad(q.astype(jnp.float32) * size**-0.5, more), jnp.pad(bias, more))
    return functools.reduce(merge, (Part(*(x[:, i, :group] for x in segment_parts)) for i in range(segments)))


def merge(first: Part, second: Part) -> Part:
    """Returns the part over the union of two disjoint token sets."""
    top = jnp.maximum(first.top, second.top)
    a, b = jnp.exp(first.top - top), jnp.exp(second.top - top)
    out = first.out * a[..., None] + second.out * b[..., None]
    return Part(out, top, first.total * a + second.total * b)


def normalise(part: Part, dtype, sink_logits: Float[Array, "*N"] | None = None) -> Float[Array, "*N D"]:
    """Returns the attention output as `dtype`; zero where no token was valid.

    Args:
      part: attention over all tokens.
      dtype: type of the result.
      sink_logits: learned logit of each query that takes a share of its softmax and adds nothing to the output.
    """
    if sink_logits is not None:
        share = sink_logits.astype(jnp.float32)
        part = merge(part, Part(jnp.zeros_like(part.out), share, jnp.ones_like(share)))
    return (part.out / jnp.maximum(part.total, 1e-30)[..., None]).astype(dtype)


def softmax(scores: Float[Array, "*K G N"], sink_logits: Float[Array, "*K G"] | None = None) -> Float[Array, "*K G N"]:
    """Returns the softmax of scores over the last axis, less the share of the sink logits if there are any."""
    if sink_logits is None:
        return jax.nn.softmax(scores)
    share = jnp.broadcast_to(sink_logits.astype(scores.dtype)[..., None], (*scores.shape[:-1], 1))
    return jax.nn.softmax(jnp.concatenate([scores, share], axis=-1))[..., :-1]
