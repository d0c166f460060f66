"""Attention of a few queries over single rows of a pool, a Pallas kernel for GPUs, by Triton.

A program attends some of the selected rows of one KV head: it reads them where they lie, a tile of rows at a time, and
keeps the sums of an online softmax. Several programs share the rows of a head, so that few heads fill a GPU, and their
sums are merged afterwards (Flash-Decoding, Dao et al., 2023). XLA's own programs copy the selected rows together and
write scores and weights to memory, in a dozen launches.

Products are those of tensor cores, and exact to f32: rows in bfloat16 and codes of 8 or 4 bits are numbers that these
take as they are, and f32 vectors stand as three of bfloat16 that sum to them. Rows in f32 meet them in f32.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kvjax.ops.kernels import NEGATIVE
from kvjax.ops.kernels.bits import from_f16, in_bfloat16
from kvjax.ops.quantize import Scattered
from kvjax.typing import Array, Float

_TILE = 32  # rows multiplied at once
_PROGRAMS = 32  # most programs of a KV head; a GPU has some hundred processors
_LEAST = 16  # vectors of a product on tensor cores, and their numbers


class Sizes(NamedTuple):
    """Static part of a call."""

    dtype: str  # of rows
    size: int  # elements of a row with numbers of its vector: D, or half of it for int4
    lanes: int  # `size` or the next power of two, at least `_LEAST`
    rows: int  # N
    tiles: int  # of rows of each program
    cap: float | None


def attend(
    q: Float[Array, "K G D"], key: Scattered, value: Scattered, bias: Float[Array, "K _ N"], cap: float | None,
) -> tuple[Array, Array, Array]:
    """Attends from the queries of each KV head to selected rows.

    Args:
      q: queries.
      key: keys of the selected rows.
      value: their values, in the same type.
      bias: added to the scores of all queries of a head or of each (axis of 1 or G); NEGATIVE for rows that do not
        count. Rows that count for no query are not read.
      cap: bound of the scores without their bias (`kvjax.ops.attention.soft_capped`).

    Returns:
      Sums of weighted values [K, S, G, D], the largest score [K, S, G] and the sum of weights [K, S, G] of each query
      over each of S sets of rows, f32.
    """
    (heads, group, size), rows = q.shape, bias.shape[-1]
    halves = 2 if key.dtype == "int4" else 1
    sizes = Sizes(key.dtype, size // halves, max(_LEAST, pl.next_power_of_2(size // halves)), rows,
                  pl.cdiv(rows, _PROGRAMS * _TILE), cap)
    programs = pl.cdiv(rows, sizes.tiles * _TILE)
    q, shifts = _smoothed(q.astype(jnp.float32) * size**-0.5, key, halves)

    def of_head(*block):
        return pl.BlockSpec((None, *block), lambda k, s: (k, *[0] * len(block)))

    def of_program(*block):
        return pl.BlockSpec((None, None, *block), lambda k, s: (k, s, *[0] * len(block)))

    results = ((halves, group, sizes.size), (group,), (group,))
    out, top, total = pl.pallas_call(
        functools.partial(_kernel, sizes), grid=(heads, programs), name="scattered_attention", interpret=interpreted(),
        in_specs=[of_head(*x.shape[1:]) for x in (q, shifts, key.index, value.index, bias)] + [pl.no_block_spec] * 2,
        out_specs=[of_program(*rest) for rest in results],
        out_shape=[jax.ShapeDtypeStruct((heads, programs, *rest), jnp.float32) for rest in results],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        metadata={"bytes_accessed_by_each": str(nbytes(sizes, key.pool, group, bias.shape[1]))},
    )(q, shifts, key.index, value.index, bias, key.pool, value.pool)
    out = jnp.moveaxis(out, 2, -1)  # a byte of int4 holds two dimensions
    return out.reshape(heads, programs, group, size), top, total


def nbytes(sizes: Sizes, pool: Array, group: int, biases: int) -> int:
    """Returns the bytes that one program accesses if all its rows count; compilers know no more of a kernel by Triton
    than how many programs it has."""
    row = 2 * pool.shape[1] * pool.dtype.itemsize + 2 * 4 + biases * 4  # key and value, their indices, the bias
    vectors = group * (sizes.size * (2 if sizes.dtype == "int4" else 1) * 2 + 3) * 4  # queries, shifts and results
    return sizes.tiles * _TILE * row + vectors


def interpreted() -> bool:
    """Returns whether the kernel is interpreted: on all platforms but GPUs, in tests."""
    return jax.default_backend() != "gpu"


def _smoothed(
    q: Float[Array, "K G D"], key: Scattered, halves: int
) -> tuple[Float[Array, "K H G D_H"], Float[Array, "K G"]]:
    """Returns queries for keys as they are stored, those of the halves of a byte apart, and what the smoothing's shift
    adds to their scores: q . (scale * k + shift) = (q * scale) . k + q . shift."""
    shifts = jnp.zeros(q.shape[:2], jnp.float32)
    if key.smoothing is not None:
        shifts = jnp.sum(q * key.smoothing.shift[:, None], axis=-1)
        q = q * key.smoothing.scale[:, None]
    return jnp.stack([q[..., half::halves] for half in range(halves)], axis=1), shifts


def _kernel(sizes, q, shifts, key_index, value_index, bias, keys, values, out, top, total):
    """Attends the rows of one program."""
    halves, group, size = q.shape
    tall = max(_LEAST, pl.next_power_of_2(group))
    query, lane = jnp.arange(tall, dtype=jnp.int32), jnp.arange(sizes.lanes, dtype=jnp.int32)
    mine = (query < group)[:, None] & (lane < size)[None]
    queries = [_read(q, (half, query[:, None], lane[None]), mine) for half in range(halves)]
    of_low, of_shift = sum(jnp.sum(each, axis=1) for each in queries), _read(shifts, (query,), query < group)
    first = pl.program_id(1) * sizes.tiles * _TILE
    own = jnp.minimum(query, bias.shape[0] - 1)[:, None]

    def add(i, sofar):
        outs, top, total = sofar
        row = first + i * _TILE + jnp.arange(_TILE, dtype=jnp.int32)
        added = _read(bias, (own, row[None]), (query < group)[:, None] & (row < sizes.rows)[None], NEGATIVE)
        counts = jnp.max(added, axis=0) > NEGATIVE / 2
        codes, low, step, shifted = _rows(sizes, keys, key_index, row, counts)
        scores = sum(_products(each, code, 1) for each, code in zip(queries, codes, strict=True))
        if low is not None:
            scores = scores * step[None] + of_low[:, None] * low[None] + of_shift[:, None] * shifted[None]
        scores = (scores if sizes.cap is None else sizes.cap * jnp.tanh(scores / sizes.cap)) + added
        now = jnp.maximum(top, jnp.max(scores, axis=1))
        weight = jnp.where(added > NEGATIVE / 2, jnp.exp(scores - now[:, None]), 0.0)
        kept = jnp.exp(top - now)
        codes, low, step, _ = _rows(sizes, values, value_index, row, counts)
        weighted = weight if low is None else weight * step[None]
        lowest = 0.0 if low is None else jnp.sum(weight * low[None], axis=1)[:, None]
        outs = [found * kept[:, None] + _products(weighted, code, 0) + lowest
                for found, code in zip(outs, codes, strict=True)]
        return outs, now, total * kept + jnp.sum(weight, axis=1)

    empty = [jnp.zeros((tall, sizes.lanes), jnp.float32)] * halves
    outs, largest, weights = jax.lax.fori_loop(
        0, sizes.tiles, add, (empty, jnp.full((tall,), NEGATIVE), jnp.zeros((tall,), jnp.float32)))
    for half, found in enumerate(outs):
        _write(out, (half, query[:, None], lane[None]), found, mine)
    _write(top, (query,), largest, query < group)
    _write(total, (query,), weights, query < group)


def _read(ref, at, mask, other=0):
    """Reads numbers where the mask is True; shapes in the kernel are powers of two, those of arrays are not."""
    return plgpu.load(ref.at[at], mask=mask, other=jnp.asarray(other, ref.dtype))


def _write(ref, at, new, mask):
    plgpu.store(ref.at[at], new, mask=mask)


def _rows(sizes: Sizes, pool, index, row, counts):
    """Reads selected rows of a pool, those that count; others are zeros.

    Returns:
      (numbers or codes [T, L] of each half of a byte, low [T], step [T], 1 [T] for keys that were smoothed with the
      shift); the latter three are None for floats.
    """
    lane = jnp.arange(sizes.lanes, dtype=jnp.int32)
    number = jnp.clip(_read(index, (row,), counts), 0, pool.shape[0] - 1)
    found = _read(pool, (number[:, None], lane[None]), counts[:, None] & (lane < sizes.size)[None])
    if sizes.dtype == "bfloat16":
        return [jax.lax.bitcast_convert_type(found, jnp.bfloat16)], None, None, None
    if sizes.dtype == "float32":
        return [found], None, None, None
    byte = found.astype(jnp.int32) & 255
    codes = [byte] if sizes.dtype == "int8" else [byte & 15, byte >> 4]
    ends = [_read(pool, (number, sizes.size + i), counts).astype(jnp.int32) & 255 for i in range(4)]
    step = from_f16(ends[2] | (ends[3] & 127) << 8)  # its sign tells how a key was smoothed
    return ([code.astype(jnp.float32).astype(jnp.bfloat16) for code in codes], from_f16(ends[0] | ends[1] << 8), step,
            (ends[3] < 128).astype(jnp.float32))


def _products(vectors, rows, axis: int):
    """Contracts f32 vectors with an axis of the rows."""
    def product(part):
        return jax.lax.dot_general(
            part, rows, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32,
            precision=None if rows.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST,
        )

    if rows.dtype != jnp.bfloat16:
        return product(vectors)
    first, second, third = map(product, in_bfloat16(vectors))
    return first + (second + third)
