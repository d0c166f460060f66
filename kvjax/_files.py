"""Atomic replacement of files and directories, and bounded reading of files that others wrote."""

import contextlib
import json
import os
import pathlib
import shutil
import stat
from collections.abc import Iterator
from typing import Any, BinaryIO

MOST_JSON_BYTES = 64 << 20  # limit for JSON files that the library wrote
_KINDS = (
    (stat.S_ISDIR, "directory"), (stat.S_ISFIFO, "FIFO"), (stat.S_ISCHR, "character device"),
    (stat.S_ISBLK, "block device"),
)


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a regular file for unbuffered reading. Never blocks: a FIFO would wait for a writer forever.

    Raises:
      OSError: the file cannot be opened.
      ValueError: `path` is not a path, or not that of a regular file.
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
    """Returns the content of a regular file of at most `most_bytes` bytes, without more memory than that takes.

    Raises:
      OSError: the file cannot be opened or read.
      ValueError: the file is larger, or `path` is not a path or not that of a regular file.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise ValueError(f"it has {size} bytes; at most {most_bytes} are read")
        pieces = []
        while size and (piece := file.read(size)):  # Linux returns at most 2 GiB per read
            pieces.append(piece)
            size -= len(piece)
    return b"".join(pieces)


def parse_json(content: bytes) -> Any:
    """Parses a JSON text in UTF-8. Infinity and NaN are accepted, and 1e400 is infinity: callers check ranges.

    Raises:
      ValueError: the text is malformed, its brackets are nested too deep, or an integer has thousands of digits.
    """
    try:
        return json.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError("its brackets are nested too deep") from None


def read_json(path: str | os.PathLike[str]) -> Any:
    """Parses a JSON file of at most MOST_JSON_BYTES; raises as `read_regular` and `parse_json` do."""
    return parse_json(read_regular(path, MOST_JSON_BYTES))


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary path that replaces `path` when the context ends, so that no reader sees half a file.

    The new file and its name are on the device then.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_directory(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary path that replaces the directory `path` when the context ends.

    The old directory is moved aside first; it is removed in the end, or moved back if the replacement fails.
    """
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
        for temporary in (fresh, old):
            shutil.rmtree(temporary, ignore_errors=True)


def write_private(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a new file that only its owner may read, and syncs it and its directory to the device.

    Raises:
      OSError: the file exists or cannot be written; a part of it may be left.
    """
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb", buffering=0) as file:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest):]
        os.fsync(file.fileno())
    sync_directory(os.path.dirname(os.path.abspath(path)))


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Syncs the names in a directory to the device. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
