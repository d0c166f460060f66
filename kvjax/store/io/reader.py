"""The reader of many extents of one file at once, with the engine that suits the file.

"aio" hands all reads of a fetch to the kernel in one system call; it needs Linux, O_DIRECT and the codec "raw".
"threads" uses blocking threads and works everywhere. "mmap" reads through a map of the file, and so through the page
cache; it needs Linux 5.14. All verify checksums as blocks land, and raise the same errors.
"""

import numpy as np
from absl import logging

from kvjax.errors import ConfigError
from kvjax.store.format.codec import Codec
from kvjax.store.io.aio import RingEngine
from kvjax.store.io.fetch import Fetch
from kvjax.store.io.file import BlockFile, Where
from kvjax.store.io.mapping import MapEngine
from kvjax.store.io.system import SystemIO
from kvjax.store.io.threads import ThreadEngine

ENGINES = ("aio", "threads", "mmap")


class Reader:
    """A reader of the extents of one file.

    Args:
      file: the file.
      codec: codec of its blocks.
      system: system calls.
      engine: one of `ENGINES`, or None for "aio" where it works, otherwise "threads".
      threads: number of threads.
      timeout: seconds after which an unanswered read becomes an error.

    Raises:
      ConfigError: "aio" or "mmap" was requested where it cannot be used.
    """

    def __init__(self, file: BlockFile, codec: Codec, system: SystemIO, *, engine: str | None, threads: int,
                 timeout: float):
        self._file = file
        self._threads = ThreadEngine(file, codec, threads, timeout)
        self._rings: RingEngine | None = None
        self._maps: MapEngine | None = None
        self._refused = False
        if engine == "threads":
            logging.info("%s: %d threads read, as requested", file.path, threads)
            return
        if engine == "mmap":
            try:
                self._maps = MapEngine(file, codec, system)
            except OSError as cause:
                raise ConfigError(f"{file.path}: engine='mmap' cannot be used: {cause}; let the store choose with "
                                  "engine=None") from cause
            logging.info("%s: reads go through a map of the file", file.path)
            return
        try:
            self._rings = _rings(file, codec, system, self._threads, timeout)
            logging.info("%s: reads are asynchronous", file.path)
        except OSError as cause:
            if engine == "aio":
                raise ConfigError(f"{file.path}: engine='aio' cannot be used: {cause}; let the store choose with "
                                  "engine=None") from cause
            # As text: a log record with the exception would keep its traceback, and with it the branch being made.
            why = str(cause)
            logging.info("%s: %d threads read, as asynchronous reads cannot be used: %s", file.path, threads, why)

    @property
    def engine(self) -> str:
        """The engine of the next fetch; "aio" becomes "threads", with a warning, when the system refuses it."""
        if self._maps is not None:
            return "mmap"
        return "aio" if self._rings is not None and not self._refused and self._file.direct else "threads"

    @property
    def held_bytes(self) -> int:
        """Bytes of arenas that were ever read into: the largest need of each fetch that was in progress at the same
        time."""
        return self._threads.held_bytes + (self._rings.held_bytes if self._rings is not None else 0)

    def start(self, extents: np.ndarray, sums: np.ndarray, where: Where) -> Fetch:
        """Begins to read blocks.

        Args:
          extents: int32[n] extents, ascending, n >= 1.
          sums: uint64[n] checksums of their blocks.
          where: names the contents at a file offset, for messages.
        """
        if self.engine == "aio":
            try:
                return self._rings.start(extents, sums, where)  # type: ignore[union-attr]
            except OSError as cause:
                self._refuse(cause)
        return self._threads.start(extents, sums, where)

    def guess(self, extents: np.ndarray, sums: np.ndarray, where: Where) -> Fetch | None:
        """Begins a speculative read like `start`, which gives way to others as far as the engine can; returns None if
        the kernel has no context left for it."""
        if self.engine == "aio":
            try:
                return self._rings.guess(extents, sums, where)  # type: ignore[union-attr]
            except OSError as cause:
                self._refuse(cause)
        return self._threads.start(extents, sums, where, urgent=False)

    @property
    def rings(self) -> RingEngine | MapEngine | None:
        """The engine whose usual case is one call of compiled code, or None if it cannot be used; see
        `RingEngine.quick`."""
        if self._maps is not None:
            return self._maps if self._maps.quick else None
        rings = self._rings
        return rings if rings is not None and rings.quick and self._file.direct and not self._refused else None

    def _refuse(self, cause: OSError) -> None:
        already, self._refused = self._refused, True
        if not already:
            logging.warning("%s: the kernel refuses asynchronous reads (%s); threads read from now on, which takes "
                            "more CPU time", self._file.path, cause)

    def stop(self) -> None:
        """Ends the threads once they are idle. Takes no lock."""
        self._threads.stop()

    def close(self) -> None:
        """Releases what the kernel holds for reads, after `stop`; waits for reads in flight."""
        for engine in (self._rings, self._maps):
            if engine is not None:
                engine.close()


def _rings(file: BlockFile, codec: Codec, system: SystemIO, threads: ThreadEngine, timeout: float) -> RingEngine:
    """Returns the engine of asynchronous reads. Raises OSError, with the reason, where it cannot be used."""
    if not system.asynchronous:
        raise OSError("the store's system calls are replaced by others, which block")
    if not file.direct:
        raise OSError("reads go through the page cache, where they would block")
    if codec.name != "raw":
        raise OSError(f"blocks in codec {codec.name!r} differ in length, and are decoded by threads")
    return RingEngine(file, codec.geometry, system, threads, timeout)
