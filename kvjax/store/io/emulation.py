"""Flash devices that are not there: a queue says when a device would have answered, `EmulatedIO` waits until then.

Emulation only slows down. Where the host needs longer than the device would, the answer is as late as the host makes
it, and `EmulatedIO.late` counts it. A host too busy even to ask in time goes uncounted: `scripts/bench_profiles.py`
compares what is reached with the curve, and says which points this host cannot reach.
"""

import bisect
import contextlib
import ctypes
import select
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from kvjax.errors import ConfigError
from kvjax.store.io.libaio import EVENT, IOCB
from kvjax.store.io.profiles import NATIVE, PROFILES, Profile
from kvjax.store.io.system import SystemIO


def system_of(name: str) -> SystemIO:
    """System calls as on that device: the host's own for "native". ConfigError on an unknown name."""
    if name == NATIVE:
        return SystemIO()
    if name not in PROFILES:
        raise ConfigError(f"unknown device profile {name!r}; use one of {', '.join([NATIVE, *PROFILES])}")
    return EmulatedIO(PROFILES[name])


class CommandQueue:
    """When a device would finish each command; knows no clock. Thread-safe.

    Commands may be told in another order than they arrive in, as threads are woken late: one that arrived before
    others gets the transfer time that they left idle.
    """

    SPANS = 32  # of time without a pause between transfers that are remembered; what lies before counts as busy

    def __init__(self, profile: Profile):
        self._profile = profile
        self._lock = threading.Lock()
        self._busy: list[tuple[float, float]] = []  # such spans, ascending
        self._idle_from = 0.0  # no transfer starts before
        self._ends = [0.0] * profile.depth  # the latest `depth` ends, ascending

    def finish_times(self, arrival: float, sizes: Sequence[int] | np.ndarray) -> list[float]:
        """Seconds on the caller's clock when each of the commands that arrive then is done."""
        times: list[float] = []
        with self._lock:
            for first in range(0, len(sizes), self._profile.depth):
                part = np.asarray(sizes[first:first + self._profile.depth])
                together = self._finish_together(arrival, part)
                times += [self._finish_time(arrival, size) for size in part.tolist()] if together is None else together
        return times

    def _finish_together(self, arrival: float, sizes: np.ndarray) -> list[float] | None:
        """What `_finish_time` says of two to `depth` commands, without a loop; None where the first could be
        transferred before what was told earlier."""
        ready = np.maximum(arrival, self._ends[:sizes.size]) + self._profile.latency
        since, until = self._busy[-1] if self._busy else (self._idle_from, self._idle_from)
        if sizes.size < 2 or ready[0] < since:
            return None
        seconds = self._profile.transfer_seconds(sizes)
        done = np.cumsum(seconds)
        base = np.maximum.accumulate(np.maximum(ready - (done - seconds), until))  # grows where the device was idle
        ends = base + done
        idle = np.diff(base, prepend=until) > 0  # before it was transferred
        idle[0] |= not self._busy
        self._note_busy((ends - seconds)[idle].tolist(), ends[np.append(idle[1:], True)].tolist())
        times: list[float] = ends.tolist()
        self._ends = [*self._ends[sizes.size:], *times]
        return times

    def _note_busy(self, starts: list[float], ends: list[float]) -> None:
        """Spans after all that are known; one end more than starts is that of the last known one."""
        if len(ends) > len(starts):
            self._busy[-1] = self._busy[-1][0], ends.pop(0)
        self._busy.extend(zip(starts, ends, strict=True))
        for _ in range(len(self._busy) - self.SPANS):
            self._idle_from = self._busy.pop(0)[1]

    def _finish_time(self, arrival: float, size: int) -> float:
        begin = max(arrival, self._ends[0])  # once fewer than `depth` commands are in the device
        end = self._transfer(begin + self._profile.latency, self._profile.transfer_seconds(size))
        bisect.insort(self._ends, end)
        del self._ends[0]
        return end

    def _transfer(self, ready: float, seconds: float) -> float:
        """The end of the first idle span so long, from `ready` on, which is then busy."""
        start, busy = max(ready, self._idle_from), self._busy
        place = bisect.bisect_left(busy, (start, start))
        if place and busy[place - 1][1] > start:
            start = busy[place - 1][1]
        while place < len(busy) and busy[place][0] < start + seconds:
            start = busy[place][1]
            place += 1
        if place and busy[place - 1][1] == start:
            busy[place - 1] = busy[place - 1][0], start + seconds
            return start + seconds
        busy.insert(place, (start, start + seconds))
        if len(busy) > self.SPANS:
            self._idle_from = busy.pop(0)[1]
        return start + seconds


