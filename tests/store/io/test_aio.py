"""Asynchronous reads: rings and who may use them again, faults at the system calls, and which engine is chosen."""

import dataclasses
import errno
import gc
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from kvjax.errors import ConfigError, ReadFailed
from kvjax.store.flash.store import FlashStore
from kvjax.store.format.codec import Codec
from kvjax.store.format.pages import HEADER_BYTES, checksum
from kvjax.store.io.aio import Ring, RingStack
from kvjax.store.io.file import BlockFile
from kvjax.store.io.reader import Reader
from kvjax.store.io.system import SystemIO
from tests.store.conftest import GEOMETRY, settle, skip_without, wait_until
from tests.store.faults import FaultySystem

EXTENT, BLOCKS = GEOMETRY.extent_bytes, 600
PAYLOAD = GEOMETRY.block_bytes


@pytest.fixture(autouse=True)
def _needs_aio(tmp_path):
    skip_without("aio", tmp_path)


@dataclasses.dataclass
class Fixed:
    """A file of random extents, and readers of it.

    Attributes:
      blocks: uint8[BLOCKS, block_bytes] what is in it.
      sums: uint64[BLOCKS]
    """

    path: str
    blocks: np.ndarray
    sums: np.ndarray
    open_readers: list = dataclasses.field(default_factory=list)

    def reader(self, system: SystemIO, engine="aio", timeout=5.0) -> Reader:
        file = BlockFile(self.path, os.open(self.path, os.O_RDONLY), system, temporary=False)
        file.open_direct()
        reader = Reader(file, Codec(GEOMETRY), system, engine=engine, threads=2, timeout=timeout)
        self.open_readers.append((reader, file))
        return reader

    def start(self, reader: Reader, extents: np.ndarray):
        return reader.start(extents.astype(np.int32), self.sums[extents], lambda offset: f"block at {offset}")


@pytest.fixture(scope="module")
def contents():
    extents = np.random.default_rng(0).integers(0, 256, (BLOCKS, EXTENT), np.uint8)
    return extents, np.array([checksum(extent[:PAYLOAD].tobytes()) & ~0xFFFF for extent in extents], np.uint64)


@pytest.fixture
def fixed(tmp_path, contents):
    path = tmp_path / "extents"
    path.write_bytes(bytes(HEADER_BYTES) + contents[0].tobytes())
    settle(path)
    made = Fixed(str(path), contents[0][:, :PAYLOAD], contents[1])
    yield made
    for reader, file in made.open_readers:
        reader.stop()
        reader.close()
        file.close()


def some(rng: np.random.Generator, count: int) -> np.ndarray:
    """Ascending extents, single ones and runs."""
    starts = rng.choice(BLOCKS, count)
    runs = [np.arange(start, min(BLOCKS, start + rng.choice([1, 1, 2, 9]))) for start in starts]
    return np.unique(np.concatenate(runs))[:count]


def check(fixed: Fixed, fetch, extents: np.ndarray, rng: np.random.Generator) -> None:
    """Collects the fetch into places in any order, some blocks into none."""
    targets = rng.permutation(extents.size)
    targets[rng.random(extents.size) < 0.2] = -1
    out = np.full((extents.size, PAYLOAD), 77, np.uint8)
    lost, error = fetch.collect(targets, out)
    assert error is None and not lost.size
    expected = np.full_like(out, 77)
    expected[targets[targets >= 0]] = fixed.blocks[extents[targets >= 0]]
    np.testing.assert_array_equal(out, expected)


# ---- fetches


@pytest.mark.parametrize("places", [2, 7, 64, 2048])
@pytest.mark.parametrize("storm", [0.0, 0.5])
@pytest.mark.parametrize("seed", range(3))
def test_every_block_arrives_whatever_the_kernel_does(fixed, monkeypatch, places, storm, seed):
    """Given few or many places in the ring, reads that come short, interrupted calls, and submissions in parts."""
    monkeypatch.setattr(RingStack, "MAX_BYTES", places * EXTENT)
    rng = np.random.default_rng(seed)
    reader = fixed.reader(FaultySystem(seed, storm))
    for count in (1, 30, 400):
        extents = some(rng, count)
        check(fixed, fixed.start(reader, extents), extents, rng)
    assert reader.engine == "aio"


