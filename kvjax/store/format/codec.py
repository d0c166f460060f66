"""Encodings of blocks in the extents of a file: unchanged ("raw"), or with runs of equal keys stored once ("rle").

Where a block lies and how much room it has does not depend on its codec. A block takes the first pages of its extent,
and only these are written and read.

Raw blocks end with their last page that is not all zeros: of a half-full cluster, half is read. Neighbours are read at
once, with the zeros between them.

With "rle", values are never coded, so at most half of a block can be saved, and nothing of a block of one page. A block
that would save no page is stored raw. Neighbours are read one by one: fewer bytes, more requests. Runs are runs of
stored rows: of packed ones if keys are kept in 8 or 4 bits (`kvjax.ops.quantize`).

The number of pages that a block takes is part of its checksum, and so available wherever the checksum is: in tables, in
the commit log, in forks and in reads in flight. `kvjax.store.format.pages` describes the bits.
"""

from collections.abc import Sequence

import numpy as np

from kvjax.errors import ConfigError
from kvjax.store.format import block_runs
from kvjax.store.format.pages import checksum
from kvjax.store.geometry import PAGE_BYTES, Geometry

_PAGES, _CODED = np.uint64(0x7FFF), np.uint64(0x8000)  # the bits of a checksum that are not part of the hash
_HASH = ~(_PAGES | _CODED)


class Codec:
    """The codec "raw", and the base of others.

    Attributes:
      geometry: geometry of the blocks.
      joins: whether neighbours are read or written at once, together with unused pages between them.
    """

    name = "raw"
    joins = True

    def __init__(self, geometry: Geometry):
        self.geometry = geometry

    def encode(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Encodes blocks; leaves its argument unchanged.

        Args:
          images: uint8[n, extent_bytes] blocks, zero beyond `block_bytes`.

        Returns:
          uint8[n, extent_bytes] encoded blocks, of which only the first `sizes` bytes matter, and uint64[n] checksums.
        """
        return images, self._seal(images, self._short(self._filled(images)))

    def sizes(self, sums: np.ndarray) -> np.ndarray:
        """Returns the bytes to read or write for blocks with checksums uint64 sums[n], int64[n]; whole pages."""
        pages = (self._told(sums) & _PAGES).astype(np.int64)
        return np.where(pages > 0, pages * PAGE_BYTES, self.geometry.extent_bytes)

    def decode(self, payloads: Sequence[memoryview], sums: np.ndarray) -> np.ndarray:
        """Verifies and decodes blocks in place.

        Args:
          payloads: n buffers of `block_bytes`, whose first `sizes` bytes were read.
          sums: uint64[n] their checksums.

        Returns:
          bool[n] which of them match their checksums and are blocks; the others are left as they are.
        """
        told, sizes = self._told(sums), self.sizes(sums).tolist()
        right = self._seal(payloads, told) == sums
        for i in (right & (told > 0)).nonzero()[0].tolist():
            right[i] = self._restore(np.frombuffer(payloads[i], np.uint8), sizes[i], bool(told[i] & _CODED))
        return right

    def _restore(self, block: np.ndarray, size: int, coded: bool) -> bool:
        """Completes uint8 block[block_bytes], of which the first `size` bytes were read; returns whether they are a
        block."""
        block[size:] = 0
        return True

    def _filled(self, images: np.ndarray) -> np.ndarray:
        """Returns the number of pages up to the last one that is not all zeros, at least one, int64[n]."""
        pages = images.reshape(len(images), -1, PAGE_BYTES).max(-1) > 0
        return np.where(pages, 1 + np.arange(pages.shape[1]), 1).max(-1)

    def _short(self, pages: np.ndarray) -> np.ndarray:
        """Returns the page bits of checksums for blocks of int64 pages[n], uint64[n]: 0 if these are all pages, or too
        many to count."""
        short = (pages * PAGE_BYTES < self.geometry.extent_bytes) & (pages <= int(_PAGES))
        return np.where(short, pages, 0).astype(np.uint64)

    def _told(self, sums: np.ndarray) -> np.ndarray:
        """Returns the bits of checksums that are not part of the hash, as this codec would set them, uint64[n]."""
        return self._short((sums & _PAGES).astype(np.int64))

    def _seal(self, payloads, told: np.ndarray) -> np.ndarray:
        """Returns uint64[n] checksums of blocks, with uint64 told[n] as their other bits."""
        pages = (told & _PAGES).astype(np.int64)
        ends = np.where(pages > 0, pages * PAGE_BYTES, self.geometry.block_bytes).tolist()
        hashes = map(checksum, (payload[:end] for payload, end in zip(payloads, ends, strict=True)))
        return np.fromiter(hashes, np.uint64, len(ends)) & _HASH | told


class RunLengthCodec(Codec):
    """The codec "rle": runs of equal keys once (`kvjax.store.format.block_runs`), in blocks where that saves pages."""

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
        """Returns the pages of coded blocks with int64 runs[n] runs, int64[n]."""
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
    """Returns a codec by its name.

    Args:
      name: one of `kvjax.store.format.pages.CODECS`.
      geometry: geometry of the blocks.
      tolerance: see `FlashStore`.

    Raises:
      ConfigError: a tolerance was given where nothing is coded or elements are not floats, or "rle" for blocks without
        keys.
    """
    if name == "rle" and not geometry.keys:
        raise ConfigError("codec 'rle' compresses keys, but these blocks hold values alone, as with icecache, rle and "
                          "shadowkv (sigma=None keeps keys there); use codec 'raw'")
    if tolerance and (name != "rle" or geometry.dtype == "int8"):
        raise ConfigError(f"tolerance={tolerance} applies to floats in codec 'rle', not to {geometry.dtype} in codec "
                          f"{name!r}; leave it at 0")
    return RunLengthCodec(geometry, tolerance) if name == "rle" else Codec(geometry)
