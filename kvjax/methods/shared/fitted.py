"""Cached reading of the files that methods are made from."""

import functools
import os
from collections.abc import Callable
from typing import Any


def read_once(load: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `load(path, *more)` with its results cached until the file or directory at the path is replaced."""

    @functools.cache
    def kept(path: str, stamp: tuple[int, ...] | None, *more):
        return load(path, *more)

    @functools.wraps(load)
    def loaded(path: str, *more):
        return kept(path, _stamp(path), *more)

    return loaded


def _stamp(path: str) -> tuple[int, ...] | None:
    """Returns a value that changes when something else is written to the path; None if nothing is there."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
