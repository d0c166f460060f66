"""The file of a flash store: one header page, then extents.

    offset        bytes          what
    0             4096           header, below
    4096 + i * S  S              extent i: one block, C rows of [key | value], zero-padded to S

S is `extent_bytes`, the size of a block rounded up to 4096, so that every extent can be read with O_DIRECT. Extents
have no fixed owner: which block lies in which extent is the business of a branch (`kvjax.store.lineage`), and an extent
may belong to several branches after a fork. An extent with more than one owner is never overwritten.

The header, little-endian:

    offset   type       field
    0        8 bytes    magic, b"KVJAXBLK"
    8        u32        format version, 1
    12       u32        header size, 4096
    16       6 x u32    layers, batch, kv_heads, num_blocks, block_rows, width
    40       u64        extent size S
    48       16 bytes   dtype name, zero-padded
    64       u32        length of the fingerprint
    68       256 bytes  fingerprint of model and codec, UTF-8, zero-padded
    324      ...        zero
    4088     u64        checksum of bytes 0..4087

Checksums are 64-bit xxh3: 0.5 us for 16 KB here, where zlib's crc32 takes 4.6 us and adler32 5.4 us, and 64 bits leave
no chance for a torn block to pass. A block's checksum covers its `block_bytes` and is verified at every read. For now
the checksums of blocks live in memory, as an array indexed by extent, like the tables of the branches. Both are written
as they are when a cache is saved: a saved cache is one more owner of its extents, so later writes go elsewhere.
"""

import dataclasses
import struct

import xxhash

from kvjax.errors import ConfigError, FormatMismatch
from kvjax.store.base import DTYPES, Geometry

MAGIC = b"KVJAXBLK"
VERSION = 1
HEADER_BYTES = 4096
FINGERPRINT_BYTES = 256

_FIELDS = struct.Struct(f"<8sII6IQ16sI{FINGERPRINT_BYTES}s")
_CHECKSUM = struct.Struct("<Q")
_CHECKSUM_OFFSET = HEADER_BYTES - _CHECKSUM.size

checksum = xxhash.xxh3_64_intdigest  # of anything with the buffer interface; an int below 2**64


@dataclasses.dataclass(frozen=True)
class Header:
    """What the first page of a store file says."""

    geometry: Geometry
    fingerprint: str

    def pack(self) -> bytes:
        """The header page. ConfigError when the fingerprint is too long."""
        geometry, fingerprint = self.geometry, self.fingerprint.encode()
        if len(fingerprint) > FINGERPRINT_BYTES:
            raise ConfigError(f"fingerprint has {len(fingerprint)} bytes, more than {FINGERPRINT_BYTES}; hash it")
        fields = _FIELDS.pack(
            MAGIC, VERSION, HEADER_BYTES, geometry.layers, geometry.batch, geometry.kv_heads, geometry.num_blocks,
            geometry.block_rows, geometry.width, geometry.extent_bytes, geometry.dtype.encode(),
            len(fingerprint), fingerprint)
        body = fields.ljust(_CHECKSUM_OFFSET, b"\0")
        return body + _CHECKSUM.pack(checksum(body))

    @classmethod
    def unpack(cls, page: bytes, path: str) -> "Header":
        """Parses a header page; FormatMismatch names `path` and what is wrong."""
        if not is_ours(page):
            raise FormatMismatch(f"{path} is not a kvjax store file; choose another path")
        (_, version, _, *sizes, extent_bytes, dtype, length, fingerprint) = _FIELDS.unpack_from(page)
        if version != VERSION:
            raise FormatMismatch(f"{path} has format version {version}, this library reads version {VERSION}")
        if len(page) < HEADER_BYTES or checksum(page[:_CHECKSUM_OFFSET]) != _stored_checksum(page):
            raise FormatMismatch(f"{path} has a damaged header; create the cache anew")
        name = dtype.rstrip(b"\0").decode()
        if name not in DTYPES:
            raise FormatMismatch(f"{path} holds dtype {name!r}, which this library does not know")
        header = cls(Geometry(*sizes, name), fingerprint[:length].decode())  # type: ignore[call-arg]
        if header.geometry.extent_bytes != extent_bytes:
            raise FormatMismatch(f"{path} has extents of {extent_bytes} bytes, expected {header.geometry.extent_bytes}")
        return header


def is_ours(page: bytes) -> bool:
    """Whether the first bytes of a file are those of a store of any version."""
    return len(page) >= _FIELDS.size and page.startswith(MAGIC)


def inspect_header(path) -> Header:
    """The header of a store file; OSError when it cannot be read, FormatMismatch when it is not one."""
    with open(path, "rb") as file:
        return Header.unpack(file.read(HEADER_BYTES), str(path))


def _stored_checksum(page: bytes) -> int:
    return _CHECKSUM.unpack_from(page, _CHECKSUM_OFFSET)[0]
