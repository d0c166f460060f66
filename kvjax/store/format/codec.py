"""How blocks are put into the extents of a file: as they are ("raw"), or with runs of equal keys stored once ("rle").

Where a block lies and how much room it has does not depend on its codec. A block takes the first pages of its extent,
and only these are written and read.

As they are, blocks end with their last page that is not all zeros: of a cluster that is half full, half is read.
Neighbours are read at once, with the zeros between them. With runs stored once, values are never coded, so half of a
block is the most that can be saved, and nothing of a block of one page; one that would save no page stays as it is, and
ends as others do. Neighbours are then read one by one: fewer bytes, more requests. Runs are of rows as they are kept:
of packed ones, if keys are kept in 8 or 4 bits (`kvjax.ops.quantize`).

How many pages a block takes is part of its checksum, so that it is wherever the checksum is: in tables, commit log,
forks and reads on their way. `kvjax.store.format.pages` tells how.
"""

from collections.abc import Sequence

import numpy as np

from kvjax.errors import ConfigError
from kvjax.store.format import block_runs
from kvjax.store.format.pages import checksum
from kvjax.store.interface import PAGE_BYTES, Geometry

_PAGES, _CODED = np.uint64(0x7FFF), np.uint64(0x8000)  # the bits of a checksum that are not the hash's
_HASH = ~(_PAGES | _CODED)


class Codec:
    """Blocks as they are, and what other codecs have to do.

    Attributes:
      geometry: of the blocks.
      joins: whether neighbours are one read, or write, whatever lies between them.
    """

    name = "raw"
    joins = True

    def __init__(self, geometry: Geometry):
        self.geometry = geometry

    def encode(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What to write for blocks in uint8 images[n, extent_bytes], zero beyond `block_bytes`: such images, of which
        only the first `sizes` bytes matter, and uint64 checksums[n]. Leaves its argument as it is."""
        return images, self._seal(images, self._short(self._filled(images)))

    def sizes(self, sums: np.ndarray) -> np.ndarray:
        """int64[n] bytes to read or write for blocks with these checksums, whole pages."""
        pages = (self._told(sums) & _PAGES).astype(np.int64)
        return np.where(pages > 0, pages * PAGE_BYTES, self.geometry.extent_bytes)

    def decode(self, payloads: Sequence[memoryview], sums: np.ndarray) -> np.ndarray:
        """Turns n payloads of `block_bytes`, whose first `sizes` bytes were read, into blocks where they are. bool[n]
        which of them have their checksums, and are blocks; the others are left as they are."""
        told, sizes = self._told(sums), self.sizes(sums).tolist()
        right = self._seal(payloads, told) == sums
        for i in (right & (told > 0)).nonzero()[0].tolist():
            right[i] = self._restore(np.frombuffer(payloads[i], np.uint8), sizes[i], bool(told[i] & _CODED))
        return right

    def _restore(self, block: np.ndarray, size: int, coded: bool) -> bool:
        """Makes uint8 block[block_bytes] whole, of which the first `size` bytes were read; whether they are a block."""
        block[size:] = 0
        return True

    def _filled(self, images: np.ndarray) -> np.ndarray:
        """int64[n] pages up to the last that is not zeros, one at least."""
        pages = images.reshape(len(images), -1, PAGE_BYTES).max(-1) > 0
        return np.where(pages, 1 + np.arange(pages.shape[1]), 1).max(-1)

    def _short(self, pages: np.ndarray) -> np.ndarray:
        """uint64[n] what checksums tell of blocks with so many pages: 0 if those are all of an extent, or too many."""
        short = (pages * PAGE_BYTES < self.geometry.extent_bytes) & (pages <= int(_PAGES))
        return np.where(short, pages, 0).astype(np.uint64)

    def _told(self, sums: np.ndarray) -> np.ndarray:
        """uint64[n] what checksums tell, as far as this codec would."""
        return self._short((sums & _PAGES).astype(np.int64))

    def _seal(self, payloads, told: np.ndarray) -> np.ndarray:
        """uint64 checksums of blocks, of which they tell so much."""
        pages = (told & _PAGES).astype(np.int64)
        ends = np.where(pages > 0, pages * PAGE_BYTES, self.geometry.block_bytes).tolist()
        hashes = map(checksum, (payload[:end] for payload, end in zip(payloads, ends, strict=True)))
        return np.fromiter(hashes, np.uint64, len(ends)) & _HASH | told


class RunLengthCodec(Codec):
    """Runs of equal keys once (`kvjax.store.format.block_runs`), in blocks where that saves pages."""

    name = "rle"
    joins = False

    def __init__(self, geometry: Geometry, tolerance: float):
        super().__init__(geometry)
        self._tolerance = tolerance
        self._key_bytes = geometry.width // 2 * geometry.numpy_dtype.itemsize

    def encode(self, images):
        geometry = self.geometry
        rows = images[:, :geometry.block_bytes].reshape(-1, geometry.block_rows, geometry.row_bytes)
        begins = block_runs.begins(rows[..., :self._key_bytes].view(geometry.numpy_dtype), self._tolerance)
        plain, pages = self._filled(images), self._pages(begins.sum(-1))
        saves = (pages < plain) & (pages <= int(_PAGES))
        coded = saves.nonzero()[0].tolist()
        images = images.copy() if coded else images
        for i in coded:
            data = block_runs.encode(rows[i], begins[i], self._key_bytes)
            images[i, :data.size] = data
            images[i, data.size:] = 0
        return images, self._seal(images, np.where(saves, pages.astype(np.uint64) | _CODED, self._short(plain)))

    def _pages(self, runs: np.ndarray) -> np.ndarray:
        """int64[n] pages of coded blocks with so many runs."""
        geometry = self.geometry
        size = block_runs.size(runs, geometry.block_rows, self._key_bytes, geometry.row_bytes - self._key_bytes)
        return -(-size // PAGE_BYTES)

    def _told(self, sums):
        pages = super()._told(sums)
        return np.where(pages > 0, pages | sums & _CODED, 0)

    def _restore(self, block, size, coded):
        if coded:
            return block_runs.decode(block[:size], block.reshape(self.geometry.block_rows, -1), self._key_bytes)
        return super()._restore(block, size, coded)


def make_codec(name: str, geometry: Geometry, tolerance: float = 0.0) -> Codec:
    """A codec of `kvjax.store.format.pages.CODECS`. ConfigError for a tolerance where nothing is coded, or no floats
    are, and for blocks without keys."""
    if name == "rle" and not geometry.keys:
        raise ConfigError("codec 'rle' is for keys, and these blocks hold values alone, as those of icecache, rle and "
                          "shadowkv (sigma=None keeps keys there); use codec 'raw'")
    if tolerance and (name != "rle" or geometry.dtype == "int8"):
        raise ConfigError(f"tolerance={tolerance} is for floats in codec 'rle', not for {geometry.dtype} in codec "
                          f"{name!r}; leave it at 0")
    return RunLengthCodec(geometry, tolerance) if name == "rle" else Codec(geometry)
