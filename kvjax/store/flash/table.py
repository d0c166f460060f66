"""Which extent holds each block: tables that share what they have in common.

A table is cut into streams, one per layer, sequence and KV head. Forking or saving a table copies the numbers of its
streams, not their contents, so that neither costs more for a longer context; a stream is copied when it is first
changed. Owner counts say who shares what: tables own streams, and streams own extents.
"""

import itertools

import numpy as np

from kvjax.store.format.extents import ExtentPool
from kvjax.store.interface import Geometry

_EMPTY = 0  # the stream in which no block was ever written, shared by all


class StreamPool:
    """The streams of all tables of one file. Not thread-safe: the volume's lock is held around every call.

    Attributes:
      rows: int32[streams, NB] extent of each block, -1 before its first write; replaced by a longer array as it grows.
    """

    def __init__(self, geometry: Geometry, extents: ExtentPool):
        self.extents = extents
        self.num_blocks = geometry.num_blocks
        self.streams = geometry.layers * geometry.streams
        self.rows = np.full((1, self.num_blocks), -1, np.int32)
        self._owners = np.ones(1, np.int64)  # one more for the empty stream, so that it is never freed or changed
        self._free: list[int] = []
        self._end = 1  # streams from here on were never used
        self._grow(self.streams)

    def _grow(self, more: int) -> None:
        rows = np.empty((self._end + more, self.num_blocks), np.int32)
        rows[:self._end] = self.rows
        self.rows = rows
        self._owners = np.concatenate([self._owners, np.zeros(more, np.int64)])

    @property
    def held_bytes(self) -> int:
        """Bytes of all streams, whoever's they are."""
        return self.rows.nbytes + self._owners.nbytes

    def add(self, row: np.ndarray) -> int:
        """A new stream with one owner and these extents, each of which the caller's ownership passes to it."""
        if self._free:
            stream = self._free.pop()
        else:
            if self._end == len(self.rows):
                self._grow(self._end)
            stream, self._end = self._end, self._end + 1
        self.rows[stream] = row
        self._owners[stream] = 1
        return stream

    def share(self, streams: np.ndarray) -> None:
        np.add.at(self._owners, streams, 1)

    def release(self, streams: np.ndarray) -> None:
        """Takes one owner from each; streams without any give their extents back."""
        np.subtract.at(self._owners, streams, 1)
        for stream in streams[self._owners[streams] == 0].tolist():
            row = self.rows[stream]
            self.extents.release(row[row >= 0])
            self._free.append(stream)

    def is_shared(self, stream: int) -> bool:
        return bool(self._owners[stream] > 1)


class Table:
    """Extents of all blocks of one branch or one saved cache, by flat id over [layers, B, K, NB].

    Every method is called with the volume's lock held.

    Attributes:
      pool: the streams, where all tables of the file have theirs.
      shift: int64[streams] from an id to its place in all the pool's rows, by the stream it is in.
    """

    def __init__(self, pool: StreamPool, streams: np.ndarray):
        self.pool = pool
        self._streams = streams
        self._first = np.arange(streams.size, dtype=np.int64)
        self.shift = (streams - self._first) * pool.num_blocks

    @classmethod
    def empty(cls, pool: StreamPool) -> "Table":
        """No block was written yet."""
        streams = np.full(pool.streams, _EMPTY, np.int64)
        pool.share(streams)
        return cls(pool, streams)

    @classmethod
    def of(cls, pool: StreamPool, ids: np.ndarray, extents: np.ndarray) -> "Table":
        """A table of blocks ids[n], ascending, in extents[n], and one more owner of each of these."""
        table = cls.empty(pool)
        pool.extents.share(extents)
        streams, blocks = np.divmod(ids, pool.num_blocks)
        starts = np.flatnonzero(np.append(True, streams[1:] != streams[:-1])[:streams.size])
        for start, stop in itertools.pairwise([*starts.tolist(), ids.size]):
            row = np.full(pool.num_blocks, -1, np.int32)
            row[blocks[start:stop]] = extents[start:stop]
            table._set(int(streams[start]), pool.add(row))
        pool.release(np.full(starts.size, _EMPTY))
        return table

    def extents(self, ids: np.ndarray) -> np.ndarray:
        """int32[n] of ids[n], -1 where nothing was written."""
        return self.pool.rows.reshape(-1)[ids + self.shift[ids // self.pool.num_blocks]]

    def extent(self, block_id: int) -> int:
        stream, block = divmod(block_id, self.pool.num_blocks)
        return int(self.pool.rows[self._streams[stream], block])

    def everything(self) -> np.ndarray:
        """int32[total_blocks], a copy."""
        return self.pool.rows[self._streams].reshape(-1)

    def blocks(self) -> tuple[np.ndarray, np.ndarray]:
        """int64 ids of the blocks that were written, ascending, and their int32 extents."""
        streams = np.flatnonzero(self._streams != _EMPTY)
        rows = self.pool.rows[self._streams[streams]]
        which, block = np.nonzero(rows >= 0)
        return streams[which] * self.pool.num_blocks + block, rows[which, block]

    def share(self) -> "Table":
        """The same table once more, independent of this one; copies no stream."""
        self.pool.share(self._streams)
        return Table(self.pool, self._streams.copy())

    def release(self) -> None:
        """Gives all streams back; the table must not be used again."""
        self.pool.release(self._streams)

    def unshare(self, block_id: int) -> None:
        """Makes the stream of a block this table's own, so that owner counts of its extents tell who else needs
        them."""
        stream = block_id // self.pool.num_blocks
        old = int(self._streams[stream])
        if not self.pool.is_shared(old):
            return
        row = self.pool.rows[old]
        self.pool.extents.share(row[row >= 0])
        self._set(stream, self.pool.add(row))
        self.pool.release(np.array([old]))

    def put(self, block_id: int, extent: int) -> None:
        """Lets a block of an unshared stream be in a new extent; the old one is released."""
        stream, block = divmod(block_id, self.pool.num_blocks)
        row = self.pool.rows[self._streams[stream]]
        if row[block] >= 0:
            self.pool.extents.release(row[block:block + 1].copy())
        row[block] = extent

    def replace_layer(self, start: int, extents: np.ndarray) -> None:
        """Lets the blocks from id `start` on, whole streams, be in new extents[n], -1 = nowhere; releases the old."""
        first = start // self.pool.num_blocks
        rows = extents.reshape(-1, self.pool.num_blocks)
        old = self._streams[first:first + len(rows)].copy()
        for stream, row in enumerate(rows, first):
            self._set(stream, self.pool.add(row))
        self.pool.release(old)

    def changes_since(self, older: "Table") -> tuple[np.ndarray, np.ndarray]:
        """int64 ids of blocks that are elsewhere than in an older table, and their int32 extents in this one."""
        streams = np.flatnonzero(self._streams != older._streams)
        rows = self.pool.rows[self._streams[streams]]
        which, block = np.nonzero(rows != self.pool.rows[older._streams[streams]])
        return streams[which] * self.pool.num_blocks + block, rows[which, block]

    def _set(self, stream: int, row: int) -> None:
        self._streams[stream] = row
        self.shift[stream] = (row - stream) * self.pool.num_blocks
