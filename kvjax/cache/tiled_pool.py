"""The pool in memory of a TPU, whose rows fill whole tiles.

A row is a key beside its value, padded to a multiple of 128 numbers, and a block has so many more rows that they fill
tiles (`kvjax.ops.kernels.tiles.block_rows`). A kernel then reads selected blocks where they lie
(`kvjax.ops.attention.attend_blocks`), others take and write blocks and rows in their place, and nothing copies the pool
into another layout. Other platforms have `MemoryPool` (`kvjax.cache.in_memory`). Saved caches are the same on all.
"""

import dataclasses

import jax.numpy as jnp

from kvjax.cache.pool import InMemory, MemoryPool, batch_and_head, take_block
from kvjax.ops import quantize
from kvjax.ops.kernels import pool_access, tiles
from kvjax.typing import Array, Int32, Num, pytree

_TOGETHER = 32  # rows of a tile of bytes


@pytree
class TiledPool(InMemory):
    """A pool with all blocks in memory, of rows in whole tiles; the slot of a block is its number."""

    # [.., C + padding, W] a key and its value, or a value alone, of X numbers each, then padding
    rows: Num[Array, "B K NB _ W"]
    block_rows: int = dataclasses.field(metadata={"static": True})  # C
    width: int = dataclasses.field(metadata={"static": True})  # X
    keeps_keys: bool = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, pool: MemoryPool) -> "TiledPool":
        """Returns the blocks of another pool in rows of whole tiles."""
        keeps_keys = pool.key is not None
        rows, (count, width) = _joined(pool.key, pool.value), pool.value.shape[-2:]
        return cls(_with_more_rows(rows, pool.dtype), count, width, keeps_keys, pool.dtype)

    def apart(self) -> MemoryPool:
        """Returns the blocks with keys and values in arrays of their own; of NumPy arrays, views."""
        key, value = self._parts(self.rows[..., : self.block_rows, :])
        return MemoryPool(key, value, self.dtype)

    def rows_at(self, number, slot, row):
        heads, blocks, rows = self.rows.shape[1:4]
        head = number * heads + jnp.arange(heads, dtype=jnp.int32)[:, None]
        index = (head * blocks + jnp.minimum(slot, blocks - 1)) * rows + row
        taken = jnp.take(self.rows.reshape(-1, self.rows.shape[-1]), index, axis=0, mode="clip")
        return self._packed(taken)

    def lying(self, slot):
        if not self.keeps_keys or not self._fits:
            return None
        return self._flat, self._index(jnp.minimum(slot, self.rows.shape[2] - 1))

    def block(self, slot):
        if not self._fits:
            return self._packed(take_block(self.rows, slot)[..., : self.block_rows, :])
        index = self._index(jnp.minimum(slot, self.rows.shape[2] - 1))
        taken = pool_access.take(self._flat, index.reshape(-1))
        return self._packed(taken.reshape(*slot.shape, *taken.shape[1:])[..., : self.block_rows, :])

    def everything(self, slot):
        rows = self.rows[..., : self.block_rows, :]
        return self._packed(rows.reshape(*rows.shape[:2], -1, rows.shape[-1]))

    def put_row(self, block, row, key, value, layer, ref):
        new = self._joined(key, value)
        if not self._fits and not self._single:
            return self._with(self.rows.at[(*batch_and_head(block), block, row)].set(new, mode="drop"))
        index, row, new = self._index(block).reshape(-1), row.reshape(-1), new.reshape(-1, new.shape[-1])
        pool = self._flat
        if self._single:  # many such blocks are to the kernel one of many rows
            index, row = jnp.where((index < 0) | (row > 0), -1, index // _TOGETHER), index % _TOGETHER
            pool = pool.reshape(-1, _TOGETHER, pool.shape[-1])
        return self._with(pool_access.put_rows(pool, index, row, new, self.dtype))

    def put_blocks(self, block, key, value, layer, ref):
        new = _with_more_rows(self._joined(key, value), self.dtype)
        if not self._fits:
            return self._with(self.rows.at[(*batch_and_head(block), block)].set(new, mode="drop"))
        index = self._index(block).reshape(-1)
        return self._with(pool_access.put_blocks(self._flat, index, new.reshape(len(index), *new.shape[3:])))

    @property
    def _fits(self) -> bool:
        """Whether kernels read and write the blocks where they lie; XLA does it where they do not."""
        return tiles.fits(self.dtype, self.rows.shape[3])

    @property
    def _single(self) -> bool:
        """Whether blocks are single rows that do not fit, but fill tiles together; where they are codes of 8 bits, XLA
        copies all to write one."""
        together = self.rows.shape[3] == 1 and self.rows.shape[2] % _TOGETHER == 0
        return together and self.dtype in tiles.TYPES and not self._fits

    @property
    def _flat(self) -> Num[Array, "R C W"]:
        """All blocks of all sequences and heads."""
        return self.rows.reshape(-1, *self.rows.shape[3:])

    def _index(self, block: Int32[Array, "B K *E"]) -> Int32[Array, "B K *E"]:
        """Returns the index of each block among all, -1 for none."""
        batch, heads, blocks = self.rows.shape[:3]
        head = jnp.arange(batch * heads, dtype=jnp.int32).reshape(batch, heads, *(1,) * (block.ndim - 2))
        return jnp.where(block < blocks, head * blocks + block, -1)

    def _with(self, rows) -> "TiledPool":
        return dataclasses.replace(self, rows=rows.reshape(self.rows.shape))

    def _joined(self, key, value):
        return _joined(key if self.keeps_keys else None, value)

    def _parts(self, rows: Num[Array, "*N W"]):
        """Returns keys, None if they are not kept, and values of rows."""
        key, value = rows[..., : self.width], rows[..., self.width : 2 * self.width]
        return (key, value) if self.keeps_keys else (None, key)

    def _packed(self, rows: Num[Array, "*N W"]):
        return tuple(None if part is None else quantize.Packed(part, self.dtype) for part in self._parts(rows))


def _with_more_rows(rows: Num[Array, "*N C W"], dtype: str) -> Num[Array, "*N _ W"]:
    """Returns blocks with rows of zeros behind their own, so many that they fill tiles."""
    count = rows.shape[-2]
    more = tiles.block_rows(dtype, count) - count
    return jnp.pad(rows, ((0, 0),) * (rows.ndim - 2) + ((0, more), (0, 0)))


def _joined(key: Num[Array, "*N X"] | None, value: Num[Array, "*N X"]) -> Num[Array, "*N W"]:
    """Returns a key beside its value, or a value alone, in rows of whole tiles."""
    rows = value if key is None else jnp.concatenate([key, value], axis=-1)
    width = rows.shape[-1]
    return jnp.pad(rows, ((0, 0),) * (rows.ndim - 1) + ((0, tiles.padded(width) - width),))
