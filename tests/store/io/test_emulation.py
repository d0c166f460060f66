"""Emulated devices: the curve, the queue that keeps to it, and the waiting; all on a clock of the test's own."""

import heapq
import itertools
import os
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.errors import ConfigError
from kvjax.store.flash.store import FlashStore
from kvjax.store.io import libaio
from kvjax.store.io.emulation import Clock, CommandQueue, EmulatedIO, system_of
from kvjax.store.io.profiles import PROFILES
from kvjax.store.io.system import SystemIO
from tests.store.conftest import settle, skip_without

every_device = pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)


class FakeClock(Clock):
    """Time moves by what is slept, and a little with every look; sleeps end `overshoot` late."""

    def __init__(self, overshoot: float = 0.0):
        self.time, self.overshoot, self.sleeps = 10.0, overshoot, []

    def now(self):
        return self.time

    def sleep(self, seconds):
        self.sleeps.append(seconds)
        self.time += seconds + self.overshoot

    def give_way(self):
        self.time += 1e-6


@pytest.fixture
def descriptor(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * 64)
    number = os.open(path, os.O_RDWR)
    yield number
    os.close(number)


# ------------------------------------------------------------------------------------------ curve


@pytest.mark.parametrize("name", ["nvme", "emmc"])
def test_kvswap_devices_give_under_6_per_cent_of_their_bandwidth_at_512_bytes(name):
    profile = PROFILES[name]
    assert 0.04 < profile.bandwidth_at(512, 10_000) / profile.bandwidth < 0.06


@pytest.mark.parametrize("name", ["ufs4.0", "ufs3.1"])
def test_ufs_bandwidth_grows_linearly_up_to_24_kb_and_then_stays(name):
    profile = PROFILES[name]
    deepest = [profile.bandwidth_at(kb << 10, profile.depth) for kb in (6, 12, 24, 48)]
    np.testing.assert_allclose(deepest, profile.bandwidth * np.array([0.25, 0.5, 1.0, 1.0]))


@every_device
def test_larger_reads_and_deeper_queues_are_never_slower(profile):
    curve = [[profile.bandwidth_at(size, depth) for size in (4096, 16384, 1 << 20)] for depth in (1, 2, 8, 64)]
    assert (np.diff(curve, axis=0) >= 0).all() and (np.diff(curve, axis=1) >= 0).all()
    assert np.max(curve) <= profile.bandwidth


# ------------------------------------------------------------------------------------------ queue


@every_device
@pytest.mark.parametrize("depth", [1, 3, 40])
@pytest.mark.parametrize("size", [4096, 24_576, 1 << 18])
def test_callers_that_always_wait_for_one_read_get_the_curve(profile, depth, size):
    """Given `depth` callers that ask again as soon as they are answered, as an event simulation."""
    queue, ready, count = CommandQueue(profile), [0.0] * depth, 4000
    for _ in range(count):
        heapq.heappush(ready, queue.finish_times(heapq.heappop(ready), [size])[0])
    assert count * size / max(ready) == pytest.approx(profile.bandwidth_at(size, depth), rel=0.02)


@every_device
@pytest.mark.parametrize("depth", [1, 4, 16])
@pytest.mark.parametrize("size", [4096, 65_536])
def test_callers_that_are_heard_late_get_the_curve(profile, depth, size):
    """Given callers whose commands are told up to 100 us after they arrived, so in another order."""
    queue, rng, count = CommandQueue(profile), np.random.default_rng(depth), 4000
    waiting, last = [(0.0, 0.0)] * depth, 0.0  # when each is heard, and when it really asked
    for _ in range(count):
        _, asked = heapq.heappop(waiting)
        last = max(last, end := queue.finish_times(asked, [size])[0])
        heapq.heappush(waiting, (end + rng.uniform(0, 100e-6), end))
    assert count * size / last == pytest.approx(profile.bandwidth_at(size, depth), rel=0.06)


@every_device
@settings(max_examples=50)
@given(commands=st.lists(st.tuples(st.floats(0, 1e-4), st.integers(1, 1 << 20)), min_size=1, max_size=80))
def test_no_command_is_faster_than_the_device(profile, commands):
    """Given any arrivals, each has its latency and transfer, transfers do not overlap, and few are in flight."""
    queue, now, ends = CommandQueue(profile), 0.0, []
    for gap, size in commands:
        now += gap
        ends += queue.finish_times(now, [size])
        transfer = profile.transfer_seconds(size)
        assert ends[-1] >= now + profile.latency + transfer - 1e-12
        assert len(ends) < 2 or ends[-1] - ends[-2] >= transfer - 1e-12
        place = len(ends) - 1 - profile.depth
        assert place < 0 or ends[-1] >= ends[place] + profile.latency + transfer - 1e-12


@every_device
@settings(max_examples=100)
@given(batches=st.lists(st.tuples(st.floats(-1e-3, 4e-3), st.lists(st.integers(1, 1 << 17), max_size=70)), max_size=12))
def test_commands_that_arrive_together_end_as_if_told_one_by_one(profile, batches):
    """Given any batches, also some that are heard after what arrived later."""
    together, singly, now = CommandQueue(profile), CommandQueue(profile), 1.0
    for gap, sizes in batches:
        now += gap
        expected = [singly.finish_times(now, [size])[0] for size in sizes]
        np.testing.assert_allclose(together.finish_times(now, sizes), expected, rtol=0, atol=1e-11)


