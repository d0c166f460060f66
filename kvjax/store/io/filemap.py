"""A store file in memory, of which blocks are copied out without touching a page that might not be there.

To touch a page that the file does not have, or its device does not give, ends the process with SIGBUS. So a page is
brought in and copied by system calls, which say EFAULT instead (`linux.populate`, `linux.copy_mapped`); so does the
second should the page go between the two. Whoever gets less than was asked for reads the rest with `preadv`, which
tells why.
"""

import contextlib
import mmap
import os
import weakref

from kvjax.store.interface import PAGE_BYTES
from kvjax.store.io.system import SystemIO

LEAST_BYTES = 1 << 30  # of a map: address space, which costs nothing until it is read


class FileMap:
    """A map of a file and of what may come after its end; it goes when nobody refers to it.

    Attributes:
      address: of the first byte.
      size: bytes that are mapped; those beyond the end of the file can be had once it has grown.
    """

    def __init__(self, system: SystemIO, descriptor: int, needed: int):
        """At least `needed` bytes. OSError where the system refuses, also where it has no room for so many."""
        self.size = max(LEAST_BYTES, 2 * -(-needed // PAGE_BYTES) * PAGE_BYTES)
        self.address = system.map(descriptor, self.size)
        self._descriptor = descriptor
        self._system = system
        weakref.finalize(self, system.unmap, self.address, self.size).atexit = False

    def check(self) -> None:
        """OSError, with the reason, where the system cannot bring in a page of the file or copy it."""
        if PAGE_BYTES % mmap.PAGESIZE:
            raise OSError(f"memory has pages of {mmap.PAGESIZE} bytes, and blocks lie at multiples of {PAGE_BYTES}")
        try:
            self._system.populate(self.address, PAGE_BYTES)
        except OSError as cause:
            raise OSError(cause.errno, "the kernel cannot bring in pages of a map, as Linux does from 5.14 on "
                                       f"(MADV_POPULATE_READ): {cause.strerror}") from cause
        page = memoryview(bytearray(PAGE_BYTES))
        try:
            copied = self._system.copy_mapped(self.address, page)
        except OSError as cause:
            raise OSError(cause.errno, "the kernel does not copy pages of a map (process_vm_readv): "
                                       f"{cause.strerror}") from cause
        if copied != PAGE_BYTES:
            raise OSError(f"the kernel copies {copied} of the {PAGE_BYTES} bytes of a page of a map")

    def read(self, requests: list[tuple[memoryview, int]]) -> list[tuple[memoryview, int]]:
        """Fills each (view, offset), page-aligned in the file and within the map, and returns those that it could not.
        """
        end = os.fstat(self._descriptor).st_size  # what a page has after it are zeros
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
