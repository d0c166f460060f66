"""Tables of which extent holds each block; tables share the parts they have in common.

A table is cut into streams, one per layer, sequence and KV head. Forking or saving a table copies the numbers of its
streams, not their contents, so that neither costs more for a longer context; a stream is copied when it is first
changed. Owner counts track sharing: tables own streams, and streams own extents.
"""

import itertools

import numpy as np

from kvjax.store.format.extents import ExtentPool
from kvjax.store.geometry import Geometry

_EMPTY = 0  # the stream without any written block, shared by all tables


class StreamPool:
    """The streams of all tables of one file. Not thread-safe: the volume's lock is held around every call.

    Attributes:
      extents: the pool of extents.
      num_blocks: blocks per stream.
      streams: streams per table.
      rows: int32[streams, NB] extent of each block, -1 before its first write; replaced by a longer array as it grows.
    """

    def __init__(self, geometry: Geometry, extents: ExtentPool):
        self.extents = extents
        self.num_blocks = geometry.num_blocks
        self.streams = geometry.layers * geometry.streams
        self.rows = np.full((1, self.num_blocks), -1, np.int32)
        self._owners = np.ones(1, np.int64)  # the empty stream has one owner more, so that it is never freed or changed
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
        """Bytes of all streams of all tables."""
        return self.rows.nbytes + self._owners.nbytes

    def add(self, row: np.ndarray) -> int:
        """Returns a new stream with one owner and the extents row[NB]; the caller's ownership of the extents passes to
        it."""
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
        """Removes one owner from each stream; streams without owners release their extents."""
        np.subtract.at(self._owners, streams, 1)
        for stream in streams[self._owners[streams] == 0].tolist():
            row = self.rows[stream]
            self.extents.release(row[row >= 0])
            self._free.append(stream)

    def is_shared(self, stream: int) -> bool:
        return bool(self._owners[stream] > 1)


class Table:
    """The extents of all blocks of one branch or saved cache, by flat id over [layers, B, K, NB].

    Every method is called with the volume's lock held.

    Attributes:
      pool: the pool that holds the streams of all tables of the file.
      shift: int64[streams], for each stream the difference between a block's place in the pool's flat rows and its id.
    """

    def __init__(self, pool: StreamPool, streams: np.ndarray):
        self.pool = pool
        self._streams = streams
        self._first = np.arange(streams.size, dtype=np.int64)
        self.shift = (streams - self._first) * pool.num_blocks

    @classmethod
    def empty(cls, pool: StreamPool) -> "Table":
        """Returns a table in which no block was written."""
        streams = np.full(pool.streams, _EMPTY, np.int64)
        pool.share(streams)
        return cls(pool, streams)

    @classmethod
    def of(cls, pool: StreamPool, ids: np.ndarray, extents: np.ndarray) -> "Table":
        """Returns a table with blocks ids[n], ascending, in extents[n], each of which gets one more owner."""
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
        """Returns the extents of ids[n], int32[n], -1 where nothing was written."""
        return self.pool.rows.reshape(-1)[ids + self.shift[ids // self.pool.num_blocks]]

    def extent(self, block_id: int) -> int:
        stream, block = divmod(block_id, self.pool.num_blocks)
        return int(self.pool.rows[self._streams[stream], block])

    def everything(self) -> np.ndarray:
        """Returns a copy of all extents, int32[total_blocks]."""
        return self.pool.rows[self._streams].reshape(-1)

    def blocks(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns int64 ids of the blocks that were written, ascending, and their int32 extents."""
        streams = np.flatnonzero(self._streams != _EMPTY)
        rows = self.pool.rows[self._streams[streams]]
        index, block = np.nonzero(rows >= 0)
        return streams[index] * self.pool.num_blocks + block, rows[index, block]

    def share(self) -> "Table":
        """Returns a copy that is independent of this table; copies no stream."""
        self.pool.share(self._streams)
        return Table(self.pool, self._streams.copy())

    def release(self) -> None:
        """Releases all streams; the table must not be used afterwards."""
        self.pool.release(self._streams)

    def unshare(self, block_id: int) -> None:
        """Copies the stream of a block if other tables share it, so that owner counts of its extents show who else
        needs them."""
        stream = block_id // self.pool.num_blocks
        old = int(self._streams[stream])
        if not self.pool.is_shared(old):
            return
        row = self.pool.rows[old]
        self.pool.extents.share(row[row >= 0])
        self._set(stream, self.pool.add(row))
        self.pool.release(np.array([old]))

    def put(self, block_id: int, extent: int) -> None:
        """Assigns a new extent to a block of an unshared stream; the old extent is released."""
        stream, block = divmod(block_id, self.pool.num_blocks)
        row = self.pool.rows[self._streams[stream]]
        if row[block] >= 0:
            self.pool.extents.release(row[block:block + 1].copy())
        row[block] = extent

    def replace_layer(self, start: int, extents: np.ndarray) -> None:
        """Assigns new extents[n], -1 = none, to the blocks from id `start` on, which are whole streams; releases the
        old ones."""
        first = start // self.pool.num_blocks
        rows = extents.reshape(-1, self.pool.num_blocks)
        old = self._streams[first:first + len(rows)].copy()
        for stream, row in enumerate(rows, first):
            self._set(stream, self.pool.add(row))
        self.pool.release(old)

    def changes_since(self, older: "Table") -> tuple[np.ndarray, np.ndarray]:
        """Returns int64 ids of blocks whose extent differs from an older table's, and their int32 extents in this one.
        """
        streams = np.flatnonzero(self._streams != older._streams)
        rows = self.pool.rows[self._streams[streams]]
        index, block = np.nonzero(rows != self.pool.rows[older._streams[streams]])
        return streams[index] * self.pool.num_blocks + block, rows[index, block]

    def _set(self, stream: int, row: int) -> None:
        self._streams[stream] = row
        self.shift[stream] = (row - stream) * self.pool.num_blocks
