"""Crashes and damage: a saved file opens at a save that was committed, with the right bytes, or says what is wrong."""

import collections
import contextlib
import itertools
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

from kvjax.errors import ChecksumMismatch, FormatMismatch, NothingSaved, ShortRead, StoreClosed
from kvjax.store.flash.store import FlashStore
from kvjax.store.format.pages import HEADER_BYTES, SUPERBLOCKS
from kvjax.store.geometry import PAGE_BYTES
from tests.store import crashes
from tests.store.conftest import GEOMETRY, Driver
from tests.store.crashes import contents

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXTENT = GEOMETRY.extent_bytes
SEED = 4


@pytest.fixture(scope="module", params=["raw", "rle"])
def codec(request):
    return request.param


@pytest.fixture(scope="module")
def expected(codec):
    return crashes.expected_saves(SEED, codec)


def check(path, expected: dict, reported: int | None, go_on: bool = True) -> int | None:
    """The file opens at the last save that was reported or at the one under way, and is usable; returns its step."""
    following = [step for step in expected if reported is None or step > reported]
    allowed = {reported, *following[:1]} - {None}
    try:
        branch = FlashStore(file=path, threads=1, direct=False).open(fingerprint="crash", read_only=not go_on)
    except (NothingSaved, FormatMismatch, StoreClosed, ChecksumMismatch):
        assert reported is None, f"save {reported} was reported and is gone"
        return None
    with contextlib.closing(branch):
        step = int(branch.saves()[0].metadata)
        assert step in allowed
        driver = Driver(branch)
        np.testing.assert_array_equal(contents(driver), expected[step])
        if go_on:
            driver.append(0, 0, -1.0)
            driver.branch.save(b"again")
            after = contents(driver)
    if go_on:
        with contextlib.closing(FlashStore(file=path, direct=False).open(read_only=True)) as branch:
            np.testing.assert_array_equal(contents(Driver(branch)), after)
    return step


# ---- SIGKILL

def kill(path, codec, points) -> tuple[dict, int]:
    """Last reported save by point, and how many writes and syncs a whole run has."""
    command = [sys.executable, "-m", "tests.store.crashes", str(path), str(SEED), codec, *map(str, points)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True)
    reported, calls = {}, 0
    for line in done.stdout.splitlines():
        word, *numbers = line.split()
        if word == "saved":
            reported[int(numbers[0])] = int(numbers[1])
        else:
            calls = int(numbers[0])
    return reported, calls


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_sigkill_at_random_points(tmp_path, codec, expected, count):
    """The point beyond all others is a run that ends well, and tells how many points there are."""
    beyond = 10**9
    reported, calls = kill(tmp_path / "whole", codec, [beyond])
    assert calls > 100 and reported[beyond] == max(expected)
    points = np.random.default_rng(count).choice(np.arange(1, calls - 3), count, replace=False).tolist()
    reported, _ = kill(tmp_path / "cache.kv", codec, points)
    found = [check(f"{tmp_path}/cache.kv.{point}", expected, reported.get(point)) for point in points]
    assert len(set(found)) > 5, "the points are spread over the run"


# ---- power cuts

@pytest.fixture(scope="module")
def recorded(codec, tmp_path_factory):
    """Every write, sync and save of one run."""
    system = crashes.PowerCut()
    path = tmp_path_factory.mktemp("recorded") / "cache.kv"

    def saved(step: int) -> None:
        with system.guard:
            system.events.append(("saved", step))

    crashes.run(path, SEED, codec, system, saved)
    return system


@pytest.mark.parametrize("count", [60, pytest.param(600, marks=pytest.mark.slow)])
def test_power_cuts_at_random_points(tmp_path, recorded, expected, count):
    rng, found = np.random.default_rng(count), []
    for _ in range(count):
        moment = int(rng.integers(0, len(recorded.events) + 1))
        path = tmp_path / "cut.kv"
        path.write_bytes(recorded.image(moment, rng))
        steps = [event[1] for event in recorded.events[:moment] if event[0] == "saved"]
        found.append(check(path, expected, steps[-1] if steps else None, go_on=rng.random() < 0.2))
    assert len(set(found)) > 5


def test_without_the_first_sync_a_power_cut_would_be_noticed(tmp_path, recorded, expected):
    """The test of the test: on a log that does not wait for its blocks, cuts behind a superblock find a save without
    them."""
    pairs = itertools.pairwise([*recorded.events, "end"])
    careless = crashes.PowerCut([event for event, after in pairs if event != "sync" or after[0] not in SUPERBLOCKS])
    behind = [i + 1 for i, event in enumerate(careless.events) if event[0] in SUPERBLOCKS]
    rng = np.random.default_rng(0)
    with pytest.raises(AssertionError):
        for _ in range(300):
            moment = int(rng.choice(behind))
            (tmp_path / "cut.kv").write_bytes(careless.image(moment, rng))
            steps = [event[1] for event in careless.events[:moment] if event[0] == "saved"]
            check(tmp_path / "cut.kv", expected, steps[-1] if steps else None, go_on=False)


# ---- truncation and flipped bits

