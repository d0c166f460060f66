"""Every system call of the flash store, in one object that tests replace by one that fails on purpose."""

import fcntl
import os

from kvjax import _files
from kvjax.store.io import libaio


class SystemIO:
    """Thin names for system calls; each raises OSError as the kernel does.

    Where retries, short counts and error types are decided is `kvjax.store.io.file`, not here.

    Attributes:
      asynchronous: whether reads may go through io_submit; one that does something of its own in `preadv` alone says
        no.
    """

    asynchronous = True

    open = staticmethod(os.open)
    close = staticmethod(os.close)
    preadv = staticmethod(os.preadv)
    pwrite = staticmethod(os.pwrite)
    unlink = staticmethod(os.unlink)
    sync = staticmethod(getattr(os, "fdatasync", os.fsync))  # macOS has no fdatasync
    io_setup = staticmethod(libaio.io_setup)
    io_destroy = staticmethod(libaio.io_destroy)
    io_submit = staticmethod(libaio.io_submit)
    io_getevents = staticmethod(libaio.io_getevents)
    sync_range = staticmethod(libaio.sync_file_range)
    map = staticmethod(libaio.map_file)
    unmap = staticmethod(libaio.unmap)
    will_need = staticmethod(libaio.will_need)
    populate = staticmethod(libaio.populate)
    copy_mapped = staticmethod(libaio.copy_mapped)

    def lock(self, descriptor: int) -> None:
        """Takes the exclusive lock of an open file, or raises BlockingIOError at once."""
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def unlock(self, descriptor: int) -> None:
        """Gives it back, for all processes that have this open file."""
        fcntl.flock(descriptor, fcntl.LOCK_UN)

    def replace(self, old: str, new: str) -> None:
        """Gives a file the name of another, which goes."""
        os.replace(old, new)

    def sync_directory(self, path: str) -> None:
        """Makes the names in a directory last."""
        _files.sync_directory(path)

    def write_back(self, descriptor: int) -> None:
        """Begins to bring what was written to the device, and lets go of what is there; nothing where there is no such
        call."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def free_bytes(self, descriptor: int) -> int:
        """What an ordinary user may still write to the file's device."""
        device = os.fstatvfs(descriptor)
        return device.f_bavail * device.f_frsize
