"""Emulated flash devices: a profile says when a device would have answered, `EmulatedIO` waits until then.

A command spends `latency` in the device, beside others, then has its bytes transferred, one command after the other,
at `bandwidth` but at most `iops` commands a second. No more than `depth` commands are in the device at a time, the
others wait outside. So a caller that keeps d commands of s bytes in flight gets, with t = max(s / bandwidth, 1 / iops),

    bandwidth(s, d) = s / max(t, (latency + t) / min(d, depth))

For large s or d that is the device's bandwidth; for small s it grows linearly with s (limited by commands a second),
which is the shape of DynaKV's figure 3(b) and KVSwap's figure 2. Neither figure has its numbers in the text; where each
of ours comes from stands beside it. Writes wait as reads do, although flash writes more slowly: no source gives a rate.

Emulation only slows down. Where the host needs longer than the device would, the answer is as late as the host makes
it, and `EmulatedIO.late` counts it. A host too busy even to ask in time goes uncounted: `scripts/bench_profiles.py`
compares what is reached with the curve, and says which points this host cannot reach.
"""

import bisect
import dataclasses
import select
import threading
import time
from collections.abc import Callable

from kvjax.errors import ConfigError
from kvjax.store.system import SystemIO

NATIVE = "native"


@dataclasses.dataclass(frozen=True)
class Profile:
    """A device.

    Attributes:
      bandwidth: bytes per second of large reads.
      iops: small commands per second, with enough of them in flight.
      latency: seconds from a command to its first byte, in an idle device.
      depth: commands the device takes at a time.
    """

    name: str
    bandwidth: float
    iops: float
    latency: float
    depth: int

    def transfer_seconds(self, size: int) -> float:
        """How long a command of `size` bytes keeps the others from being transferred."""
        return max(size / self.bandwidth, 1 / self.iops)

    def bandwidth_at(self, size: int, depth: int) -> float:
        """Bytes per second with `depth` commands of `size` bytes always in flight."""
        transfer = self.transfer_seconds(size)
        return size / max(transfer, (self.latency + transfer) / min(depth, self.depth))


_ALL = (
    # Bandwidth: KVSwap section 4.1. IOPS: its section 2.3 says below 6 % of that at 512 bytes; 5 % is our choice, so
    # that bandwidth is reached at 10 KB. Latency: our assumption, of a TLC die and its controller. Depth: the Linux
    # driver's default.
    Profile("nvme", bandwidth=1.8e9, iops=0.05 * 1.8e9 / 512, latency=80e-6, depth=1023),
    # Bandwidth and IOPS as for nvme. Latency: our assumption. Depth: command queue of the eMMC 5.1 standard.
    Profile("emmc", bandwidth=250e6, iops=0.05 * 250e6 / 512, latency=200e-6, depth=32),
    # Bandwidth: one lane, DynaKV section 2.2. IOPS: bandwidth is reached at 24 KB, same place. Depth: "e.g., 32
    # entries", same place. Latency: our assumption.
    Profile("ufs4.0", bandwidth=2.9e9, iops=2.9e9 / 24_576, latency=100e-6, depth=32),
    # DynaKV says only that the UFS 3.1 of its oldest phone is weaker. One lane of it has half the rate of UFS 4.0
    # (HS-Gear 4 and 5); all else as for ufs4.0 is our assumption.
    Profile("ufs3.1", bandwidth=1.45e9, iops=1.45e9 / 24_576, latency=100e-6, depth=32),
)
PROFILES = {profile.name: profile for profile in _ALL}


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

    SPANS = 32  # of transfers that are remembered; what lies before counts as busy

    def __init__(self, profile: Profile):
        self._profile = profile
        self._lock = threading.Lock()
        self._busy: list[tuple[float, float]] = []  # transfers, ascending
        self._idle_from = 0.0  # no transfer starts before
        self._ends = [0.0] * profile.depth  # the latest `depth` ends, ascending

    def finish_time(self, arrival: float, size: int) -> float:
        """Seconds on the caller's clock when a command that arrives then is done."""
        with self._lock:
            begin = max(arrival, self._ends[0])  # once fewer than `depth` commands are in the device
            end = self._transfer(begin + self._profile.latency, self._profile.transfer_seconds(size))
            bisect.insort(self._ends, end)
            del self._ends[0]
            return end

    def _transfer(self, ready: float, seconds: float) -> float:
        """The end of the first idle span so long, from `ready` on, which is then busy."""
        start = max(ready, self._idle_from)
        place = bisect.bisect_left(self._busy, (start, start))
        if place and self._busy[place - 1][1] > start:
            start = self._busy[place - 1][1]
        while place < len(self._busy) and self._busy[place][0] < start + seconds:
            start = self._busy[place][1]
            place += 1
        self._busy.insert(place, (start, start + seconds))
        if len(self._busy) > self.SPANS:
            self._idle_from = self._busy.pop(0)[1]
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


class EmulatedIO(SystemIO):
    """The system's calls, where a read or write takes as long as on another device, if that is longer.

    Attributes:
      profile: the device.
      commands, late: reads and writes so far, and how many of them the host finished later than the device would have.
    """

    asynchronous = False  # only calls that block can be kept waiting

    def __init__(self, profile: Profile, clock: Clock | None = None):
        self.profile = profile
        self.commands = 0
        self.late = 0
        self._queue = CommandQueue(profile)
        self._counts = threading.Lock()
        self._clock = clock or Clock()
        self._debt = _Debt()

    def preadv(self, descriptor, views, offset):
        return self._timed(views, SystemIO.preadv, descriptor, views, offset)

    def pwrite(self, descriptor, data, offset):
        return self._timed((data,), SystemIO.pwrite, descriptor, data, offset)

    def _timed(self, buffers, call: Callable[..., int], *args) -> int:
        """The call's result, not before the device would have answered. OSError comes at once."""
        clock = self._clock
        asked = clock.now()
        debt = self._debt.at(asked)
        due = self._queue.finish_time(asked - debt, sum(map(len, buffers)))
        result = call(*args)
        ready = clock.now() - debt
        with self._counts:
            self.commands += 1
            self.late += ready > due
        clock.wait_until(due)
        now = clock.now()
        self._debt.note(now - max(due, ready), now)
        return result
