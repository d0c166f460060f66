"""The compiled part of asynchronous reads (native.c). Arrays are C-contiguous; `control` and `events` are the bytes of
IOCB and EVENT of `kvjax.store.linux`. ValueError where sizes do not agree."""

import numpy as np

def resolve(
    block: np.ndarray, slot: np.ndarray, rows: np.ndarray, shift: np.ndarray, pending: np.ndarray,
    checksums: np.ndarray, extents: np.ndarray, sums: np.ndarray, targets: np.ndarray, staged: np.ndarray,
    lanes: int, num_blocks: int, slots: int, first_lane: int, /,
) -> tuple[int, int]:
    """Where the blocks of one fetch are.

    Fills int32 extents[n], ascending, uint64 sums[n] and int64 targets[n], the flat slots, of blocks to read, and int64
    staged[m, 2], flat ids and slots, of those that are staged. Returns n and m; n = -1 where a block is neither in the
    file nor wholly staged, or a slot does not exist.

    Args:
      block, slot: int32[lanes, M], blocks of a lane and where to; a block outside [0, num_blocks) is not wanted.
      rows, shift: int32 and int64[all lanes] of a `kvjax.store.table.Table`.
      pending: uint8[all blocks], 1 where rows of a block are staged, 2 where all of it is.
      checksums: uint64[all extents].
      slots: per lane.
      first_lane: of the layer, among all lanes.
    """

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

def read(layout: np.ndarray, out: np.ndarray, count: int, descriptor: int, timeout: float, /) -> tuple[
        int, int, int, int, int, float, float, float]:
    """`control`, submission, waiting and `land` for a ring whose memory is described in `layout`, as `Ring.read` of
    `kvjax.store.aio` says. Returns blocks copied, reads made, bytes of those that came whole, bytes of the blocks
    copied, reads in flight, when the first was handed over and the last answered (seconds, the clock of
    `time.perf_counter`), and seconds waited. Other threads run meanwhile."""