class Clock:
    """Time, and waiting for it more precisely than the kernel wakes a sleeping thread."""

    WAKE_SECONDS = 50e-6  # a sleep ends 70 to 100 us too late on an idle Linux machine; more spinning is no better

    now = staticmethod(time.perf_counter)
    sleep = staticmethod(time.sleep)

    @staticmethod
    def give_way() -> None:
        """Lets other Python threads run for an instant: 1 us, where sleep(0) takes 50 to 100."""
        select.select((), (), (), 0)

    def wait_until(self, due: float) -> None:
        """Sleeps for the bulk, then asks again and again."""
        left = due - self.now()
        if left > self.WAKE_SECONDS:
            self.sleep(left - self.WAKE_SECONDS)
        while self.now() < due:
            self.give_way()


class _Debt(threading.local):
    """How far behind its device one thread is because it was woken too late.

    A thread that goes on at once would have asked for the next block so much earlier, and the device is told so;
    otherwise every late wake-up would make the device slower than it is. What the host's own calls took too long is
    no debt, nor is the lateness of a thread that did something else meanwhile.
    """

    MOST_SECONDS = 5e-3  # about what a busy kernel keeps a thread waiting; beyond it, the host is just too slow
    PAUSE_SECONDS = 200e-6  # a thread that stays away for longer waited for something else

    seconds = 0.0
    since = 0.0

    def at(self, now: float) -> float:
        """The debt of a thread that asks now."""
        return self.seconds if now - self.since < self.PAUSE_SECONDS else 0.0

    def note(self, seconds: float, now: float) -> None:
        self.seconds, self.since = min(seconds, self.MOST_SECONDS), now


class _InFlight:
    """Reads of one asynchronous context.

    Attributes:
      due: when the device answers each that the host has not answered yet, by address of its control block.
    """

    def __init__(self):
        self.due: dict[int, float] = {}
        self._dues, self._events = np.zeros(0), np.zeros(0, EVENT)  # the host's answers: when each is due, ascending

    def hear(self, events: np.ndarray, now: float) -> int:
        """Takes answers of the host; how many of them came after the device's."""
        if not events.size:
            return 0
        dues = np.array([self.due.pop(address) for address in events["iocb"].tolist()])
        both, heard = np.append(self._dues, dues), np.append(self._events, events)
        order = both.argsort(kind="stable")
        self._dues, self._events = both[order], heard[order]
        return int(np.count_nonzero(dues < now))

    @property
    def count(self) -> int:
        """Reads whose answers nobody has had."""
        return len(self.due) + self._dues.size

    def ready(self, now: float) -> int:
        """How many answers of the host are due."""
        return int(self._dues.searchsorted(now, "right"))

    def due_of(self, count: int) -> float:
        """When the device has given `count` answers, whatever the host has done by then."""
        dues = np.sort(np.append(self._dues, list(self.due.values()))) if self.due else self._dues
        return float(dues[min(count, dues.size) - 1])

    def release(self, now: float, events: np.ndarray) -> int:
        """Moves the answers that are due to `events`; how many."""
        count = min(self.ready(now), events.size)
        events[:count] = self._events[:count]
        self._dues, self._events = self._dues[count:], self._events[count:]
        return count


