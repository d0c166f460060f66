"""One open store file: creation, positional reads and writes, and what errno means in the library's own errors.

Locks: whoever may write a file holds flock(LOCK_EX) on it from creation or opening to closing, so that there is one
writer at most; readers take no lock, and many may read while one writes. What a writer does to extents that a reader
still wants, the reader's checksums tell. A lock goes with its process, so that a crash leaves none behind.
"""

import contextlib
import errno
import glob
import os
import stat
import threading
import uuid
from collections.abc import Callable, Iterable

from absl import logging

from kvjax.errors import (
    FormatMismatch,
    NoSpace,
    ReadFailed,
    ShortRead,
    StoreClosed,
    StoreError,
    StoreLocked,
    WriteFailed,
)
from kvjax.store.base import PAGE_BYTES, Geometry
from kvjax.store.format import HEADER_BYTES, Header, is_ours
from kvjax.store.system import SystemIO

Where = Callable[[int], str]  # file offset -> what lies there, for messages
_FULL = (errno.ENOSPC, errno.EDQUOT)


class BlockFile:
    """An open file with a buffered descriptor and, while `direct`, one for O_DIRECT reads.

    Writes are buffered; the kernel writes dirty pages of a range back before it reads the range with O_DIRECT, so both
    descriptors see the same bytes. Thread-safe: all I/O is positional.

    Attributes:
      temporary: the file is deleted when it is closed.
      read_only: the file belongs to somebody else.
    """

    read_only = False

    def __init__(self, path: str, descriptor: int, system: SystemIO, *, temporary: bool):
        self.path = path
        self.temporary = temporary
        self.direct = False
        self._system = system
        self._fallback_lock = threading.Lock()
        self._buffered = descriptor
        self._direct: int | None = None
        self._owner = os.getpid()

    def open_direct(self) -> None:
        """Adds the descriptor for O_DIRECT; where it is refused, warns and goes on without."""
        try:
            self._direct = self._system.open(self.path, os.O_RDONLY | os.O_DIRECT)
            self.direct = True
        except OSError as cause:
            self._warn(cause)

    def _warn(self, cause: OSError) -> None:
        logging.warning("%s: the filesystem refuses O_DIRECT (%s); reads go through the page cache, so read times "
                        "depend on free memory", self.path, cause)

    def read(self, requests: Iterable[tuple[memoryview, int]], where: Where, direct: bool = True) -> None:
        """Fills each (view, offset); with O_DIRECT all of them are page-aligned. Raises ShortRead or ReadFailed."""
        direct = direct and self.direct
        preadv, descriptor = self._system.preadv, self._descriptor(direct)
        for view, offset in requests:
            try:
                got = preadv(descriptor, (view,), offset)
            except OSError as cause:
                got = 0
                direct = self._forgive(cause, offset, where, direct)
                descriptor = self._descriptor(direct)
            if got != len(view):
                self._read_rest(view, offset, got, where, direct)

    def _read_rest(self, view: memoryview, offset: int, got: int, where: Where, direct: bool) -> None:
        while got < len(view):
            try:
                more = self._system.preadv(self._descriptor(direct), (view[got:],), offset + got)
            except OSError as cause:
                direct = self._forgive(cause, offset, where, direct)
                continue
            if more == 0:
                raise self._short(offset, got, len(view), where)
            got += more

    def _descriptor(self, direct: bool) -> int:
        return self._direct if direct else self._buffered  # type: ignore[return-value]

    def _forgive(self, cause: OSError, offset: int, where: Where, direct: bool) -> bool:
        """Whether to go on with O_DIRECT after an error that allows another try; raises after any other."""
        if cause.errno == errno.EINTR:
            return direct
        if direct and cause.errno == errno.EINVAL:
            with self._fallback_lock:
                if self.direct:
                    self.direct = False
                    self._warn(cause)
            return False
        raise ReadFailed(f"{self.path}: reading {where(offset)} at offset {offset} failed: {cause}; "
                         "check the device, then retry") from cause

    def _short(self, offset: int, got: int, wanted: int, where: Where) -> ShortRead:
        return ShortRead(f"{self.path}: the file ends {got} bytes into {where(offset)} at offset {offset}, where "
                         f"{wanted} were expected; it was truncated, restore it or prefill again")

    def write(self, data, offset: int, where: Where) -> None:
        """Writes all of `data` at `offset`. Raises NoSpace or WriteFailed; the range then holds anything."""
        view, done = memoryview(data), 0
        while done < len(view):
            try:
                done += self._system.pwrite(self._buffered, view[done:], offset + done)
            except InterruptedError:
                continue
            except OSError as cause:
                raise _write_error(f"{self.path}: writing {where(offset)} at offset {offset} failed", cause) from cause

    def sync(self) -> None:
        """Returns when all that was written is on the device. Raises NoSpace or WriteFailed; then the kernel may have
        dropped any of it, also what it seemed to keep, and must not be asked again."""
        try:
            self._system.sync(self._buffered)
        except OSError as cause:
            raise _write_error(f"{self.path}: syncing to the device failed", cause) from cause

    def lock(self) -> None:
        """Takes the lock of a writer, until the file is closed. Raises StoreLocked."""
        _lock(self.path, self._buffered, self._system)

    def check_room(self, needed: int) -> None:
        """NoSpace unless the device has `needed` bytes free."""
        free = self._system.free_bytes(self._buffered)
        if free < needed:
            raise NoSpace(f"{self.path}: {needed} bytes are needed and {free} are free; free some, then retry")

    def check_present(self) -> None:
        """StoreClosed when the path no longer leads to this file; decoding could go on, but nobody could reopen it."""
        ours = os.fstat(self._buffered)
        try:
            found = os.stat(self.path)
        except OSError:
            found = None
        if found is None or not os.path.samestat(ours, found):
            raise StoreClosed(f"{self.path} was removed or replaced while in use; put it back, or create a new one")

    def close(self) -> None:
        for descriptor in (self._direct, self._buffered):
            if descriptor is not None:
                with contextlib.suppress(OSError):
                    self._system.close(descriptor)

    def remove_if_temporary(self) -> None:
        if self.temporary and os.getpid() == self._owner:  # a forked process runs our finalizer too
            with contextlib.suppress(OSError):
                self._system.unlink(self.path)


