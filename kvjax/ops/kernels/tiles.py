"""How arrays lie in the memory of a TPU: in tiles of some rows of 128 lanes each."""

import jax

LANES = 128
SUBLANES = 8  # rows of a tile of 32-bit numbers
TYPES = ("float32", "bfloat16", "int8", "int4")  # of blocks that `kvjax.ops.kernels.selected_attention` reads
# Other counts of rows that lie in whole words: a word of 32 bits holds several rows of narrow numbers.
_FEW = {"float32": (1, 2, 4), "bfloat16": (2, 4), "int8": (4,), "int4": (4,)}


def wanted() -> bool:
    """Returns whether pools in memory are to have whole tiles, as on TPUs."""
    return jax.default_backend() == "tpu"


def interpreted() -> bool:
    """Returns whether Pallas kernels for TPUs are interpreted: on all other platforms, in tests."""
    return jax.default_backend() != "tpu"


def padded(width: int) -> int:
    """Returns the numbers of a row that has room for `width` of them: the next multiple of `LANES`."""
    return -(-width // LANES) * LANES


def whole(count: int) -> int:
    """Returns how many blocks there should be for `count`: where they are many, the next multiple of `LANES`, on every
    platform. An index has an axis of them, and XLA for TPUs makes another one the last if this fills no tiles."""
    return count if count < 8 * LANES else padded(count)


def fits(dtype: str, block_rows: int) -> bool:
    """Returns whether a kernel can read blocks where they lie: Mosaic and XLA give others different layouts, and XLA
    then copies the whole pool in each call."""
    return dtype in TYPES and (block_rows % SUBLANES == 0 or block_rows in _FEW[dtype])


def block_rows(dtype: str, rows: int) -> int:
    """Returns the rows that a block has in memory so that a kernel can read it: its own, or the next multiple of
    `SUBLANES`; its own, too, where that would take more than half as much again, or no kernel reads the type."""
    more = -(-rows // SUBLANES) * SUBLANES
    return rows if fits(dtype, rows) or dtype not in TYPES or 2 * more > 3 * rows else more
