"""Runs of equal keys inside a block of a store: the block with every run's key once, as bytes, and back.

A block is C rows of [key | value]. Its coded form is, one after the other,

    ceil(C / 8) bytes   a bit for each row, the first row's the highest: whether a run begins there
    P keys              the first one of each of the P runs
    C values

As in `kvjax.ops.runs`, a key joins the open run if it equals the run's first key; here runs are of rows of one block,
in its order, and without a tolerance equal means bit by bit, so that NaN and -0.0 come back as they were. Runs are
consecutive: a bit per row says what an index of slots says in two bytes.

NumPy on the host, for the threads of a store, which must not touch JAX.
"""

import numpy as np


def begins(keys: np.ndarray, tolerance: float = 0.0) -> np.ndarray:
    """bool[n, C]: whether each of keys[n, C, X] begins a run of its block.

    tolerance: how far elements may be from those of the run's first key; above 0 for floats only.
    """
    found = np.ones(keys.shape[:2], bool)
    bits = keys.view(f"u{keys.dtype.itemsize}")
    if not tolerance:  # then equal is transitive, and the key before will do
        np.any(bits[:, 1:] != bits[:, :-1], axis=-1, out=found[:, 1:])
        return found
    keys = keys.astype(np.float32)
    first, first_bits = keys[:, 0], bits[:, 0]
    for row in range(1, keys.shape[1]):
        with np.errstate(invalid="ignore"):  # infinities, which are equal bit by bit or not at all
            near = np.abs(keys[:, row] - first) <= tolerance
        fresh = found[:, row] = ~np.all(near | (bits[:, row] == first_bits), axis=-1)
        first = np.where(fresh[:, None], keys[:, row], first)
        first_bits = np.where(fresh[:, None], bits[:, row], first_bits)
    return found


def size(runs, rows: int, key_bytes: int, value_bytes: int):
    """Bytes of coded blocks with so many runs."""
    return -(-rows // 8) + runs * key_bytes + rows * value_bytes


def encode(rows: np.ndarray, begins: np.ndarray, key_bytes: int) -> np.ndarray:
    """uint8[n] of the block uint8 rows[C, key_bytes + value_bytes] whose runs begin at bool begins[C]."""
    keys, values = rows[begins, :key_bytes], rows[:, key_bytes:]
    return np.concatenate([np.packbits(begins), keys.reshape(-1), values.reshape(-1)])


def decode(coded: np.ndarray, rows: np.ndarray, key_bytes: int) -> bool:
    """Fills uint8 rows[C, key_bytes + value_bytes] from uint8 coded[>= n]; both may be the same memory. Returns whether
    it did: not where `coded` is too short for what it says, or no run begins at the first row."""
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
