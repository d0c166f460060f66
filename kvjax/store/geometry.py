"""The shape of a cache, as stores see it, and the types of its elements."""

import dataclasses
from typing import SupportsInt

import ml_dtypes
import numpy as np

from kvjax.errors import ConfigError

PAGE_BYTES = 4096
MAX_GENERATION = 2**31 - 1  # an int32 in compiled programs
DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "int8": np.dtype(np.int8),
}


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The shape of one cache: all that a store knows about the model.

    Attributes:
      layers: number of layers.
      batch: sequences in the batch.
      kv_heads: KV heads with blocks of their own.
      num_blocks: blocks per KV head.
      block_rows: rows (tokens) per block.
      width: elements per row.
      dtype: one of `DTYPES`.
      keys: True if a row is a key and its value, False if it is a value alone.
    """

    layers: int
    batch: int
    kv_heads: int
    num_blocks: int
    block_rows: int
    width: int
    dtype: str
    keys: bool = dataclasses.field(default=True, compare=False)

    def __post_init__(self):
        for name in ("layers", "batch", "kv_heads", "num_blocks", "block_rows", "width"):
            if getattr(self, name) < 1:
                raise ConfigError(f"geometry: {name}={getattr(self, name)} must be at least 1")
        if self.dtype not in DTYPES:
            raise ConfigError(f"geometry: dtype {self.dtype!r} is unknown; use one of {', '.join(DTYPES)}")

    @property
    def numpy_dtype(self) -> np.dtype:
        return DTYPES[self.dtype]

    @property
    def streams(self) -> int:
        """Number of streams: pairs of sequence and KV head."""
        return self.batch * self.kv_heads

    @property
    def total_blocks(self) -> int:
        return self.layers * self.streams * self.num_blocks

    @property
    def row_bytes(self) -> int:
        return self.width * self.numpy_dtype.itemsize

    @property
    def block_bytes(self) -> int:
        return self.block_rows * self.row_bytes

    @property
    def extent_bytes(self) -> int:
        """`block_bytes` rounded up to whole pages, as O_DIRECT requires."""
        return -(-self.block_bytes // PAGE_BYTES) * PAGE_BYTES

    def describe(self, block_id: SupportsInt) -> str:
        """Returns text such as `"layer 0, sequence 1, head 2, block 3"` for a flat id over [layers, B, K, NB]."""
        shape = (self.layers, self.batch, self.kv_heads, self.num_blocks)
        layer, sequence, head, block = np.unravel_index(int(block_id), shape)
        return f"layer {layer}, sequence {sequence}, head {head}, block {block}"


def as_stored(rows: np.ndarray) -> np.ndarray:
    """Returns the same memory with the element type of the store: uint16, which stands for bfloat16 in programs,
    becomes bfloat16."""
    return rows.view(ml_dtypes.bfloat16) if rows.dtype == np.uint16 else rows
