"""System calls that Python has no names for: Linux native asynchronous I/O (`man 2 io_submit`), maps, and one more.

A context takes control blocks with `io_submit` and answers each with an event, in any order, which `io_getevents`
takes. Structures are those of <linux/aio_abi.h>, as NumPy dtypes, so that many are filled and read at once.
"""

import ctypes
import errno
import mmap
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


# ---- functions of the C library


def _function(name: str, result, *kinds) -> Callable[..., int]:
    """A function that raises OSError as errno says when it returns -1; ENOSYS where there is no such function."""
    found: Any = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if found is None:
        def missing(*_) -> int:
            raise OSError(errno.ENOSYS, f"no {name} on {sys.platform}")
        return missing
    found.argtypes, found.restype = kinds, result

    def call(*args) -> int:
        value = found(*args)
        if value == -1:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return value
    return call


_INT, _SIZE, _OFFSET = ctypes.c_int, ctypes.c_size_t, ctypes.c_int64
_sync_file_range = _function("sync_file_range", _INT, _INT, _OFFSET, _OFFSET, ctypes.c_uint)
_mmap = _function("mmap", ctypes.c_ssize_t, _POINTER, _SIZE, _INT, _INT, _INT, _OFFSET)
_munmap = _function("munmap", _INT, _POINTER, _SIZE)
_madvise = _function("madvise", _INT, _POINTER, _SIZE, _INT)
_process_vm_readv = _function(
    "process_vm_readv", ctypes.c_ssize_t, _INT, _POINTER, ctypes.c_ulong, _POINTER, ctypes.c_ulong, ctypes.c_ulong)
_RANDOM, _WILL_NEED, _POPULATE_READ = 1, 3, 22  # of madvise, on every machine that Linux runs on but for alpha


def sync_file_range(descriptor: int, offset: int, size: int, wait: bool) -> None:
    """Has dirty pages of a range on their way to the device; with `wait`, returns when they are there. That is no sync:
    see `man 2 sync_file_range`."""
    _sync_file_range(descriptor, offset, size, 7 if wait else 2)


def map_file(descriptor: int, size: int) -> int:
    """Address of the first `size` bytes of a file, mapped to be read; also of those that it does not have yet. Nothing
    is read ahead but what `will_need` says."""
    address = _mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    try:
        _madvise(address, size, _RANDOM)
    except OSError:
        unmap(address, size)
        raise
    return address


def unmap(address: int, size: int) -> None:
    _munmap(address, size)


def will_need(address: int, size: int) -> None:
    """Begins to read the pages of a map from `address` on, a multiple of the page size."""
    _madvise(address, size, _WILL_NEED)


def populate(address: int, size: int) -> None:
    """Returns when these pages are in memory; EFAULT where the file ends before or the device fails, EINVAL where the
    kernel has no such advice, which came with Linux 5.14."""
    _madvise(address, size, _POPULATE_READ)


def copy_mapped(address: int, to: memoryview) -> int:
    """How many bytes at `address` of our own memory were copied, all that `to` has room for or fewer: EFAULT or a short
    count where an access would be SIGBUS."""
    ours = (ctypes.c_size_t * 2)(ctypes.addressof(ctypes.c_char.from_buffer(to)), len(to))
    mapped = (ctypes.c_size_t * 2)(address, len(to))
    return _process_vm_readv(os.getpid(), ours, 1, mapped, 1, 0)
