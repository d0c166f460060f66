"""Files and directories that are written whole or not at all."""

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator


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