def _sizes(pointers: np.ndarray) -> np.ndarray:
    """Bytes that the control blocks at int64 pointers[n], of one array, ask for."""
    if not pointers.size:
        return np.zeros(0, np.int64)
    first = int(pointers.min())
    span = int(pointers.max()) - first + IOCB.itemsize
    blocks = np.ctypeslib.as_array((ctypes.c_ubyte * span).from_address(first)).view(IOCB)
    return blocks["nbytes"][(pointers - first) // IOCB.itemsize]


class EmulatedIO(SystemIO):
    """The system's calls, where a read or write takes as long as on another device, if that is longer.

    Asynchronous reads are in the device together from their submission on, and their answers are held back.

    Attributes:
      profile: the device.
      commands, late: reads and writes so far, and how many of them the host finished later than the device would have;
        of asynchronous reads, those that were waited for by then.
      host_seconds: in asynchronous calls, but for waiting: a RAM disk's copying and what is emulated are in it, which
        a device does by itself.
    """

    def __init__(self, profile: Profile, clock: Clock | None = None):
        self.profile = profile
        self.commands = 0
        self.late = 0
        self.host_seconds = 0.0
        self._queue = CommandQueue(profile)
        self._counts = threading.Lock()
        self._clock = clock or Clock()
        self._debt = _Debt()
        self._contexts: dict[int, _InFlight] = {}

    def preadv(self, descriptor, views, offset):
        return self._timed(views, SystemIO.preadv, descriptor, views, offset)

    def pwrite(self, descriptor, data, offset):
        return self._timed((data,), SystemIO.pwrite, descriptor, data, offset)

    def _timed(self, buffers, call: Callable[..., int], *args) -> int:
        """The call's result, not before the device would have answered. OSError comes at once."""
        clock = self._clock
        asked = clock.now()
        debt = self._debt.at(asked)
        due = self._queue.finish_times(asked - debt, [sum(map(len, buffers))])[0]
        result = call(*args)
        ready = clock.now() - debt
        with self._counts:
            self.commands += 1
            self.late += ready > due
        clock.wait_until(due)
        now = clock.now()
        self._debt.note(now - max(due, ready), now)
        return result

    def io_setup(self, depth):
        context = SystemIO.io_setup(depth)
        self._contexts[context] = _InFlight()
        return context

    def io_destroy(self, context):
        del self._contexts[context]  # first: the kernel may give the number to another thread's context at once
        SystemIO.io_destroy(context)

    def io_submit(self, context, pointers):
        called, reads = self._clock.now(), self._contexts[context]
        asked = called - self._debt.at(called)
        taken = SystemIO.io_submit(context, pointers)
        answers, came = np.zeros(taken, EVENT), 0
        with contextlib.suppress(InterruptedError):
            came = SystemIO.io_getevents(context, 0, answers, 0.0)
        answers, begun = answers[:came], pointers[:taken]
        failed = answers["iocb"][answers["result"] < 0].astype(np.int64)
        if failed.size:  # nothing was read: will be asked for again
            failed, begun = np.intersect1d(begun, failed), np.setdiff1d(begun, failed, assume_unique=True)
            reads.due.update(dict.fromkeys(failed.tolist(), asked))
        reads.due.update(zip(begun.tolist(), self._queue.finish_times(asked, _sizes(begun)), strict=True))
        reads.hear(answers, asked)
        with self._counts:
            self.commands += begun.size
            self.host_seconds += self._clock.now() - called
        return taken

    def io_getevents(self, context, least, events, seconds):
        clock, reads = self._clock, self._contexts[context]
        called, waited = clock.now(), 0.0
        until, least = called + seconds, min(least, reads.count)  # nothing else will come
        self._hear(context, 0, events, 0.0)
        while reads.ready(now := clock.now()) < least and now < until:
            due = reads.due_of(least)
            if now < due:
                self._wait_until(min(due, until))
                waited += clock.now() - now
                self._hear(context, 0, events, 0.0)
            else:  # the host is late
                self._hear(context, 1, events, until - now)
        released = reads.release(clock.now(), events)
        with self._counts:
            self.host_seconds += clock.now() - called - waited
        return released

    def _wait_until(self, due: float) -> None:
        self._clock.wait_until(due)
        now = self._clock.now()
        self._debt.note(now - due, now)

    def _hear(self, context: int, least: int, events: np.ndarray, seconds: float) -> None:
        """Takes answers of the host, which is asked only while it owes some: asking costs a system call. One that was
        not waited for may have come any time: it is not called late."""
        reads = self._contexts[context]
        if not reads.due:
            return
        count = SystemIO.io_getevents(context, least, events, seconds)
        late = reads.hear(events[:count], self._clock.now())
        with self._counts:
            self.late += late if least else 0
