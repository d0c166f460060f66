"""The file of a flash store: a header page, two superblocks, then extents.

    offset         bytes          contents
    0              4096           header: what the file is for; written once
    4096           4096           superblock 0, and
    8192           4096           superblock 1: one names the newest saved cache, the other the one before it
    12288 + i * S  S              extent i: one block, C rows of [key | value], or part of a log record; zero-padded

Only the pages that a block takes in its extent have meaning (`kvjax.store.format.codec`); the others may hold anything.

S is `extent_bytes`, the size of a block rounded up to 4096, so that every extent can be read with O_DIRECT. Extents
have no fixed owner: tables (`kvjax.store.flash.table`) say which block is in which extent, and an extent may belong to
several tables. An extent with more than one owner is never overwritten; a saved cache is an owner.

All numbers are little-endian. The last 8 bytes of each of the first three pages are the checksum of the other 4088.

    header         type           field
    0              8 bytes        magic, b"KVJAXBLK"
    8              u32            format version, 3
    12             u32            where extents begin, 12288
    16             6 x u32        layers, batch, kv_heads, num_blocks, block_rows, width
    40             u64            extent size S
    48             16 bytes       dtype name, zero-padded
    64             16 bytes       codec name, "raw" or "rle", zero-padded
    80             u32            length of the fingerprint
    84             256 bytes      fingerprint of model and tokenizer, UTF-8, zero-padded

    superblock     type           field (a page of zeros was never used)
    0              8 bytes        magic, b"KVJAXLOG"
    8              u64            sequence number of the save
    16             u64            number of records n, oldest first; the first is complete, the others are changes to it
    24 + 24 * i    3 x u64        record i: first extent, bytes, checksum; it lies in consecutive extents

    log record     type           field
    0              8 bytes        magic, b"KVJAXREC"
    8              u64            sequence number of the save
    16             u64            generation of the branch
    24             u64            number n of blocks listed; a block listed in no record was never written
    32             u64            bytes of metadata m
    40             n x u64        checksum of each block
    40 + 8 * n     n x u32        id of each block, over [layers, B, K, NB]
    40 + 12 * n    n x i32        its extent, -1 for none
    40 + 16 * n    m bytes        the caller's metadata

A record's checksum is in the superblock, not in the record: extents are reused, and an older record that passes its own
check may lie where a newer one should be. Checksums are 64-bit xxh3: 0.5 us for 16 KB here, where zlib's crc32 takes
4.6 us and adler32 5.4 us. A block's checksum is verified at every read. Its low 15 bits are the number of pages that
the block takes, 0 for all pages of the extent; the next bit says whether the block is coded; the other 48 bits are
those of the checksum of these pages, or of `block_bytes`. They leave no chance for a torn block to pass.

Limits: 2**28 blocks, of them 2**24 per KV head; 2**20 streams (layers x batch x kv_heads); 2**28 bytes per block; 2**31
extents. Thus no header asks for more memory than a machine has; everything else in a file is limited by its size.
"""

import dataclasses
import struct

import numpy as np
import xxhash

from kvjax.errors import ChecksumMismatch, ConfigError, FormatMismatch
from kvjax.store.geometry import DTYPES, MAX_GENERATION, PAGE_BYTES, Geometry

MAGIC, LOG_MAGIC, RECORD_MAGIC = b"KVJAXBLK", b"KVJAXLOG", b"KVJAXREC"
VERSION = 3
CODECS = ("raw", "rle")
SUPERBLOCKS = (PAGE_BYTES, 2 * PAGE_BYTES)  # offsets
HEADER_BYTES = 3 * PAGE_BYTES  # extents begin here
FINGERPRINT_BYTES = 256

_FIELDS = struct.Struct(f"<8sII6IQ16s16sI{FINGERPRINT_BYTES}s")
_SUPERBLOCK = struct.Struct("<8sQQ")
_PLACE = struct.Struct("<QQQ")
_RECORD = struct.Struct("<8sQQQQ")
_CHECKSUM = struct.Struct("<Q")
_SEALED_BYTES = PAGE_BYTES - _CHECKSUM.size
MAX_RECORDS = (_SEALED_BYTES - _SUPERBLOCK.size) // _PLACE.size
MAX_BLOCKS, MAX_BLOCKS_OF_A_HEAD, MAX_STREAMS = 1 << 28, 1 << 24, 1 << 20
MAX_BLOCK_BYTES, MAX_EXTENTS = 1 << 28, 1 << 31
MAX_SEQUENCE = (1 << 63) - 1

checksum = xxhash.xxh3_64_intdigest  # takes any object with the buffer interface; returns an int below 2**64


def _seal(body: bytes) -> bytes:
    """Returns a page that ends with its own checksum."""
    body = body.ljust(_SEALED_BYTES, b"\0")
    return body + _CHECKSUM.pack(checksum(body))


