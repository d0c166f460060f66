"""The compiled part of asynchronous reads (blocks.c, fetch.c, reads.c), of rows that a token adds (rows.c), and of
programs that call back (callback.c). Arrays are C-contiguous; `control` and `events` are the bytes of IOCB and EVENT of
`kvjax.store.io.libaio`. ValueError where sizes do not agree."""

from collections.abc import Callable
from typing import Any

import numpy as np

JAXLIB: str
"""Version that it was compiled for."""

def handlers() -> dict[str, object]:
    """XLA's handler of "callback", as a capsule: a call with attribute `function`, int32, calls that one of `serve`'s
    with its operands, at most eight: int32[] as numbers, all else as memoryviews that are good until it returns,
    writable where they are results, too. What it returns, 0 or more, is the last result, int32[]; 0 if it raises."""

def serve(functions: tuple[Callable[..., Any], ...], failed: Callable[..., Any], /) -> None:
    """Replaces the functions that programs may call, and the one that is told of what they raise: the exception, then
    the operands. A program fails if that one raises."""

def control(
    extents: np.ndarray, sums: np.ndarray, control: np.ndarray, starts: np.ndarray, piece: int, places: int,
    address: int, extent_bytes: int, page_bytes: int, header_bytes: int, descriptor: int, /,
) -> int:
    """Fills control blocks that read int32 extents[n], ascending, of each the pages that uint64 sums[n] tell, extent i
    to place i % places at `address`, and int64 starts[reads], the first extent of each; `reads` is returned.
    Neighbours are one read, with what lies between them, cut at every `piece`."""

def land(
    events: np.ndarray, control: np.ndarray, starts: np.ndarray, sums: np.ndarray, targets: np.ndarray,
    results: np.ndarray, done: np.ndarray, out: np.ndarray, count: int, reads: int, address: int, places: int,
    extent_bytes: int, block_bytes: int, page_bytes: int, hash: int, /,
) -> int:
    """Takes `count` events: notes int64 results[reads], verifies the blocks of reads that came whole and copies them to
    uint8 out[slots, block_bytes] at int64 targets[n], -1 nowhere, zeros after the pages that were read. Returns how
    many it copied and marked in uint8 done[n]. Other threads run meanwhile."""

def guess(branch: Any, layer: int, generation: int, block: Any, /) -> bool:
    """`FlashBranch.submit` of int32 block[B, K, M], in the usual case; False, with nothing begun, where Python has to
    look: `branch._guess_window` says so, the array is not as it should be, or a block lies beyond the file.

    Finds the blocks as `fetch` does, begins to read them through the window's ring, and tells `branch._guessed`.
    """

def fetch(branch: Any, layer: int, generation: int, block: Any, slot: Any, slots: Any, /) -> bool:
    """`FlashBranch.read_into` of int32 block[B, K, M] to int32 slot[B, K, M] of slots[B, K, NS, C, width], in the usual
    case; False, with nothing but zeros in some of these slots, where Python has to look: `branch._window` says so,
    arrays are not as they should be, a block lies beyond the file, or a slot does not exist.

    Finds the blocks with the volume's lock held, takes those that the window's guess has, reads the others through the
    window's ring, in the order of their extents, verifies and copies them, lays what is staged over them,
    and adds to the window's totals. One that was never written is zeros. Other Python threads run meanwhile. Tells
    `branch._landed` where events are recorded or not all came, and gives the ring to `branch._give_back`. What these
    raise goes on. A ring that is not `plain` makes its system calls itself (`Ring.submit`, `Ring.wait`).
    """

def put_rows(
    block: Any, row: Any, rows: Any, to: tuple[np.ndarray, np.ndarray, np.ndarray], count: int, first: int,
    shape: tuple[int, int, int, int, int, int, str], /,
) -> int:
    """Adds rows[B, K, width] at int32 row[B, K] of int32 block[B, K] to int64 ids, int32 places and uint8 data, which
    have `count` already; returns how many they then have. Block b of stream n has id first + n * NB + b; one that is
    not within NB, or a row not within C, is nothing. -1, with nothing added, where an array is not as it should be or
    there is no room. `shape` is (B, K, NB, C, width, bytes of an element, its format in Python's buffers).
    """
