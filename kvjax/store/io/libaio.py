"""System calls that Python lacks: Linux native asynchronous I/O (`man 2 io_submit`), memory maps, and sync_file_range.

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

# System call numbers of io_setup, io_destroy, io_getevents and io_submit.
_NUMBERS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2), "riscv64": (0, 1, 4, 2)}
_SUPPORTED = sys.platform == "linux" and platform.machine() in _NUMBERS and ctypes.sizeof(ctypes.c_void_p) == 8


def _system_call(which: int, *kinds) -> Callable[..., int]:
    """Returns a function that makes the call and raises OSError as the kernel reports it; ENOSYS where there is no such
    call."""
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
    """Returns a context for `depth` reads in flight."""
    context = ctypes.c_long(0)
    _setup(depth, ctypes.byref(context))
    return context.value


def io_destroy(context: int) -> None:
    """Destroys a context once everything in flight has landed."""
    _destroy(context)


def io_submit(context: int, pointers: np.ndarray) -> int:
    """Submits the control blocks at int64 pointers[n]; returns how many the kernel took, in order. It keeps none of
    them."""
    return _submit(context, pointers.size, pointers.ctypes.data)


def io_getevents(context: int, least: int, events: np.ndarray, seconds: float) -> int:
    """Waits for events.

    Args:
      context: the context.
      least: events to wait for.
      events: EVENT[n] to fill.
      seconds: time limit.

    Returns:
      How many events were stored: `least` or more, or fewer when the time is up.
    """
    whole = int(seconds)
    time = (ctypes.c_long * 2)(whole, int(1e9 * (seconds - whole)))
    return _getevents(context, least, events.size, events.ctypes.data, time)


# ---- functions of the C library


def _function(name: str, result, *kinds) -> Callable[..., int]:
    """Returns a C function that raises OSError from errno when it returns -1; ENOSYS where there is no such function.
    """
    function: Any = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is None:
        def missing(*_) -> int:
            raise OSError(errno.ENOSYS, f"no {name} on {sys.platform}")
        return missing
    function.argtypes, function.restype = kinds, result

    def call(*args) -> int:
        value = function(*args)
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
_RANDOM, _WILL_NEED, _POPULATE_READ = 1, 3, 22  # advice of madvise, on all Linux architectures except alpha


def sync_file_range(descriptor: int, offset: int, size: int, wait: bool) -> None:
    """Starts to write back dirty pages of a range given in bytes; with `wait`, returns when they are written. This is
    no sync: see `man 2 sync_file_range`."""
    _sync_file_range(descriptor, offset, size, 7 if wait else 2)


def map_file(descriptor: int, size: int) -> int:
    """Maps the first `size` bytes of a file for reading, also beyond its end; returns the address. Nothing is read
    ahead except by `will_need`."""
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
    """Returns when these pages are in memory.

    Raises:
      OSError: EFAULT where the file ends earlier or the device fails; EINVAL if the kernel is older than Linux 5.14.
    """
    _madvise(address, size, _POPULATE_READ)


def copy_mapped(address: int, to: memoryview) -> int:
    """Copies mapped memory at `address` to a buffer.

    Returns:
      How many bytes were copied: fewer than `len(to)`, or OSError with EFAULT, where an access would raise SIGBUS.
    """
    ours = (ctypes.c_size_t * 2)(ctypes.addressof(ctypes.c_char.from_buffer(to)), len(to))
    mapped = (ctypes.c_size_t * 2)(address, len(to))
    return _process_vm_readv(os.getpid(), ours, 1, mapped, 1, 0)