def create_file(path, geometry: Geometry, fingerprint: str, system: SystemIO, *,
                direct: bool, max_bytes: int | None, least_blocks: int = 1) -> BlockFile:
    """Creates `path`, or a temporary file in the directory `path`, and writes its header.

    A kvjax file nobody holds is replaced; temporary files that a crash left in the directory are removed. Raises
    FormatMismatch for any other file, StoreLocked, NoSpace, or WriteFailed when the place cannot be written; a file
    made by a failed call is removed again.
    """
    page = Header(geometry, fingerprint).pack()
    path, temporary = os.fspath(path), False
    if os.path.isdir(path):
        remove_orphans(path, system)
        path, temporary = os.path.join(path, f"kvjax-{os.getpid()}-{uuid.uuid4().hex[:12]}.kv"), True
    descriptor, made = _open_for_writing(path, system)
    with contextlib.ExitStack() as undo:
        if made:
            undo.callback(system.unlink, path)
        undo.callback(system.close, descriptor)
        _claim(path, descriptor, system)
        _check_space(path, descriptor, system, HEADER_BYTES + least_blocks * geometry.extent_bytes, max_bytes)
        _empty(path, descriptor, system)
        file = BlockFile(path, descriptor, system, temporary=temporary)
        file.write(page.ljust(HEADER_BYTES, b"\0"), 0, lambda _: "the header")
        if not temporary:
            _make_durable(file, system)
        undo.pop_all()
    if direct:
        file.open_direct()
    return file


def _make_durable(file: BlockFile, system: SystemIO) -> None:
    file.sync()
    try:
        system.sync_directory(os.path.dirname(os.path.abspath(file.path)))
    except OSError as cause:
        raise _write_error(f"{file.path}: syncing its directory failed", cause) from cause


