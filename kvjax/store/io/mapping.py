"""The engine that reads through a map of the file: the usual case is one call of C, everything else is read by threads.

C uses the structures of the rings of asynchronous reads (`kvjax.store.io.aio`). A guess tells the kernel which pages
will be needed, and takes no memory but the page cache; a fetch copies from there to the targets. C waits only a short
time for pages, as nothing could interrupt it if the device hangs, and leaves missing ones to threads.
"""

from kvjax.store.format.codec import Codec
from kvjax.store.io.aio import XXH3, Ring, RingStack, native
from kvjax.store.io.file import BlockFile
from kvjax.store.io.filemap import FileMap
from kvjax.store.io.system import SystemIO


class MapRing(Ring):
    """A list of blocks to read from a mapped file. The kernel keeps no state of it, and its arena stays untouched."""

    _file_map: FileMap | None = None

    def look_at(self, file_map: FileMap) -> None:
        """Reads through this map from now on, and keeps it alive."""
        if self._file_map is not file_map:
            self._file_map = file_map
            self.make_room(self.room)

    def _map(self) -> tuple[int, int]:
        return (self._file_map.address, self._file_map.size) if self._file_map is not None else (0, 0)

    def _set_up(self) -> int:
        return 0

    def settled(self) -> bool:
        self.in_flight = 0
        return True

    def close(self, seconds: float) -> None:
        self.in_flight = 0
        self._closed = True
        self._file_map = None


class MapRings(RingStack):
    """Rings that use the newest map of a file."""

    KIND = MapRing
    held_bytes = 0  # type: ignore[assignment]

    def __init__(self, file: BlockFile, codec: Codec, system: SystemIO):
        super().__init__(system, codec.geometry.extent_bytes, codec.geometry.block_bytes, most=self.MAX_BYTES)
        self._file = file

    def take(self) -> MapRing:
        ring = super().take()
        assert isinstance(ring, MapRing) and self._file.map is not None
        ring.look_at(self._file.map)
        return ring


class MapEngine:
    """The engine with which C reads a mapped file.

    Attributes:
      rings, guess_rings: as in `RingEngine`.
      descriptor: -1, as no descriptor is read.
      quick: whether `native.fetch` and `native.guess` may be used: there is a single file, system calls are the
        kernel's, and blocks are stored raw.
    """

    descriptor = -1

    def __init__(self, file: BlockFile, codec: Codec, system: SystemIO):
        """Maps the file. Raises OSError, with the reason, where it cannot be read this way."""
        file.map_blocks()
        self.rings = self.guess_rings = MapRings(file, codec, system)
        compiled = native is not None and XXH3 != 0
        self.quick = compiled and type(file) is BlockFile and type(system) is SystemIO and codec.name == "raw"

    def close(self) -> None:
        """Releases the map. Call it once nothing reads any more."""
        self.rings.close(0.0)
