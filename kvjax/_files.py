"""Files and directories that are written whole or not at all, and files of others, which are read with care."""

import contextlib
import json
import os
import pathlib
import shutil
import stat
from collections.abc import Iterator
from typing import Any, BinaryIO

MOST_JSON_BYTES = 64 << 20  # of files that the library writes
_KINDS = (
    (stat.S_ISDIR, "directory"), (stat.S_ISFIFO, "FIFO"), (stat.S_ISCHR, "character device"),
    (stat.S_ISBLK, "block device"),
)


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a regular file for reading, without a buffer and without waiting: a FIFO would wait for a writer for ever.

    Raises OSError where it cannot be opened, and ValueError for what is no regular file or no path.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "special file")
            raise ValueError(f"it is a {kind}, not a regular file")
        return os.fdopen(descriptor, "rb", buffering=0)
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """Returns the content of a regular file of at most `most_bytes` bytes; takes no more memory than the file has.

    Raises OSError where it cannot be opened or read, and ValueError for a larger file, and for what is no regular file
    or no path.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise ValueError(f"it has {size} bytes; at most {most_bytes} are read")
        pieces = []
        while size and (piece := file.read(size)):  # Linux gives 2 GiB at most at once
            pieces.append(piece)
            size -= len(piece)
    return b"".join(pieces)


def parse_json(content: bytes) -> Any:
    """Returns what a JSON text in UTF-8 says; ValueError for whatever keeps it from being read.

    Among that are brackets nested too deep and integers of thousands of digits. Infinity and NaN are numbers, as Python
    writes them, and 1e400 is infinity: the range of a number is for its user to check.
    """
    try:
        return json.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError("its brackets are nested too deep") from None


def read_json(path: str | os.PathLike[str]) -> Any:
    """Returns what a JSON file says. Raises OSError where it cannot be opened, ValueError for whatever else keeps it
    from being read (`read_regular`, `parse_json`)."""
    return parse_json(read_regular(path, MOST_JSON_BYTES))


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A temporary path beside `path` that takes its place at the end, so that no reader sees half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_directory(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """The same for a directory. The old one is moved aside before the new one takes its place, and removed then."""
    fresh, old = (path.with_name(f".{path.name}.{os.getpid()}.{kind}") for kind in ("tmp", "old"))
    try:
        yield fresh
        if path.exists():
            os.replace(path, old)
        os.replace(fresh, path)
    except BaseException:
        if old.exists():
            os.replace(old, path)
        raise
    finally:
        for one in (fresh, old):
            shutil.rmtree(one, ignore_errors=True)


def write_private(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a new file that only its owner may read, and returns once it is on the device, its name included.

    Raises OSError; then there may be a part of it.
    """
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb", buffering=0) as file:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest):]
        os.fsync(file.fileno())
    sync_directory(os.path.dirname(os.path.abspath(path)))


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Returns once the names in a directory are on the device. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