def test_threads_share_one_device():
    """Given commands from several threads at one moment, the last ends when all transfers are done."""
    profile, ends = PROFILES["nvme"], []
    queue = CommandQueue(profile)

    def ask():
        for _ in range(50):
            ends.extend(queue.finish_times(0.0, [65_536]))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_allclose(np.sort(ends), profile.latency + profile.transfer_seconds(65_536) * np.arange(1, 201))


# ---------------------------------------------------------------------------------------- waiting


@pytest.mark.parametrize("overshoot", [0.0, 30e-6, 90e-6])
def test_waiting_ends_when_it_should(overshoot):
    """Given sleeps that end too late, the wait is too long only where they were later than expected."""
    for seconds in (-1.0, 20e-6, 400e-6, 0.1):
        clock = FakeClock(overshoot)
        clock.wait_until(clock.time + seconds)
        late = clock.time - 10.0 - max(seconds, 0.0)
        assert -1e-9 <= late <= max(1.1e-6, overshoot - Clock.WAKE_SECONDS + 1e-9)
        assert len(clock.sleeps) == (seconds > Clock.WAKE_SECONDS)


def test_calls_take_the_modelled_time_and_do_their_work(descriptor):
    profile, clock = PROFILES["emmc"], FakeClock()
    system, memory = EmulatedIO(profile, clock), bytearray(8192)
    assert system.preadv(descriptor, [memoryview(memory)], 4096) == 8192
    assert memory == bytes(range(256)) * 32
    read_at = clock.time
    assert read_at - 10.0 == pytest.approx(profile.latency + profile.transfer_seconds(8192), abs=2e-6)
    assert system.pwrite(descriptor, b"x" * 4096, 0) == 4096
    assert os.pread(descriptor, 4097, 0) == b"x" * 4096 + b"\0"
    assert clock.time - read_at == pytest.approx(profile.latency + profile.transfer_seconds(4096), abs=2e-6)
    assert (system.commands, system.late) == (2, 0)


def test_late_wake_ups_do_not_add_up(descriptor):
    """Given sleeps that end 120 us too late, many reads in a row take their modelled time and one such delay."""
    profile, clock = PROFILES["nvme"], FakeClock(overshoot=120e-6)
    system, memory = EmulatedIO(profile, clock), memoryview(bytearray(16_384))
    for _ in range(200):
        system.preadv(descriptor, [memory], 0)
    modelled = 200 * (profile.latency + profile.transfer_seconds(16_384))
    assert modelled <= clock.time - 10.0 + 1e-6 <= modelled + 150e-6


def test_a_host_that_is_slower_than_the_device_is_counted_and_not_made_up_for(descriptor, monkeypatch):
    """Given system calls of 2 ms, every answer is late; fast ones afterwards still take the modelled time."""
    profile, clock = PROFILES["nvme"], FakeClock()
    system, memory = EmulatedIO(profile, clock), memoryview(bytearray(4096))
    pauses = itertools.chain([2e-3] * 5, itertools.repeat(0.0))

    def slow(descriptor, views, offset):
        clock.time += next(pauses)
        return os.preadv(descriptor, views, offset)

    monkeypatch.setattr(SystemIO, "preadv", staticmethod(slow))
    for _ in range(5):
        system.preadv(descriptor, [memory], 0)
    assert (system.commands, system.late) == (5, 5) and clock.time == pytest.approx(10.0 + 5 * 2e-3)
    before = clock.time
    for _ in range(10):
        system.preadv(descriptor, [memory], 0)
    assert clock.time - before >= 10 * (profile.latency + profile.transfer_seconds(4096)) - 1e-9


class Ring:
    """Reads of `size` bytes of one file through an emulated device, asynchronously."""

    def __init__(self, system, descriptor, size: int, count: int):
        self.system, self.memory = system, np.zeros((count, size), np.uint8)
        self.blocks = np.zeros(count, libaio.IOCB)
        self.blocks["data"], self.blocks["descriptor"], self.blocks["nbytes"] = np.arange(count), descriptor, size
        self.blocks["buffer"] = self.memory.ctypes.data + size * np.arange(count)
        self.pointers = self.blocks.ctypes.data + np.arange(count) * libaio.IOCB.itemsize
        self.context, self.events = system.io_setup(count), np.zeros(count, libaio.EVENT)

    def submit(self):
        assert self.system.io_submit(self.context, self.pointers) == self.pointers.size

    def wait(self, least: int, seconds: float = 9.0) -> list[int]:
        """Which reads were answered."""
        return self.events["data"][:self.system.io_getevents(self.context, least, self.events, seconds)].tolist()


@pytest.fixture
def ring(tmp_path, descriptor):
    skip_without("aio", tmp_path)
    made = Ring(EmulatedIO(PROFILES["emmc"], FakeClock()), descriptor, 4096, 4)
    yield made
    made.system.io_destroy(made.context)


