"""Reading through a map of the file: the usual case is one call of C, and all else is read by threads.

What C reads with has the shape of the rings of asynchronous reads (`kvjax.store.io.aio`). A guess tells the kernel what
will be wanted, and takes no memory but its page cache; a fetch copies from there to where blocks are wanted. C waits
for pages a little while, as it could not be called back from a device that hangs, and leaves what does not come to
threads.
"""

from kvjax.store.format.codec import Codec
from kvjax.store.io.aio import XXH3, Ring, RingStack, native
from kvjax.store.io.file import BlockFile
from kvjax.store.io.filemap import FileMap
from kvjax.store.io.system import SystemIO


class MapRing(Ring):
    """Which blocks of a mapped file are wanted. The kernel keeps nothing of it, and its arena stays untouched."""

    _file_map: FileMap | None = None

    def look_at(self, file_map: FileMap) -> None:
        """Reads the file through this map from now on, and keeps it."""
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
    """Rings that look at the newest map of a file."""

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
    """What C reads a mapped file with.

    Attributes:
      rings, guess_rings: as those of `RingEngine`.
      descriptor: of no file.
      quick: whether `native.fetch` and `native.guess` may be used: there is one file, system calls are the kernel's,
        and blocks lie there as they are.
    """

    descriptor = -1

    def __init__(self, file: BlockFile, codec: Codec, system: SystemIO):
        """Maps the file. OSError, with the reason, where it cannot be read so."""
        file.map_blocks()
        self.rings = self.guess_rings = MapRings(file, codec, system)
        compiled = native is not None and XXH3 != 0
        self.quick = compiled and type(file) is BlockFile and type(system) is SystemIO and codec.name == "raw"

    def close(self) -> None:
        """Lets go of the map; nobody reads any more."""
        self.rings.close(0.0)
