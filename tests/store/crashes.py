"""A run like decoding with saves, and two ways to end it: SIGKILL, and a power cut that forgets unsynced writes.

In codec "rle" blocks have runs, and take another number of pages each time a row breaks or makes one.
"""

import dataclasses
import os
import random
import signal
import sys
import threading

import numpy as np

from kvjax.store.flash.store import FlashStore
from kvjax.store.host import HostStore
from kvjax.store.io.system import SystemIO
from tests.store.conftest import GEOMETRY, WIDE, Driver, plant_runs

STEPS = 60
GEOMETRIES = {"raw": GEOMETRY, "rle": WIDE}


def decode_like(driver: Driver, seed: int, save) -> None:
    """Appends, splits and prefills; calls save(step) now and then. Depends on seed and geometry alone."""
    rng, width = np.random.default_rng(seed), driver.geometry.width
    for layer in range(2):
        driver.prefill(layer, seed)
    for step in range(STEPS):
        kind, layer = rng.random(), int(rng.integers(2))
        if kind < 0.6:
            driver.append(int(rng.integers(6)), int(rng.integers(4)), float(step), layer)
        elif kind < 0.7:
            block = rng.permuted(np.tile(np.arange(6, dtype=np.int32), (2, 2, 1)), axis=-1)[..., :2].copy()
            blocks = plant_runs(rng.normal(size=(2, 2, 2, 4, width)).astype(np.float32))
            assert driver.branch.put_blocks(layer, driver.branch.generation, block, blocks)
            driver.commit()
        elif kind < 0.75:
            driver.prefill(layer, seed + step)
        else:
            save(step)


def contents(driver: Driver) -> np.ndarray:
    """[layers, B, K, NB, C, width]"""
    return np.stack([driver.read(layer) for layer in range(2)])


def expected_saves(seed: int, codec: str) -> dict[int, np.ndarray]:
    """What each save of a run holds, by its step: from the store in memory."""
    driver, found = Driver(HostStore().create(GEOMETRIES[codec], "crash")), {}
    decode_like(driver, seed, lambda step: found.update({step: contents(driver)}))
    return found


def run(path, seed: int, codec: str, system: SystemIO, saved) -> None:
    """The same run on flash; calls saved(step) after each save."""
    geometry = GEOMETRIES[codec]
    store = FlashStore(file=path, threads=1, direct=False, staging_bytes=8 * geometry.extent_bytes, codec=codec)
    store.system = system
    driver = Driver(store.create(geometry, "crash"))

    def save(step: int) -> None:
        driver.branch.save(b"%d" % step)
        saved(step)

    decode_like(driver, seed, save)
    driver.branch.close()


class Killer(SystemIO):
    """Ends the process with SIGKILL at a given write or sync, in the middle of it if it is a write."""

    def __init__(self, at: int, seed: int):
        self.count, self._at, self._random = 0, at, random.Random(seed)
        self._lock = threading.Lock()

    def pwrite(self, descriptor, data, offset):
        if self._due():
            os.pwrite(descriptor, data[:self._random.randint(0, len(data))], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return os.pwrite(descriptor, data, offset)

    def sync(self, descriptor):
        if self._due():
            os.kill(os.getpid(), signal.SIGKILL)
        os.fdatasync(descriptor)

    def _due(self) -> bool:
        with self._lock:
            self.count += 1
            return self.count == self._at


@dataclasses.dataclass
class PowerCut(SystemIO):
    """Keeps every write and sync of one file in order, so that the device can be rebuilt as of any moment."""

    events: list = dataclasses.field(default_factory=list)  # (offset, bytes), "sync", or ("saved", step)
    guard: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def pwrite(self, descriptor, data, offset):
        with self.guard:
            done = os.pwrite(descriptor, data, offset)
            self.events.append((offset, bytes(data[:done])))
        return done

    def sync(self, descriptor):
        os.fdatasync(descriptor)
        with self.guard:
            self.events.append("sync")

    def image(self, moment: int, rng: np.random.Generator) -> bytes:
        """The device after a power cut: what was not synced may be there, or not, or some of its 512-byte sectors."""
        synced = max((i for i in range(moment) if self.events[i] == "sync"), default=-1)
        device = bytearray()
        for i, event in enumerate(self.events[:moment]):
            if event != "sync" and event[0] != "saved":
                offset, data = event
                kept = [True] * -(-len(data) // 512)
                if i > synced:
                    chance = rng.choice([0.0, 0.5, 1.0])
                    kept = (rng.random(len(kept)) < chance).tolist()
                for sector in np.flatnonzero(kept).tolist():
                    piece = data[512 * sector:512 * (sector + 1)]
                    at = offset + 512 * sector
                    device.extend(bytes(max(0, at + len(piece) - len(device))))
                    device[at:at + len(piece)] = piece
        return bytes(device)


def serve(path: str, seed: int, codec: str, points: list[int]) -> None:
    """For each point forks a process that dies there; prints the saves it lived to see, or how many points there are.

    Forking spares importing everything anew; no thread has been started here.
    """
    for point in points:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            killer = Killer(point, seed + point)
            run(f"{path}.{point}", seed, codec, killer,
                lambda step, point=point: print("saved", point, step, flush=True))
            print("calls", killer.count, flush=True)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), sys.argv[3], [int(point) for point in sys.argv[4:]])