def _is_sealed(page: bytes) -> bool:
    return len(page) >= PAGE_BYTES and checksum(page[:_SEALED_BYTES]) == _CHECKSUM.unpack_from(page, _SEALED_BYTES)[0]


@dataclasses.dataclass(frozen=True)
class Header:
    """The contents of the first page of a store file."""

    geometry: Geometry
    fingerprint: str
    codec: str = "raw"

    def pack(self) -> bytes:
        """Returns the header page.

        Raises:
          ConfigError: the fingerprint is too long, or the cache too large for a file.
        """
        geometry, fingerprint = self.geometry, self.fingerprint.encode()
        too_large = _too_large(geometry)
        if too_large:
            raise ConfigError(f"a store file cannot hold {too_large}; lower batch or capacity, or use other blocks")
        if len(fingerprint) > FINGERPRINT_BYTES:
            raise ConfigError(f"fingerprint has {len(fingerprint)} bytes, more than {FINGERPRINT_BYTES}; pass its hash")
        return _seal(_FIELDS.pack(
            MAGIC, VERSION, HEADER_BYTES, geometry.layers, geometry.batch, geometry.kv_heads, geometry.num_blocks,
            geometry.block_rows, geometry.width, geometry.extent_bytes, geometry.dtype.encode(), self.codec.encode(),
            len(fingerprint), fingerprint))

    @classmethod
    def unpack(cls, page: bytes, path: str) -> "Header":
        """Parses a header page; errors name `path` and what is wrong.

        Raises:
          FormatMismatch: the file is no store, has another version, or numbers out of range.
          ChecksumMismatch: the page is damaged.
        """
        if not is_ours(page):
            raise FormatMismatch(f"{path} is not a kvjax store file; choose another path")
        (_, version, begin, *sizes, extent_bytes, dtype, codec, length, fingerprint) = _FIELDS.unpack_from(page)
        if version != VERSION:
            raise FormatMismatch(f"{path} has format version {version}, but this library reads version {VERSION}; "
                                 "choose another path, or use the kvjax version that wrote it")
        if not _is_sealed(page):
            raise ChecksumMismatch(f"{path} has a damaged header; create the cache anew")
        name, codec = (_text(field.rstrip(b"\0")) for field in (dtype, codec))
        if name not in DTYPES or codec not in CODECS:
            raise FormatMismatch(f"{path} holds dtype {name!r} in codec {codec!r}, which this library does not know; "
                                 "choose another path, or use the kvjax version that wrote it")
        text = None if length > FINGERPRINT_BYTES else _text(fingerprint[:length])
        if text is None or begin != HEADER_BYTES or min(sizes) < 1 or (codec == "rle" and sizes[-1] < 2):
            raise FormatMismatch(f"{path} has an inconsistent header; create the cache anew")
        geometry = Geometry(*sizes, name)  # type: ignore[call-arg]
        too_large = _too_large(geometry)
        if too_large:
            raise FormatMismatch(f"{path} has a header that claims {too_large}; create the cache anew")
        if geometry.extent_bytes != extent_bytes:
            raise FormatMismatch(f"{path} has extents of {extent_bytes} bytes instead of {geometry.extent_bytes}; "
                                 "create the cache anew")
        return cls(geometry, text, codec)

    def check(self, path: str, geometry: Geometry | None, fingerprint: str | None, codec: str | None) -> None:
        """Raises FormatMismatch unless the file is for this geometry, fingerprint and codec; None allows any."""
        if geometry is not None and geometry != self.geometry:
            raise FormatMismatch(f"{path} holds a cache of {self.geometry}, not of {geometry}; choose another file")
        if fingerprint is not None and fingerprint != self.fingerprint:
            raise FormatMismatch(f"{path} was made with the model {self.fingerprint!r}, not with {fingerprint!r}; use "
                                 "that model and tokenizer, or choose another file")
        if codec is not None and codec != self.codec:
            raise FormatMismatch(f"{path} holds blocks in codec {self.codec!r}, not in {codec!r}; leave it to the file "
                                 "with codec=None, or choose another file")


def _text(field: bytes) -> str | None:
    try:
        return field.decode()
    except UnicodeDecodeError:
        return None


def _too_large(geometry: Geometry) -> str:
    """Returns text that names the parts of a geometry beyond the format's limits; empty if there are none."""
    counts = (("blocks", geometry.total_blocks, MAX_BLOCKS),
              ("blocks per KV head", geometry.num_blocks, MAX_BLOCKS_OF_A_HEAD),
              ("layers x batch x kv_heads", geometry.layers * geometry.streams, MAX_STREAMS),
              ("bytes per block", geometry.block_bytes, MAX_BLOCK_BYTES))
    return ", ".join(f"{count} {what} (at most {most})" for what, count, most in counts if count > most)


