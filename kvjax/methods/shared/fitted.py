"""Files that methods are made from, read again only when they were replaced."""

import functools
import os
from collections.abc import Callable
from typing import Any


def read_once(load: Callable[..., Any]) -> Callable[..., Any]:
    """`load(path, *more)`, whose results are kept as long as the file or directory is the one it was."""

    @functools.cache
    def kept(path: str, stamp: tuple[int, ...] | None, *more):
        return load(path, *more)

    @functools.wraps(load)
    def loaded(path: str, *more):
        return kept(path, _stamp(path), *more)

    return loaded


def _stamp(path: str) -> tuple[int, ...] | None:
    """Changes when something else is written to that path; None where nothing is."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
