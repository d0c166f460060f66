"""Indices of marked elements, and rows and columns changed in place, in the forms that are fastest."""

import functools
import math

import jax
import jax.numpy as jnp

from kvjax.ops.kernels import tiles
from kvjax.typing import Array, Bool, Int32, Num


def places_of(among: Bool[Array, "N"], size: int) -> Int32[Array, "size"]:
    """Returns the indices of the first `size` marked elements in order, padded with -1.

    The same as `jnp.nonzero(among, size=size, fill_value=-1)`, and faster on XLA:CPU: a cumulative sum and a scatter,
    without a sort.
    """
    nth = jnp.where(among, jnp.cumsum(among, dtype=jnp.int32) - 1, size)
    return jnp.full(size, -1, jnp.int32).at[nth].set(jnp.arange(among.shape[0], dtype=jnp.int32), mode="drop")


def first(among: Bool[Array, "N"]) -> Int32[Array, ""]:
    """Returns the index of the first marked element, or the last index if none is marked."""
    return jnp.min(jnp.where(among, jnp.arange(among.shape[0], dtype=jnp.int32), among.shape[0] - 1))


def with_column(
    x: Num[Array, "*L R N"], at: Int32[Array, "*L"], new: Num[Array, "*L R"], how: str = "set"
) -> Num[Array, "*L R N"]:
    """Returns matrices with a column of each changed, on every platform without a copy of them.

    Args:
      x: matrices.
      at: number of the column in each; N changes nothing.
      new: what each column is replaced with (`set`), compared with (`max`), or what is added to it (`add`).
      how: the change.
    """
    if tiles.wanted():
        return _with_line(how, 2)(x, at, new)
    leading = jnp.indices(at.shape, jnp.int32, sparse=True)
    return getattr(x.at[(*leading, slice(None), at)], how)(new.astype(x.dtype), mode="drop")


def column(x: Num[Array, "*L R N"], at: Int32[Array, "*L"]) -> Num[Array, "*L R"]:
    """Returns a column of each matrix, the last one where the number is too large."""
    if tiles.wanted():
        return _line(2)(x, at)
    leading = jnp.indices(at.shape, jnp.int32, sparse=True)
    return x.at[(*leading, slice(None), at)].get(mode="clip")


def row(x: Num[Array, "*L R N"], at: Int32[Array, "*L"]) -> Num[Array, "*L N"]:
    """Returns a row of each matrix, the last one where the number is too large; as `with_row` replaces one."""
    if tiles.wanted() and x.shape[-1] % tiles.LANES:
        return column(x.swapaxes(-1, -2), at)
    if tiles.wanted():
        return _line(1)(x, at)
    leading = jnp.indices(at.shape, jnp.int32, sparse=True)
    return x.at[(*leading, at)].get(mode="clip")


def with_columns(x: Num[Array, "R N"], at: Int32[Array, "*E"], new: Num[Array, "*E R"]) -> Num[Array, "R N"]:
    """Returns a matrix with some columns replaced, no two alike, in the same way; column N is none."""
    if not tiles.wanted():
        return x.at[:, at].set(jnp.moveaxis(new, -1, 0), mode="drop")
    if at.shape == ():
        return with_column(x, at, new)
    return jax.lax.fori_loop(0, len(at), lambda i, x: with_column(x, at[i], new[i]), x)


def with_row(x: Num[Array, "*L R N"], at: Int32[Array, "*L"], new: Num[Array, "*L N"]) -> Num[Array, "*L R N"]:
    """Returns matrices with a row of each replaced, in the same way; row R is none.

    XLA for TPUs keeps the longer axis last where the other one fills no tiles, so that rows are columns there.
    """
    if tiles.wanted() and x.shape[-1] % tiles.LANES:
        return with_column(x.swapaxes(-1, -2), at, new).swapaxes(-1, -2)
    if tiles.wanted():
        return _with_line("set", 1)(x, at, new)
    leading = jnp.indices(at.shape, jnp.int32, sparse=True)
    return x.at[(*leading, at)].set(new.astype(x.dtype), mode="drop")


def with_rows(x: Num[Array, "L R N"], at: Int32[Array, "L E"], new: Num[Array, "L E N"]) -> Num[Array, "L R N"]:
    """Returns matrices with some rows of each replaced, no two alike, in the same way; row R is none."""
    if not tiles.wanted():
        return x.at[jnp.arange(len(x), dtype=jnp.int32)[:, None], at].set(new, mode="drop")
    for e in range(at.shape[1]):
        x = with_row(x, at[:, e], new[:, e])
    return x


def with_number(
    x: Num[Array, "L R N"], at: Int32[Array, "L"], place: Int32[Array, "L"], new: Num[Array, "..."]
) -> Num[Array, "L R N"]:
    """Returns matrices with one number of a row of each replaced, in the same way; row R and place N are none."""
    if not tiles.wanted():
        return x.at[jnp.arange(len(x), dtype=jnp.int32), at, place].set(new, mode="drop")
    mine = jnp.arange(x.shape[-1], dtype=jnp.int32) == place[:, None]
    return with_row(x, at, jnp.where(mine, new[..., None], row(x, at)))


def with_rows_at(x: Num[Array, "L R N"], at: Int32[Array, "T"], new: Num[Array, "L T N"]) -> Num[Array, "L R N"]:
    """Returns matrices with the same rows of each replaced, no two alike; a single one in the same way. Row R is none.
    """
    if tiles.wanted() and at.shape == (1,):
        return with_row(x, jnp.broadcast_to(at, len(x)), new[:, 0])
    return x.at[:, at].set(new, mode="drop")


def with_columns_at(x: Num[Array, "L R N"], at: Int32[Array, "T"], new: Num[Array, "L R T"]) -> Num[Array, "L R N"]:
    """Returns matrices with the same columns of each replaced, as `with_rows_at` does with rows."""
    if tiles.wanted() and at.shape == (1,):
        return with_column(x, jnp.broadcast_to(at, len(x)), new[..., 0])
    return x.at[:, :, at].set(new, mode="drop")


@functools.cache
def _with_line(how: str, axis: int):
    """Returns `kvjax.ops.kernels.lines.change` for any leading axes, under `jax.vmap`, too."""
    from kvjax.ops.kernels import lines  # imports Pallas, which takes a while

    @jax.custom_batching.custom_vmap
    def change(x, at, new):
        count = math.prod(at.shape)
        x_flat, new_flat = x.reshape(count, *x.shape[-2:]), new.reshape(count, new.shape[-1])
        return lines.change(x_flat, at.reshape(count), new_flat, how, axis).reshape(x.shape)

    return _batched(change)


@functools.cache
def _line(axis: int):
    """Returns `kvjax.ops.kernels.lines.take` in the same way."""
    from kvjax.ops.kernels import lines

    @jax.custom_batching.custom_vmap
    def take(x, at):
        count = math.prod(at.shape)
        found = lines.take(x.reshape(count, *x.shape[-2:]), at.reshape(count), axis)
        return found.reshape(*at.shape, found.shape[-1])

    return _batched(take)


def _batched(function):
    """Lets a function of arrays with any leading axes take those that `jax.vmap` adds as more of them."""
    @function.def_vmap
    def each(size, batched, *args):
        given = (leaf if there else jnp.broadcast_to(leaf, (size, *leaf.shape))
                 for leaf, there in zip(args, batched, strict=True))
        return function(*given), True

    return function
