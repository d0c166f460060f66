"""The commit log: how caches are saved in a store file. `kvjax.store.flash.recovery` reads it.

A commit takes two syncs. The blocks, and a log record that says where they are, go to extents without owners; sync.
Then the superblock of the save before last is overwritten by one that names the record; sync. Whatever happens in
between, the other superblock names a whole saved cache, because its blocks and records are owned until it is
overwritten itself.
"""

import dataclasses
import threading
from collections.abc import Sequence

import numpy as np

from kvjax.errors import WriteFailed
from kvjax.store.flash.recovery import Recovered
from kvjax.store.flash.table import Table
from kvjax.store.format.extents import ExtentPool
from kvjax.store.format.pages import MAX_RECORDS, MAX_SEQUENCE, SUPERBLOCKS, Place, Record, Superblock, checksum
from kvjax.store.geometry import Geometry
from kvjax.store.io.file import BlockFile


@dataclasses.dataclass
class Saved:
    """A saved cache that this process keeps track of.

    Attributes:
      sequence: its number, counted from 1.
      generation: generation of the branch that was saved.
      metadata: bytes given by the caller.
      slot: index of the superblock that names it.
      table: where its blocks are; owns their extents.
      places: its log records, the complete one first.
    """

    sequence: int
    generation: int
    metadata: bytes
    slot: int
    table: Table
    places: tuple[Place, ...]


@dataclasses.dataclass
class SaveRequest:
    """A request to save a branch. It owns its table until it is `done`; then `error` or `sequence` is set."""

    table: Table
    generation: int
    metadata: bytes
    sequence: int = 0
    error: BaseException | None = None
    done: bool = False


class CommitLog:
    """The log of saved caches, written by the volume's writer thread.

    Attributes:
      broken: why nothing can be saved any more. After a failed sync the kernel may report success although data were
        dropped, so a second sync would prove nothing.
    """

    def __init__(self, file: BlockFile, geometry: Geometry, extents: ExtentPool, lock: threading.Lock):
        self._file, self._geometry, self._extents, self._lock = file, geometry, extents, lock
        self.broken: WriteFailed | None = None
        self._kept: list[Saved] = []  # the saves that the two superblocks name, oldest first
        self._doubtful: list[Saved] = []  # saves whose superblock may or may not have reached the device
        self._sequence = 0

    def saves(self) -> list[Saved]:
        """Returns the saved caches in the file, newest first: at most two. The lock is held."""
        return self._kept[::-1]

    def restore(self, found: Sequence[Recovered], tables: Sequence[Table]) -> None:
        """Takes over the results of `recover` and `adopt`, newest first. The lock is held."""
        self._kept = [Saved(save.sequence, save.generation, save.metadata, save.slot, table, save.superblock.records)
                      for save, table in zip(reversed(found), reversed(tables), strict=True)]
        self._sequence = found[0].latest

    def commit(self, requests: list[SaveRequest]) -> None:
        """Saves the newest of the requests; it supersedes the others at the same moment, and they share its syncs.

        Raises:
          StoreError: nothing was saved, unless the last step failed: then the save may or may not be there after a
            crash, and everything it needs is kept until another save has replaced it.
        """
        if self.broken is not None:
            raise self.broken
        if self._sequence + len(requests) > MAX_SEQUENCE:
            raise WriteFailed(f"{self._file.path} was saved {self._sequence} times, and there is no number left for "
                              "another save; save to another file")
        saved, record = self._prepare(requests[-1], self._sequence + len(requests))
        try:
            self._write_record(record, saved.places[-1])
            self._sync()
        except BaseException:
            with self._lock:
                self._drop([saved])
            raise
        self._doubtful.append(saved)
        self._sequence = saved.sequence  # never used twice, even after a failure: a reader may have seen it already
        self._file.write(Superblock(saved.sequence, saved.places).pack(), SUPERBLOCKS[saved.slot],
                         lambda _: f"superblock {saved.slot}")
        self._sync()
        self._file.take_place()
        for i, request in enumerate(requests):
            request.sequence = saved.sequence - len(requests) + i + 1
        with self._lock:
            self._settle(saved)

    def _prepare(self, request: SaveRequest, sequence: int) -> tuple[Saved, bytes]:
        """Returns a saved cache whose newest record is still to be written, and the bytes of that record."""
        current = self._kept[-1] if self._kept else None
        chain = current.places if current is not None and not _outgrown(current.places) else ()
        with self._lock:
            table = request.table.share()
            ids, extents = table.changes_since(current.table) if current is not None and chain else table.blocks()
            sums = np.where(extents >= 0, self._extents.checksums[extents], 0).astype(np.uint64)
        try:  # without the lock, which reads need: the record of a large cache has hundreds of megabytes
            data = Record(sequence, request.generation, ids, extents, sums, request.metadata).pack()
            digest = checksum(data)
            with self._lock:
                run = self._extents.allocate_run(-(-len(data) // self._geometry.extent_bytes))
        except BaseException:
            with self._lock:
                table.release()
            raise
        slot = 0 if current is None else 1 - current.slot
        place = Place(int(run[0]), len(data), digest)
        return Saved(sequence, request.generation, request.metadata, slot, table, (*chain, place)), data

    def _write_record(self, data: bytes, place: Place) -> None:
        padding = -len(data) % self._geometry.extent_bytes
        self._file.write(data + bytes(padding), self._extents.offset(place.extent), lambda _: "a log record")

    def _sync(self) -> None:
        try:
            self._file.sync()
        except OSError as cause:
            self.broken = WriteFailed(f"{cause}; nothing more can be saved in this file, and its newest blocks may be "
                                      "lost: save to another file, or open this one again at its last save")
            raise self.broken from cause

    def _settle(self, saved: Saved) -> None:
        """Releases the saves that `saved` replaced, once its superblock is on the device."""
        dropped = [*self._kept[:-1], *(other for other in self._doubtful if other is not saved)]
        self._kept = [*self._kept[-1:], saved]
        self._doubtful = []
        self._drop(dropped)

    def _drop(self, dropped: list[Saved]) -> None:
        needed = {place for saved in (*self._kept, *self._doubtful) for place in saved.places}
        for saved in dropped:
            saved.table.release()
        for place in {place for saved in dropped for place in saved.places} - needed:
            self._extents.release(place.extents(self._geometry.extent_bytes))


def _outgrown(places: tuple[Place, ...]) -> bool:
    """Returns whether a new complete record is due, because the changes outweigh the old one or their list is long."""
    return len(places) > MAX_RECORDS // 2 or sum(place.bytes for place in places[1:]) > places[0].bytes
