"""Saved caches of one store file: committing them. `kvjax.store.flash.recovery` finds them again.

A commit is two syncs. The blocks and a log record that tells where they are go to extents nobody owned; sync. Then the
superblock of the save before last is overwritten by one that names the record; sync. Whatever happens in between, the
other superblock names a whole saved cache, because its blocks and records are owned until it is overwritten itself.
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
from kvjax.store.interface import Geometry
from kvjax.store.io.file import BlockFile


@dataclasses.dataclass
class Saved:
    """A saved cache that this process keeps track of.

    Attributes:
      sequence: its number, counted from 1.
      generation: of the branch that was saved.
      metadata: the caller's.
      slot: which superblock names it.
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
    """A branch that wants to be saved; `error` or `sequence` is set when `done`. Owns its table until then."""

    table: Table
    generation: int
    metadata: bytes
    sequence: int = 0
    error: BaseException | None = None
    done: bool = False


class CommitLog:
    """Writes saved caches, on the volume's writer thread.

    Attributes:
      broken: why nothing can be saved any more. After a failed sync the kernel may report success although data were
        dropped, so a second one would prove nothing.
    """

    def __init__(self, file: BlockFile, geometry: Geometry, extents: ExtentPool, lock: threading.Lock):
        self._file, self._geometry, self._extents, self._lock = file, geometry, extents, lock
        self.broken: WriteFailed | None = None
        self._kept: list[Saved] = []  # what the two superblocks name, oldest first
        self._doubtful: list[Saved] = []  # their superblock may or may not have reached the device
        self._sequence = 0

    def saves(self) -> list[Saved]:
        """Saved caches that the file holds, newest first: at most two. The lock is held."""
        return self._kept[::-1]

    def restore(self, found: Sequence[Recovered], tables: Sequence[Table]) -> None:
        """Takes over what `recover` found and `adopt` made of it, newest first. The lock is held."""
        self._kept = [Saved(one.sequence, one.generation, one.metadata, one.slot, table, one.superblock.records)
                      for one, table in zip(reversed(found), reversed(tables), strict=True)]
        self._sequence = found[0].latest

    def commit(self, requests: list[SaveRequest]) -> None:
        """Saves the newest of the requests; the others are superseded by it in the same moment, and share its syncs.

        On an error nothing is saved, unless the last step failed: then the save may or may not be there after a crash,
        and everything it needs is kept until another one has replaced it.
        """
        if self.broken is not None:
            raise self.broken
        if self._sequence + len(requests) > MAX_SEQUENCE:
            raise WriteFailed(f"{self._file.path} was saved {self._sequence} times, and there is no number left; save "
                              "to another file")
        saved, record = self._prepare(requests[-1], self._sequence + len(requests))
        try:
            self._write_record(record, saved.places[-1])
            self._sync()
        except BaseException:
            with self._lock:
                self._drop([saved])
            raise
        self._doubtful.append(saved)
        self._sequence = saved.sequence  # never used twice, even if this fails: a reader may have seen it already
        self._file.write(Superblock(saved.sequence, saved.places).pack(), SUPERBLOCKS[saved.slot],
                         lambda _: f"superblock {saved.slot}")
        self._sync()
        self._file.take_place()
        for i, request in enumerate(requests):
            request.sequence = saved.sequence - len(requests) + i + 1
        with self._lock:
            self._settle(saved)

    def _prepare(self, request: SaveRequest, sequence: int) -> tuple[Saved, bytes]:
        """A saved cache with its newest record still to be written, and that record."""
        current = self._kept[-1] if self._kept else None
        chain = current.places if current is not None and not _outgrown(current.places) else ()
        with self._lock:
            table = request.table.share()
            ids, extents = table.changes_since(current.table) if current is not None and chain else table.blocks()
            sums = np.where(extents >= 0, self._extents.checksums[extents], 0).astype(np.uint64)
        try:  # with the lock free, which reads need: of a large cache this is hundreds of megabytes
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
            self.broken = WriteFailed(f"{cause}; nothing more can be saved in this file, whose newest blocks may be "
                                      "lost. Save to another file, or open this one again at its last save")
            raise self.broken from cause

    def _settle(self, saved: Saved) -> None:
        """The superblock is on the device: lets go of what it replaced."""
        dropped = [*self._kept[:-1], *(one for one in self._doubtful if one is not saved)]
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
    """Whether a new complete record is due, because the changes outweigh the old one or their list is long."""
    return len(places) > MAX_RECORDS // 2 or sum(place.bytes for place in places[1:]) > places[0].bytes
