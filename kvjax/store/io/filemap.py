"""A memory map of a store file, from which blocks are copied without touching a page that might be missing.

Touching a page that the file does not have, or that its device fails to deliver, ends the process with SIGBUS. So a
page is brought in and copied by system calls, which return EFAULT instead (`libaio.populate`, `libaio.copy_mapped`),
also if the page disappears between the two. What they do not deliver is read with `preadv`, which reports the cause.
"""

import contextlib
import mmap
import os
import weakref

from kvjax.store.geometry import PAGE_BYTES
from kvjax.store.io.system import SystemIO

LEAST_BYTES = 1 << 30  # minimum size of a map: address space costs nothing until it is read


class FileMap:
    """A map of a file, with room for its growth; unmapped when nothing refers to it.

    Attributes:
      address: address of the first byte.
      size: bytes that are mapped; those beyond the end of the file become readable once it has grown.
    """

    def __init__(self, system: SystemIO, descriptor: int, needed: int):
        """Maps at least `needed` bytes. Raises OSError where the system refuses, or has no room for so many."""
        self.size = max(LEAST_BYTES, 2 * -(-needed // PAGE_BYTES) * PAGE_BYTES)
        self.address = system.map(descriptor, self.size)
        self._descriptor = descriptor
        self._system = system
        weakref.finalize(self, system.unmap, self.address, self.size).atexit = False

    def check(self) -> None:
        """Raises OSError, with the reason, where the system cannot bring in or copy a page of the file."""
        if PAGE_BYTES % mmap.PAGESIZE:
            raise OSError(f"memory has pages of {mmap.PAGESIZE} bytes, but blocks lie at multiples of {PAGE_BYTES}")
        try:
            self._system.populate(self.address, PAGE_BYTES)
        except OSError as cause:
            raise OSError(cause.errno, "the kernel cannot bring in pages of a map, which needs Linux 5.14 "
                                       f"(MADV_POPULATE_READ): {cause.strerror}") from cause
        page = memoryview(bytearray(PAGE_BYTES))
        try:
            copied = self._system.copy_mapped(self.address, page)
        except OSError as cause:
            raise OSError(cause.errno, "the kernel does not copy pages of a map (process_vm_readv): "
                                       f"{cause.strerror}") from cause
        if copied != PAGE_BYTES:
            raise OSError(f"the kernel copies only {copied} of the {PAGE_BYTES} bytes of a mapped page")

    def read(self, requests: list[tuple[memoryview, int]]) -> list[tuple[memoryview, int]]:
        """Fills views from the map.

        Args:
          requests: (view, offset in bytes) pairs, page-aligned in the file and within the map.

        Returns:
          The requests that could not be filled.
        """
        end = os.fstat(self._descriptor).st_size  # a page reads as zeros beyond it
        for view, offset in requests:
            with contextlib.suppress(OSError):  # a hint
                self._system.will_need(self.address + offset, len(view))
        return [(view, offset) for view, offset in requests
                if offset + len(view) > end or not self._copy(view, self.address + offset)]

    def _copy(self, view: memoryview, address: int) -> bool:
        try:
            self._system.populate(address, len(view))
            return self._system.copy_mapped(address, view) == len(view)
        except OSError:
            return False
