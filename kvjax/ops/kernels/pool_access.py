"""Blocks and rows of a pool taken and written where they lie, Pallas kernels for TPUs.

XLA gathers and scatters in place, too, but may bring the whole pool to the chip's memory and back for it. The pool of
these kernels stays in device memory: they copy single pieces of it, all at the same time.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.ops import quantize
from kvjax.ops.kernels import tiles
from kvjax.typing import Array, Int32, Num

_AT_ONCE = 64  # pieces
IN_PLACE = pl.BlockSpec(memory_space=pltpu.HBM)  # an operand that the kernel itself copies from and to


def piece_rows(dtype: str, block_rows: int) -> int:
    """Returns how many rows of a block are copied at once."""
    largest = 32 if dtype in quantize.BITS else 16  # rows: a tile of bytes, or two of floats
    return math.gcd(block_rows, largest) if block_rows % tiles.SUBLANES == 0 else block_rows


def off_chip(pool: Num[Array, "R C W"]) -> Num[Array, "R C W"]:
    """Returns the pool, which XLA then leaves in device memory: else it would bring the whole of it to the chip's own
    memory, where that has room, and back after a write."""
    return pool if tiles.interpreted() else pltpu.with_memory_space_constraint(pool, pltpu.HBM)


def take(pool: Num[Array, "R C W"], block: Int32[Array, "L"]) -> Num[Array, "L C W"]:
    """Returns copies of blocks.

    Args:
      pool: all blocks.
      block: numbers of the blocks to copy.
    """
    def kernel(block, pool, out, arrived):
        def each(act):
            def one(i, _):
                act(pltpu.make_async_copy(pool.at[block[i]], out.at[i], arrived))

            jax.lax.fori_loop(0, out.shape[0], one, None)

        each(lambda copy: copy.start())
        each(lambda copy: copy.wait())

    grid = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=(1,), in_specs=[IN_PLACE], out_specs=IN_PLACE,
                                        scratch_shapes=[pltpu.SemaphoreType.DMA])
    result = jax.ShapeDtypeStruct((*block.shape, *pool.shape[1:]), pool.dtype)
    moved = 2 * result.size * result.dtype.itemsize
    return pl.pallas_call(
        kernel, grid_spec=grid, out_shape=result, interpret=tiles.interpreted(), name="take_blocks",
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=moved + 4 * block.size),
    )(block, off_chip(pool))


def put_blocks(
    pool: Num[Array, "R C W"], block: Int32[Array, "L"], new: Num[Array, "L C W"]
) -> Num[Array, "R C W"]:
    """Returns the pool with some blocks replaced, in the same memory if the caller has no other use for it.

    Args:
      pool: all blocks.
      block: numbers of the blocks to replace, no two alike; -1 = none.
      new: their rows.
    """
    def kernel(block, new, pool, out, done):
        del pool  # `out` is the same memory

        def each(act):
            def one(i, _):
                @pl.when(block[i] >= 0)
                def _():
                    act(pltpu.make_async_copy(new.at[i], out.at[block[i]], done))

            jax.lax.fori_loop(0, new.shape[0], one, None)

        each(lambda copy: copy.start())
        each(lambda copy: copy.wait())

    grid = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=(1,), in_specs=[IN_PLACE] * 2, out_specs=IN_PLACE,
                                        scratch_shapes=[pltpu.SemaphoreType.DMA])
    moved = 2 * new.size * new.dtype.itemsize
    return pl.pallas_call(
        kernel, grid_spec=grid, out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype), input_output_aliases={2: 0},
        interpret=tiles.interpreted(), name="put_blocks",
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=moved + 4 * block.size),
    )(block, new, off_chip(pool))


def put_rows(
    pool: Num[Array, "R C W"], block: Int32[Array, "L"], row: Int32[Array, "L"], new: Num[Array, "L W"], dtype: str,
) -> Num[Array, "R C W"]:
    """Returns the pool with some rows replaced, in the same memory if the caller has no other use for it.

    A row is part of a tile, which is read and written whole.

    Args:
      pool: all blocks.
      block: numbers of the blocks to write a row of, no two alike; -1 = none.
      row: row in each block.
      new: the rows.
      dtype: type of keys and values (`kvjax.ops.quantize`).
    """
    rows, (_, block_rows, width) = piece_rows(dtype, pool.shape[1]), pool.shape
    count = min(len(block), _AT_ONCE)
    steps = -(-len(block) // count)
    more = steps * count - len(block)
    piece = jnp.where(block < 0, -1, block * (block_rows // rows) + row // rows)
    piece, row = jnp.pad(piece, (0, more), constant_values=-1), jnp.pad(row % rows, (0, more))
    new = jnp.pad(new, ((0, more), (0, 0)))[:, None]
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2, grid=(steps,), out_specs=IN_PLACE,
        in_specs=[pl.BlockSpec((count, 1, width), lambda i, piece, row: (i, 0, 0)), IN_PLACE],
        scratch_shapes=[pltpu.VMEM((count, rows, width), pool.dtype), pltpu.SemaphoreType.DMA],
    )
    moved = 2 * len(block) * rows * width * pool.dtype.itemsize
    others = sum(x.size * x.dtype.itemsize for x in (piece, row, new))
    found = pl.pallas_call(
        functools.partial(_put_rows, count=count), grid_spec=grid, interpret=tiles.interpreted(), name="put_rows",
        out_shape=jax.ShapeDtypeStruct((pool.size // (rows * width), rows, width), pool.dtype),
        input_output_aliases={3: 0},
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=moved + others),
    )(piece, row, new, off_chip(pool.reshape(-1, rows, width)))
    return found.reshape(pool.shape)


def _put_rows(piece, row, new, pool, out, rows, done, *, count):
    """Reads the pieces of one step, replaces a row in each, and writes them."""
    del pool  # `out` is the same memory
    first = pl.program_id(0) * count

    def each(act, back):
        def one(i, _):
            number = piece[first + i]

            @pl.when(number >= 0)
            def _():
                pair = (rows.at[i], out.at[number]) if back else (out.at[number], rows.at[i])
                act(pltpu.make_async_copy(*pair, done))

        jax.lax.fori_loop(0, count, one, None)

    def replace(i, _):
        wide = rows.dtype if rows.dtype.itemsize == 4 else jnp.int32  # Mosaic masks no narrower numbers
        mine = jax.lax.broadcasted_iota(jnp.int32, rows.shape[1:], 0) == row[first + i]
        rows[i] = jnp.where(mine, new[i].astype(wide), rows[i].astype(wide)).astype(rows.dtype)

    each(lambda copy: copy.start(), False)
    each(lambda copy: copy.wait(), False)
    jax.lax.fori_loop(0, count, replace, None)
    each(lambda copy: copy.start(), True)
    each(lambda copy: copy.wait(), True)
