"""Reading many extents of one file at once, by the engine that suits the file.

"aio" hands all reads of a fetch to the kernel in one system call; it wants Linux, O_DIRECT and the codec "raw".
"threads" has threads that block, and works everywhere. "mmap" reads through a map of the file, and so through the page
cache; it wants Linux 5.14. All verify checksums as blocks land, and fail with the same errors.
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
    """Fetches extents of one file.

    Args:
      engine: one of `ENGINES`, None for "aio" where it can be.

    Raises ConfigError when "aio" or "mmap" is asked for where it cannot be.
    """

    def __init__(self, file: BlockFile, codec: Codec, system: SystemIO, *, engine: str | None, threads: int,
                 timeout: float):
        self._file = file
        self._threads = ThreadEngine(file, codec, threads, timeout)
        self._rings: RingEngine | None = None
        self._maps: MapEngine | None = None
        self._refused = False
        if engine == "threads":
            logging.info("%s: %d threads read, as asked for", file.path, threads)
            return
        if engine == "mmap":
            try:
                self._maps = MapEngine(file, codec, system)
            except OSError as cause:
                raise ConfigError(f"{file.path}: engine='mmap' cannot be used: {cause}; leave the choice to the store "
                                  "with engine=None") from cause
            logging.info("%s: reads go through a map of the file", file.path)
            return
        try:
            self._rings = _rings(file, codec, system, self._threads, timeout)
            logging.info("%s: reads are asynchronous", file.path)
        except OSError as cause:
            if engine == "aio":
                raise ConfigError(f"{file.path}: engine='aio' cannot be used: {cause}; leave the choice to the store "
                                  "with engine=None") from cause
            # As text: who keeps what was logged would keep a traceback, and with it the branch that is being made.
            why = str(cause)
            logging.info("%s: %d threads read, as asynchronous reads cannot be used: %s", file.path, threads, why)

    @property
    def engine(self) -> str:
        """The one that serves the next fetch; "aio" becomes "threads", with a warning, when the system refuses it."""
        if self._maps is not None:
            return "mmap"
        return "aio" if self._rings is not None and not self._refused and self._file.direct else "threads"

    @property
    def held_bytes(self) -> int:
        """Bytes of arenas that were ever read into: what a fetch needs at most, for each one that was under way."""
        return self._threads.held_bytes + (self._rings.held_bytes if self._rings is not None else 0)

    def start(self, extents: np.ndarray, sums: np.ndarray, where: Where) -> Fetch:
        """Begins to read extents[n], ascending, n >= 1, whose blocks must hash to sums[n]."""
        if self.engine == "aio":
            try:
                return self._rings.start(extents, sums, where)  # type: ignore[union-attr]
            except OSError as cause:
                self._refuse(cause)
        return self._threads.start(extents, sums, where)

    def guess(self, extents: np.ndarray, sums: np.ndarray, where: Where) -> Fetch | None:
        """The same for what gives way to others, as far as the engine can; None where there is no room for a guess."""
        if self.engine == "aio":
            try:
                return self._rings.guess(extents, sums, where)  # type: ignore[union-attr]
            except OSError as cause:
                self._refuse(cause)
        return self._threads.start(extents, sums, where, urgent=False)

    @property
    def rings(self) -> RingEngine | MapEngine | None:
        """Reads whose usual case is one call, where they are to be had; see `RingEngine.quick`."""
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
        """Gives back what the kernel holds for reads, after `stop`; waits for what is in flight."""
        for engine in (self._rings, self._maps):
            if engine is not None:
                engine.close()


def _rings(file: BlockFile, codec: Codec, system: SystemIO, threads: ThreadEngine, timeout: float) -> RingEngine:
    """OSError, with the reason, where reads cannot be asynchronous."""
    if not system.asynchronous:
        raise OSError("the system calls are somebody's own, and block")
    if not file.direct:
        raise OSError("reads go through the page cache, where they would block")
    if codec.name != "raw":
        raise OSError(f"blocks in codec {codec.name!r} have different lengths, and are decoded by threads")
    return RingEngine(file, codec.geometry, system, threads, timeout)
