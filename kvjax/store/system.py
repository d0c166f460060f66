"""Every system call of the flash store, in one object that tests replace by one that fails on purpose."""

import fcntl
import os

from kvjax import files
from kvjax.store import linux


class SystemIO:
    """Thin names for system calls; each raises OSError as the kernel does.

    Where retries, short counts and error types are decided is `kvjax.store.file`, not here.

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
    io_setup = staticmethod(linux.io_setup)
    io_destroy = staticmethod(linux.io_destroy)
    io_submit = staticmethod(linux.io_submit)
    io_getevents = staticmethod(linux.io_getevents)
    sync_range = staticmethod(linux.sync_file_range)
    map = staticmethod(linux.map_file)
    unmap = staticmethod(linux.unmap)
    will_need = staticmethod(linux.will_need)
    populate = staticmethod(linux.populate)
    copy_mapped = staticmethod(linux.copy_mapped)

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
        files.sync_directory(path)

    def write_back(self, descriptor: int) -> None:
        """Begins to bring what was written to the device, and lets go of what is there; nothing where there is no such
        call."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def free_bytes(self, descriptor: int) -> int:
        """What an ordinary user may still write to the file's device."""
        device = os.fstatvfs(descriptor)
        return device.f_bavail * device.f_frsize
