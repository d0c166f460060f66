"""A saved cache's blocks as NumPy arrays that lie in its file: for looking at keys and values where no cache is needed.

    saved = open_saved("saved/blocks.kv")
    rows = saved.block(layer=0, sequence=0, head=1, block=3)    # [C, width], checked, not copied

The file is memory-mapped, so that pages come as they are looked at. One that its device does not give ends the process
with SIGBUS then, where a cache raises ReadFailed, also one that decodes through a map (`kvjax.store.io.filemap`).
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

    A cache that goes on writing the file leaves its blocks alone until it is saved twice more.
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
        """int32[L, B, KB, NB] where each block lies, -1 = never written. KB is 1 where all heads fetch alike."""
        return self._of_all(self._save.blocks[1], -1)

    @property
    def sums(self) -> np.ndarray:
        """uint64[L, B, KB, NB] what each block hashes to, 0 where it was never written."""
        return self._of_all(self._save.blocks[2], 0)

    def _of_all(self, column: np.ndarray, default: int) -> np.ndarray:
        found = np.full(_shape(self.codec), default, column.dtype)
        found.reshape(-1)[self._save.blocks[0]] = column
        return found

    def block(self, layer: int, sequence: int, head: int, block: int) -> np.ndarray:
        """Rows `[C, width]` of a block, keys before values and as they are stored; zeros where nothing was written.

        A read-only view of the file, but a copy of a block in codec "rle". Raises IndexError, or ChecksumMismatch for
        what is not what was saved.
        """
        geometry, at = self.codec.geometry, (layer, sequence, head, block)
        if min(at) < 0:
            raise IndexError(f"{at} has a negative number")
        if not all(index < size for index, size in zip(at, _shape(self.codec), strict=True)):
            raise IndexError(f"{at} is not within {_shape(self.codec)}")
        ids, extents, sums = self._save.blocks
        block_id = int(np.ravel_multi_index(at, _shape(self.codec)))
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
        image.flags.writeable = False  # also where it is a copy
        return np.asarray(image).view(geometry.numpy_dtype).reshape(geometry.block_rows, geometry.width)


def open_saved(path: str | os.PathLike) -> MappedSave:
    """Maps the newest whole save of a store file; any number may, also while a cache writes it.

    Raises ConfigError, NothingSaved, FormatMismatch, ChecksumMismatch, StoreClosed or ReadFailed as `FlashStore.open`
    does, and ShortRead for a file that has been cut.
    """
    path = _validate.path("path", path)
    file, header = open_file(path, SystemIO(), direct=False, read_only=True)
    try:
        codec = make_codec(header.codec, header.geometry)
        newest, mapped = whole_saves(file, codec)[0], file.mapped()
    finally:
        file.close()
    needed, size = newest.end(codec), mapped.size
    if size < needed:  # beyond its end a mapped file is SIGBUS
        raise ShortRead(f"{path} has {size} bytes, and save {newest.sequence} needs {needed}; restore a whole copy")
    return MappedSave(path, codec, newest, mapped)


def _shape(codec: Codec) -> tuple[int, int, int, int]:
    geometry = codec.geometry
    return geometry.layers, geometry.batch, geometry.kv_heads, geometry.num_blocks