@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A file with two saves, the newest log record at its end; path and contents by save."""
    path = tmp_path_factory.mktemp("saved") / "cache.kv"
    driver = Driver(FlashStore(file=path).create(GEOMETRY, "fingerprint"))
    driver.prefill()
    driver.branch.save(b"1")
    found = {1: contents(driver)}
    driver.append(2, 2, 5.0)
    driver.branch.save(b"2")
    found[2] = contents(driver)
    driver.branch.close()
    place = driver.branch._volume.log.saves()[0].places[-1]
    assert HEADER_BYTES + (place.extent + 1) * EXTENT == os.path.getsize(path)
    return path, found, place


def test_truncation_at_every_byte_of_the_last_record(tmp_path, saved):
    path, found, place = saved
    start = HEADER_BYTES + place.extent * EXTENT
    whole, copy = path.read_bytes(), tmp_path / "cut.kv"
    for length in range(start, start + place.bytes):
        copy.write_bytes(whole[:length])
        with contextlib.closing(FlashStore(file=copy, direct=False, threads=1).open(read_only=True)) as branch:
            assert branch.saves()[0].metadata == b"1"
            if length % 16 == 0:
                np.testing.assert_array_equal(contents(Driver(branch)), found[1])
    copy.write_bytes(whole[:start + place.bytes])
    with contextlib.closing(FlashStore(file=copy, direct=False).open(read_only=True)) as branch:
        np.testing.assert_array_equal(contents(Driver(branch)), found[2])


def region(offset: int, place) -> str:
    if offset < PAGE_BYTES:
        return "header"
    if offset < HEADER_BYTES:
        return "superblocks"
    extent, at = divmod(offset - HEADER_BYTES, EXTENT)
    if extent in (24, place.extent):
        return "log" if at < place.bytes else "padding"
    return "block" if at < GEOMETRY.block_bytes else "padding"


def outcome(path, found: dict) -> str:
    """Returns what a user of a damaged file meets; never wrong bytes."""
    try:
        branch = FlashStore(file=path, direct=False, threads=1).open(GEOMETRY, "fingerprint", read_only=True)
    except (ChecksumMismatch, FormatMismatch, NothingSaved, ShortRead) as cause:
        assert str(path) in str(cause)
        return "refused"
    with contextlib.closing(branch):
        number, driver = int(branch.saves()[0].metadata), Driver(branch)
        for layer in range(2):
            ok, blocks = driver.try_read(layer)
            if not ok:
                error = branch.take_error()
                assert type(error) is ChecksumMismatch and "block" in str(error) and str(path) in str(error)
                return "named"
            np.testing.assert_array_equal(blocks, found[number][layer])
        return "harmless" if number == 2 else "the save before"


def flipped_bits(saved, tmp_path, offsets, rng) -> collections.Counter:
    path, found, place = saved
    copy, counts = tmp_path / "spoilt.kv", collections.Counter()
    shutil.copy(path, copy)
    with open(copy, "r+b") as file:
        for offset in offsets:
            file.seek(offset)
            good = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([good ^ (1 << int(rng.integers(8)))]))
            file.flush()
            counts[region(offset, place), outcome(copy, found)] += 1
            file.seek(offset)
            file.write(bytes([good]))
            file.flush()
    assert outcome(copy, found) == "harmless", "and when the damage is undone, all is well"
    return counts


LIKELY = {
    ("header", "refused"), ("superblocks", "harmless"), ("superblocks", "the save before"), ("log", "the save before"),
    ("log", "refused"), ("block", "named"), ("block", "harmless"), ("padding", "harmless"),
}


def test_one_flipped_bit_in_every_region(saved, tmp_path):
    path, _, place = saved
    size, rng = os.path.getsize(path), np.random.default_rng(0)
    everywhere = np.arange(size)
    regions = {name: [offset for offset in range(0, size, 3) if region(offset, place) == name]
               for name in ("header", "superblocks", "log", "block", "padding")}
    offsets = [offset for one in regions.values() for offset in rng.choice(one, 6, replace=False).tolist()]
    counts = flipped_bits(saved, tmp_path, [*offsets, *rng.choice(everywhere, 6).tolist()], rng)
    assert set(counts) <= LIKELY
    assert {"header", "superblocks", "log", "block", "padding"} == {where for where, _ in counts}
    assert not {("header", "harmless"), ("log", "harmless")} & set(counts)


@pytest.mark.slow
def test_many_flipped_bits(saved, tmp_path):
    path, _, place = saved
    rng = np.random.default_rng(1)
    offsets = [offset for offset in range(os.path.getsize(path)) if region(offset, place) in ("log", "block")]
    counts = flipped_bits(saved, tmp_path, [*range(0, HEADER_BYTES, 23), *offsets[::7]], rng)
    assert set(counts) <= LIKELY
    print(dict(counts))


# ---- one CPU

def test_one_cpu_is_enough(tmp_path, codec, expected):
    """Reader, writer and caller share one core, and nothing waits for ever."""
    command = [sys.executable, "-m", "tests.store.crashes", str(tmp_path / "one"), str(SEED), codec, str(10**9)]
    one = str(min(os.sched_getaffinity(0)))
    subprocess.run(["taskset", "-c", one, *command], cwd=ROOT, check=True, capture_output=True, timeout=120)
    assert check(f"{tmp_path}/one.{10**9}", expected, max(expected)) == max(expected)
