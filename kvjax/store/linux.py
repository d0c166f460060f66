"""The system calls of Linux native asynchronous I/O (`man 2 io_submit`), and one more, which Python has no names for.

A context takes control blocks with `io_submit` and answers each with an event, in any order, which `io_getevents`
takes. Structures are those of <linux/aio_abi.h>, as NumPy dtypes, so that many are filled and read at once.
"""

import ctypes
import errno
import os
import platform
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

_ORDER = ("key", "rw_flags") if sys.byteorder == "little" else ("rw_flags", "key")
IOCB = np.dtype([("data", "u8"), (_ORDER[0], "u4"), (_ORDER[1], "u4"), ("opcode", "u2"), ("priority", "i2"),
                 ("descriptor", "u4"), ("buffer", "u8"), ("nbytes", "u8"), ("offset", "i8"), ("reserved", "u8"),
                 ("flags", "u4"), ("eventfd", "u4")])
EVENT = np.dtype([("data", "u8"), ("iocb", "u8"), ("result", "i8"), ("result2", "i8")])

# Numbers of io_setup, io_destroy, io_getevents, io_submit.
_NUMBERS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2), "riscv64": (0, 1, 4, 2)}
_SUPPORTED = sys.platform == "linux" and platform.machine() in _NUMBERS and ctypes.sizeof(ctypes.c_void_p) == 8


def _system_call(which: int, *kinds) -> Callable[..., int]:
    """A function that makes the call and raises OSError as the kernel says; ENOSYS where there is no such call."""
    if not _SUPPORTED:
        def missing(*_) -> int:
            raise OSError(errno.ENOSYS, f"no native asynchronous I/O on {sys.platform} {platform.machine()}")
        return missing
    number = _NUMBERS[platform.machine()][which]
    function = ctypes.CDLL(None, use_errno=True)["syscall"]
    function.argtypes, function.restype = (ctypes.c_long, *kinds), ctypes.c_long

    def call(*args) -> int:
        result = function(number, *args)
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return result
    return call


_LONG, _POINTER = ctypes.c_long, ctypes.c_void_p
_setup = _system_call(0, _LONG, _POINTER)
_destroy = _system_call(1, _LONG)
_getevents = _system_call(2, _LONG, _LONG, _LONG, _POINTER, _POINTER)
_submit = _system_call(3, _LONG, _LONG, _POINTER)


def io_setup(depth: int) -> int:
    """A context for `depth` reads in flight."""
    context = ctypes.c_long(0)
    _setup(depth, ctypes.byref(context))
    return context.value


def io_destroy(context: int) -> None:
    """Ends a context once everything in flight has landed."""
    _destroy(context)


def io_submit(context: int, pointers: np.ndarray) -> int:
    """How many of the control blocks at int64 pointers[n] the kernel took, the first ones; it keeps none of them."""
    return _submit(context, pointers.size, pointers.ctypes.data)


def io_getevents(context: int, least: int, events: np.ndarray, seconds: float) -> int:
    """Fills EVENT events[n] and returns how many: `least` or more, or fewer when the time is up."""
    whole = int(seconds)
    time = (ctypes.c_long * 2)(whole, int(1e9 * (seconds - whole)))
    return _getevents(context, least, events.size, events.ctypes.data, time)


def sync_file_range(descriptor: int, offset: int, size: int, wait: bool) -> None:
    """Has dirty pages of a range on their way to the device; with `wait`, returns when they are there. That is no sync:
    see `man 2 sync_file_range`."""
    if _sync_file_range(descriptor, offset, size, 7 if wait else 2) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _missing(*_) -> int:
    ctypes.set_errno(errno.ENOSYS)
    return -1


_sync_file_range: Any = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", _missing)
if _sync_file_range is not _missing:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