def test_memory_in_flight_is_bounded_and_refilled(fixed, monkeypatch):
    """Given a fetch of 400 blocks through 32 places, no more than 32 are with the kernel, and usually more than one."""
    monkeypatch.setattr(RingStack, "MAX_BYTES", 32 * EXTENT)
    depth, now = [], 0

    class Counting(SystemIO):
        def io_submit(self, context, pointers):
            nonlocal now
            taken = SystemIO.io_submit(context, pointers)
            now += taken
            depth.append(now)
            return taken

        def io_getevents(self, context, least, events, seconds):
            nonlocal now
            count = SystemIO.io_getevents(context, least, events, seconds)
            now -= count
            return count

    extents = np.arange(0, BLOCKS, 2)
    reader = fixed.reader(Counting())
    fetch = fixed.start(reader, extents)
    assert len(depth) == 1, "one system call submits all there is room for"
    check(fixed, fetch, extents, np.random.default_rng(0))
    assert max(depth) == 32 and fetch.requests == extents.size
    assert np.median(depth) > 8


def test_neighbours_become_one_read(fixed):
    reader = fixed.reader(SystemIO())
    extents = np.array([3, 4, 5, 9, 20, 21])
    fetch = fixed.start(reader, extents)
    check(fixed, fetch, extents, np.random.default_rng(0))
    assert fetch.requests == 3
    assert fetch.times.began < fetch.times.ended and fetch.times.waited > 0


def test_damaged_blocks_are_named_and_not_copied(fixed):
    reader, extents = fixed.reader(SystemIO()), np.arange(10, 40, dtype=np.int32)
    sums = fixed.sums[extents]
    sums[[3, 17]] += np.uint64(1)
    out = np.full((extents.size, PAYLOAD), 77, np.uint8)
    lost = reader.start(extents, sums, str).copy(np.arange(extents.size), out)
    np.testing.assert_array_equal(lost, [3, 17])
    assert (out[[3, 17]] == 77).all()
    kept = np.delete(np.arange(extents.size), lost)
    np.testing.assert_array_equal(out[kept], fixed.blocks[extents[kept]])


def test_a_refused_read_is_typed_and_costs_only_its_own_blocks(fixed):
    system = FaultySystem()
    reader, extents = fixed.reader(system), np.arange(0, 40, 2)
    system.fail("preadv", errno.EIO, times=1, skip=4)
    fetch = fixed.start(reader, extents)
    out = np.zeros((extents.size, PAYLOAD), np.uint8)
    lost, error = fetch.collect(np.arange(extents.size), out)
    np.testing.assert_array_equal(lost, [4])
    assert type(error) is ReadFailed and f"block at {HEADER_BYTES + 8 * EXTENT}" in str(error)
    np.testing.assert_array_equal(np.delete(out, 4, 0), fixed.blocks[np.delete(extents, 4)])
    assert system.calls.count("preadv") == extents.size, "threads need not try what the device has refused"


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EINTR, errno.EINVAL])
def test_reads_the_kernel_puts_off_are_made_by_threads(fixed, code):
    """Given a read in five that is not begun, those alone are read again, all at the first attempt."""
    system, rng = FaultySystem(), np.random.default_rng(0)
    reader, extents = fixed.reader(system), np.arange(0, 100, 2)
    system.fail("preadv_direct", code, times=10, skip=20)
    fetch = fixed.start(reader, extents)
    system.heal()
    check(fixed, fetch, extents, rng)
    begun = extents.size - 10 * (code == errno.EAGAIN)
    assert begun < fetch.requests <= begun + 10


def test_a_kernel_without_room_is_no_error(fixed):
    """Given submissions that always fail with EAGAIN, threads read, and what nobody wants is not read at all."""
    system, rng = FaultySystem(), np.random.default_rng(0)
    reader, extents = fixed.reader(system), np.arange(0, 100, 2)
    system.fail("io_submit", errno.EAGAIN)
    check(fixed, fixed.start(reader, extents), extents, rng)
    assert reader.engine == "aio" and 0 < system.calls.count("preadv") < extents.size


