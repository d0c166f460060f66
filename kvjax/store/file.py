"""One open store file: creation, positional reads and writes, and what errno means in the library's own errors."""

import contextlib
import errno
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
from kvjax.store.base import Geometry
from kvjax.store.format import HEADER_BYTES, Header, is_ours
from kvjax.store.system import SystemIO

Where = Callable[[int], str]  # file offset -> what lies there, for messages
_FULL = (errno.ENOSPC, errno.EDQUOT)


class BlockFile:
    """A locked file with a buffered descriptor and, while `direct`, one for O_DIRECT reads.

    Writes are buffered; the kernel writes dirty pages of a range back before it reads the range with O_DIRECT, so both
    descriptors see the same bytes. Thread-safe: all I/O is positional.
    """

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
                direct: bool, max_bytes: int | None) -> BlockFile:
    """Creates `path`, or a temporary file in the directory `path`, and writes its header.

    A kvjax file nobody holds is replaced. Raises FormatMismatch for any other file, StoreLocked, NoSpace, or
    WriteFailed when the place cannot be written; a file made by a failed call is removed again.
    """
    page = Header(geometry, fingerprint).pack()
    path, temporary = os.fspath(path), False
    if os.path.isdir(path):
        path, temporary = os.path.join(path, f"kvjax-{os.getpid()}-{uuid.uuid4().hex[:12]}.kv"), True
    descriptor, made = _open_for_writing(path, system)
    with contextlib.ExitStack() as undo:
        if made:
            undo.callback(system.unlink, path)
        undo.callback(system.close, descriptor)
        _claim(path, descriptor, system)
        _check_space(path, descriptor, system, max(max_bytes or 0, HEADER_BYTES + geometry.extent_bytes))
        _empty(path, descriptor, system)
        file = BlockFile(path, descriptor, system, temporary=temporary)
        file.write(page, 0, lambda _: "the header")
        undo.pop_all()
    if direct:
        file.open_direct()
    return file


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
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise FormatMismatch(f"{path} is not a regular file; choose another path")
    try:
        system.lock(descriptor)
    except BlockingIOError as cause:
        raise StoreLocked(f"{path} is in use by another live store; close that one or choose another path") from cause
    except OSError as cause:
        raise _write_error(f"cannot lock {path}; choose a path on a local filesystem", cause) from cause
    beginning = os.pread(descriptor, HEADER_BYTES, 0)
    if beginning and not is_ours(beginning):
        raise FormatMismatch(f"{path} exists and is not a kvjax store file; choose another path or remove it")


def _check_space(path: str, descriptor: int, system: SystemIO, needed: int) -> None:
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
