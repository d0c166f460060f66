"""The block store on flash: creates and opens files, which branches (`kvjax.store.flash.branch`) read and write."""

import contextlib
import math
import os
import tempfile
import threading

from kvjax import _validate
from kvjax.errors import ConfigError, ReadFailed
from kvjax.store.flash.branch import Anchor, FlashBranch
from kvjax.store.flash.creation import create_file, open_file
from kvjax.store.flash.layout import LAYOUTS, SEQUENTIAL, check_layout
from kvjax.store.flash.overlay import OverlayFile
from kvjax.store.flash.recovery import Recovered, adopt, whole_saves
from kvjax.store.flash.sequential import SequentialBranch, log_geometry
from kvjax.store.flash.table import StreamPool, Table
from kvjax.store.flash.volume import Volume
from kvjax.store.flash.writer import Writer
from kvjax.store.format.codec import Codec, make_codec
from kvjax.store.format.extents import ExtentPool
from kvjax.store.format.pages import CODECS, HEADER_BYTES, Header
from kvjax.store.geometry import Geometry
from kvjax.store.interface import OpenBranches
from kvjax.store.io import emulation, profiles
from kvjax.store.io.file import BlockFile
from kvjax.store.io.reader import ENGINES, Reader


class FlashStore(OpenBranches):
    """A store that keeps blocks in files on flash. It touches no disk before `create` or `open`.

    Args:
      directory: directory, which is created if it is missing. Every cache gets a temporary file in it that is removed
        when its last branch is closed or collected, and at exit.
      file: in place of a directory, the file to create or open. A kvjax file without a writer is replaced: at once if
        nothing was saved in it, otherwise by the first save of the new one.
      threads: number of concurrent reads when threads read.
      engine: how blocks are read: "aio", "threads" or "mmap" (see `kvjax.store.io.reader`). None selects "aio" where it
        works, otherwise "threads"; the branch's `engine` says which. Blocks in another codec than "raw" are read by
        threads, which read through the map if there is one.
      direct: whether reads bypass the page cache with O_DIRECT. Where the file system refuses, a warning is logged and
        the branch's `direct` becomes False. It is always False with "mmap", which maps the page cache.
      layout: placement of blocks: one of `LAYOUTS` (see `kvjax.store.flash.layout`) or "sequential"; changes no result.
      max_bytes: the largest size that the file may reach; None for as large as the device allows.
      staging_bytes: memory limit for committed but unwritten blocks, in addition to those of one token or one chunk of
        text. A quarter of it stays filled, so that the rows of a block become one write.
      timeout: seconds after which a read or write without progress becomes an error.
      scratch: directory for the additions of branches opened read-only; None for the system's temporary directory.
      profile: device to emulate, see `kvjax.store.io.profiles`; all files of one store share it.
      codec: how blocks are encoded in the file (`kvjax.store.format.codec`): "raw", or "rle", which stores runs of
        equal keys once where that saves pages. None for "raw" in a new file, and for the file's codec in an opened one.
      tolerance: with "rle" and for floats, how far an element of a key may differ from that of its run's first key.
        Above 0, keys change by at most this much each time a block is written. Blocks are written in the background, so
        results also depend on when that happens.

    In `directory`, `file` and `scratch`, `~` is the user's directory.

    Attributes:
      path: absolute path of the directory or file.
      temporary: whether it is a directory, in which files are temporary.
      system: its system calls; tests replace it.

    Raises:
      ConfigError: a setting is invalid or contradicts another one, or not exactly one of `directory` and `file` is
        given.
    """

    def __init__(self, *, directory=None, file=None, threads: int = 4, engine: str | None = None, direct: bool = True,
                 layout: str = "grouped", max_bytes: int | None = None, staging_bytes: int = 64 << 20,
                 timeout: float = 60.0, scratch: str | os.PathLike | None = None, profile: str = profiles.NATIVE,
                 codec: str | None = None, tolerance: float = 0.0):
        super().__init__()
        if (directory is None) == (file is None):
            raise ConfigError("give either directory=, for temporary files, or file=, for one that can be opened again")
        _check_sizes(threads, max_bytes, staging_bytes, direct)
        if not _validate.number(timeout) or not 0.0 < timeout <= threading.TIMEOUT_MAX:
            raise ConfigError(f"timeout={timeout!r} must be positive, and at most {threading.TIMEOUT_MAX:.0f} seconds")
        check_layout(layout)
        if engine not in (None, *ENGINES):
            raise ConfigError(f"unknown engine {engine!r}; use one of {', '.join(ENGINES)}, or None")
        if codec not in (None, *CODECS):
            raise ConfigError(f"unknown codec {codec!r}; use one of {', '.join(CODECS)}, or None")
        if engine == "aio" and codec not in (None, "raw"):
            raise ConfigError(f"engine='aio' cannot decode blocks in codec {codec!r}; leave out one of the two")
        if engine == "mmap" and profile != profiles.NATIVE:
            raise ConfigError(f"engine='mmap' reads from the page cache, which the emulated device {profile!r} does "
                              "not have; use another engine")
        if not _validate.number(tolerance) or not 0.0 <= tolerance < math.inf:
            raise ConfigError(f"tolerance={tolerance!r} must be a finite, non-negative number")
        self.temporary = file is None
        self.path = _absolute("directory", directory) if file is None else _absolute("file", file)
        self.threads = threads
        self.engine = engine
        self.direct = direct and engine != "mmap"
        self.layout = layout
        self.max_bytes = max_bytes
        self.staging_bytes = staging_bytes
        self.timeout = timeout
        self.scratch = None if scratch is None else _absolute("scratch", scratch)
        self.profile = profile
        self.codec = codec
        self.tolerance = tolerance
        self.system = emulation.system_of(profile)

    def create(self, geometry: Geometry, fingerprint: str, least_blocks: int = 1) -> "FlashBranch | SequentialBranch":
        """Creates the file and its first branch, in which every block is zero.

        Args:
          geometry: shape of the cache.
          fingerprint: identifies model and tokenizer; at most 256 bytes of UTF-8.
          least_blocks: blocks that the caller is sure to write.

        Returns:
          The branch; a SequentialBranch for the layout "sequential".

        Raises:
          ConfigError: a tolerance was given for keys that must not change.
          NoSpace: not even `least_blocks` blocks would fit.
          StoreError: as `create_file`.
        """
        if self.layout == SEQUENTIAL:
            pages = log_geometry(geometry)
            full = max(0, least_blocks - geometry.layers * geometry.streams)  # a stream's last block may have one row
            least_pages = max(1, full * geometry.block_rows // pages.block_rows)
            return self._opened(SequentialBranch.over(geometry, self._create(pages, fingerprint, least_pages)))
        return self._opened(self._create(geometry, fingerprint, least_blocks))

    def _create(self, geometry: Geometry, fingerprint: str, least_blocks: int) -> "FlashBranch":
        codec = make_codec(self.codec or "raw", geometry, self.tolerance)
        file = self._create_file(self.path, Header(geometry, fingerprint, codec.name), least_blocks, self.temporary)
        try:
            volume = self._volume(file, codec, self._streams(file, geometry))
        except BaseException:
            file.remove_if_temporary()
            file.close()
            raise
        return FlashBranch(volume, Anchor(volume), Table.empty(volume.streams))

    def open(self, geometry: Geometry | None = None, fingerprint: str | None = None, *,
             read_only: bool = False) -> "FlashBranch":
        """Opens a saved file at its newest whole save, in this or another process.

        For writing, it may have no other writer. Any number of processes may read it, also while one writes: a
        read-only branch sees the save it was opened at, keeps what it adds in a private temporary file, and cannot be
        saved. Once the file has been saved twice more, blocks of that save may be overwritten, and reading them raises
        StaleCache. A damaged save is skipped with a warning.

        Args:
          geometry: the expected geometry; None = any.
          fingerprint: the expected fingerprint; None = any.
          read_only: whether to open it for reading only.

        Returns:
          A branch at the newest whole save.

        Raises:
          ConfigError: the layout is "sequential", there is no scratch directory, or the store is a directory, in which
            nothing stays.
          FormatMismatch: the file is for another model or geometry, in another codec, or no store file.
          ChecksumMismatch: its header is damaged.
          NothingSaved: no save in it is whole.
          StoreLocked: another store may write it.
          StoreClosed: there is no file.
          ReadFailed, WriteFailed: the system refuses.
        """
        if self.layout == SEQUENTIAL:
            raise ConfigError("layout='sequential' cannot be saved or opened; use another layout")
        if self.temporary:
            raise ConfigError(f"files in directory={self.path!r} are temporary; give file= to open a saved one")
        file, header = open_file(self.path, self.system, direct=self.direct, read_only=read_only)
        try:
            header.check(file.path, geometry, fingerprint, self.codec)
            codec = make_codec(header.codec, header.geometry, self.tolerance)
            found = whole_saves(file, codec)
            volume = self._restored(file, header, codec, found)
        except MemoryError as cause:
            file.close()
            raise ReadFailed(f"{file.path}: not enough memory for the tables of {header.geometry}; free some, then "
                             "retry") from cause
        except BaseException:
            file.close()
            raise
        with volume.lock:
            table = volume.log.saves()[0].table.share()
        return self._opened(FlashBranch(volume, Anchor(volume), table, found[0].generation))

    def _restored(self, file: BlockFile, header: Header, codec: Codec, found: list[Recovered]) -> Volume:
        streams = self._streams(file, header.geometry)
        tables = adopt(found, streams)
        with contextlib.ExitStack() as undo:
            if file.read_only:
                streams.extents.leave_shared()
                private = self._create_private(header)
                undo.callback(private.close)
                undo.callback(private.remove_if_temporary)
                file = OverlayFile(file, private, streams.extents.offset(streams.extents.end), HEADER_BYTES)
            volume = self._volume(file, codec, streams)
            undo.pop_all()
        with volume.lock:
            volume.restore(found, tables)
        return volume

    def _create_private(self, header: Header) -> BlockFile:
        """Creates the file for what is added to a file that was opened read-only."""
        try:
            scratch = self.scratch or tempfile.gettempdir()
        except OSError as cause:
            raise ConfigError(f"there is no temporary directory ({cause}); set scratch to a directory") from cause
        if not os.path.isdir(scratch):
            raise ConfigError(f"scratch={scratch} is not a directory; set it to one in which files can be created")
        return self._create_file(scratch, header, temporary=True)

    def _create_file(self, path, header: Header, least_blocks: int = 1, temporary: bool = False) -> BlockFile:
        return create_file(path, header, self.system, temporary=temporary, direct=self.direct,
                           max_bytes=self.max_bytes, least_blocks=least_blocks)

    def _streams(self, file: BlockFile, geometry: Geometry) -> StreamPool:
        return StreamPool(geometry, ExtentPool(file.path, geometry.extent_bytes, self.max_bytes))

    def _volume(self, file: BlockFile, codec: Codec, streams: StreamPool) -> Volume:
        # Pages of logs are in token order: in their file, a block is a page.
        layout = "cluster_major" if self.layout == SEQUENTIAL else self.layout
        chosen = LAYOUTS[layout](codec.geometry, streams.extents)
        reader = Reader(file, codec, self.system, engine=self.engine, threads=self.threads, timeout=self.timeout)
        volume = Volume(file, codec, streams, chosen, reader=reader, staging_bytes=self.staging_bytes,
                        timeout=self.timeout)
        volume.start(Writer(volume).serve)
        return volume


    def __repr__(self) -> str:
        kind = "directory" if self.temporary else "file"
        device = "" if self.profile == profiles.NATIVE else f", emulated {self.profile}"
        return f"FlashStore({kind}={self.path!r}, engine={self.engine!r}{device})"


def _absolute(name: str, given) -> str:
    """Returns the absolute path, as the process may change its directory. Raises ConfigError for an invalid path, and
    where the current directory no longer exists."""
    path = _validate.path(name, given)
    try:
        return os.path.abspath(path)
    except OSError as cause:
        raise ConfigError(f"{name}={path!r} is relative to a directory that no longer exists ({cause}); give an "
                          "absolute path") from cause


def _check_sizes(threads, max_bytes, staging_bytes, direct) -> None:
    """Raises ConfigError for the first invalid setting."""
    for name, value, least in (("threads", threads, 1), ("max_bytes", 1 if max_bytes is None else max_bytes, 1),
                               ("staging_bytes", staging_bytes, 0)):
        if not _validate.whole(value, least):
            raise ConfigError(f"{name}={value!r} must be a whole number of at least {least}")
    if not isinstance(direct, bool):
        raise ConfigError(f"direct={direct!r} must be True or False")
