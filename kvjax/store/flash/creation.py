"""Creating and opening store files: what may be replaced, how much space is needed, and who may write."""

import contextlib
import functools
import glob
import os
import stat
import time
import uuid

from kvjax import _validate
from kvjax.errors import FormatMismatch, NoSpace, ReadFailed, StoreClosed, StoreError, StoreLocked, WriteFailed, typed
from kvjax.store.format.pages import HEADER_BYTES, Header, is_ours
from kvjax.store.geometry import PAGE_BYTES
from kvjax.store.io.file import BlockFile, Replaced
from kvjax.store.io.system import SystemIO

MODE = 0o600  # of store files, whatever the umask: they hold the contents of prompts
STILLBORN_SECONDS = 60.0  # a temporary file that has been empty for this long was abandoned
_KINDS = ((stat.S_ISDIR, "a directory"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))


def create_file(path, header: Header, system: SystemIO, *, temporary: bool, direct: bool, max_bytes: int | None,
                least_blocks: int = 1) -> BlockFile:
    """Creates the file `path`, or a temporary file in the directory `path`, and writes its header.

    A kvjax file without a writer is replaced; its readers keep reading the old one. If something was saved in it, the
    new file is created beside it and takes its place at its own first save: until then the old one can be restored, and
    if there is no save, it stays. Temporary files that a crash left in the directory are removed. Only the user may
    read and write the new file, whatever the modes of the old one were.

    After an error everything is as before; if only the last step failed, syncing the directory, there is an empty store
    instead.

    Args:
      path: a file, or a directory for a temporary one, which is created if it is missing.
      header: what the file is for.
      system: system calls.
      temporary: whether `path` is a directory for a temporary file.
      direct: whether to open a descriptor for O_DIRECT.
      max_bytes: the largest size that the file may reach; None = any.
      least_blocks: blocks that have to fit at least.

    Returns:
      The open, locked file.

    Raises:
      ConfigError: `path` cannot be a path, or the header cannot be written.
      FormatMismatch: another kind of file is at the path.
      StoreLocked: another store may write it.
      StoreClosed: it was removed meanwhile.
      NoSpace: the device or `max_bytes` is too small.
      WriteFailed: the path cannot be written.
    """
    path = _validate.path("path", path)
    if temporary:
        path = _place_in(path, system)
    descriptor, made = _open_for_writing(path, system)
    with contextlib.ExitStack() as undo:
        file = _tentative(path, descriptor, made, system, undo)
        kept = _claim(file, descriptor, system)
        _check_space(path, descriptor, system, HEADER_BYTES + least_blocks * header.geometry.extent_bytes, max_bytes,
                     kept)
        if not made:
            file = _beside(path, system, undo)
        file.temporary = temporary
        file.write(header.pack().ljust(HEADER_BYTES, b"\0"), 0, lambda _: "the header")
        if direct:
            undo.callback(file.close_direct)
            file.open_direct()
        if kept:
            file.replaces = Replaced(path, descriptor)
        elif not temporary:
            file.sync()
            file.move_to(path)
        undo.pop_all()
    if not made and not kept:
        _close(descriptor, system)
    return file


def _place_in(directory: str, system: SystemIO) -> str:
    """Makes a directory ready for temporary files; returns the path of a new one in it."""
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
    except OSError as cause:
        raise typed(f"cannot use the directory {directory}", cause, remedy="choose another directory") from cause
    remove_orphans(directory, system)
    return _name_in(directory)


def _name_in(directory: str) -> str:
    return os.path.join(directory, f"kvjax-{os.getpid()}-{uuid.uuid4().hex[:12]}.kv")


def _tentative(path: str, descriptor: int, made: bool, system: SystemIO, undo: contextlib.ExitStack) -> BlockFile:
    """Returns an open file that is closed, and removed if this call made it, should a later step fail."""
    undo.callback(_close, descriptor, system)
    if made:
        undo.push(functools.partial(_remove_made, path, system))  # runs before the descriptor and its lock are closed
    return BlockFile(path, descriptor, system, temporary=False)


def _beside(path: str, system: SystemIO, undo: contextlib.ExitStack) -> BlockFile:
    """Returns a locked file that is to replace `path`. Emptying that one instead would raise SIGBUS in processes that
    have it mapped, and lose what was saved in it if a later step fails."""
    directory = os.path.dirname(os.path.realpath(path))
    remove_orphans(directory, system)
    name = _name_in(directory)
    descriptor, made = _open_for_writing(name, system)
    file = _tentative(name, descriptor, made, system, undo)
    file.lock()
    return file


def open_file(path: str, system: SystemIO, *, direct: bool, read_only: bool) -> tuple[BlockFile, Header]:
    """Opens a file that `create_file` made, and reads its header.

    Args:
      path: the file.
      system: system calls.
      direct: whether to open a descriptor for O_DIRECT.
      read_only: open for reading, without a lock.

    Returns:
      The open file and its header.

    Raises:
      ConfigError: `path` cannot be a path.
      StoreClosed: there is no file.
      FormatMismatch: it is no store file of this version.
      ChecksumMismatch: its header is damaged.
      StoreLocked: another store may write it.
      ReadFailed, WriteFailed: the system refuses.
    """
    path = _validate.path("path", path)
    _check_place(path)
    try:
        descriptor = system.open(path, (os.O_RDONLY if read_only else os.O_RDWR) | os.O_NONBLOCK)
    except FileNotFoundError as cause:
        raise StoreClosed(f"{path} does not exist; give the path of a saved store file") from cause
    except OSError as cause:
        kind, use = (ReadFailed, "reading") if read_only else (WriteFailed, "writing (to read it: read_only=True)")
        raise typed(f"cannot open {path} for {use}", cause, kind) from cause
    with contextlib.ExitStack() as undo:
        undo.callback(_close, descriptor, system)
        _check_kind(path, descriptor)
        file = BlockFile(path, descriptor, system, temporary=False)
        file.read_only = read_only
        if not read_only:
            file.lock()
            file.check_present()  # the previous holder of the lock may have removed the file
        header = Header.unpack(_beginning(path, descriptor, system, PAGE_BYTES), path)
        if direct:
            file.open_direct()
        undo.pop_all()
    return file, header


