"""An open store file: positional reads and writes, its lock, and the mapping of errno to the library's errors.

Locks: a process that may write a file holds flock(LOCK_EX) on it from creation or opening to closing, so that there is
at most one writer. Readers take no lock, and many may read while one writes; if a writer overwrites extents that a
reader still needs, the reader's checksums detect it. A lock ends with its process, so that a crash leaves none behind.
"""

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from absl import logging

from kvjax.errors import (
    NoSpace,
    ReadFailed,
    ShortRead,
    StoreClosed,
    StoreError,
    StoreLocked,
    typed,
)
from kvjax.store.io.filemap import FileMap
from kvjax.store.io.system import SystemIO

WRITE_BYTES = 4 << 20  # blocks are gathered and written in pieces of this size
Where = Callable[[int], str]  # file offset -> what lies there, for messages
_NO_MORE_FILES = (errno.EMFILE, errno.ENFILE)
_NO_SUCH_CALL = (errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP)  # unsupported by system or file system


class Replaced(NamedTuple):
    """A saved file that is to be replaced: its path, and the descriptor that holds its lock."""

    path: str
    descriptor: int


class BlockFile:
    """An open file with a buffered descriptor and, while `direct`, one for O_DIRECT reads.

    Writes are buffered. The kernel writes back dirty pages of a range before it reads the range with O_DIRECT, so both
    descriptors see the same bytes. Thread-safe: all I/O is positional.

    Attributes:
      path: its present path.
      direct: whether reads bypass the page cache.
      temporary: whether the file is deleted when it is closed.
      read_only: whether the file may only be read.
      replaces: the saved file that this one replaces at its first save; None if it is at its final path.
      map: the memory map of the file, if blocks are read through one.
    """

    read_only = False
    replaces: Replaced | None = None
    map: FileMap | None = None
    _outgrown = False  # whether the file has outgrown its map

    def __init__(self, path: str, descriptor: int, system: SystemIO, *, temporary: bool):
        self.path = path
        self.temporary = temporary
        self.direct = False
        self._system = system
        self._fallback_lock = threading.Lock()
        self._size_lock = threading.Lock()
        self._buffered = descriptor
        self._size = self.size  # a lower bound, unless another process truncates the file
        self._direct: int | None = None
        self._owner = os.getpid()

    def open_direct(self) -> None:
        """Opens the descriptor for O_DIRECT; where the file system refuses, logs a warning and continues without.

        Raises:
          StoreClosed: another file is at the path now.
          ReadFailed: no more files can be opened.
        """
        if not hasattr(os, "O_DIRECT"):
            self._warn(OSError(errno.EOPNOTSUPP, "this system has no O_DIRECT"))
            return
        try:
            self._direct = self._system.open(self.path, os.O_RDONLY | os.O_DIRECT | os.O_NONBLOCK)
        except OSError as cause:
            if cause.errno in _NO_MORE_FILES:  # not a refusal by the file system
                raise typed(f"cannot open {self.path} with O_DIRECT", cause, ReadFailed) from cause
            self._warn(cause)
            return
        if not os.path.samestat(os.fstat(self._direct), os.fstat(self._buffered)):
            self.close_direct()
            raise StoreClosed(f"{self.path} was replaced while it was being opened; open it again")
        self.direct = True

    def map_blocks(self) -> None:
        """Maps the file, so that `read` uses the map first. Raises OSError, with the reason, where it cannot be mapped.
        """
        made = FileMap(self._system, self._buffered, os.fstat(self._buffered).st_size)
        made.check()
        self.map = made

    def _read_map(self, mapped: FileMap, requests: list[tuple[memoryview, int]]) -> list[tuple[memoryview, int]]:
        """Fills what the map provides and returns the other requests: a page may be missing, or the file may have grown
        and the system has no room for a larger map."""
        needed = max((offset + len(view) for view, offset in requests), default=0)
        if needed > mapped.size:
            try:
                mapped = self.map = FileMap(self._system, self._buffered, needed)
            except OSError as cause:
                if not self._outgrown:
                    self._outgrown = True
                    logging.warning("%s: the system refuses a map of %d bytes (%s); reads beyond byte %d are slower",
                                    self.path, needed, cause, mapped.size)
                return requests
        return mapped.read(requests)

    def close_direct(self) -> None:
        """Closes the descriptor for O_DIRECT, if there is one."""
        descriptor, self._direct, self.direct = self._direct, None, False
        if descriptor is not None:
            with contextlib.suppress(OSError):
                self._system.close(descriptor)

    def _warn(self, cause: OSError) -> None:
        logging.warning("%s: the file system refuses O_DIRECT (%s); reads go through the page cache, so read times "
                        "depend on free memory", self.path, cause)

    def read(self, requests: Iterable[tuple[memoryview, int]], where: Where, direct: bool = True) -> None:
        """Fills each view from its offset.

        Args:
          requests: (view, offset in bytes) pairs; page-aligned for O_DIRECT or a map.
          where: names the contents at an offset, for messages.
          direct: whether to use O_DIRECT or the map, if the file has one.

        Raises:
          ShortRead: the file ends before a view is full.
          ReadFailed: the system refused a read.
        """
        if direct and (mapped := self.map) is not None:
            requests = self._read_map(mapped, list(requests))
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
        """Returns whether to continue with O_DIRECT after an error that allows another try; raises after any other."""
        if cause.errno == errno.EINTR:
            return direct
        if direct and cause.errno == errno.EINVAL:
            with self._fallback_lock:
                if self.direct:
                    self.direct = False
                    self._warn(cause)
            return False
        raise self.read_error(cause, offset, where) from cause

    def read_error(self, cause: OSError, offset: int, where: Where) -> StoreError:
        """Returns the error to raise for a read at `offset` that the system refused."""
        return typed(f"{self.path}: reading {where(offset)} at offset {offset} failed", cause, ReadFailed)

    @property
    def direct_descriptor(self) -> int:
        """The descriptor for O_DIRECT; only while `direct`."""
        return self._descriptor(direct=True)

    def redirect(self, reads: np.ndarray) -> None:
        """Corrects descriptor and offset of IOCB reads[n] that were made for `direct_descriptor`."""

    def _short(self, offset: int, got: int, wanted: int, where: Where) -> ShortRead:
        return ShortRead(f"{self.path}: the file ends {got} bytes into {where(offset)} at offset {offset}, but "
                         f"{wanted} were expected; it was truncated: restore it or prefill again")

    @property
    def size(self) -> int:
        """Current size of the file in bytes."""
        return os.fstat(self._buffered).st_size

    def write(self, data, offset: int, where: Where) -> None:
        """Writes all of `data` at `offset` (bytes); `where` names the contents for messages.

        Raises:
          NoSpace, WriteFailed: the contents of the range are undefined.
          ShortRead: the file was truncated by another process; nothing was written.
        """
        view, done = memoryview(data), 0
        self._check_uncut()
        while done < len(view):
            try:
                done += self._system.pwrite(self._buffered, view[done:], offset + done)
            except InterruptedError:
                continue
            except OSError as cause:
                raise typed(f"{self.path}: writing {where(offset)} at offset {offset} failed", cause) from cause
        with self._size_lock:
            self._size = max(self._size, offset + done)

    def _check_uncut(self) -> None:
        """Raises ShortRead if another process truncated the file. Writing beyond its end would fill the gap with zeros
        and hide the loss, and a save would replace an older one that may still be whole."""
        with self._size_lock:
            size, least = self.size, self._size
        if size < least:
            raise ShortRead(f"{self.path} has {size} bytes, but {least} were written; it was truncated: restore it or "
                            "save to another file")

    def sync(self) -> None:
        """Returns when everything written is on the device.

        Raises:
          NoSpace, WriteFailed: the kernel may have dropped any of it, even data that it still shows; a second sync
            would prove nothing.
        """
        try:
            self._system.sync(self._buffered)
        except OSError as cause:
            raise typed(f"{self.path}: syncing to the device failed", cause) from cause

    @property
    def place(self) -> str:
        """The path of the file once something is saved in it."""
        return self.path if self.replaces is None else self.replaces.path

    def take_place(self) -> None:
        """Moves the file to the path of the one that it replaces, if there is one.

        Raises:
          StoreClosed: another file is at that path now.
          WriteFailed: the directory cannot be written.
        """
        if self.replaces is None:
            return
        path, descriptor = self.replaces
        with contextlib.suppress(FileNotFoundError):
            if self.path != path and not os.path.samestat(os.stat(path), os.fstat(descriptor)):
                raise StoreClosed(f"{path} was replaced while its successor was written; save to another directory")
        self.move_to(path)
        self._let_go()

    def move_to(self, path: str) -> None:
        """Moves the file to a path, durably. Raises WriteFailed."""
        try:
            if self.path != path:
                self._system.replace(self.path, os.path.realpath(path))
                self.path = path
            self._system.sync_directory(os.path.dirname(os.path.abspath(path)))
        except OSError as cause:
            raise typed(f"writing the directory of {path} failed", cause) from cause

    def _let_go(self) -> None:
        """Closes the replaced file, which releases its lock."""
        replaced, self.replaces = self.replaces, None
        if replaced is not None:
            with contextlib.suppress(OSError):
                self._system.close(replaced.descriptor)

    def write_back(self) -> None:
        """Starts to write dirty pages to the device, as later O_DIRECT reads would wait for them.

        This is a hint, so errors are ignored. Without O_DIRECT nothing is done, as reads use the page cache.
        """
        if self.direct:
            with contextlib.suppress(OSError):
                self._system.write_back(self._buffered)

    def write_back_range(self, offset: int, size: int, wait: bool) -> None:
        """Starts to write back a range given in bytes; with `wait`, returns when O_DIRECT reads of it need not wait.

        It uses the O_DIRECT descriptor, so that an error is reported to `sync` too.

        Raises:
          NoSpace, WriteFailed: the contents of the range may be lost.
        """
        if not self.direct:
            return
        try:
            self._system.sync_range(self.direct_descriptor, offset, size, wait)
        except OSError as cause:
            if cause.errno not in _NO_SUCH_CALL:
                raise typed(f"{self.path}: writing back {size} bytes at offset {offset} failed", cause) from cause

    def settle(self) -> None:
        """Waits until everything written is on the device.

        It uses a descriptor of its own, because the kernel reports an error once per open file and `sync` must not miss
        it.

        Raises:
          NoSpace, WriteFailed: the device failed.
        """
        try:
            descriptor = self._system.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                self._system.sync(descriptor)
            finally:
                self._system.close(descriptor)
        except OSError as cause:
            raise typed(f"{self.path}: syncing to the device failed", cause) from cause

    def mapped(self) -> np.ndarray:
        """Returns a read-only view of the file as it is now, uint8[bytes], which stays mapped while the array exists.

        Raises:
          ReadFailed: the file cannot be mapped.
          ShortRead: the file is empty.
        """
        try:
            return np.frombuffer(mmap.mmap(self._buffered, 0, access=mmap.ACCESS_READ), np.uint8)
        except OSError as cause:
            raise typed(f"{self.path}: mapping the file failed", cause, ReadFailed) from cause
        except ValueError as cause:
            raise ShortRead(f"{self.path} is empty; it was truncated: restore it or prefill again") from cause

    def lock(self) -> None:
        """Takes the writer's lock until the file is closed.

        Raises:
          StoreLocked: another store holds it.
          WriteFailed: the file system refuses locks.
        """
        try:
            self._system.lock(self._buffered)
        except BlockingIOError as cause:
            raise StoreLocked(f"{self.path} is in use by another live store; close it or choose another path"
                              ) from cause
        except OSError as cause:
            raise typed(f"cannot lock {self.path}", cause, remedy="choose a path on a local file system") from cause

    def unlock(self) -> None:
        """Releases the writer's lock."""
        with contextlib.suppress(OSError):  # closing releases it, too
            self._system.unlock(self._buffered)

    def check_room(self, needed: int) -> None:
        """Raises NoSpace unless the device has `needed` bytes free."""
        try:
            free = self._system.free_bytes(self._buffered)
        except OSError as cause:
            raise typed(f"{self.path}: querying the free space failed", cause) from cause
        if free < needed:
            raise NoSpace(f"{self.path}: {needed} bytes are needed and {free} are free; free some space, then "
                          "retry")

    def check_present(self) -> None:
        """Raises StoreClosed if the path no longer leads to this file: decoding could continue, but nothing could be
        reopened."""
        ours = os.fstat(self._buffered)
        try:
            present = os.stat(self.path)
        except OSError:
            present = None
        if present is None or not os.path.samestat(ours, present):
            raise StoreClosed(f"{self.path} was removed or replaced while in use; put it back, or create a new one")

    def close(self) -> None:
        if os.getpid() == self._owner:
            self.unlock()  # a forked process shares the descriptors, so closing alone might keep the lock
        self._let_go()
        self.map = None
        self.close_direct()
        with contextlib.suppress(OSError):
            self._system.close(self._buffered)

    def remove_if_temporary(self) -> None:
        """Removes the file if it is temporary, or was to replace another one and never did."""
        unwanted = self.temporary or self.replaces is not None
        if unwanted and os.getpid() == self._owner:  # a forked process runs the finalizer, too
            with contextlib.suppress(OSError):
                self._system.unlink(self.path)