def test_asynchronous_reads_are_in_the_device_together(ring):
    """Given four reads submitted at once, the last answer is due after one latency and four transfers."""
    profile, clock = PROFILES["emmc"], ring.system._clock
    ring.submit()
    assert sorted(ring.wait(4)) == [0, 1, 2, 3] and ring.memory.tobytes() == bytes(range(256)) * 64
    expected = profile.latency + 4 * profile.transfer_seconds(4096)
    assert clock.time - 10.0 == pytest.approx(expected, abs=2e-6)
    assert (ring.system.commands, ring.system.late) == (4, 0)


def test_a_host_that_has_answered_everything_is_not_asked_again(ring, monkeypatch):
    """Given four reads, of which it is told once that they are there, and a wait for more than there are."""
    calls, ask = [], SystemIO.io_getevents
    ring.submit()
    assert ring.wait(0) == [] and not ring.system._contexts[ring.context].due
    monkeypatch.setattr(SystemIO, "io_getevents", staticmethod(lambda *args: calls.append(args) or ask(*args)))
    assert ring.wait(1) == [0] and sorted(ring.wait(9)) == [1, 2, 3] and not calls


def test_an_answer_is_held_back_until_the_device_gives_it(ring):
    """Given four reads that the host has done, each wait for one more ends a transfer later, in order."""
    profile, clock = PROFILES["emmc"], ring.system._clock
    ring.submit()
    assert ring.wait(0) == []
    for nth in range(4):
        assert ring.wait(1) == [nth]
        expected = profile.latency + (nth + 1) * profile.transfer_seconds(4096)
        assert clock.time - 10.0 == pytest.approx(expected, abs=3e-6)


def test_a_wait_that_is_over_gives_what_is_due(ring):
    """Given time for the first two of four answers, these come, and the others with the next wait."""
    profile = PROFILES["emmc"]
    ring.submit()
    assert ring.wait(4, profile.latency + 2.5 * profile.transfer_seconds(4096)) == [0, 1]
    assert ring.wait(2) == [2, 3]


def test_what_the_host_works_is_counted_apart_from_waiting(ring, monkeypatch):
    """Given a host that copies for 100 us while it is asked, and a device that takes longer, the 100 us are counted."""
    clock, submit = ring.system._clock, SystemIO.io_submit

    def copying(context, pointers):
        clock.time += 1e-4
        return submit(context, pointers)

    monkeypatch.setattr(SystemIO, "io_submit", staticmethod(copying))
    ring.submit()
    ring.wait(4)
    assert ring.system.host_seconds == pytest.approx(1e-4) and clock.time - 10.0 > 2e-4


def test_a_refused_asynchronous_read_is_answered_at_once(ring):
    ring.blocks["descriptor"][1] = 2**31 - 1  # no such file: the kernel takes the read before it, and then refuses
    assert ring.system.io_submit(ring.context, ring.pointers) == 1
    ring.wait(1)
    before = ring.system._clock.time
    ring.blocks["descriptor"][2], ring.blocks["buffer"][2] = ring.blocks["descriptor"][0], 8  # no such memory
    assert ring.system.io_submit(ring.context, ring.pointers[2:3]) == 1
    assert ring.wait(1) == [2] and ring.events["result"][0] < 0 and ring.system._clock.time == before


def test_an_error_is_not_kept_waiting(tmp_path):
    clock = FakeClock()
    with pytest.raises(OSError):
        EmulatedIO(PROFILES["emmc"], clock).preadv(-1, [memoryview(bytearray(4096))], 0)
    assert clock.time == 10.0


# ------------------------------------------------------------------------------------------ store


def test_a_store_on_an_emulated_device_keeps_its_contents(tmp_path, open_branch):
    store = FlashStore(directory=tmp_path, profile="ufs4.0")
    driver = open_branch(store)
    blocks = driver.prefill()
    np.testing.assert_array_equal(driver.read(), blocks)
    assert store.system.profile.name == "ufs4.0" and store.system.commands >= 2


@pytest.mark.parametrize("engine", ["aio", "threads"])
def test_a_fetch_takes_as_long_as_the_device(tmp_path, open_branch, engine):
    """Given either engine, a fetch is never answered before the device would have."""
    skip_without(engine, tmp_path)
    store = FlashStore(directory=tmp_path, profile="emmc", engine=engine)
    driver = open_branch(store)
    blocks = driver.prefill()
    settle(driver.branch.path)
    before = driver.branch.stats()
    np.testing.assert_array_equal(driver.read(), blocks)
    after, profile = driver.branch.stats(), PROFILES["emmc"]
    assert driver.branch.engine == engine
    least = profile.latency + (after.bytes_read - before.bytes_read) / profile.bandwidth
    assert after.io_seconds - before.io_seconds >= least


def test_an_unknown_profile_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"unknown device profile 'floppy'; use one of native, nvme, emmc, ufs4.0"):
        FlashStore(directory=tmp_path, profile="floppy")


def test_native_is_the_system_itself():
    assert type(system_of("native")) is SystemIO
