"""A saved cache's blocks as NumPy arrays that lie in its file: for looking at keys and values where no cache is needed.

    saved = open_saved("saved/blocks.kv")
    rows = saved.block(layer=0, sequence=0, head=1, block=3)    # [C, width], checked, not copied

The file is memory-mapped, so that pages come as they are looked at. Decoding does not read this way: a mapped page that
its device does not give ends the process with SIGBUS, where a cache raises ReadFailed.
"""

import dataclasses
import os

import numpy as np

from kvjax import fields
from kvjax.errors import ChecksumMismatch, ShortRead
from kvjax.store.codec import Codec, make_codec
from kvjax.store.creation import open_file
from kvjax.store.format import HEADER_BYTES
from kvjax.store.log import whole_saves
from kvjax.store.system import SystemIO


@dataclasses.dataclass(frozen=True)
class MappedSave:
    """The newest whole save of a store file at the time of opening.

    A cache that goes on writing the file leaves its blocks alone until it is saved twice more.

    Attributes:
      extents: int32[L, B, KB, NB] where each block lies, -1 = never written. KB is 1 where all heads fetch alike.
      sums: uint64[L, B, KB, NB] what it hashes to.
      sequence: number of the save.
    """

    path: str
    codec: Codec
    extents: np.ndarray
    sums: np.ndarray
    sequence: int
    _bytes: np.ndarray

    def block(self, layer: int, sequence: int, head: int, block: int) -> np.ndarray:
        """Rows `[C, width]` of a block, keys before values and as they are stored; zeros where nothing was written.

        A read-only view of the file, but a copy of a block in codec "rle". Raises IndexError, or ChecksumMismatch for
        what is not what was saved.
        """
        geometry, at = self.codec.geometry, (layer, sequence, head, block)
        if min(at) < 0:
            raise IndexError(f"{at} has a negative number")
        extent, sums = int(self.extents[at]), self.sums[at].reshape(1)
        if extent < 0:
            return np.zeros((geometry.block_rows, geometry.width), geometry.numpy_dtype)
        start, size = HEADER_BYTES + extent * geometry.extent_bytes, int(self.codec.sizes(sums)[0])
        image = self._bytes[start : start + min(size, geometry.block_bytes)]
        if size < geometry.extent_bytes:
            image = np.concatenate([image, np.zeros(geometry.block_bytes - size, np.uint8)])
        if not self.codec.decode([image.data], sums)[0]:
            raise ChecksumMismatch(f"{self.path}: layer {layer}, sequence {sequence}, head {head}, block {block} at "
                                   f"offset {start} is not what save {self.sequence} wrote; open the file again, or "
                                   "run kvjax.store.inspect to see what else is damaged")
        image.flags.writeable = False  # also where it is a copy
        return np.asarray(image).view(geometry.numpy_dtype).reshape(geometry.block_rows, geometry.width)


def open_saved(path: str | os.PathLike) -> MappedSave:
    """Maps the newest whole save of a store file; any number may, also while a cache writes it.

    Raises ConfigError, NothingSaved, FormatMismatch, ChecksumMismatch, StoreClosed or ReadFailed as `FlashStore.open`
    does, and ShortRead for a file that has been cut.
    """
    path = fields.path("path", path)
    file, header = open_file(path, SystemIO(), direct=False, read_only=True)
    try:
        newest, mapped = whole_saves(file, header.geometry)[0], file.mapped()
    finally:
        file.close()
    geometry, codec = header.geometry, make_codec(header.codec, header.geometry)
    extents, sums = newest.table(geometry)
    ends = HEADER_BYTES + extents.astype(np.int64) * geometry.extent_bytes + codec.sizes(sums)
    needed, size = max(ends[extents >= 0], default=0), mapped.size
    if size < needed:  # beyond its end a mapped file is SIGBUS
        raise ShortRead(f"{path} has {size} bytes, and save {newest.sequence} needs {needed}; restore a whole copy")
    shape = (geometry.layers, geometry.batch, geometry.kv_heads, geometry.num_blocks)
    return MappedSave(path, codec, extents.reshape(shape), sums.reshape(shape), newest.sequence, mapped)
