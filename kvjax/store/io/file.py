"""One open store file: positional reads and writes, its lock, and what errno means in the library's own errors.

Locks: whoever may write a file holds flock(LOCK_EX) on it from creation or opening to closing, so that there is one
writer at most; readers take no lock, and many may read while one writes. What a writer does to extents that a reader
still wants, the reader's checksums tell. A lock goes with its process, so that a crash leaves none behind.
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
_NO_SUCH_CALL = (errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP)  # of the system, or for such a file


class Replaced(NamedTuple):
    """The saved file whose place another one is to take: its path, and the descriptor that holds its lock."""

    path: str
    descriptor: int


class BlockFile:
    """An open file with a buffered descriptor and, while `direct`, one for O_DIRECT reads.

    Writes are buffered; the kernel writes dirty pages of a range back before it reads the range with O_DIRECT, so both
    descriptors see the same bytes. Thread-safe: all I/O is positional.

    Attributes:
      temporary: the file is deleted when it is closed.
      read_only: the file belongs to somebody else.
      replaces: the saved file whose place this one takes once something is saved in it; None = it is in its place.
      map: the file in memory, once blocks are read through it.
    """

    read_only = False
    replaces: Replaced | None = None
    map: FileMap | None = None
    _outgrown = False  # by the file

    def __init__(self, path: str, descriptor: int, system: SystemIO, *, temporary: bool):
        self.path = path
        self.temporary = temporary
        self.direct = False
        self._system = system
        self._fallback_lock = threading.Lock()
        self._size_lock = threading.Lock()
        self._buffered = descriptor
        self._size = self.size  # or more, unless somebody cuts the file
        self._direct: int | None = None
        self._owner = os.getpid()

    def open_direct(self) -> None:
        """Adds the descriptor for O_DIRECT; where the file system has none, warns and goes on without. Raises
        StoreClosed where another file has come to the path, and ReadFailed where no more files can be opened."""
        if not hasattr(os, "O_DIRECT"):
            self._warn(OSError(errno.EOPNOTSUPP, "this system has no O_DIRECT"))
            return
        try:
            self._direct = self._system.open(self.path, os.O_RDONLY | os.O_DIRECT | os.O_NONBLOCK)
        except OSError as cause:
            if cause.errno in _NO_MORE_FILES:  # says nothing of the file system
                raise typed(f"cannot open {self.path} with O_DIRECT", cause, ReadFailed) from cause
            self._warn(cause)
            return
        if not os.path.samestat(os.fstat(self._direct), os.fstat(self._buffered)):
            self.close_direct()
            raise StoreClosed(f"{self.path} was replaced while it was being opened; open it again")
        self.direct = True

    def map_blocks(self) -> None:
        """Has `read` look for blocks in a map of the file first. OSError, with the reason, where it cannot be."""
        made = FileMap(self._system, self._buffered, os.fstat(self._buffered).st_size)
        made.check()
        self.map = made

    def _read_map(self, mapped: FileMap, requests: list[tuple[memoryview, int]]) -> list[tuple[memoryview, int]]:
        """Fills what a map of the file gives, and returns the rest: a page may be missing, and the file may have grown
        to where the system has no room for another map."""
        needed = max((offset + len(view) for view, offset in requests), default=0)
        if needed > mapped.size:
            try:
                mapped = self.map = FileMap(self._system, self._buffered, needed)
            except OSError as cause:
                if not self._outgrown:
                    self._outgrown = True
                    logging.warning("%s: the system refuses a map of %d bytes (%s); reads beyond %d do without, which "
                                    "takes longer", self.path, needed, cause, mapped.size)
                return requests
        return mapped.read(requests)

    def close_direct(self) -> None:
        """Closes the descriptor for O_DIRECT, if there is one."""
        descriptor, self._direct, self.direct = self._direct, None, False
        if descriptor is not None:
            with contextlib.suppress(OSError):
                self._system.close(descriptor)

    def _warn(self, cause: OSError) -> None:
        logging.warning("%s: the filesystem refuses O_DIRECT (%s); reads go through the page cache, so read times "
                        "depend on free memory", self.path, cause)

    def read(self, requests: Iterable[tuple[memoryview, int]], where: Where, direct: bool = True) -> None:
        """Fills each (view, offset); with O_DIRECT, or through a map, all of them are page-aligned. Raises ShortRead or
        ReadFailed."""
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
        """Whether to go on with O_DIRECT after an error that allows another try; raises after any other."""
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
        """What to raise for a read at `offset` that the system refused."""
        return typed(f"{self.path}: reading {where(offset)} at offset {offset} failed", cause, ReadFailed)

    @property
    def direct_descriptor(self) -> int:
        """The one that is read past the page cache; only while `direct`."""
        return self._descriptor(direct=True)

    def redirect(self, reads: np.ndarray) -> None:
        """Corrects descriptor and offset of IOCB reads[n] that were meant for `direct_descriptor`."""

    def _short(self, offset: int, got: int, wanted: int, where: Where) -> ShortRead:
        return ShortRead(f"{self.path}: the file ends {got} bytes into {where(offset)} at offset {offset}, where "
                         f"{wanted} were expected; it was truncated, restore it or prefill again")

    @property
    def size(self) -> int:
        """Bytes of the file at this moment."""
        return os.fstat(self._buffered).st_size

    def write(self, data, offset: int, where: Where) -> None:
        """Writes all of `data` at `offset`. Raises NoSpace or WriteFailed, and the range then holds anything; or
        ShortRead, and nothing was written."""
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
        """ShortRead where somebody has cut the file: to write behind its end would fill what is missing with zeros, so
        that nobody notices any more, and a save would replace one that may still be whole."""
        with self._size_lock:
            size, least = self.size, self._size
        if size < least:
            raise ShortRead(f"{self.path} has {size} bytes, where {least} were written; it was truncated, restore it "
                            "or save to another file")

    def sync(self) -> None:
        """Returns when all that was written is on the device. Raises NoSpace or WriteFailed; then the kernel may have
        dropped any of it, also what it seemed to keep, and must not be asked again."""
        try:
            self._system.sync(self._buffered)
        except OSError as cause:
            raise typed(f"{self.path}: syncing to the device failed", cause) from cause

    @property
    def place(self) -> str:
        """The path at which the file is found once something is saved in it."""
        return self.path if self.replaces is None else self.replaces.path

    def take_place(self) -> None:
        """Moves the file to the place of the one that it replaces, if there is one. Raises StoreClosed where another
        file has come there, and WriteFailed."""
        if self.replaces is None:
            return
        path, descriptor = self.replaces
        with contextlib.suppress(FileNotFoundError):
            if self.path != path and not os.path.samestat(os.stat(path), os.fstat(descriptor)):
                raise StoreClosed(f"{path} was replaced while its successor was made; save to another directory")
        self.move_to(path)
        self._let_go()

    def move_to(self, path: str) -> None:
        """Gives the file a path, for good when this returns. Raises WriteFailed."""
        try:
            if self.path != path:
                self._system.replace(self.path, os.path.realpath(path))
                self.path = path
            self._system.sync_directory(os.path.dirname(os.path.abspath(path)))
        except OSError as cause:
            raise typed(f"{path}: its directory could not be written", cause) from cause

    def _let_go(self) -> None:
        """Gives the replaced file back, with its lock."""
        replaced, self.replaces = self.replaces, None
        if replaced is not None:
            with contextlib.suppress(OSError):
                self._system.close(replaced.descriptor)

    def write_back(self) -> None:
        """Has what was written on its way to the device while others compute: O_DIRECT reads would wait for it. A hint,
        so that a refusal is none of anybody's business; without O_DIRECT the page cache is what is read from."""
        if self.direct:
            with contextlib.suppress(OSError):
                self._system.write_back(self._buffered)

    def write_back_range(self, offset: int, size: int, wait: bool) -> None:
        """The same for a range; with `wait`, returns when O_DIRECT reads of it need not wait. It has their descriptor,
        so that `sync` is told of an error, too. Raises NoSpace or WriteFailed: what is there may be lost."""
        if not self.direct:
            return
        try:
            self._system.sync_range(self.direct_descriptor, offset, size, wait)
        except OSError as cause:
            if cause.errno not in _NO_SUCH_CALL:
                raise typed(f"{self.path}: writing back {size} bytes at offset {offset} failed", cause) from cause

    def settle(self) -> None:
        """Waits until what was written is on the device. On a descriptor of its own: an error is told to each open file
        once, and `sync` must not miss it. Raises NoSpace or WriteFailed."""
        try:
            descriptor = self._system.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                self._system.sync(descriptor)
            finally:
                self._system.close(descriptor)
        except OSError as cause:
            raise typed(f"{self.path}: syncing to the device failed", cause) from cause

    def mapped(self) -> np.ndarray:
        """uint8[bytes] the file as it is now, read-only; it stays mapped while the array is there. Raises ReadFailed,
        or ShortRead where nothing is left of it."""
        try:
            return np.frombuffer(mmap.mmap(self._buffered, 0, access=mmap.ACCESS_READ), np.uint8)
        except OSError as cause:
            raise typed(f"{self.path}: mapping the file failed", cause, ReadFailed) from cause
        except ValueError as cause:
            raise ShortRead(f"{self.path} is empty: it was truncated, restore it or prefill again") from cause

    def lock(self) -> None:
        """Takes the lock of a writer, until the file is closed. Raises StoreLocked or WriteFailed."""
        try:
            self._system.lock(self._buffered)
        except BlockingIOError as cause:
            raise StoreLocked(f"{self.path} is in use by another live store; close that one or choose another "
                              "path") from cause
        except OSError as cause:
            raise typed(f"cannot lock {self.path}", cause, remedy="choose a path on a local filesystem") from cause

    def unlock(self) -> None:
        """Gives the lock of a writer back."""
        with contextlib.suppress(OSError):  # then closing does it
            self._system.unlock(self._buffered)

    def check_room(self, needed: int) -> None:
        """NoSpace unless the device has `needed` bytes free."""
        try:
            free = self._system.free_bytes(self._buffered)
        except OSError as cause:
            raise typed(f"{self.path}: how much is free cannot be told", cause) from cause
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
        if os.getpid() == self._owner:
            self.unlock()  # a forked process has our descriptors too, so that closing ours would leave the lock
        self._let_go()
        self.map = None
        self.close_direct()
        with contextlib.suppress(OSError):
            self._system.close(self._buffered)

    def remove_if_temporary(self) -> None:
        """Removes a temporary file, and one that never took the place of another."""
        unwanted = self.temporary or self.replaces is not None
        if unwanted and os.getpid() == self._owner:  # a forked process runs our finalizer too
            with contextlib.suppress(OSError):
                self._system.unlink(self.path)
