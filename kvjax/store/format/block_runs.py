"""Run-length coding of a block of a store: every run of equal keys keeps one key.

A block is C rows of [key | value]. Its coded form is, one after the other,

    ceil(C / 8) bytes   one bit per row, the first row's the highest: whether a run begins there
    P keys              the first key of each of the P runs
    C values

As in `kvjax.ops.runs`, a key joins the open run if it equals the run's first key. Here runs are of consecutive rows of
one block, so that a bit per row says what an index of slots says in two bytes. Without a tolerance, equal means bit by
bit, so that NaN and -0.0 are preserved.

This is NumPy on the host, for the threads of a store, which must not touch JAX.
"""

import numpy as np


def begins(keys: np.ndarray, tolerance: float = 0.0) -> np.ndarray:
    """Finds the runs of equal keys.

    Args:
      keys: [n, C, X] keys of n blocks.
      tolerance: how far elements may differ from those of the run's first key; above 0 for floats only.

    Returns:
      bool[n, C] whether a run begins at each key.
    """
    starts = np.ones(keys.shape[:2], bool)
    bits = keys.view(f"u{keys.dtype.itemsize}")
    if not tolerance:  # equality is transitive, so comparing with the previous key suffices
        np.any(bits[:, 1:] != bits[:, :-1], axis=-1, out=starts[:, 1:])
        return starts
    keys = keys.astype(np.float32)
    first, first_bits = keys[:, 0], bits[:, 0]
    for row in range(1, keys.shape[1]):
        with np.errstate(invalid="ignore"):  # inf - inf; infinities are compared bit by bit below
            near = np.abs(keys[:, row] - first) <= tolerance
        fresh = starts[:, row] = ~np.all(near | (bits[:, row] == first_bits), axis=-1)
        first = np.where(fresh[:, None], keys[:, row], first)
        first_bits = np.where(fresh[:, None], bits[:, row], first_bits)
    return starts


def size(runs, rows: int, key_bytes: int, value_bytes: int):
    """Returns the bytes of a coded block of `rows` rows with `runs` runs."""
    return -(-rows // 8) + runs * key_bytes + rows * value_bytes


def encode(rows: np.ndarray, begins: np.ndarray, key_bytes: int) -> np.ndarray:
    """Encodes a block.

    Args:
      rows: uint8[C, key_bytes + value_bytes] the block.
      begins: bool[C] where its runs begin.
      key_bytes: bytes of a key.

    Returns:
      uint8[n] its coded form, n = `size(...)`.
    """
    keys, values = rows[begins, :key_bytes], rows[:, key_bytes:]
    return np.concatenate([np.packbits(begins), keys.reshape(-1), values.reshape(-1)])


def decode(coded: np.ndarray, rows: np.ndarray, key_bytes: int) -> bool:
    """Decodes a block.

    Args:
      coded: uint8[m] coded form, m >= its size; may share the memory of `rows`.
      rows: uint8[C, key_bytes + value_bytes] to fill.
      key_bytes: bytes of a key.

    Returns:
      Whether the block was decoded: not if `coded` is too short for its runs, or no run begins at the first row.
    """
    count, row_bytes = rows.shape
    bits = -(-count // 8)
    if coded.size < bits:
        return False
    begins = np.unpackbits(coded[:bits], count=count)
    end = bits + int(begins.sum()) * key_bytes
    if not begins[0] or coded.size < end + count * (row_bytes - key_bytes):
        return False
    coded = coded[:end + count * (row_bytes - key_bytes)].copy()
    rows[:, key_bytes:] = coded[end:].reshape(count, -1)
    rows[:, :key_bytes] = coded[bits:end].reshape(-1, key_bytes).take(begins.cumsum(dtype=np.int64) - 1, axis=0)
    return True
