"""The state of one branch: which extent holds each of its blocks, and which blocks are newer in memory than on flash.
"""

import collections
import itertools
from typing import NamedTuple

import numpy as np

from kvjax.errors import StoreError
from kvjax.store.flash.table import Table
from kvjax.store.geometry import Geometry
from kvjax.store.stats import Tally
from kvjax.store.transaction import Blocks, StagedRows


class Staged:
    """A block with committed rows that are not on flash yet.

    Attributes:
      image: uint8[extent_bytes], zero-padded; only the rows in `mask` are valid, or all if `complete`.
      rows: uint8[C, row_bytes] view of the image's rows.
      mask: bool[C] rows that were put.
      span: (first, last + 1) of these rows while they are consecutive, as appended rows are; otherwise None.
      complete: whether the image is the whole block, so that nothing is needed from flash.
      address: address of the image, for C.
      appended: rows put one by one, for the statistics.
    """

    __slots__ = ("address", "appended", "complete", "image", "mask", "rows", "span")

    def __init__(self, geometry: Geometry):
        self.image = np.zeros(geometry.extent_bytes, np.uint8)
        self.address = self.image.ctypes.data
        self.rows = self.image[:geometry.block_bytes].reshape(geometry.block_rows, geometry.row_bytes)
        self.mask = np.zeros(geometry.block_rows, bool)
        self.span: tuple[int, int] | None = (0, 0)
        self.complete = False
        self.appended = 0

    def put_row(self, row: int, data: np.ndarray) -> None:
        self.rows[row] = data
        self.mask[row] = True
        self.appended += 1
        if self.span is not None:
            first, stop = self.span if self.span[1] else (row, row)
            self.span = (first, row + 1) if row == stop else None

    def put_block(self, data: np.ndarray) -> None:
        self.rows.reshape(-1)[:] = data
        self.appended = 0
        self.complete = True

    def fill_under(self, rows: np.ndarray) -> None:
        """Completes the image with older rows[C, row_bytes] where no newer row was put."""
        older = np.flatnonzero(~self.mask)
        self.rows[older] = rows[older]
        self.complete = True

    @property
    def runs(self) -> list[tuple[int, int]]:
        """(first, last + 1) of each run of rows that were put."""
        if self.complete:
            return [(0, len(self.rows))]
        if self.span is not None:
            return [self.span]
        edges = np.flatnonzero(np.diff(self.mask, prepend=False, append=False)).tolist()
        return list(zip(edges[::2], edges[1::2], strict=True))

    def copy_to(self, out: np.ndarray) -> None:
        """Copies the rows that were put over out[block_bytes], which holds the older rows."""
        for first, stop in self.runs:
            out.reshape(self.rows.shape)[first:stop] = self.rows[first:stop]


class Sources(NamedTuple):
    """The locations of the blocks of one read, in the order requested.

    Attributes:
      extents: int32[n] extents; meaningless where not `on_flash`.
      sums: uint64[n] checksums of the extents; meaningless where not `on_flash`.
      on_flash: bool[n] whether anything of the block has to be read.
      staged: (i, older and newer Staged of block i) for blocks that are in memory, wholly or in part; only the first
        one may be complete.
    """

    extents: np.ndarray
    sums: np.ndarray
    on_flash: np.ndarray
    staged: list[tuple[int, tuple[Staged, ...]]]