@pytest.mark.parametrize("operation", ["io_setup", "io_submit"])
def test_a_kernel_that_refuses_is_asked_no_more(fixed, caplog, operation):
    system, rng = FaultySystem(), np.random.default_rng(0)
    reader, extents = fixed.reader(system), np.arange(0, 100, 2)
    guess = fixed.start(reader, extents)  # has the only ring, so that the next fetch needs another
    system.fail(operation, errno.ENOSYS)
    with caplog.at_level("WARNING", logger="absl"):
        for _ in range(2):
            check(fixed, fixed.start(reader, extents), extents, rng)
    assert reader.engine == "threads" and system.calls.count(operation) <= 3
    assert len([record for record in caplog.records if "refuses asynchronous" in record.message]) == 1
    check(fixed, guess, extents, rng)


# ---- rings


def test_a_dropped_fetch_parks_its_ring_until_the_kernel_is_done(fixed):
    system = FaultySystem()
    reader, extents = fixed.reader(system), np.arange(0, 100, 2)
    rings = reader._rings.rings
    system.hang("preadv")
    first = fixed.start(reader, extents)
    ring = first._ring
    first.drop()
    second = rings.take()
    assert second is not ring, "the kernel may still write to its memory"
    rings.give(second)
    system.heal()
    wait_until(lambda: rings.give(rings.take()) or not ring.in_flight)
    assert {rings.take(), rings.take()} == {ring, second}


@pytest.fixture
def collect():
    """Collects what became garbage in this test: to look at all that other tests left takes a second each time."""
    gc.freeze()
    yield gc.collect
    gc.unfreeze()


def test_a_forgotten_fetch_gives_its_ring_back(fixed, collect):
    reader = fixed.reader(SystemIO())
    rings = reader._rings.rings
    for _ in range(20):
        fixed.start(reader, np.arange(0, 100, 2))
        collect()
        wait_until(lambda: rings.give(rings.take()) or not any(ring.in_flight for ring in rings._all))
    assert len(rings._all) <= 2


def test_a_guess_may_be_in_flight_at_exit(tmp_path):
    program = f"""
import numpy as np
from kvjax.store.geometry import Geometry
from kvjax.store.flash.store import FlashStore
from tests.store.conftest import settle
branch = FlashStore(directory={str(tmp_path)!r}).create(Geometry(1, 1, 1, 64, 1, 2, "int8"), "")
branch.write_layer(0, np.ones((1, 1, 64, 1, 2), np.int8), np.ones((1, 1, 64), np.int32))
settle(branch.path)
assert branch.submit(0, 0, np.arange(64, dtype=np.int32)[None, None]) and branch._reads.guesses
"""
    root = pathlib.Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", program], check=True, cwd=root, capture_output=True, text=True)
    assert "Exception" not in done.stderr and not list(tmp_path.iterdir())


def test_a_hung_fetch_gives_up_and_its_memory_stays_untouched(fixed):
    system = FaultySystem()
    reader, extents = fixed.reader(system, timeout=1.5), np.arange(0, 100, 2)
    system.hang("preadv")
    fetch = fixed.start(reader, extents)
    ring = fetch._ring
    out = np.full((extents.size, PAYLOAD), 77, np.uint8)
    with pytest.raises(ReadFailed, match=r"1\.5 s"):
        fetch.copy(np.arange(extents.size), out)
    assert ring.in_flight == extents.size and (out == 77).all()
    system.heal()
    check(fixed, fixed.start(reader, extents), extents, np.random.default_rng(0))


def test_closing_ends_every_context_also_of_what_is_in_flight(tmp_path, open_branch):
    store = FlashStore(directory=tmp_path)
    ended, made = [], []
    store.system.io_setup = lambda depth: made.append(SystemIO.io_setup(depth)) or made[-1]
    store.system.io_destroy = lambda context: ended.append(context) or SystemIO.io_destroy(context)
    driver = open_branch(store)
    driver.prefill()
    settle(driver.branch.path)
    block = np.tile(np.arange(GEOMETRY.num_blocks, dtype=np.int32), (2, 2, 1))
    for layer in range(2):
        assert driver.branch.submit(layer, driver.branch.generation, block)
    driver.read(1)
    driver.branch.close()
    assert len(made) >= 1 and sorted(ended) == sorted(made)


