"""Attention of a few queries over selected blocks of a pool, a Pallas kernel for TPUs.

A pool is an array of blocks in device memory, each of C rows of a key beside a value, as `kvjax.ops.quantize` stores
them, in rows of W numbers. W is a multiple of 128, because a TPU keeps rows in tiles of 128 lanes: narrower ones would
be copied to a wider array in each call. Only blocks with rows that count are copied to the chip's memory, in pieces of
a few rows; while the rows of one step are multiplied, those of the next are on their way. Queries stand in rows of W
numbers, too, with zeros beside the key's lanes, so that neither keys nor values have to be cut out of a row: scores are
products over all lanes, and the sum of weighted rows has the output in the value's lanes.

XLA's own gather copies selected rows to memory and reads them from there, and goes through whole pools whose rows are
narrower than a tile (`docs/decisions/33-a-kernel-for-selected-blocks.md`).
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.ops import quantize
from kvjax.ops.kernels import NEGATIVE, tiles
from kvjax.ops.kernels.bits import from_f16, in_bfloat16
from kvjax.ops.kernels.pool_access import IN_PLACE, off_chip, piece_rows
from kvjax.ops.kernels.tiles import LANES, SUBLANES
from kvjax.ops.quantize import Smoothing
from kvjax.typing import Array, Float, Int32, Num

_STEP_ROWS = 512  # rows multiplied at once: 128 KiB of bfloat16 for heads of 64


class Cut(NamedTuple):
    """How the blocks of a call are cut: P rows are copied at once, and S such pieces multiplied."""

    piece_rows: int  # P
    pieces: int  # S
    steps: int  # of each head


def _halves(dtype: str) -> int:
    """Returns how many numbers an element of stored rows holds."""
    return 2 if dtype == "int4" else 1


def cut(dtype: str, block_rows: int, blocks: int) -> Cut:
    """Returns how `blocks` blocks of each head are cut into pieces and steps."""
    rows = piece_rows(dtype, block_rows)
    pieces = blocks * (block_rows // rows)
    whole = LANES // math.gcd(LANES, rows)  # pieces that fill lanes with the scores of their rows
    at_once = whole * max(1, _STEP_ROWS // (whole * rows))
    return Cut(rows, min(pieces, at_once), -(-pieces // at_once))


def cost(dtype: str, q: Array, bias: Array, results, pool: Array, block: Array, most_rows: int) -> pl.CostEstimate:
    """Returns what a call computes and accesses if each head reads as many rows as it may.

    Args:
      dtype: type of keys and values.
      q, bias, results: operands and results of the kernel, or their shapes.
      pool, block, most_rows: as for `attend`.
    """
    found, (heads, blocks), (_, block_rows, width) = cut(dtype, pool.shape[1], block.shape[1]), block.shape, pool.shape
    # Each block may have a row in its last piece alone.
    longest = (most_rows + blocks * (found.piece_rows - 1)) // found.piece_rows
    read = heads * min(longest, blocks * block_rows // found.piece_rows) * found.piece_rows
    scores = heads * q.shape[2] * found.steps * found.pieces * found.piece_rows
    scalars = 2 * 4 * heads * found.steps * found.pieces
    others = sum(x.size * x.dtype.itemsize for x in (q, bias, *results))
    return pl.CostEstimate(
        flops=4 * scores * q.shape[1] * width, transcendentals=scores,
        bytes_accessed=read * width * pool.dtype.itemsize + scalars + others,
    )


def attend(
    q: Float[Array, "N G D"], pool: Num[Array, "R C W"], block: Int32[Array, "N M"], count: Int32[Array, "N M"],
    bias: Float[Array, "N _ MC"], dtype: str, smoothing: Smoothing | None, cap: float | None, most_rows: int,
) -> tuple[Array, Array, Array]:
    """Attends from the queries of each KV head to the first rows of its selected blocks.

    Args:
      q: queries of the N heads of all sequences.
      pool: blocks of all sequences and heads.
      block: selected blocks of each head.
      count: how many of each block's rows to read; 0 = the block is not read.
      bias: added to the scores of rows in the order of the blocks, of all queries of a head or of each (axis of 1 or
        G); NEGATIVE for rows that do not count.
      dtype: type of keys and values (`kvjax.ops.quantize`), one of `tiles.TYPES`.
      smoothing: of keys in few bits, [N, D]; None = they are not smoothed.
      cap: bound of the scores without their bias (`kvjax.ops.attention.soft_capped`).
      most_rows: rows that `count` adds up to at most for a head, for XLA's estimate of the cost.

    Returns:
      Sums of weighted values [N, G, D], the largest score [N, G] and the sum of weights [N, G] of each query, f32.
    """
    (heads, group, size), (_, block_rows, width) = q.shape, pool.shape
    key_width, more = quantize.width(dtype, size), -group % SUBLANES
    found = cut(dtype, block_rows, block.shape[1])
    q = _in_rows(q.astype(jnp.float32) * size**-0.5, dtype, smoothing, width)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, more), (0, 0)))
    if dtype == "bfloat16":
        q = jnp.concatenate(in_bfloat16(q), axis=2)
    rows = found.steps * found.pieces * found.piece_rows
    bias = jnp.pad(bias, ((0, 0), (0, more if bias.shape[1] > 1 else 0), (0, rows - bias.shape[-1])),
                   constant_values=NEGATIVE)
    sums, numbers = (heads, _halves(dtype), group + more, width), (heads, 1, group + more, LANES)
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (sums, numbers, numbers)]

    piece = _pieces(found, block_rows, block, count)
    kernel = functools.partial(_kernel, steps=found.steps, dtype=dtype, key_width=key_width, cap=cap)
    out, top, total = pl.pallas_call(
        kernel, out_shape=results, grid_spec=_grid(found, q, bias, results, width, pool.dtype),
        interpret=tiles.interpreted(), name="selected_attention",
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        cost_estimate=cost(dtype, q, bias, results, pool, block, most_rows),
    )(piece, piece, q, bias, off_chip(pool.reshape(-1, found.piece_rows, width)))
    codes = size // _halves(dtype)
    out = out[:, :, :group, key_width : key_width + codes]
    out = jnp.moveaxis(out, 1, -1).reshape(heads, group, size)  # a byte of int4 holds two dimensions
    return out, top[:, 0, :group, 0], total[:, 0, :group, 0]


def _grid(found: Cut, q, bias, results, width: int, pool_type) -> pl.GridSpec:
    """Returns the kernel's grid, a step for each `found.pieces` pieces of a head, and what of its operands a step sees.

    Args:
      found: how blocks are cut into pieces.
      q, bias, results: operands and results of the kernel, or their shapes.
      width: numbers of a row in the pool.
      pool_type: element type of the pool.
    """
    heads = q.shape[0]
    last = heads * found.steps - 1

    def mine(shape):
        return pl.BlockSpec((1, *shape[1:]), lambda n, i: (n, 0, 0, 0))

    def numbers_of(ahead):
        return pl.BlockSpec((1, 1, found.pieces), memory_space=pltpu.SMEM,
                            index_map=lambda n, i: (jnp.minimum(n * found.steps + i + ahead, last), 0, 0))

    return pl.GridSpec(
        grid=(heads, found.steps),
        in_specs=[
            numbers_of(ahead=0), numbers_of(ahead=1), mine(q.shape),
            pl.BlockSpec((1, bias.shape[1], bias.shape[-1] // found.steps), lambda n, i: (n, 0, i)), IN_PLACE,
        ],
        out_specs=[mine(result.shape) for result in results],
        scratch_shapes=[
            pltpu.VMEM((2, found.pieces, found.piece_rows, width), pool_type), pltpu.SemaphoreType.DMA((2,))
        ],
    )


def _in_rows(q: Float[Array, "N G D"], dtype: str, smoothing: Smoothing | None, width: int) -> Float[Array, "N Q G W"]:
    """Returns queries with each number in the lane of its dimension of a key; Q = 2 for the halves of int4's bytes."""
    shifts = jnp.zeros((*q.shape[:2], 1), jnp.float32)
    if smoothing is not None:  # q . (scale * k + shift) = (q * scale) . k + q . shift
        shifts = jnp.sum(q * smoothing.shift[:, None], axis=-1, keepdims=True)
        q = q * smoothing.scale[:, None]
    halves = [q[..., i :: _halves(dtype)] for i in range(_halves(dtype))]
    if dtype in quantize.BITS:
        halves = [jnp.concatenate([half, shifts if i == 0 else 0 * shifts], axis=-1) for i, half in enumerate(halves)]
    return jnp.stack([jnp.pad(half, ((0, 0), (0, 0), (0, width - half.shape[-1]))) for half in halves], axis=1)