def is_ours(page: bytes) -> bool:
    """Returns whether the first bytes of a file are those of a store file of any version."""
    return len(page) >= _FIELDS.size and page.startswith(MAGIC)


@dataclasses.dataclass(frozen=True)
class Place:
    """Position and checksum of a log record.

    Attributes:
      extent: first extent.
      bytes: length.
      checksum: what its bytes must hash to.
    """

    extent: int
    bytes: int
    checksum: int

    def stop(self, extent_bytes: int) -> int:
        """Returns the number of the extent after its last one."""
        return self.extent - (-self.bytes // extent_bytes)

    def extents(self, extent_bytes: int) -> np.ndarray:
        """Returns the extents it takes, int32[n]."""
        return np.arange(self.extent, self.stop(extent_bytes), dtype=np.int32)


@dataclasses.dataclass(frozen=True)
class Superblock:
    """The table of contents of one saved cache.

    Attributes:
      sequence: number of the save.
      records: where its log records are, oldest first.
    """

    sequence: int
    records: tuple[Place, ...]

    def pack(self) -> bytes:
        places = b"".join(_PLACE.pack(place.extent, place.bytes, place.checksum) for place in self.records)
        return _seal(_SUPERBLOCK.pack(LOG_MAGIC, self.sequence, len(self.records)) + places)

    @classmethod
    def unpack(cls, page: bytes, name: str) -> "Superblock | None":
        """Parses a superblock page; returns None for a page that was never used.

        Args:
          page: PAGE_BYTES bytes.
          name: names the page in errors.

        Raises:
          ChecksumMismatch: the page is torn or damaged.
          FormatMismatch: a number is out of range.
        """
        if not any(page):
            return None
        magic, sequence, count = _SUPERBLOCK.unpack_from(page)
        if magic != LOG_MAGIC or not _is_sealed(page):
            raise ChecksumMismatch(f"{name} is torn or damaged")
        if not 1 <= count <= MAX_RECORDS or not 1 <= sequence <= MAX_SEQUENCE:
            raise FormatMismatch(f"{name} names {count} log records of save {sequence}, which is out of range")
        places = [_PLACE.unpack_from(page, _SUPERBLOCK.size + i * _PLACE.size) for i in range(count)]
        return cls(sequence, tuple(Place(*place) for place in places))


@dataclasses.dataclass(frozen=True)
class Record:
    """A log record of one save: the blocks whose extents have changed.

    Attributes:
      sequence: number of the save.
      generation: generation of the saved branch.
      ids: uint32[n] flat ids over [layers, B, K, NB], ascending.
      extents: int32[n] their extents, -1 = no longer written.
      sums: uint64[n] their checksums.
      metadata: bytes given by the caller of `save`.
    """

    sequence: int
    generation: int
    ids: np.ndarray
    extents: np.ndarray
    sums: np.ndarray
    metadata: bytes

    def pack(self) -> bytes:
        head = _RECORD.pack(RECORD_MAGIC, self.sequence, self.generation, self.ids.size, len(self.metadata))
        columns = (self.sums.astype("<u8"), self.ids.astype("<u4"), self.extents.astype("<i4"))
        return b"".join([head, *(column.tobytes() for column in columns), self.metadata])

    @classmethod
    def unpack(cls, data: bytes, place: Place, name: str, geometry: Geometry) -> "Record":
        """Parses a log record. Whether its extents are in the file is for the caller to check.

        Args:
          data: the record's bytes.
          place: its entry in the superblock.
          name: names the record in errors.
          geometry: geometry of the cache.

        Raises:
          ChecksumMismatch: the bytes are not those that `place` describes.
          FormatMismatch: the contents are impossible for a cache of this geometry.
        """
        if len(data) != place.bytes or checksum(data) != place.checksum or not data.startswith(RECORD_MAGIC):
            raise ChecksumMismatch(f"{name} is damaged")
        head = data[:_RECORD.size].ljust(_RECORD.size, b"\0")
        _, sequence, generation, count, length = _RECORD.unpack(head)
        if len(data) != _RECORD.size + 16 * count + length or generation > MAX_GENERATION:
            raise FormatMismatch(f"{name} has {len(data)} bytes, but claims {count} blocks, {length} bytes of metadata "
                                 f"and generation {generation}")
        starts = [_RECORD.size + size * count for size in (0, 8, 12)]
        sums, ids, extents = (np.frombuffer(data, kind, count, start) for kind, start in
                              zip(("<u8", "<u4", "<i4"), starts, strict=True))
        if count and (np.any(ids[1:] <= ids[:-1]) or ids[-1] >= geometry.total_blocks or extents.min() < -1):
            raise FormatMismatch(f"{name} lists blocks that are out of order, repeated or beyond the cache, or extents "
                                 "below -1")
        return cls(sequence, generation, ids, extents, sums, data[_RECORD.size + 16 * count:])