def remove_orphans(directory: str, system: SystemIO) -> None:
    """Removes temporary files whose process is gone, which nobody locks any more.

    A file that is empty and young stays: its creator may be about to lock it.
    """
    for path in glob.glob(os.path.join(glob.escape(directory), "kvjax-*-????????????.kv")):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:  # locked, gone, or of another user
            descriptor = system.open(path, os.O_RDWR | os.O_NONBLOCK)
            stack.callback(_close, descriptor, system)
            page = _beginning(path, descriptor, system, PAGE_BYTES)
            if is_ours(page) if page else time.time() - os.fstat(descriptor).st_mtime > STILLBORN_SECONDS:
                system.lock(descriptor)
                system.unlink(path)


def _open_for_writing(path: str, system: SystemIO) -> tuple[int, bool]:
    """Returns a descriptor and whether this call created the file. O_NONBLOCK, because opening a pipe must not block
    before it is refused."""
    flags = os.O_RDWR | os.O_NONBLOCK
    try:
        with contextlib.suppress(FileExistsError):
            descriptor = system.open(path, flags | os.O_CREAT | os.O_EXCL, MODE)
            with contextlib.suppress(OSError):  # a file system without modes
                os.fchmod(descriptor, MODE)
            return descriptor, True
    except OSError as cause:
        raise _refused(path, cause) from cause
    _check_place(path)
    try:
        return system.open(path, flags), False
    except OSError as cause:
        raise _refused(path, cause) from cause


def _refused(path: str, cause: OSError) -> StoreError:
    return typed(f"cannot create the store file {path}", cause, remedy="use a path in an existing, writable directory")


def _remove_made(path: str, system: SystemIO, kind: type[BaseException] | None, *_) -> None:
    """Removes a file that a failed call created, unless another store has locked or removed it first."""
    if kind is not None and not issubclass(kind, (StoreLocked, StoreClosed)):
        with contextlib.suppress(OSError):
            system.unlink(path)


def _claim(file: BlockFile, descriptor: int, system: SystemIO) -> bool:
    """Locks the file and checks that replacing it destroys no foreign data. Returns whether something may have been
    saved in it, that is, whether a superblock of any version was written, whole or not."""
    _check_kind(file.path, descriptor)
    file.lock()
    file.check_present()  # the previous holder of the lock may have removed the file, as a failed call does
    beginning = _beginning(file.path, descriptor, system, HEADER_BYTES)
    if beginning and not is_ours(beginning):
        raise FormatMismatch(f"{file.path} exists and is not a kvjax store file; choose another path or remove it")
    return any(beginning[PAGE_BYTES:])


def _beginning(path: str, descriptor: int, system: SystemIO, size: int) -> bytes:
    """Returns the first `size` bytes of a file, or fewer if it is shorter."""
    page, got, more = memoryview(bytearray(size)), 0, 1
    while more and got < size:
        try:
            more = system.preadv(descriptor, (page[got:],), got)
            got += more
        except InterruptedError:
            continue
        except OSError as cause:
            raise typed(f"{path}: reading the header failed", cause, ReadFailed) from cause
    return bytes(page[:got])


def _check_place(path: str) -> None:
    """Raises FormatMismatch for anything but a regular file, before it is opened: opening a device may have effects.
    Paths that do not exist or cannot be examined are left to `open`."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return
    _check_mode(path, mode)


def _check_kind(path: str, descriptor: int) -> None:
    _check_mode(path, os.fstat(descriptor).st_mode)


def _check_mode(path: str, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for is_one, name in _KINDS if is_one(mode)), "a device")
        raise FormatMismatch(f"{path} is {kind}, not a file; choose another path")


def _close(descriptor: int, system: SystemIO) -> None:
    """Closes a descriptor and ignores errors: everything written through it was confirmed by `sync`, and the descriptor
    is gone in any case."""
    with contextlib.suppress(OSError):
        system.close(descriptor)


def _check_space(path: str, descriptor: int, system: SystemIO, least: int, max_bytes: int | None, kept: bool) -> None:
    """Raises NoSpace unless the device can hold `least` bytes, or `max_bytes` if given. The space of the existing file
    counts as free unless it is kept."""
    if max_bytes is not None and least > max_bytes:
        raise NoSpace(f"{path}: at least {least} bytes are needed, more than max_bytes={max_bytes}; increase max_bytes")
    needed = max_bytes or least
    try:
        freed = 0 if kept else os.fstat(descriptor).st_blocks * 512
        free = system.free_bytes(descriptor) + freed
    except OSError as cause:
        raise typed(f"{path}: querying the free space failed", cause) from cause
    if free < needed:
        remedy = "remove the cache that is saved there, " if kept else ""
        raise NoSpace(f"{path}: {needed} bytes are needed and {free} are free; {remedy}free some space, lower "
                      "max_bytes, or choose another device")
