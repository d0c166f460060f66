"""A saved cache's blocks as NumPy arrays in its file, to examine keys and values without a cache.

    saved = open_saved("saved/blocks.kv")
    rows = saved.block(layer=0, sequence=0, head=1, block=3)    # [C, width], verified, not copied

The file is memory-mapped, so that pages are read when they are accessed. If the device fails to deliver a page, the
process ends with SIGBUS, where a cache would raise ReadFailed, also one that reads through a map
(`kvjax.store.io.filemap`).
"""

import dataclasses
import os

import numpy as np

from kvjax import _validate
from kvjax.errors import ChecksumMismatch, ShortRead
from kvjax.store.flash.creation import open_file
from kvjax.store.flash.recovery import Recovered, whole_saves
from kvjax.store.format.codec import Codec, make_codec
from kvjax.store.format.pages import HEADER_BYTES
from kvjax.store.io.system import SystemIO


@dataclasses.dataclass(frozen=True)
class MappedSave:
    """The newest whole save of a store file at the time of opening.

    A cache that continues to write the file leaves the save's blocks alone until it has saved twice more.

    Attributes:
      path: the file.
      codec: codec of its blocks.
    """

    path: str
    codec: Codec
    _save: Recovered
    _bytes: np.ndarray

    @property
    def sequence(self) -> int:
        """Number of the save."""
        return self._save.sequence

    @property
    def extents(self) -> np.ndarray:
        """int32[L, B, KB, NB] extent of each block, -1 = never written. KB is 1 where all heads fetch alike."""
        return self._of_all(self._save.blocks[1], -1)

    @property
    def sums(self) -> np.ndarray:
        """uint64[L, B, KB, NB] checksum of each block, 0 where it was never written."""
        return self._of_all(self._save.blocks[2], 0)

    def _of_all(self, column: np.ndarray, default: int) -> np.ndarray:
        values = np.full(_shape(self.codec), default, column.dtype)
        values.reshape(-1)[self._save.blocks[0]] = column
        return values

    def block(self, layer: int, sequence: int, head: int, block: int) -> np.ndarray:
        """Returns the rows of a block, keys before values and in stored form; zeros if it was never written.

        Args:
          layer, sequence, head, block: indices over [L, B, KB, NB].

        Returns:
          [C, width] a read-only view of the file, or a copy if the block is stored in fewer pages than its extent has.

        Raises:
          IndexError: an index is out of range.
          ChecksumMismatch: the block is not what was saved.
        """
        geometry, index_of_block = self.codec.geometry, (layer, sequence, head, block)
        if min(index_of_block) < 0:
            raise IndexError(f"{index_of_block} has a negative index")
        if not all(index < size for index, size in zip(index_of_block, _shape(self.codec), strict=True)):
            raise IndexError(f"{index_of_block} is outside the shape {_shape(self.codec)}")
        ids, extents, sums = self._save.blocks
        block_id = int(np.ravel_multi_index(index_of_block, _shape(self.codec)))
        place = int(ids.searchsorted(block_id))
        if place == ids.size or ids[place] != block_id:
            return np.zeros((geometry.block_rows, geometry.width), geometry.numpy_dtype)
        extent, sums = int(extents[place]), sums[place : place + 1]
        start, size = HEADER_BYTES + extent * geometry.extent_bytes, int(self.codec.sizes(sums)[0])
        image = self._bytes[start : start + min(size, geometry.block_bytes)]
        if size < geometry.extent_bytes:
            image = np.concatenate([image, np.zeros(geometry.block_bytes - size, np.uint8)])
        if not self.codec.decode([image.data], sums)[0]:
            raise ChecksumMismatch(f"{self.path}: layer {layer}, sequence {sequence}, head {head}, block {block} at "
                                   f"offset {start} is not what save {self.sequence} wrote; open the file again, or "
                                   "run kvjax.store.tools.inspect to see what else is damaged")
        image.flags.writeable = False  # for a copy, too
        return np.asarray(image).view(geometry.numpy_dtype).reshape(geometry.block_rows, geometry.width)


def open_saved(path: str | os.PathLike) -> MappedSave:
    """Maps the newest whole save of a store file. Any number of processes may do so, also while a cache writes the
    file.

    Args:
      path: the file.

    Returns:
      The save.

    Raises:
      ConfigError, NothingSaved, FormatMismatch, ChecksumMismatch, StoreClosed, ReadFailed: as `FlashStore.open`.
      ShortRead: the file was truncated.
    """
    path = _validate.path("path", path)
    file, header = open_file(path, SystemIO(), direct=False, read_only=True)
    try:
        codec = make_codec(header.codec, header.geometry)
        newest, mapped = whole_saves(file, codec)[0], file.mapped()
    finally:
        file.close()
    needed, size = newest.end(codec), mapped.size
    if size < needed:  # accessing a map beyond the end of its file raises SIGBUS
        raise ShortRead(f"{path} has {size} bytes, but save {newest.sequence} needs {needed}; restore a whole copy")
    return MappedSave(path, codec, newest, mapped)


def _shape(codec: Codec) -> tuple[int, int, int, int]:
    geometry = codec.geometry
    return geometry.layers, geometry.batch, geometry.kv_heads, geometry.num_blocks
