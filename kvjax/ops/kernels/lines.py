"""One row or column of each matrix read or changed where it lies, Pallas kernels for TPUs.

XLA scatters into rows or columns of a large array by a copy of the whole of it, there and back, and may gather from a
copy with other axes last. These kernels move only the tiles that the lines are in.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.ops.kernels import tiles
from kvjax.ops.kernels.pool_access import off_chip
from kvjax.typing import Array, Int32, Num

CHANGES = {"set": lambda old, new: new, "max": jnp.maximum, "add": jnp.add}


def change(
    x: Num[Array, "L R N"], at: Int32[Array, "L"], new: Num[Array, "L _"], how: str, axis: int
) -> Num[Array, "L R N"]:
    """Returns the matrices with a line of each changed, in the same memory if the caller has no other use for them.

    Args:
      x: matrices.
      at: number of the line in each; one too large changes nothing.
      new: what each line is replaced with, or compared with, or what is added to it.
      how: one of CHANGES.
      axis: 1 = lines are rows [L, N], 2 = they are columns [L, R].
    """
    line, tile, width = _blocks(x, axis)
    grid = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=at.shape, in_specs=[line, tile], out_specs=tile)
    moved = new.size * (2 * width + 1) * x.dtype.itemsize
    kernel = functools.partial(_change, size=x.shape[axis], axis=axis, change=CHANGES[how])
    return pl.pallas_call(
        kernel, grid_spec=grid, name="change_lines",
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), input_output_aliases={2: 0}, interpret=tiles.interpreted(),
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=moved + 4 * at.size),
    )(at, jnp.expand_dims(new, axis).astype(x.dtype), off_chip(x))


def take(x: Num[Array, "L R N"], at: Int32[Array, "L"], axis: int) -> Num[Array, "L _"]:
    """Returns a line of each matrix, the last one where the number is too large; arguments are those of `change`."""
    line, tile, width = _blocks(x, axis)
    grid = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=at.shape, in_specs=[tile], out_specs=line)
    size = x.size // x.shape[axis]
    shape = [*x.shape]
    shape[axis] = 1
    found = pl.pallas_call(
        functools.partial(_take, size=x.shape[axis], axis=axis), grid_spec=grid, name="take_lines",
        out_shape=jax.ShapeDtypeStruct(tuple(shape), x.dtype), interpret=tiles.interpreted(),
        cost_estimate=pl.CostEstimate(
            flops=0, transcendentals=0, bytes_accessed=size * (width + 1) * x.dtype.itemsize + 4 * at.size),
    )(at, off_chip(x))
    return jnp.squeeze(found, axis)


def _blocks(x: Num[Array, "L R N"], axis: int) -> tuple[pl.BlockSpec, pl.BlockSpec, int]:
    """Returns the blocks of a matrix's line, and of the tiles that it is in, and how many lines these have."""
    size = x.shape[axis]
    width = min(tiles.LANES if axis == 2 else tiles.SUBLANES * (4 // x.dtype.itemsize), size)

    def tile_of(i, at):
        number = jax.lax.div(jnp.minimum(at[i], size - 1), jnp.int32(width))
        return (i, number, 0) if axis == 1 else (i, 0, number)

    def shape(lines):
        return (1, lines, x.shape[2]) if axis == 1 else (1, x.shape[1], lines)

    return pl.BlockSpec(shape(1), lambda i, at: (i, 0, 0)), pl.BlockSpec(shape(width), tile_of), width


def _wide(kind):
    """Returns the type in which numbers are masked: Mosaic masks no narrower ones."""
    return kind if kind.itemsize == 4 else jnp.float32 if jnp.issubdtype(kind, jnp.floating) else jnp.int32


def _take(at, x, out, *, size, axis):
    line = jax.lax.rem(jnp.minimum(at[pl.program_id(0)], size - 1), jnp.int32(x.shape[axis]))
    mine = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) == line
    found = jnp.where(mine, x[...].astype(_wide(x.dtype)), 0)
    out[...] = jnp.sum(found, axis=axis, keepdims=True).astype(out.dtype)


def _change(at, new, old, out, *, size, axis, change):
    line = at[pl.program_id(0)]
    place = jnp.where(line < size, jax.lax.rem(line, jnp.int32(out.shape[axis])), -1)
    wide = _wide(out.dtype)
    mine = jax.lax.broadcasted_iota(jnp.int32, out.shape, axis) == place
    before = old[...].astype(wide)
    out[...] = jnp.where(mine, change(before, new[...].astype(wide)), before).astype(out.dtype)