def _pieces(found: Cut, block_rows: int, block: Int32[Array, "N M"], count: Int32[Array, "N M"]):
    """Returns the number of each piece in the pool, `[steps of all heads, 1, pieces of a step]`, in the order of blocks
    and rows; -1 = it is not read."""
    each = block_rows // found.piece_rows
    nth = jnp.arange(each, dtype=jnp.int32)
    piece = jnp.where(count[..., None] > nth * found.piece_rows, block[..., None] * each + nth, -1)
    piece = piece.reshape(block.shape[0], -1)
    missing = found.steps * found.pieces - piece.shape[1]
    return jnp.pad(piece, ((0, 0), (0, missing)), constant_values=-1).reshape(-1, 1, found.pieces)


def _kernel(piece, piece_next, q, bias, pool, out, top, total, rows, arrived, *, steps, dtype, key_width, cap):
    """Attends the pieces of one step of one head, after the copies for the next step have begun."""
    step = pl.program_id(0) * steps + pl.program_id(1)

    def each_copy(step, numbers, act):
        def one(i, _):
            number = numbers[0, 0, i]

            @pl.when(number >= 0)
            def _():
                act(pltpu.make_async_copy(pool.at[number], rows.at[step % 2, i], arrived.at[step % 2]))

        jax.lax.fori_loop(0, rows.shape[1], one, None)

    @pl.when(step == 0)
    def _():
        rows[...] = jnp.zeros_like(rows)  # rows that are not read count with weight 0, and must not be NaN
        each_copy(step, piece, lambda copy: copy.start())

    @pl.when(step + 1 < pl.num_programs(0) * steps)
    def _():
        each_copy(step + 1, piece_next, lambda copy: copy.start())

    @pl.when(pl.program_id(1) == 0)
    def _():
        out[...], total[...] = jnp.zeros_like(out), jnp.zeros_like(total)
        top[...] = jnp.full_like(top, NEGATIVE)

    each_copy(step, piece, lambda copy: copy.wait())
    _add(q, bias, rows[step % 2].reshape(-1, rows.shape[-1]), out, top, total, dtype, key_width, cap)


