"""Emulated flash devices: a queue computes when a device would have answered, and `EmulatedIO` waits until then.

Emulation only slows down. Where the host is slower than the device would be, the answer is as late as the host makes
it, and `EmulatedIO.late` counts it. A host too busy to submit in time is not counted: `scripts/bench_profiles.py`
compares the rates reached with the model's curve and names the points that this host cannot reach.
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
    """Returns the system calls for a device profile: the host's own for "native". Raises ConfigError for an unknown
    name."""
    if name == NATIVE:
        return SystemIO()
    if name not in PROFILES:
        raise ConfigError(f"unknown device profile {name!r}; use one of {', '.join([NATIVE, *PROFILES])}")
    return EmulatedIO(PROFILES[name])


class CommandQueue:
    """A model of when a device finishes each command; it knows no clock. Thread-safe.

    Commands may be added in another order than they arrive in, because threads are woken late: one that arrived before
    others gets the transfer time that they left idle.
    """

    SPANS = 32  # busy spans (transfers without a pause) to remember; the time before them counts as busy

    def __init__(self, profile: Profile):
        self._profile = profile
        self._lock = threading.Lock()
        self._busy: list[tuple[float, float]] = []  # (start, end) of these spans, ascending
        self._idle_from = 0.0  # no transfer starts earlier
        self._ends = [0.0] * profile.depth  # the latest `depth` ends, ascending

    def finish_times(self, arrival: float, sizes: Sequence[int] | np.ndarray) -> list[float]:
        """Adds commands that arrive together.

        Args:
          arrival: time of arrival, seconds on the caller's clock.
          sizes: bytes of each command.

        Returns:
          When each command is done, seconds on the same clock.
        """
        times: list[float] = []
        with self._lock:
            for first in range(0, len(sizes), self._profile.depth):
                part = np.asarray(sizes[first:first + self._profile.depth])
                together = self._finish_together(arrival, part)
                times += [self._finish_time(arrival, size) for size in part.tolist()] if together is None else together
        return times

    def _finish_together(self, arrival: float, sizes: np.ndarray) -> list[float] | None:
        """Returns what `_finish_time` returns for each of two to `depth` commands, without a loop; None if the first
        one could be transferred before commands added earlier."""
        ready = np.maximum(arrival, self._ends[:sizes.size]) + self._profile.latency
        since, until = self._busy[-1] if self._busy else (self._idle_from, self._idle_from)
        if sizes.size < 2 or ready[0] < since:
            return None
        seconds = self._profile.transfer_seconds(sizes)
        done = np.cumsum(seconds)
        base = np.maximum.accumulate(np.maximum(ready - (done - seconds), until))  # grows where the device was idle
        ends = base + done
        idle = np.diff(base, prepend=until) > 0  # whether the device was idle before the transfer
        idle[0] |= not self._busy
        self._note_busy((ends - seconds)[idle].tolist(), ends[np.append(idle[1:], True)].tolist())
        times: list[float] = ends.tolist()
        self._ends = [*self._ends[sizes.size:], *times]
        return times

    def _note_busy(self, starts: list[float], ends: list[float]) -> None:
        """Adds spans after all known ones; if there is one more end than starts, the first end extends the last known
        span."""
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
        """Returns the end of the first sufficiently long idle span from `ready` on, and marks it as busy."""
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
    """Time, and waits more precise than the kernel's wake-up of a sleeping thread."""

    WAKE_SECONDS = 50e-6  # a sleep ends 70 to 100 us late on an idle Linux machine; spinning longer does not help

    now = staticmethod(time.perf_counter)
    sleep = staticmethod(time.sleep)

    @staticmethod
    def give_way() -> None:
        """Lets other Python threads run for an instant: 1 us, where sleep(0) takes 50 to 100 us."""
        select.select((), (), (), 0)

    def wait_until(self, due: float) -> None:
        """Sleeps for most of the time, then polls the clock."""
        left = due - self.now()
        if left > self.WAKE_SECONDS:
            self.sleep(left - self.WAKE_SECONDS)
        while self.now() < due:
            self.give_way()


