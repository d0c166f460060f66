"""The sequential layout: rows are stored in token order, whatever block they belong to, and blocks are gathered.

It is the baseline of DynaKV's Figure 12. Every stream (one KV head of one sequence in one layer) has a log of its
tokens, in pages of as many rows as fit 4096 bytes; the pages of a stream are consecutive in the file. A block is a list
of places in the log: reading it reads every page that holds one of its rows, whole, and gathers the rows. Appending
writes at the end of the log; splitting a block rewrites its list and moves no row.
"""

import dataclasses
import threading
from typing import TYPE_CHECKING

import numpy as np

from kvjax.store.format.pages import checksum
from kvjax.store.geometry import PAGE_BYTES, Geometry
from kvjax.store.prompt import Prompt, whole
from kvjax.store.transaction import Blocks, StagedRows, TransactionalBranch

if TYPE_CHECKING:
    from kvjax.store.flash.branch import FlashBranch


class LogGeometry(Geometry):
    """The geometry of the logs, in which a block is a page of consecutive tokens."""

    def describe(self, block_id):
        page = int(block_id) % self.num_blocks
        return super().describe(block_id).replace(f"block {page}", f"tokens of log page {page}")


def log_geometry(geometry: Geometry) -> LogGeometry:
    """Returns the geometry of logs with room for every row of every block."""
    rows = max(1, PAGE_BYTES // geometry.row_bytes)
    pages = -(-geometry.num_blocks * geometry.block_rows // rows)
    return LogGeometry(geometry.layers, geometry.batch, geometry.kv_heads, pages, rows, geometry.width, geometry.dtype,
                       geometry.keys)


@dataclasses.dataclass
class Log:
    """The contents of all streams' logs, and where the rows of each block are in them.

    Attributes:
      place: int32[layers * B * K * NB, C] place of each row in its stream's log, -1 = a row of zeros, which takes none.
      sums: uint64[layers * B * K, places] checksum of the row in each place, by which rows of a split block are
        recognised.
      end: int64[layers * B * K] first place that was never used.
    """

    place: np.ndarray
    sums: np.ndarray
    end: np.ndarray

    @classmethod
    def empty(cls, geometry: Geometry, pages: Geometry) -> "Log":
        streams = geometry.layers * geometry.streams
        return cls(np.full((geometry.total_blocks, geometry.block_rows), -1, np.int32),
                   np.zeros((streams, pages.num_blocks * pages.block_rows), np.uint64), np.zeros(streams, np.int64))

    def copy(self) -> "Log":
        return Log(self.place.copy(), self.sums.copy(), self.end.copy())


class Draft:
    """The changes that one transaction makes to a log, and the rows it has to write."""

    def __init__(self, log: Log, geometry: Geometry):
        self._log = log
        self._geometry = geometry
        self._place: dict[int, np.ndarray] = {}  # block id -> places of its rows
        self._end: dict[int, int] = {}  # stream -> end of its log
        self._written: list[tuple[int, int, int, np.ndarray]] = []  # stream, place, checksum, row

    def put_rows(self, record: StagedRows) -> None:
        for block_id, row, data in zip(record.ids.tolist(), record.row.tolist(), record.data, strict=True):
            place = self._place[block_id] = self._rows_of(block_id).copy()
            place[row] = -1  # the place of the replaced row may be reused
            place[row] = self._append(self._stream(block_id), data)

    def put_blocks(self, record: Blocks) -> None:
        """Rewrites blocks: rows that one of them has already stay where they are; others are appended."""
        known = self._known(record.ids)
        fresh = []
        for block_id, data in dict(zip(record.ids.tolist(), record.data, strict=True)).items():
            rows = data.reshape(self._geometry.block_rows, -1)
            sums = [checksum(row) if row.any() else None for row in rows]
            places = known[self._stream(block_id)]
            self._place[block_id] = np.array([-1 if key is None else places.get(key, -1) for key in sums], np.int32)
            fresh += [(block_id, i, rows[i]) for i, key in enumerate(sums) if key is not None and key not in places]
        for block_id, i, row in fresh:  # last, so that no place of a row that stays is reused
            self._place[block_id][i] = self._append(self._stream(block_id), row)

    def _known(self, ids: np.ndarray) -> dict[int, dict[int, int]]:
        """Returns, for each stream, the place of every row that these blocks have now, by checksum."""
        new = {(stream, place): key for stream, place, key, _ in self._written}
        known: dict[int, dict[int, int]] = {}
        for block_id in ids.tolist():
            stream = self._stream(block_id)
            places = [place for place in self._rows_of(block_id).tolist() if place >= 0]
            keys = [new.get((stream, place), int(self._log.sums[stream, place])) for place in places]
            known.setdefault(stream, {}).update(zip(keys, places, strict=True))
        return known

    def _stream(self, block_id: int) -> int:
        return block_id // self._geometry.num_blocks

    def _rows_of(self, block_id: int) -> np.ndarray:
        changed = self._place.get(block_id)
        return self._log.place[block_id] if changed is None else changed

    def _append(self, stream: int, row: np.ndarray) -> int:
        """Returns a place for a new row: the end of the log, or an unused place once the log is full."""
        place = self._end.get(stream, int(self._log.end[stream]))
        if place < self._log.sums.shape[1]:
            self._end[stream] = place + 1
        else:
            place = self._unused(stream)
        self._written.append((stream, place, checksum(row), row))  # type: ignore[arg-type]
        return place

    def _unused(self, stream: int) -> int:
        """Returns a place that no block uses. There is one: a log has room for all rows of all blocks, and at least one
        of these has no place now."""
        start = stream * self._geometry.num_blocks
        places = [self._rows_of(block_id) for block_id in range(start, start + self._geometry.num_blocks)]
        used = np.zeros(self._log.sums.shape[1] + 1, bool)
        used[np.concatenate(places)] = True
        return int(np.argmin(used[:-1]))

    def rows(self, pages: Geometry) -> list[StagedRows]:
        """Returns the rows to write, addressed by pages."""
        if not self._written:
            return []
        stream, place = np.array([entry[:2] for entry in self._written], np.int64).T
        data = np.stack([entry[3] for entry in self._written])
        return [StagedRows(stream * pages.num_blocks + place // pages.block_rows, place % pages.block_rows, data)]

    def take_over(self) -> None:
        """Applies the changes to the log."""
        for block_id, place in self._place.items():
            self._log.place[block_id] = place
        for stream, end in self._end.items():
            self._log.end[stream] = end
        for stream, place_in_log, key, _ in self._written:
            self._log.sums[stream, place_in_log] = key


class SequentialBranch(TransactionalBranch):
    """A branch that keeps its rows in logs, whose pages are the blocks of another branch.

    Attributes:
      path, direct, engine, codec: as in `FlashBranch`.
    """

    on_flash = True

    def __init__(self, geometry: Geometry, pages: "FlashBranch", log: Log, generation: int = 0):
        super().__init__(geometry, generation)
        self._pages = pages
        self._log = log
        self._guard = threading.Lock()  # so that reads of other layers do not see half a commit

    @classmethod
    def over(cls, geometry: Geometry, pages: "FlashBranch") -> "SequentialBranch":
        """Returns a branch in which every block is zero."""
        return cls(geometry, pages, Log.empty(geometry, pages.geometry))

    @property
    def path(self) -> str:
        return self._pages.path

    @property
    def direct(self) -> bool:
        return self._pages.direct

    @property
    def engine(self) -> str:
        return self._pages.engine

    @property
    def codec(self) -> str:  # type: ignore[override]
        return self._pages.codec

    @property
    def stored_bytes(self):
        return self._pages.stored_bytes

    @property
    def held_bytes(self):
        log = self._log
        return self._pages.held_bytes + log.place.nbytes + log.sums.nbytes + log.end.nbytes

    def stats(self):
        """Returns I/O requests and bytes of the pages, and counts of the gathered blocks. Bytes put are the pages' for
        prompts, this branch's for tokens."""
        ours, pages = super().stats(), self._pages.stats()
        return dataclasses.replace(pages, blocks_read=ours.blocks_read, read_seconds=ours.read_seconds,
                                   bytes_put=pages.bytes_put + ours.bytes_put)

    def fork(self):
        with self._mutex:
            self._raise_saved()
            self._check(self.generation)
            return self._akin(SequentialBranch(self.geometry, self._pages.fork(), self._log.copy(), self.generation))

    # ---- prefill

    def write_layer(self, layer, blocks, counts, prompt: Prompt | None = None):
        """Writes a layer as `Branch.write_layer`; without `prompt`, token order is the order of blocks and rows."""
        geometry, pages = self.geometry, self._pages.geometry
        with self._mutex:
            counts = self._prefill_counts(blocks, counts)
            blocks = whole(blocks)
            valid = (np.arange(geometry.block_rows) < counts[..., None]).reshape(geometry.streams, -1)
            valid &= blocks.reshape(*valid.shape, -1).any(-1)
            order = np.arange(valid.shape[1]) if prompt is None else prompt.pos.reshape(valid.shape)
            rank = np.where(valid, order, np.iinfo(np.int32).max).argsort(axis=-1, kind="stable")
            length = valid.sum(-1)
            logged = np.zeros((geometry.streams, pages.num_blocks * pages.block_rows, geometry.width), blocks.dtype)
            place = np.full(valid.shape, -1, np.int32)
            for stream, rows in enumerate(blocks.reshape(*valid.shape, -1)):
                taken = rank[stream, :length[stream]]
                place[stream, taken] = np.arange(taken.size)
                logged[stream, :taken.size] = rows[taken]
            self._write_logs(layer, logged, length)
            self._book(layer, place, logged, length)

    def _write_logs(self, layer, logged: np.ndarray, length: np.ndarray) -> None:
        """Writes logged[streams, places, width] to the pages."""
        pages = self._pages.geometry
        shape = (pages.batch, pages.kv_heads, pages.num_blocks)
        counts = np.clip(length[:, None] - np.arange(pages.num_blocks) * pages.block_rows, 0, pages.block_rows)
        self._pages.write_layer(layer, logged.reshape(*shape, pages.block_rows, -1),
                                counts.reshape(shape).astype(np.int32))

    def _book(self, layer, place: np.ndarray, logged: np.ndarray, length: np.ndarray) -> None:
        """Records a written layer in the log."""
        start, streams = self._layer_start(layer), self.geometry.streams
        first = start // self.geometry.num_blocks
        with self._guard:
            self._log.place[start:start + streams * self.geometry.num_blocks] = place.reshape(
                -1, self.geometry.block_rows)
            self._log.end[first:first + streams] = length
            for stream, count in enumerate(length.tolist()):
                self._log.sums[first + stream, :count] = [
                    checksum(row) for row in logged[stream, :count].view(np.uint8)]

    # ---- hooks of TransactionalBranch

    def _load(self, layer, ids, targets, out):
        geometry, pages = self.geometry, self._pages.geometry
        with self._guard:
            place = self._log.place[ids]
            kept = place >= 0
            page = (ids // geometry.num_blocks * pages.num_blocks)[:, None] + place // pages.block_rows
            needed, page_index = np.unique(page[kept], return_inverse=True)
            read = np.empty((needed.size, pages.block_bytes), np.uint8)
            if needed.size:
                self._pages._load(layer, needed, np.arange(needed.size), read)
        rows = np.zeros((*place.shape, geometry.row_bytes), np.uint8)
        rows[kept] = read.reshape(-1, pages.block_rows, geometry.row_bytes)[page_index, place[kept] % pages.block_rows]
        out[targets] = rows.reshape(ids.size, -1)
        self._tally.add(blocks_read=ids.size)

    def _prepare(self, records):
        draft = Draft(self._log, self.geometry)
        for record in records:
            if isinstance(record, StagedRows):
                draft.put_rows(record)
            else:
                draft.put_blocks(record)
        return draft, self._pages._prepare(draft.rows(self._pages.geometry))

    def _publish(self, prepared):
        draft, rows = prepared
        with self._guard:
            self._pages._publish(rows)
            draft.take_over()

    def _drain(self):
        self._pages.flush()

    def settle(self):
        self.flush()
        self._pages.settle()

    def _release(self):
        self._pages.discard()
