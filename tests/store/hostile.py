"""Store files whose pages have right checksums and wrong numbers."""

import dataclasses
import random
import struct
from collections.abc import Iterator

import numpy as np

from kvjax.store.flash.store import FlashStore
from kvjax.store.format import pages
from kvjax.store.format.pages import HEADER_BYTES, SUPERBLOCKS
from kvjax.store.geometry import PAGE_BYTES, Geometry
from tests.store.conftest import Driver

HEADER = {  # offset and struct format of each field
    "magic": (0, "8s"), "version": (8, "I"), "begin": (12, "I"), "layers": (16, "I"), "batch": (20, "I"),
    "kv_heads": (24, "I"), "num_blocks": (28, "I"), "block_rows": (32, "I"), "width": (36, "I"), "extent": (40, "Q"),
    "dtype": (48, "16s"), "codec": (64, "16s"), "length": (80, "I"), "fingerprint": (84, "16s"),
}
TEXTS = (b"", b"\xff" * 16, b"float16", b"rle", b"raw", b"int8")


@dataclasses.dataclass(frozen=True)
class Field:
    """A number in a page: its place in the file, its struct format, and its name."""

    name: str
    offset: int
    kind: str

    def values(self, data: bytes, chance: random.Random) -> list:
        """Values at the borders of what the field can hold and beside the one it has, and one at random."""
        if self.kind.endswith("s"):
            return [text for text in TEXTS if text.ljust(16, b"\0") != self.of(data)]
        size = 8 * struct.calcsize(self.kind)
        low, high = (-(1 << size - 1), (1 << size - 1) - 1) if self.kind == "i" else (0, (1 << size) - 1)
        now, random_one = self.of(data), chance.randint(low, high)
        found = [0, 1, high, high - 1, 1 << size - 1, (1 << size - 1) - 1, now + 1, now - 1, 2 * now, now ^ 4096, low,
                 chance.randint(0, 64), random_one]
        return [value for value in dict.fromkeys(found) if low <= value <= high and value != now]

    def of(self, data: bytes):
        return struct.unpack_from(f"<{self.kind}", data, self.offset)[0]


class StoreFile:
    """The bytes of a saved store file, and where its numbers are.

    Attributes:
      data: the bytes.
      fields: all numbers of the header, of both superblocks and of the log records, those of long columns in part.
      contents: by save, newest first, the first one's too, which no superblock names any more: blocks
        [layers, B, K, NB, C, width].
    """

    def __init__(self, path, geometry: Geometry, **settings):
        driver = Driver(FlashStore(file=path, direct=False, threads=1, **settings).create(geometry, "fingerprint"))
        driver.prefill()
        driver.branch.save(b"first")
        self.contents = [everything(driver)]
        for number, block in enumerate((0, 3)):
            driver.append(block, number, 5.0 + number)
            driver.branch.save(b"metadata")
            self.contents.insert(0, everything(driver))
        driver.branch.close()
        self.data, self.geometry = path.read_bytes(), geometry
        self.fields = list(self._fields())

    def _fields(self) -> Iterator[Field]:
        for name, (offset, kind) in HEADER.items():
            yield Field(f"header {name}", offset, kind)
        seen = set()
        for slot, start in enumerate(SUPERBLOCKS):
            for name, offset in (("sequence", 8), ("count", 16)):
                yield Field(f"superblock {slot} {name}", start + offset, "Q")
            for i, place in enumerate(self.places(self.data, start)):
                for name, offset in (("extent", 0), ("bytes", 8)):
                    yield Field(f"superblock {slot} {name} of record {i}", start + 24 + 24 * i + offset, "Q")
                if place not in seen:
                    yield from self._record(place[0])
                seen.add(place)

    def _record(self, extent: int) -> Iterator[Field]:
        start = HEADER_BYTES + extent * self.geometry.extent_bytes
        count = struct.unpack_from("<Q", self.data, start + 24)[0]
        for name, offset in (("sequence", 8), ("generation", 16), ("count", 24), ("metadata", 32)):
            yield Field(f"record {extent} {name}", start + offset, "Q")
        for name, kind, begin in (("sum", "Q", 40), ("id", "I", 40 + 8 * count), ("extent", "i", 40 + 12 * count)):
            for i in sorted({0, 1, count - 1}):
                yield Field(f"record {extent} {name} {i}", start + begin + i * struct.calcsize(kind), kind)

    @staticmethod
    def places(data: bytes, start: int) -> list[tuple[int, int]]:
        """Extents and bytes of the log records that the superblock at `start` names, as far as it has room for them."""
        count = min(struct.unpack_from("<Q", data, start + 16)[0], pages.MAX_RECORDS)
        return [struct.unpack_from("<QQ", data, start + 24 + 24 * i) for i in range(count)]

    def changed(self, *changes: tuple[Field, object]) -> bytes:
        """The file with other numbers, and all checksums made anew."""
        data = bytearray(self.data)
        for field, value in changes:
            struct.pack_into(f"<{field.kind}", data, field.offset, value)
        return self.sealed(data)

    def sealed(self, data: bytearray) -> bytes:
        for start in SUPERBLOCKS:
            for i, (extent, size) in enumerate(self.places(data, start)):
                begin = HEADER_BYTES + extent * self.geometry.extent_bytes
                if begin + size <= len(data):
                    struct.pack_into("<Q", data, start + 40 + 24 * i, pages.checksum(data[begin:begin + size]))
        for start in (0, *SUPERBLOCKS):
            end = start + PAGE_BYTES - 8
            data[start:start + PAGE_BYTES] = pages._seal(bytes(data[start:end]))
        return bytes(data)

    def field(self, name: str) -> Field:
        return next(field for field in self.fields if field.name == name)

    def wrong(self, found: np.ndarray) -> bool:
        """Whether some block has contents that no save has anywhere."""
        size = self.geometry.block_rows * self.geometry.width
        known = {block.tobytes() for one in self.contents for block in one.reshape(-1, size)}
        return any(block.tobytes() not in known for block in found.reshape(-1, size))


def everything(driver: Driver) -> np.ndarray:
    """Blocks [layers, B, K, NB, C, width]; raises what a read fails with."""
    layers = []
    for layer in range(driver.geometry.layers):
        ok, blocks = driver.try_read(layer)
        if not ok:
            raise driver.branch.failure(f"layer {layer}")
        layers.append(blocks.copy())
    return np.stack(layers)