class _Debt(threading.local):
    """The time by which one thread is behind its device because it was woken late.

    A thread woken in time would have submitted its next read that much earlier, and the queue is given that earlier
    time; otherwise every late wake-up would make the device slower than it is. Time that the host's own calls took too
    long is not part of the debt, nor is the lateness of a thread that did something else meanwhile.
    """

    MOST_SECONDS = 5e-3  # about how long a busy kernel delays a thread; beyond this the host is simply too slow
    PAUSE_SECONDS = 200e-6  # a thread that is away for longer waited for something else

    seconds = 0.0
    since = 0.0

    def at(self, now: float) -> float:
        """Returns the debt, in seconds, of a thread that submits at `now`."""
        return self.seconds if now - self.since < self.PAUSE_SECONDS else 0.0

    def note(self, seconds: float, now: float) -> None:
        self.seconds, self.since = min(seconds, self.MOST_SECONDS), now


class _InFlight:
    """The reads in flight of one asynchronous context.

    Attributes:
      due: when the device answers each read that the host has not answered yet, by address of its control block.
    """

    def __init__(self):
        self.due: dict[int, float] = {}
        self._dues, self._events = np.zeros(0), np.zeros(0, EVENT)  # the host's answers, by when each is due

    def hear(self, events: np.ndarray, now: float) -> int:
        """Adds answers of the host; returns how many of them came after the device's."""
        if not events.size:
            return 0
        dues = np.array([self.due.pop(address) for address in events["iocb"].tolist()])
        both, heard = np.append(self._dues, dues), np.append(self._events, events)
        order = both.argsort(kind="stable")
        self._dues, self._events = both[order], heard[order]
        return int(np.count_nonzero(dues < now))

    @property
    def count(self) -> int:
        """Number of reads whose answers have not been released."""
        return len(self.due) + self._dues.size

    def ready(self, now: float) -> int:
        """Returns how many of the host's answers are due."""
        return int(self._dues.searchsorted(now, "right"))

    def due_of(self, count: int) -> float:
        """Returns when the device has given `count` answers, whatever the host has done by then."""
        dues = np.sort(np.append(self._dues, list(self.due.values()))) if self.due else self._dues
        return float(dues[min(count, dues.size) - 1])

    def release(self, now: float, events: np.ndarray) -> int:
        """Moves the answers that are due to `events`; returns how many."""
        count = min(self.ready(now), events.size)
        events[:count] = self._events[:count]
        self._dues, self._events = self._dues[count:], self._events[count:]
        return count


def _sizes(pointers: np.ndarray) -> np.ndarray:
    """Returns the bytes that control blocks at int64 pointers[n], all in one array, ask for."""
    if not pointers.size:
        return np.zeros(0, np.int64)
    first = int(pointers.min())
    span = int(pointers.max()) - first + IOCB.itemsize
    blocks = np.ctypeslib.as_array((ctypes.c_ubyte * span).from_address(first)).view(IOCB)
    return blocks["nbytes"][(pointers - first) // IOCB.itemsize]


class EmulatedIO(SystemIO):
    """System calls whose reads and writes take at least as long as on another device.

    Asynchronous reads are in the device together from their submission on; their answers are held back.

    Attributes:
      profile: the device.
      commands: reads and writes so far.
      late: commands that the host finished later than the device would have; of asynchronous reads, only those that a
        caller was waiting for.
      host_seconds: time in asynchronous calls without the waiting. It includes a RAM disk's copying and the cost of
        emulation, which a real device would do by itself.
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
        """Returns the call's result, not before the device would have answered. An OSError is raised at once."""
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
        if failed.size:  # nothing was read, and the caller will submit it again
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
        until, least = called + seconds, min(least, reads.count)  # no more than this can arrive
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
        """Takes answers of the host, which is asked only while reads are outstanding, as asking costs a system call. An
        answer that was not waited for may have come at any time, so it does not count as late."""
        reads = self._contexts[context]
        if not reads.due:
            return
        count = SystemIO.io_getevents(context, least, events, seconds)
        late = reads.hear(events[:count], self._clock.now())
        with self._counts:
            self.late += late if least else 0
