"""Check of emulated devices: their speed against that of their profiles.

    python scripts/bench_profiles.py [--profiles=nvme,emmc,ufs4.0,ufs3.1] [--seconds=0.3] [--dir=DIR]

Reads a file of which every page is in memory through `EmulatedIO`, at several sizes and numbers of threads, each with
one request in flight, and compares with the profile's own curve: "ok" within 5 %. Two columns show the limits of the
host: "calls" is the same code with a device that answers at once, "disk" is bare O_DIRECT reads. If the disk is slower
than the curve, or calls are not three times as fast (one that waits costs two, and wakes a thread), the host cannot
emulate the device at that point, and the line says so. The exit code is 1 if a point within the host's limits is off.
Figures are medians of three alternating runs. Other programs on the machine make waiting threads late: run it on an
idle one.

A Python process on two cores answers some 30,000 to 60,000 commands a second from several threads, which limits the
devices that can be emulated, and the commands that the store can issue.
"""

import math
import pathlib
import sys
import tempfile

import numpy as np
from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from experiments.speed.raw_disk import RawFile, random_file, random_offsets
from kvjax.store.io.emulation import EmulatedIO
from kvjax.store.io.profiles import PROFILES, Profile
from kvjax.store.io.system import SystemIO

NAMES = flags.DEFINE_list("profiles", list(PROFILES), "devices to emulate")
SECONDS = flags.DEFINE_float("seconds", 0.3, "modelled time of each run", lower_bound=0.01)
DIR = flags.DEFINE_string("dir", None, "directory on the host's disk; default: the temporary directory")

SIZES_KB, DEPTHS = (4, 16, 64, 256), (1, 4, 16)
FILE_BYTES, RUNS, TOLERANCE, CALLS_NEEDED = 256 << 20, 3, 0.05, 3
INSTANT = Profile("instant", bandwidth=math.inf, iops=math.inf, latency=0.0, depth=1024)


def run_once(path: str, system: SystemIO, size: int, depth: int, count: int, direct: bool) -> float:
    """Returns the bytes per second of `count` random reads."""
    rng, raw = np.random.default_rng(count), RawFile(path, depth, direct, system)
    raw.seconds(random_offsets(rng, FILE_BYTES, size, 2 * depth), size)  # starts the threads
    offsets = random_offsets(rng, FILE_BYTES, size, min(count, FILE_BYTES // size))
    seconds = raw.seconds(offsets, size)
    raw.close()
    return len(offsets) * size / seconds


def measure(path: str, profile: Profile, size: int, depth: int) -> tuple[float, float, float]:
    """Returns bytes per second: emulated, with calls that are answered at once, and of the host's disk."""
    count = max(8 * depth, int(SECONDS.value * profile.bandwidth_at(size, depth) / size))
    runs = [(run_once(path, EmulatedIO(profile), size, depth, count, direct=False),
             run_once(path, EmulatedIO(INSTANT), size, depth, count, direct=False),
             run_once(path, SystemIO(), size, depth, min(count, 2000), direct=True)) for _ in range(RUNS)]
    return tuple(np.median(runs, axis=0))


def verdict(curve: float, emulated: float, calls: float, disk: float) -> str:
    """Returns the last column of a line: whether the emulation fits the curve, or why it cannot."""
    if abs(emulated / curve - 1) > TOLERANCE:
        return "host's CPU too slow for this device" if calls < CALLS_NEEDED * curve else "OFF"
    return "ok in memory; host's disk slower than this device" if disk < curve else "ok"


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    unknown = set(NAMES.value) - set(PROFILES)
    if unknown:
        raise app.UsageError(f"unknown profiles {sorted(unknown)}; use some of {', '.join(PROFILES)}")
    off = 0
    print(f"{'MB/s':8} {'KB':>5} {'depth':>6} {'curve':>8} {'emulated':>9} {'ratio':>6} {'calls':>8} {'disk':>8}")
    with random_file(DIR.value or tempfile.gettempdir(), FILE_BYTES) as path:
        for name in NAMES.value:
            for size in (kb << 10 for kb in SIZES_KB):
                for depth in DEPTHS:
                    curve = PROFILES[name].bandwidth_at(size, depth)
                    rates = measure(path, PROFILES[name], size, depth)
                    says = verdict(curve, *rates)
                    off += says == "OFF"
                    print(f"{name:8} {size >> 10:5} {depth:6} {curve / 1e6:8.0f} {rates[0] / 1e6:9.0f} "
                          f"{rates[0] / curve:6.2f} {rates[1] / 1e6:8.0f} {rates[2] / 1e6:8.0f}  {says}", flush=True)
    return 1 if off else 0


if __name__ == "__main__":
    app.run(main)
