"""The system calls of the flash store, in one object that tests replace by one that fails on purpose."""

import fcntl
import os

from kvjax import _files
from kvjax.store.io import libaio


class SystemIO:
    """Thin names for system calls; each raises OSError as the kernel does.

    Retries, short counts and error types are handled in `kvjax.store.io.file`, not here.

    Attributes:
      asynchronous: whether reads may go through io_submit; False in a subclass that replaces `preadv` alone.
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
        """Takes the exclusive lock of an open file; raises BlockingIOError at once if it is held."""
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def unlock(self, descriptor: int) -> None:
        """Releases the lock, for all processes that share this open file."""
        fcntl.flock(descriptor, fcntl.LOCK_UN)

    def replace(self, old: str, new: str) -> None:
        """Renames a file, replacing the file of that name."""
        os.replace(old, new)

    def sync_directory(self, path: str) -> None:
        """Makes the names in a directory durable."""
        _files.sync_directory(path)

    def write_back(self, descriptor: int) -> None:
        """Starts to write dirty pages to the device and drops clean ones from the page cache; does nothing where there
        is no such call."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def free_bytes(self, descriptor: int) -> int:
        """Returns how many bytes an ordinary user may still write to the file's device."""
        device = os.fstatvfs(descriptor)
        return device.f_bavail * device.f_frsize