def open_file(path: str, system: SystemIO, *, direct: bool, read_only: bool) -> tuple[BlockFile, Header]:
    """Opens a file that `create_file` made, and reads its header.

    Raises StoreClosed when it is not there, FormatMismatch when it is something else, ChecksumMismatch when its header
    is damaged, StoreLocked when another store may write it, ReadFailed or WriteFailed when the system refuses.
    """
    try:
        descriptor = system.open(path, (os.O_RDONLY if read_only else os.O_RDWR) | os.O_NONBLOCK)
    except FileNotFoundError as cause:
        raise StoreClosed(f"{path} does not exist; give the path of a saved store file") from cause
    except IsADirectoryError as cause:
        raise FormatMismatch(f"{path} is a directory; give the path of a saved store file") from cause
    except OSError as cause:
        if read_only:
            raise ReadFailed(f"cannot open {path}: {cause}; check its permissions") from cause
        raise _write_error(f"cannot open {path} for writing; open it with read_only=True", cause) from cause
    with contextlib.ExitStack() as undo:
        undo.callback(system.close, descriptor)
        _check_kind(path, descriptor)
        file = BlockFile(path, descriptor, system, temporary=False)
        file.read_only = read_only
        if not read_only:
            file.lock()
            file.check_present()  # whoever held the lock before us may have removed it
        header = Header.unpack(_first_page(path, descriptor, system), path)
        undo.pop_all()
    if direct:
        file.open_direct()
    return file, header


def remove_orphans(directory: str, system: SystemIO) -> None:
    """Removes temporary files whose process is gone, as nobody holds their lock.

    An empty one is left alone: its maker may be about to lock it, which must not fail because of us.
    """
    for path in glob.glob(os.path.join(glob.escape(directory), "kvjax-*-????????????.kv")):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:  # locked, gone, or somebody else's
            descriptor = system.open(path, os.O_RDWR | os.O_NONBLOCK)
            stack.callback(system.close, descriptor)
            if is_ours(_first_page(path, descriptor, system)):  # not empty
                system.lock(descriptor)
                system.unlink(path)


def _open_for_writing(path: str, system: SystemIO) -> tuple[int, bool]:
    """A descriptor, and whether this call made the file. O_NONBLOCK: a pipe must not hang us before it is refused."""
    flags = os.O_RDWR | os.O_NONBLOCK
    try:
        with contextlib.suppress(FileExistsError):
            return system.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600), True
        return system.open(path, flags), False
    except OSError as cause:
        raise _write_error(f"cannot create the store file {path}; give a path in an existing, writable directory",
                           cause) from cause


def _claim(path: str, descriptor: int, system: SystemIO) -> None:
    """Locks the file and makes sure that replacing it destroys nothing foreign."""
    _check_kind(path, descriptor)
    _lock(path, descriptor, system)
    beginning = _first_page(path, descriptor, system)
    if beginning and not is_ours(beginning):
        raise FormatMismatch(f"{path} exists and is not a kvjax store file; choose another path or remove it")


def _first_page(path: str, descriptor: int, system: SystemIO) -> bytes:
    """What is at the beginning of a file, at most a page."""
    page, got, more = memoryview(bytearray(PAGE_BYTES)), 0, 1
    while more and got < PAGE_BYTES:
        try:
            more = system.preadv(descriptor, (page[got:],), got)
            got += more
        except InterruptedError:
            continue
        except OSError as cause:
            raise ReadFailed(f"{path}: reading the header failed: {cause}; check the device, then retry") from cause
    return bytes(page[:got])


def _check_kind(path: str, descriptor: int) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise FormatMismatch(f"{path} is not a regular file; choose another path")


def _lock(path: str, descriptor: int, system: SystemIO) -> None:
    try:
        system.lock(descriptor)
    except BlockingIOError as cause:
        raise StoreLocked(f"{path} is in use by another live store; close that one or choose another path") from cause
    except OSError as cause:
        raise _write_error(f"cannot lock {path}; choose a path on a local filesystem", cause) from cause


def _check_space(path: str, descriptor: int, system: SystemIO, least: int, max_bytes: int | None) -> None:
    """NoSpace unless the device can hold what the file will have at least, and what it may have at most."""
    if max_bytes is not None and least > max_bytes:
        raise NoSpace(f"{path}: {least} bytes are needed at least, more than max_bytes={max_bytes}; raise the limit")
    needed = max_bytes or least
    free = system.free_bytes(descriptor) + os.fstat(descriptor).st_blocks * 512
    if free < needed:
        raise NoSpace(f"{path}: {needed} bytes are needed and {free} are free; free some, lower max_bytes, or choose "
                      "another device")


def _empty(path: str, descriptor: int, system: SystemIO) -> None:
    try:
        system.ftruncate(descriptor, 0)
    except OSError as cause:
        raise _write_error(f"cannot empty {path}", cause) from cause


def _write_error(what: str, cause: OSError) -> StoreError:
    if cause.errno in _FULL:
        return NoSpace(f"{what}: {cause}; free some space, then retry")
    return WriteFailed(f"{what}: {cause}")