def _add(q, bias, rows, out, top, total, dtype, key_width, cap):
    """Adds the rows of one step to the sums, by online softmax."""
    vectors = _unpacked(rows, dtype, key_width)
    scores = sum(_products(q[0, i], half, 1) for i, half in enumerate(vectors))
    scores = (scores if cap is None else cap * jnp.tanh(scores / cap)) + bias[0]
    before = top[0, 0, :, :1]
    now = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
    weight = jnp.where(bias[0] > NEGATIVE / 2, jnp.exp(scores - now), 0.0)
    kept = jnp.exp(before - now)
    for i, half in enumerate(vectors):
        wide = jnp.concatenate(in_bfloat16(weight), axis=0) if dtype == "bfloat16" else weight
        out[0, i] = out[0, i] * kept + _products(wide, half, 0)
    total[0, 0] = total[0, 0] * kept + jnp.sum(weight, axis=1, keepdims=True)
    top[0, 0] = jnp.broadcast_to(now, top.shape[2:])


def _products(vectors, rows, axis: int):
    """Contracts f32 vectors with an axis of the rows; those with bfloat16 rows stand as three that sum to each."""
    found = jax.lax.dot_general(
        vectors, rows, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32,
        precision=None if rows.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST,
    )
    if rows.dtype != jnp.bfloat16:
        return found
    first, second, third = jnp.split(found, 3, axis=0)
    return first + (second + third)


def _unpacked(rows, dtype: str, key_width: int) -> list:
    """Returns rows as numbers: one array, or for int4 those in the lower and in the upper half of each byte.

    The lane after a key's codes tells whether it was smoothed with the shift (`kvjax.ops.quantize.Packed.shifted`), so
    that its query there may hold what the shift adds; others beside codes hold numbers of no meaning.
    """
    if dtype == "bfloat16":
        return [jax.lax.bitcast_convert_type(rows, jnp.bfloat16)]
    if dtype == "float32":
        return [rows]
    byte = rows.astype(jnp.int32) & 255
    lane = jax.lax.broadcasted_iota(jnp.int32, byte.shape, 1)

    def half_float(end):
        return from_f16(byte[:, end - 2 : end - 1] | byte[:, end - 1 : end] << 8)

    of_value = lane >= key_width
    low = jnp.where(of_value, half_float(2 * key_width - 2), half_float(key_width - 2))
    step = jnp.abs(jnp.where(of_value, half_float(2 * key_width), half_float(key_width)))
    shifted = jnp.where(byte[:, key_width - 1 : key_width] < 128, 1.0, 0.0)
    codes = [byte] if dtype == "int8" else [byte & 15, byte >> 4]
    flag = lane == key_width - quantize.width(dtype, 0)  # the range alone
    return [jnp.where(flag, shifted, low + step * code.astype(jnp.float32)) for code in codes]