def test_a_ring_that_hangs_is_left_to_the_kernel(tmp_path):
    system = FaultySystem()
    ring = Ring(system, 4, 4096, 4096)
    ring.in_flight = 1
    system.hang("preadv")
    ring.close(0.05)
    assert not ring._closed
    system.heal()
    ring.in_flight = 0
    ring.close(0.05)
    assert ring._closed


def test_memory_in_doubt_is_not_used_again():
    """Given Ctrl-C as the kernel takes reads: they count as being on their way."""
    class Interrupted(SystemIO):
        def io_submit(self, context, pointers):
            raise KeyboardInterrupt

    ring = Ring(Interrupted(), 4, 4096, 4096)
    with pytest.raises(KeyboardInterrupt):
        ring.submit(0, 3)
    assert ring.in_flight == 3
    ring.in_flight = 0
    ring.close(0.05)


@pytest.mark.parametrize("depth", [1, 3])
def test_more_reads_than_may_be_in_flight(fixed, monkeypatch, depth):
    """Given 400 single blocks, no more than `depth` reads are ever with the kernel, and all blocks arrive."""
    monkeypatch.setattr(RingStack, "MAX_DEPTH", depth)
    taken = []

    class Counting(SystemIO):
        def io_submit(self, context, pointers):
            taken.append(SystemIO.io_submit(context, pointers))
            return taken[-1]

    extents = np.arange(0, BLOCKS, 2)
    reader = fixed.reader(Counting())
    check(fixed, fixed.start(reader, extents), extents, np.random.default_rng(0))
    assert max(taken) <= depth and sum(taken) == extents.size


def test_a_guess_is_left_out_when_the_kernel_has_no_ring_left(fixed):
    """Given contexts of other depths for guesses, which run out: reads stay asynchronous."""
    depths = []

    class Scarce(SystemIO):
        def io_setup(self, depth):
            depths.append(depth)
            if len(depths) > 2:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            return SystemIO.io_setup(depth)

    reader, extents = fixed.reader(Scarce()), np.arange(3)
    guesses = [reader.guess(extents.astype(np.int32), fixed.sums[extents], str) for _ in range(2)]
    assert guesses[0] is not None and guesses[1] is None
    assert depths[1:] == [512, 512]
    check(fixed, fixed.start(reader, extents), extents, np.random.default_rng(0))
    check(fixed, guesses[0], extents, np.random.default_rng(0))
    assert reader.engine == "aio"


# ---- the choice


@pytest.mark.parametrize("settings, expected", [({}, "aio"), ({"direct": False}, "threads"),
                                                ({"profile": "nvme"}, "aio"), ({"engine": "threads"}, "threads"),
                                                ({"engine": "aio"}, "aio")])
def test_the_engine_that_runs_is_told(tmp_path, open_branch, caplog, settings, expected):
    with caplog.at_level("INFO", logger="absl"):
        driver = open_branch(FlashStore(directory=tmp_path, **settings))
    assert driver.branch.engine == expected
    assert len([record for record in caplog.records if "threads read" in record.message
                or "reads are asynchronous" in record.message]) == 1


@pytest.mark.parametrize("settings, words", [({"direct": False}, "page cache"), ({"codec": "rle"}, "codec 'rle'")])
def test_aio_where_it_cannot_be(tmp_path, settings, words):
    with pytest.raises(ConfigError, match=rf"engine='aio'.*{words}"):
        FlashStore(directory=tmp_path, engine="aio", **settings).create(GEOMETRY, "")
    assert not list(tmp_path.iterdir())


def test_a_kernel_without_aio(tmp_path, open_branch, caplog):
    store, strict = FlashStore(directory=tmp_path), FlashStore(directory=tmp_path, engine="aio")
    store.system = strict.system = FaultySystem()
    store.system.fail("io_setup", errno.ENOSYS)
    with caplog.at_level("INFO", logger="absl"):
        driver = open_branch(store)
    assert driver.branch.engine == "threads" and "cannot be used: " in caplog.text
    np.testing.assert_array_equal(driver.prefill(), driver.read())
    with pytest.raises(ConfigError, match="engine='aio' cannot be used"):
        strict.create(GEOMETRY, "")


def test_unknown_engine(tmp_path):
    with pytest.raises(ConfigError, match="unknown engine 'uring'; use one of aio, threads"):
        FlashStore(directory=tmp_path, engine="uring")
