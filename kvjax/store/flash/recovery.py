"""Recovery of the saved caches of a store file: which are whole, what they hold, and who owns which extents.

Checksums detect damage, not whether numbers make sense: a page may come from a faulty or malicious program. So every
number of a superblock or log record is checked against the geometry and the size of the file before it is used, and a
save that contradicts itself is skipped like one that is torn.
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
from absl import logging

from kvjax.errors import ChecksumMismatch, FormatMismatch, NothingSaved, ShortRead
from kvjax.store.flash.table import StreamPool, Table
from kvjax.store.format.codec import Codec
from kvjax.store.format.pages import HEADER_BYTES, MAX_EXTENTS, SUPERBLOCKS, Record, Superblock
from kvjax.store.geometry import PAGE_BYTES
from kvjax.store.io.file import BlockFile

_PROBLEMS = (ChecksumMismatch, FormatMismatch, ShortRead)  # problems of one save that do not concern the other


@dataclasses.dataclass(frozen=True)
class Recovered:
    """A whole saved cache in a file.

    Attributes:
      superblock: its table of contents.
      slot: index of the superblock.
      records: its log records, oldest first.
      latest: the highest sequence number in any superblock of the file.
    """

    superblock: Superblock
    slot: int
    records: tuple[Record, ...]
    latest: int

    @property
    def sequence(self) -> int:
        return self.superblock.sequence

    @property
    def generation(self) -> int:
        return self.records[-1].generation

    @property
    def metadata(self) -> bytes:
        return self.records[-1].metadata

    @functools.cached_property
    def blocks(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """int64[n] ids of the blocks that were written, ascending; int32[n] their extents; uint64[n] their checksums.
        """
        ids, extents, sums = (np.concatenate([getattr(record, name) for record in self.records]).astype(kind)
                              for name, kind in (("ids", np.int64), ("extents", np.int32), ("sums", np.uint64)))
        if len(self.records) > 1:  # a single record has every id once, in order
            order = ids.argsort(kind="stable")
            newest = order[np.append(np.diff(ids[order]) > 0, True)[:order.size]]
            newest = newest[extents[newest] >= 0]
            ids, extents, sums = ids[newest], extents[newest], sums[newest]
        return ids, extents, sums

    def end(self, codec: Codec) -> int:
        """Returns where in the file the last of its blocks ends, in bytes."""
        _, extents, sums = self.blocks
        last = int(extents.max(initial=0))
        size = int(codec.sizes(sums[extents == last]).max(initial=0))
        return HEADER_BYTES + last * codec.geometry.extent_bytes + size


def recover(file: BlockFile, codec: Codec) -> tuple[list[Recovered], list[str]]:
    """Finds the whole saved caches of a file.

    Args:
      file: an open store file.
      codec: codec of its blocks.

    Returns:
      The whole saves, newest first, and a description of each problem of the others.

    Raises:
      ReadFailed: the system refused a read.
    """
    while True:
        superblocks, problems = read_superblocks(file)
        latest = max((save.sequence for save in superblocks.values()), default=0)
        saves: list[Recovered] = []
        for slot, superblock in sorted(superblocks.items(), key=lambda item: -item[1].sequence):
            try:
                save = Recovered(superblock, slot, _read_records(file, codec, superblock), latest)
                _check_owners(file, codec, save, saves)
                saves.append(save)
            except _PROBLEMS as cause:
                problems.append(str(cause))
        if not problems or read_superblocks(file)[0] == superblocks:  # otherwise a writer saved meanwhile
            return saves, problems


def whole_saves(file: BlockFile, codec: Codec) -> list[Recovered]:
    """Returns the saves of `recover`, with a warning for each problem. Raises NothingSaved if no save is whole."""
    saves, problems = recover(file, codec)
    if not saves:
        why = "; ".join(problems) or "it was never saved"
        raise NothingSaved(f"{file.path} holds no saved cache ({why}); prefill again")
    for problem in problems:
        logging.warning("%s; continuing with save %d of %s", problem, saves[0].sequence, file.path)
    return saves


def adopt(found: Sequence[Recovered], streams: StreamPool) -> list[Table]:
    """Makes the saved caches owners of their extents.

    Args:
      found: whole saves, newest first.
      streams: the streams of the file.

    Returns:
      A table of each save, which owns the extents of its blocks; log records get owners, too.
    """
    tables = []
    for save in reversed(found):
        ids, extents, sums = save.blocks
        streams.extents.restore(extents, sums)
        tables.append(Table.of(streams, ids, extents))
    for place in {place for save in found for place in save.superblock.records}:
        extents = place.extents(streams.extents.extent_bytes)
        streams.extents.restore(extents, np.zeros(extents.size, np.uint64))
        streams.extents.share(extents)
    return tables[::-1]


def read_superblocks(file: BlockFile) -> tuple[dict[int, Superblock], list[str]]:
    """Returns the valid superblocks by slot, and a description of each problem of the others. Raises ReadFailed."""
    superblocks, problems = {}, []
    for slot, offset in enumerate(SUPERBLOCKS):
        name = f"{file.path}: superblock {slot} at offset {offset}"
        try:
            superblock = Superblock.unpack(_read(file, offset, PAGE_BYTES, f"superblock {slot}"), name)
        except _PROBLEMS as cause:
            problems.append(str(cause))
            continue
        if superblock is not None:
            superblocks[slot] = superblock
    return superblocks, problems


def _read_records(file: BlockFile, codec: Codec, superblock: Superblock) -> tuple[Record, ...]:
    geometry, records = codec.geometry, []
    what = f"a log record of save {superblock.sequence}"
    _check_places(file, codec, superblock)
    for place in superblock.records:
        offset = HEADER_BYTES + place.extent * geometry.extent_bytes
        data = _read(file, offset, place.bytes, what)
        records.append(Record.unpack(data, place, f"{file.path}: {what} at offset {offset}", geometry))
    if records[0].extents.min(initial=0) < 0:
        raise FormatMismatch(f"{file.path}: {what} is the complete one, but lists blocks without extents")
    numbers = [record.sequence for record in records]
    if numbers[-1] != superblock.sequence or sorted(set(numbers)) != numbers:
        raise FormatMismatch(f"{file.path}: log records of save {superblock.sequence} have the sequence numbers "
                             f"{numbers}")
    return tuple(records)


def _check_places(file: BlockFile, codec: Codec, superblock: Superblock) -> None:
    """Raises ShortRead or FormatMismatch unless log records lie in the file, each in extents of its own, so that
    together they are no larger than the file."""
    extent_bytes, end, last = codec.geometry.extent_bytes, 0, 0
    what = f"{file.path}: log records of save {superblock.sequence}"
    for place in sorted(superblock.records, key=lambda place: place.extent):
        if place.extent < end:
            raise FormatMismatch(f"{what} overlap at extent {place.extent}")
        end, last = place.stop(extent_bytes), place.extent * extent_bytes + place.bytes
    if end > MAX_EXTENTS:
        raise FormatMismatch(f"{what} reach to extent {end}, beyond the maximum of {MAX_EXTENTS}")
    _check_end(file, what, HEADER_BYTES + last)  # the padding of the last record may be missing


def _check_owners(file: BlockFile, codec: Codec, save: Recovered, others: Sequence[Recovered]) -> None:
    """Raises ShortRead or FormatMismatch unless everything that a save names lies in the file, with one owner per
    extent: otherwise one of two would be overwritten while the other is needed. Another save may have the same block
    there."""
    what = f"{file.path}: save {save.sequence}"
    for other in others:
        if other.sequence == save.sequence:
            raise FormatMismatch(f"{what} exists twice")
    _check_end(file, what, save.end(codec))
    extent_bytes = codec.geometry.extent_bytes
    ids, extents, sums = save.blocks
    # 1 + position of the block in each extent, -1 for a log record. Zeros that are not touched take no memory: a file
    # may have large holes.
    holder, positions = np.zeros(file.size // extent_bytes + 1, np.int32), np.arange(1, ids.size + 1, dtype=np.int32)
    holder[extents] = positions
    _refuse_any(holder[extents] != positions, extents, f"{what}: a block")
    for place in dict.fromkeys(place for recovered in (*others, save) for place in recovered.superblock.records):
        taken = place.extents(extent_bytes)
        _refuse_any(holder[taken] != 0, taken, f"{what}: a log record")
        holder[taken] = -1
    for other in others:
        other_ids, other_extents, other_sums = other.blocks
        held = holder[other_extents]
        same = held[held > 0] - 1
        wrong = held < 0
        wrong[held > 0] = (ids[same] != other_ids[held > 0]) | (sums[same] != other_sums[held > 0])
        _refuse_any(wrong, other_extents, f"{what}: a block of save {other.sequence}")


def _refuse_any(wrong: np.ndarray, extents: np.ndarray, what: str) -> None:
    if wrong.any():
        raise FormatMismatch(f"{what} is in extent {extents[wrong.argmax()]}, which has another owner")


def _check_end(file: BlockFile, what: str, end: int) -> None:
    size = file.size
    if size < end:
        raise ShortRead(f"{what}: data reach to byte {end}, but the file ends at byte {size}; it was truncated")


def _read(file: BlockFile, offset: int, size: int, what: str) -> bytes:
    data = bytearray(size)
    file.read([(memoryview(data), offset)], lambda _: what, direct=False)
    return bytes(data)
