"""What one branch knows: which extent holds each of its blocks, and which blocks are newer in memory than on flash."""

import collections
import itertools
from typing import NamedTuple

import numpy as np

from kvjax.errors import StoreError
from kvjax.store.flash.table import Table
from kvjax.store.interface import Geometry, Tally
from kvjax.store.transaction import Blocks, StagedRows


class Staged:
    """A block with committed rows that are not yet on flash.

    Attributes:
      image: uint8[extent_bytes], the padding zero; only rows in `mask` mean anything.
      mask: bool[C] rows that were put.
      span: (first, last + 1) of those rows while they are consecutive, as appended rows are; None when they are not.
      complete: the image is the whole block, so nothing is needed from flash.
      address: of the image, for C.
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
        """Completes the image with older rows[C, row_bytes] where nothing newer was put."""
        older = np.flatnonzero(~self.mask)
        self.rows[older] = rows[older]
        self.complete = True

    @property
    def runs(self) -> list[tuple[int, int]]:
        """(first, last + 1) of rows that were put."""
        if self.complete:
            return [(0, len(self.rows))]
        if self.span is not None:
            return [self.span]
        edges = np.flatnonzero(np.diff(self.mask, prepend=False, append=False)).tolist()
        return list(zip(edges[::2], edges[1::2], strict=True))

    def copy_to(self, out: np.ndarray) -> None:
        """Lays what was put over out[block_bytes], which holds the older rows."""
        for first, stop in self.runs:
            out.reshape(self.rows.shape)[first:stop] = self.rows[first:stop]


class Sources(NamedTuple):
    """Where the blocks of one read are, in the order asked for.

    extents: int32[n], sums: uint64[n] what the extent must hash to; both meaningless where not `on_flash`: bool[n].
    staged: (i, older and newer Staged of block i) for blocks that are in memory, wholly or in part; only the first may
      be complete.
    """

    extents: np.ndarray
    sums: np.ndarray
    on_flash: np.ndarray
    staged: list[tuple[int, tuple[Staged, ...]]]


class Lineage:
    """State of one branch, kept apart from it so that the writer thread keeps no branch alive.

    All fields are guarded by the volume's lock.

    Attributes:
      table: the extent of each block.
      queue: staged blocks by id, the one that was put longest ago first; they may still take more rows.
      flight: staged blocks that the writer has, until they are on the device; their rows no longer change.
      failed: why the writer gave up on this lineage; cleared to let it try again.
      untold: it gave up, and since then nobody was told of a failure, and not all was written.
      urgent: somebody waits for the queue to be empty.
      pending: uint8[total_blocks] of ids in queue or flight: 1, or 2 where nothing of the block is needed from flash.
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
        """Bytes of its own tables; what is staged is the volume's."""
        return self.pending.nbytes + self.table.shift.nbytes

    def stage(self, record: StagedRows | Blocks) -> None:
        """Adds a committed record to the queue. Ctrl-C may cut it short: what was staged before stays, and the same
        record may be added again."""
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
        """Moves the blocks that were put longest ago from the queue to the writer, at most so many: a block that keeps
        getting rows stays in its buffer until they fill it (DynaKV section 5.2: buffers for hot clusters, direct writes
        for cold ones). Not those of which the writer still has older rows."""
        waiting = (block_id for block_id in self.queue if block_id not in self.flight)
        taken = {block_id: self.queue.pop(block_id) for block_id in list(itertools.islice(waiting, most))}
        self.flight.update(taken)
        return taken

    def complete(self, block_id: int, rows: np.ndarray) -> None:
        """Gives the writer's block the older rows[C, row_bytes] where nothing newer was put."""
        self.flight[block_id].fill_under(rows)
        self.pending[block_id] = 2

    def written(self, block_id: int) -> None:
        """The writer is done with a block, unless more rows came meanwhile."""
        del self.flight[block_id]
        self.pending[block_id] = 1 + self.queue[block_id].complete if block_id in self.queue else 0

    def put_back(self, block_id: int, error: StoreError) -> None:
        """The writer failed: the block waits first in line again, with newer rows that came meanwhile."""
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
        """Where ids[n] are at this moment."""
        extents = self.table.extents(ids)
        on_flash = extents >= 0
        staged = []
        if not self.idle:
            staged = [(i, self._layers(int(ids[i]))) for i in self.pending[ids].nonzero()[0].tolist()]
            on_flash[[i for i, layers in staged if layers[0].complete]] = False
        return Sources(extents, checksums[extents], on_flash, staged)

    def _layers(self, block_id: int) -> tuple[Staged, ...]:
        """The same as `add_staged` of staged.c."""
        older, newer = self.flight.get(block_id), self.queue.get(block_id)
        if newer is None or older is None or newer.complete:
            return (newer or older,)  # type: ignore[return-value]
        return older, newer


def _join(newer: Staged, older: Staged) -> None:
    keep = older.mask & ~newer.mask
    newer.rows[keep] = older.rows[keep]
    newer.mask |= keep
    newer.span = None