class Lineage:
    """The state of one branch, kept apart from it so that the writer thread keeps no branch alive.

    All fields are guarded by the volume's lock.

    Attributes:
      table: the extent of each block.
      queue: staged blocks by id, least recently put first; they may still take more rows.
      flight: staged blocks that the writer has, until they are on the device; their rows no longer change.
      failed: why the writer gave up on this lineage; cleared to let it try again.
      untold: whether the writer gave up, and since then no failure was reported and not everything was written.
      urgent: whether a caller waits for the queue to become empty.
      tally: totals of the branch.
      pending: uint8[total_blocks], not 0 for ids in queue or flight: 1, or 2 if nothing of the block is needed from
        flash.
    """

    def __init__(self, geometry: Geometry, table: Table, tally: Tally):
        self.geometry = geometry
        self.table = table
        self.queue: collections.OrderedDict[int, Staged] = collections.OrderedDict()
        self.flight: dict[int, Staged] = {}
        self.failed: StoreError | None = None
        self.untold = False
        self.urgent = False
        self.tally = tally
        self.pending = np.zeros(geometry.total_blocks, np.uint8)

    @property
    def idle(self) -> bool:
        return not self.queue and not self.flight

    @property
    def held_bytes(self) -> int:
        """Bytes of the lineage's own tables; staged blocks are counted by the volume."""
        return self.pending.nbytes + self.table.shift.nbytes

    def stage(self, record: StagedRows | Blocks) -> None:
        """Adds a committed record to the queue. If KeyboardInterrupt cuts it short, what was staged before stays, and
        the same record may be added again."""
        ids = record.ids.tolist()
        if isinstance(record, StagedRows):
            for block_id, row, data in zip(ids, record.row.tolist(), record.data, strict=True):
                self._staged(block_id).put_row(row, data)
            self.pending[record.ids] = np.maximum(self.pending[record.ids], 1)
        else:
            for block_id, data in zip(ids, record.data, strict=True):
                self._staged(block_id).put_block(data)
            self.pending[record.ids] = 2

    def _staged(self, block_id: int) -> Staged:
        if block_id in self.queue:
            self.queue.move_to_end(block_id)
        else:
            self.queue[block_id] = Staged(self.geometry)
        return self.queue[block_id]

    def take_coldest(self, most: int) -> dict[int, Staged]:
        """Moves at most `most` blocks, least recently put first, from the queue to the writer.

        A block that keeps getting rows thus stays in its buffer until they fill it (DynaKV section 5.2: buffers for hot
        clusters, direct writes for cold ones). Blocks whose older rows the writer still has are left out.
        """
        waiting = (block_id for block_id in self.queue if block_id not in self.flight)
        taken = {block_id: self.queue.pop(block_id) for block_id in list(itertools.islice(waiting, most))}
        self.flight.update(taken)
        return taken

    def complete(self, block_id: int, rows: np.ndarray) -> None:
        """Completes the writer's block with older rows[C, row_bytes] where no newer row was put."""
        self.flight[block_id].fill_under(rows)
        self.pending[block_id] = 2

    def written(self, block_id: int) -> None:
        """Removes a block that the writer has finished; rows that came meanwhile stay in the queue."""
        del self.flight[block_id]
        self.pending[block_id] = 1 + self.queue[block_id].complete if block_id in self.queue else 0

    def put_back(self, block_id: int, error: StoreError) -> None:
        """Requeues a block that the writer failed to write at the head of the queue, joined with newer rows that came
        meanwhile."""
        older, newer = self.flight.pop(block_id), self.queue.get(block_id)
        if newer is not None and not newer.complete:
            newer.fill_under(older.rows) if older.complete else _join(newer, older)
            newer.appended += older.appended
        self.queue[block_id] = newer or older
        self.queue.move_to_end(block_id, last=False)
        self.pending[block_id] = 1 + self.queue[block_id].complete
        self.untold = self.untold or self.failed is None
        self.failed = self.failed or error

    def resolve(self, ids: np.ndarray, checksums: np.ndarray) -> Sources:
        """Returns the present locations of the blocks ids[n]; `checksums` are those of all extents."""
        extents = self.table.extents(ids)
        on_flash = extents >= 0
        staged = []
        if not self.idle:
            staged = [(i, self._layers(int(ids[i]))) for i in self.pending[ids].nonzero()[0].tolist()]
            on_flash[[i for i, layers in staged if layers[0].complete]] = False
        return Sources(extents, checksums[extents], on_flash, staged)

    def _layers(self, block_id: int) -> tuple[Staged, ...]:
        """Returns the staged parts of a block, older first, as `add_staged` of staged.c does."""
        older, newer = self.flight.get(block_id), self.queue.get(block_id)
        if newer is None or older is None or newer.complete:
            return (newer or older,)  # type: ignore[return-value]
        return older, newer


def _join(newer: Staged, older: Staged) -> None:
    keep = older.mask & ~newer.mask
    newer.rows[keep] = older.rows[keep]
    newer.mask |= keep
    newer.span = None
