"""A system that fails on purpose, for the tests of the flash store."""

import errno
import fcntl
import os
import random
import threading

from kvjax.store.system import SystemIO


class FaultySystem(SystemIO):
    """Real system calls, except where a rule says otherwise.

    A rule is fail(operation, errno) or hang(operation); `heal` ends all rules. `storm` is the probability that a read
    or write is interrupted or does only a part of its work, which a correct caller never notices.
    """

    def __init__(self, seed: int = 0, storm: float = 0.0):
        self.calls: list[str] = []
        self._storm = storm
        self._random = random.Random(seed)
        self._errors: dict[str, list[int]] = {}
        self._gates: dict[str, threading.Event] = {}

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

    def pwrite(self, descriptor, data, offset):
        self._meet("pwrite")
        return os.pwrite(descriptor, data[:self._part(len(data)) or None], offset)

    def lock(self, descriptor):
        self._meet("lock")
        super().lock(descriptor)

    def sync(self, descriptor):
        self._meet("sync")
        super().sync(descriptor)

    def sync_directory(self, path):
        self._meet("sync_directory")
        super().sync_directory(path)

    def free_bytes(self, descriptor):
        return 0 if "free_bytes" in self._errors else super().free_bytes(descriptor)

    def _meet(self, operation: str) -> None:
        self.calls.append(operation)
        gate = self._gates.get(operation)
        if gate is not None:
            gate.wait(30)
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
