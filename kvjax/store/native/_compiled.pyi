"""The compiled part of asynchronous reads (blocks.c, fetch.c, reads.c), of appending the rows of a token (rows.c), and
of programs that call Python (callback.c).

Arrays are C-contiguous; `control` and `events` are the bytes of IOCB and EVENT of `kvjax.store.io.libaio`. Sizes that
do not match raise ValueError.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

XLA_FFI_API_MAJOR: int
XLA_FFI_API_MINOR: int
"""Version of XLA's foreign function interface that the module was compiled for."""

def handlers() -> dict[str, object]:
    """Returns XLA's handlers as capsules by name.

    "callback" calls a function of `serve`: the one with the number in its attribute `function`, int32. It passes its
    operands, at most eight: int32[] as numbers, others as memoryviews that are valid until the function returns, and
    writable if they are also results. The return value, 0 or more, is the last result, int32[]; 0 if the function
    raises.
    """

def serve(
    functions: tuple[Callable[..., Any], ...], failed: Callable[..., Any], branches: dict[int, Any], /
) -> None:
    """Replaces the functions that programs may call.

    Args:
      functions: functions by number; number 0 reads (rows, handle, generation, layer, block, slot), and is called only
        where `fetch` cannot read with the branch.
      branches: weak references to branches by handle.
      failed: called with the exception, then the operands, when one of them raises; if it raises too, the program
        fails.
    """

def control(
    extents: np.ndarray, sums: np.ndarray, control: np.ndarray, starts: np.ndarray, piece: int, places: int,
    address: int, extent_bytes: int, page_bytes: int, header_bytes: int, descriptor: int, /,
) -> int:
    """Fills control blocks.

    Args:
      extents: int32[n] extents to read, ascending. Neighbours are one read, together with what lies between them, cut
        at every `piece`.
      sums: uint64[n] checksums, which say how many pages of each extent to read.
      control: bytes of IOCB[n] to fill.
      starts: int64[n] to fill with the position in `extents` where each read begins.
      piece: most extents per read.
      places: number of places; extent i is read to place i % places.
      address: address of the first place.
      extent_bytes, page_bytes, header_bytes: sizes; extents begin after the header.
      descriptor: the file.

    Returns:
      The number of reads.
    """

def land(
    events: np.ndarray, control: np.ndarray, starts: np.ndarray, sums: np.ndarray, targets: np.ndarray,
    results: np.ndarray, done: np.ndarray, out: np.ndarray, count: int, reads: int, address: int, places: int,
    extent_bytes: int, block_bytes: int, page_bytes: int, hash: int, /,
) -> int:
    """Handles events of reads: verifies the blocks of reads that returned all bytes and copies them. The GIL is
    released.

    Args:
      events: bytes of the events.
      control: bytes of the control blocks.
      starts: int64[reads] position in `sums` where each read begins.
      sums: uint64[n] checksums of the blocks.
      targets: int64[n] slot of each block, -1 = none.
      results: int64[reads] to set for the reads of these events.
      done: uint8[n] to set to 1 for copied blocks.
      out: uint8[slots, block_bytes] memory of the slots; zeros are written after the pages that were read.
      count: number of events.
      reads: number of reads.
      address, places: as in `control`.
      extent_bytes, block_bytes, page_bytes: sizes.
      hash: address of the checksum function.

    Returns:
      How many blocks were copied.
    """

def guess(branch: Any, layer: int, generation: int, block: Any, /) -> bool:
    """Does `FlashBranch.submit` of int32 block[B, K, M] in the usual case.

    Finds the blocks as `fetch` does, begins to read them through the window's ring, and calls `branch._guessed`.

    Returns:
      Whether it was done. False, with nothing begun, if the Python path has to handle the call: `branch._guess_window`
      returned None, the array has another type or shape, or a block lies beyond the file.
    """

def fetch(branch: Any, layer: int, generation: int, block: Any, slot: Any, slots: Any, /) -> bool:
    """Does `FlashBranch.read_into` of int32 block[B, K, M] to int32 slot[B, K, M] of slots[B, K, NS, C, width] in the
    usual case.

    Finds the blocks with the volume's lock held; takes those that the window's guess has; reads the others through the
    window's ring, in the order of their extents; verifies and copies them; copies staged rows over them; and adds to
    the window's totals. Blocks that were never written become zeros. The GIL is released while reading. It calls
    `branch._landed` if events are recorded or some blocks did not arrive, and returns the ring with
    `branch._give_back`; exceptions of these propagate. A ring that is not `plain` makes its system calls itself
    (`Ring.submit`, `Ring.wait`).

    Returns:
      Whether it was done. False, with nothing but zeros written to some of the slots, if the Python path has to handle
      the call: `branch._window` returned None, an array has another type or shape, a block lies beyond the file, or a
      slot does not exist.
    """

def put_rows(
    block: Any, row: Any, rows: Any, to: tuple[np.ndarray, np.ndarray, np.ndarray], count: int, first: int,
    shape: tuple[int, int, int, int, int, int, str], /,
) -> int:
    """Appends the rows of a layer to the buffer of a transaction.

    Args:
      block: int32[B, K] block of each row; a row is skipped if this is not in 0..NB-1 or `row` not in 0..C-1.
      row: int32[B, K] position in the block.
      rows: [B, K, width] contents.
      to: int64 ids, int32 places and uint8 data to append to; block b of stream n has id first + n * NB + b.
      count: entries that `to` has already.
      first: id of the layer's first block.
      shape: (B, K, NB, C, width, bytes of an element, its format in the buffer protocol).

    Returns:
      The new number of entries; -1, with nothing added, if an array has another type or shape, or there is no room.
    """
