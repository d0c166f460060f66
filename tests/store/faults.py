"""A system that fails on purpose, for the tests of the flash store."""

import ctypes
import errno
import fcntl
import os
import random
import threading

import numpy as np

from kvjax.store.io.libaio import IOCB
from kvjax.store.io.system import SystemIO


class FaultySystem(SystemIO):
    """Real system calls, except where a rule says otherwise.

    A rule is fail(operation, errno) or hang(operation); `heal` ends all rules. `storm` is the probability that a read
    or write is interrupted or does only a part of its work, which a correct caller never notices.

    The rules for `preadv` are those for asynchronous reads too, one by one: whether they work is decided when they are
    submitted, and is told when they land. Those that hang do not land. Under a storm, the kernel also takes only the
    first of what is submitted, or nothing, and `io_getevents` is interrupted.

    While a read would fail, no page of a map comes in, which uses up no failure: what a map does not give is read with
    `preadv`, which meets the same device.
    """

    def __init__(self, seed: int = 0, storm: float = 0.0):
        self.calls: list[str] = []
        self._storm = storm
        self._random = random.Random(seed)
        self._errors: dict[str, list[int]] = {}
        self._gates: dict[str, threading.Event] = {}
        self._fates: dict[tuple[int, int], int] = {}  # (context, data): errno of reads that fail

    def fail(self, operation: str, code: int, times: int = 1_000_000, skip: int = 0) -> None:
        """The operation fails `times` times, after `skip` more that work."""
        self._errors[operation] = [code, skip, times]

    def hang(self, operation: str) -> None:
        """Every call of the operation waits until `heal`."""
        self._gates[operation] = threading.Event()

    def heal(self) -> None:
        self._errors.clear()
        self.release()

    def release(self) -> None:
        """Lets go on what hangs."""
        for gate in self._gates.values():
            gate.set()
        self._gates.clear()

    def open(self, path, flags, mode=0o777):
        self._meet("open_direct" if flags & os.O_DIRECT else "open")
        return os.open(path, flags, mode)

    def preadv(self, descriptor, views, offset):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            self._meet("preadv_direct")
        self._meet("preadv")
        size = self._part(len(views[0]) // 4096) * 4096
        return os.preadv(descriptor, [views[0][:size]] if size else views, offset)

    def io_setup(self, depth):
        self._meet("io_setup")
        return super().io_setup(depth)

    def io_submit(self, context, pointers):
        self._meet("io_submit")
        if self._random.random() < self._storm:
            pointers = pointers[:self._random.randint(0, pointers.size)]
        if not pointers.size:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        reads = [_at(pointer) for pointer in pointers.tolist()]
        sizes = [int(read["nbytes"][0]) for read in reads]
        for read, size in zip(reads, sizes, strict=True):
            read["nbytes"] = self._submitted(context, read, size)
        taken = super().io_submit(context, pointers)
        for read, size in zip(reads, sizes, strict=True):
            read["nbytes"] = size
        return taken

    def _submitted(self, context: int, read: np.ndarray, size: int) -> int:
        """How much of it is really read."""
        self._fates.pop((context, int(read["data"][0])), None)
        self.calls += ("preadv_direct", "preadv")
        try:
            self._rule("preadv_direct")
            self._rule("preadv")
        except OSError as cause:
            self._fates[context, int(read["data"][0])] = cause.errno
            return 0
        return self._part(size // 4096) * 4096

    def io_getevents(self, context, least, events, seconds):
        gate = self._gates.get("preadv")
        if gate is not None and not gate.wait(seconds):
            return 0
        if seconds and self._random.random() < self._storm:
            raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
        count = super().io_getevents(context, least, events, seconds)
        for event in events[:count]:
            code = self._fates.pop((context, int(event["data"])), 0)
            event["result"] = -code if code else event["result"]
        return count

    def populate(self, address, size):
        self.calls.append("populate")
        self._wait_for("preadv")
        rule = self._errors.get("populate") or self._errors.get("preadv")
        if rule is not None and rule[1] == 0 and rule[2] > 0:
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
        super().populate(address, size)

    def copy_mapped(self, address, to):
        self._rule("copy_mapped")
        return super().copy_mapped(address, to[:self._part(len(to) // 4096) * 4096])

    def pwrite(self, descriptor, data, offset):
        self._meet("pwrite")
        return os.pwrite(descriptor, data[:self._part(len(data)) or None], offset)

    def lock(self, descriptor):
        self._meet("lock")
        super().lock(descriptor)

    def sync(self, descriptor):
        self._meet("sync")
        super().sync(descriptor)

    def sync_range(self, descriptor, offset, size, wait):
        if wait:
            self._meet("sync_range")
        super().sync_range(descriptor, offset, size, wait)

    def sync_directory(self, path):
        self._meet("sync_directory")
        super().sync_directory(path)

    def replace(self, old, new):
        self._meet("replace")
        super().replace(old, new)

    def free_bytes(self, descriptor):
        return 0 if "free_bytes" in self._errors else super().free_bytes(descriptor)

    def _meet(self, operation: str) -> None:
        self.calls.append(operation)
        self._wait_for(operation)
        self._rule(operation)

    def _wait_for(self, operation: str) -> None:
        gate = self._gates.get(operation)
        if gate is not None:
            gate.wait(30)

    def _rule(self, operation: str) -> None:
        rule = self._errors.get(operation)
        if rule is not None and rule[1] > 0:
            rule[1] -= 1
        elif rule is not None and rule[2] > 0:
            rule[2] -= 1
            raise OSError(rule[0], os.strerror(rule[0]))
        if operation in ("preadv", "pwrite") and self._random.random() < self._storm:
            raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))

    def _part(self, size: int) -> int:
        """All of `size`, or under a storm sometimes less, but not nothing."""
        return self._random.randint(1, size) if size and self._random.random() < self._storm else size


def _at(pointer: int) -> np.ndarray:
    """IOCB[1] at an address."""
    return np.frombuffer((ctypes.c_char * IOCB.itemsize).from_address(pointer), IOCB)
