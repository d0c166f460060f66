"""The compiled part of asynchronous reads: when it is used, what it leaves to others, and what it refuses."""

import ctypes
import errno
import gc
import os
import threading
import time
import types

import numpy as np
import pytest

from kvjax.errors import ReadFailed, StoreError
from kvjax.store import aio
from kvjax.store.branch import FlashBranch
from kvjax.store.flash import FlashStore
from kvjax.store.format import HEADER_BYTES, checksum
from kvjax.store.linux import EVENT, IOCB
from kvjax.store.system import SystemIO
from tests.store.conftest import GEOMETRY, settle, skip_without
from tests.store.faults import FaultySystem

native = pytest.importorskip("kvjax.store.native")


@pytest.fixture(autouse=True)
def _needs_aio(tmp_path):
    skip_without("aio", tmp_path)


@pytest.fixture
def quick(monkeypatch):
    """How many blocks each `native.fetch` copied, of those it read itself and of a guess."""
    fetches, landed = [], FlashBranch._landed

    def counted(self, ring, layer, started, numbers, ahead, *rest):
        fetches.append(aio.Landed(*numbers).copied)
        if ahead is not None:
            fetches[-1] = fetches[-1], aio.Landed(*ahead[1]).copied
        landed(self, ring, layer, started, numbers, ahead, *rest)

    monkeypatch.setattr(FlashBranch, "_landed", counted)
    return fetches


def filled(open_branch, store):
    """A branch whose blocks are on the device, and the blocks."""
    driver = open_branch(store)
    blocks = driver.prefill()
    settle(driver.branch.path)
    return driver, blocks


def test_the_usual_read_is_one_call(tmp_path, open_branch, quick):
    driver, blocks = filled(open_branch, FlashStore(tmp_path))
    np.testing.assert_array_equal(driver.read(), blocks)
    stats = driver.branch.stats()
    assert quick == [stats.blocks_read] and stats.reads >= 1
    assert 0 < stats.io_seconds <= stats.read_seconds and stats.wait_seconds <= stats.io_seconds


@pytest.mark.parametrize("whole", [False, True])
def test_staged_rows_and_blocks_lie_over_what_is_read(tmp_path, open_branch, quick, whole):
    driver, blocks = filled(open_branch, FlashStore(tmp_path))
    new = np.ones((2, 2, 1, *blocks.shape[3:]), GEOMETRY.numpy_dtype)
    index, expected = np.zeros((2, 2), np.int32), blocks.copy()
    if whole:
        assert driver.branch.put_blocks(0, 0, index[..., None], new)
        expected[:, :, :1] = new
    else:
        assert driver.branch.put_rows(0, 0, index, index + 1, new[:, :, 0, 0], np.ones(2, bool))
        expected[:, :, 0, 1] = 1
    driver.branch.commit(0)
    np.testing.assert_array_equal(driver.read(), expected)
    driver.branch.flush()
    settle(driver.branch.path)
    np.testing.assert_array_equal(driver.read(), expected)
    assert quick == [blocks[..., 0, 0].size - (4 if whole else 0), blocks[..., 0, 0].size], "what is whole is not read"


def test_what_does_not_come_at_the_first_try_is_read_again_alone(tmp_path, open_branch, monkeypatch):
    driver, blocks = filled(open_branch, FlashStore(tmp_path))
    landed = FlashBranch._landed

    def torn(self, ring, layer, started, numbers, *rest):
        ring._done[[0, 3]] = 0
        rest[-1].reshape(-1, *rest[-1].shape[3:])[ring.targets[[0, 3]]] = 0
        found = aio.Landed(*numbers)
        landed(self, ring, layer, started, found._replace(copied=found.copied - 2), *rest)

    monkeypatch.setattr(FlashBranch, "_landed", torn)
    np.testing.assert_array_equal(driver.read(), blocks)
    assert driver.branch.stats().blocks_read == blocks[..., 0, 0].size


def test_what_the_kernel_puts_off_again_and_again_is_left_to_threads(tmp_path, open_branch, quick):
    """Given a block that was written a moment ago, as it was, and is not on the device; all blocks are one read."""
    path = tmp_path / "dirty.kv"
    driver, blocks = filled(open_branch, FlashStore(path))
    with open(path, "r+b") as file:
        offset = driver.branch._volume.extents.offset(driver.branch._lineage.table.extent(0))
        os.pwrite(file.fileno(), os.pread(file.fileno(), GEOMETRY.extent_bytes, offset), offset)
    np.testing.assert_array_equal(driver.read(), blocks)
    assert quick == [0] and driver.branch.stats().blocks_read == blocks[..., 0, 0].size


def test_a_kernel_without_another_ring_leaves_reading_to_threads(tmp_path, open_branch, monkeypatch, caplog):
    driver, blocks = filled(open_branch, FlashStore(tmp_path))

    def refused(_):
        raise OSError(errno.EAGAIN, "no more")

    monkeypatch.setattr(aio.RingStack, "take", refused)
    np.testing.assert_array_equal(driver.read(), blocks)
    assert driver.branch.engine == "threads" and "refuses asynchronous reads" in caplog.text


def guessed(driver, size: int):
    """Lets the first `size` blocks of every lane be read ahead; how many blocks that are."""
    block = np.tile(np.arange(size, dtype=np.int32), (2, 2, 1))
    assert driver.branch.submit(0, driver.branch.generation, block)
    return block.size


@pytest.mark.parametrize("profile", ["native", "emmc"])
@pytest.mark.parametrize("missing", [0, 1, GEOMETRY.num_blocks])
def test_what_was_read_ahead_is_used(tmp_path, open_branch, quick, profile, missing):
    driver, blocks = filled(open_branch, FlashStore(tmp_path, profile=profile))
    before, ahead = driver.branch.stats(), guessed(driver, GEOMETRY.num_blocks - missing)
    np.testing.assert_array_equal(driver.read(), blocks)
    stats, late = driver.branch.stats(), 4 * missing
    assert quick == [(late, ahead)] if ahead else quick == [late]
    assert (stats.prefetched, stats.prefetch_used) == (ahead, ahead)
    assert stats.mispredicted == (late if ahead else 0) and stats.blocks_read - before.blocks_read == ahead + late
    np.testing.assert_array_equal(driver.read(), blocks)
    assert driver.branch.stats().prefetched == ahead, "a guess is used once"


def test_a_guess_of_what_has_changed_is_not_used(tmp_path, open_branch, quick):
    """Given a guess, block 1 of each lane gets other contents, and lies elsewhere when it is asked for."""
    driver, blocks = filled(open_branch, FlashStore(tmp_path))
    guessed(driver, GEOMETRY.num_blocks)
    expected, new = blocks.copy(), np.ones((2, 2, 1, *blocks.shape[3:]), GEOMETRY.numpy_dtype)
    expected[:, :, 1:2] = new
    assert driver.branch.put_blocks(0, 0, np.ones((2, 2, 1), np.int32), new)
    driver.branch.commit(0)
    driver.branch.flush()
    settle(driver.branch.path)
    np.testing.assert_array_equal(driver.read(), expected)
    stats = driver.branch.stats()
    assert stats.mispredicted == 4 and quick == [(4, stats.prefetch_used)]


def test_a_later_guess_takes_the_place_of_an_earlier_one(tmp_path, open_branch, quick):
    driver, blocks = filled(open_branch, FlashStore(tmp_path))
    rings = driver.branch._volume.reader.rings.guess_rings
    guessed(driver, 3)
    guessed(driver, 1)
    np.testing.assert_array_equal(driver.read(), blocks)
    assert quick == [(4 * (GEOMETRY.num_blocks - 1), 4)]
    back = [*rings._idle, *rings._parked]
    assert len(back) == len(rings._all) == len(set(map(id, back))), "each ring came back once"


def test_what_came_damaged_with_a_guess_is_read_again(tmp_path, open_branch, monkeypatch):
    """Given a bit that is wrong where the guess was read to."""
    driver, blocks = filled(open_branch, FlashStore(tmp_path))
    before, ahead, window = driver.branch.stats(), guessed(driver, GEOMETRY.num_blocks), aio.Guess.window

    def flipped(guess):
        memory = (ctypes.c_uint8 * 1).from_address(guess.ring.arena.address)
        time.sleep(0.1)  # until it has come
        memory[0] ^= 1
        return window(guess)

    monkeypatch.setattr(aio.Guess, "window", flipped)
    np.testing.assert_array_equal(driver.read(), blocks)
    assert driver.branch.stats().blocks_read - before.blocks_read == ahead + 1


@pytest.mark.parametrize("end", ["closed", "forgotten"])
def test_a_guess_that_nobody_asks_for_gives_its_ring_back(tmp_path, open_branch, end):
    driver, _ = filled(open_branch, FlashStore(tmp_path))
    rings = driver.branch._volume.reader.rings.guess_rings
    guessed(driver, 2)
    ring, = rings._all
    if end == "closed":
        driver.branch.close()
        assert ring._closed and not driver.branch._reads._guesses
    else:
        driver.branch._reads._guesses.clear()
        gc.collect()
        assert list(rings._parked) == [ring]


def test_a_guess_of_more_reads_than_may_be_in_flight(tmp_path, open_branch, quick, monkeypatch):
    monkeypatch.setattr(aio.RingStack, "GUESS_DEPTH", 1)
    driver, blocks = filled(open_branch, FlashStore(tmp_path))
    before, block = driver.branch.stats(), np.tile(np.arange(0, GEOMETRY.num_blocks, 2, dtype=np.int32), (2, 2, 1))
    assert driver.branch.submit(0, 0, block)
    np.testing.assert_array_equal(driver.read(), blocks)
    stats, left = driver.branch.stats(), blocks[..., 0, 0].size - block.size
    assert quick == [(left, block.size)] and stats.prefetch_used == block.size and stats.reads - before.reads > 2


def test_a_device_that_hangs_with_a_guess_is_one_error(tmp_path, open_branch, monkeypatch):
    driver, blocks = filled(open_branch, FlashStore(tmp_path, profile="emmc", timeout=0.3))
    guessed(driver, 2)
    with monkeypatch.context() as changed:
        changed.setattr(aio.Ring, "wait", lambda *_: 0)
        started = time.monotonic()
        assert not driver.try_read()[0]
        assert time.monotonic() - started < 5
    error = driver.branch.take_error()
    assert isinstance(error, ReadFailed) and "did not answer within 0.3 s" in str(error)
    np.testing.assert_array_equal(driver.read(), blocks)


def test_a_fork_does_not_take_the_guess_of_its_parent(tmp_path, open_branch):
    driver, blocks = filled(open_branch, FlashStore(tmp_path))
    ahead = guessed(driver, 2)
    fork = type(driver)(driver.branch.fork())
    driver.append(0, 0, 5.0)
    np.testing.assert_array_equal(fork.read(), blocks)
    expected = blocks.copy()
    expected[:, :, 0, 0] = 5.0
    np.testing.assert_array_equal(driver.read(), expected)
    assert fork.branch.stats().prefetch_used == 0 and driver.branch.stats().prefetch_used == ahead
    fork.branch.close()


def test_a_block_that_was_never_written_is_zeros(tmp_path, open_branch, quick):
    driver = open_branch(FlashStore(tmp_path))
    blocks = driver.full()
    counts = np.full(blocks.shape[:3], GEOMETRY.block_rows, np.int32)
    counts[:, :, 1] = 0
    driver.branch.write_layer(0, blocks, counts)
    driver.branch.flush()
    settle(driver.branch.path)
    blocks[:, :, 1] = 0
    np.testing.assert_array_equal(driver.read(), blocks)
    assert quick == [np.count_nonzero(counts)]


def test_a_damaged_block_is_not_copied(tmp_path, open_branch, quick):
    path = tmp_path / "damaged.kv"
    driver, blocks = filled(open_branch, FlashStore(path))
    extent = driver.branch._lineage.table.extent(0)
    with open(path, "r+b") as file:
        file.seek(driver.branch._volume.extents.offset(extent))
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 4]))
    settle(path)
    assert not driver.try_read()[0]
    assert quick == [blocks.shape[0] * blocks.shape[1] * blocks.shape[2] - 1]
    with pytest.raises(StoreError, match="block 0"):
        raise driver.branch.take_error()


def test_a_device_that_does_not_answer_is_an_error_and_its_ring_is_not_used_again(tmp_path, open_branch, monkeypatch):
    driver, blocks = filled(open_branch, FlashStore(tmp_path, timeout=0.5))
    rings = driver.branch._volume.reader._rings.rings
    landed = FlashBranch._landed

    def stuck(self, ring, layer, started, numbers, *rest):
        ring.in_flight = 3
        landed(self, ring, layer, started, aio.Landed(*numbers)._replace(copied=0), *rest)

    monkeypatch.setattr(FlashBranch, "_landed", stuck)
    monkeypatch.setattr(aio.Ring, "wait", lambda *_: 0)
    assert not driver.try_read()[0]
    error = driver.branch.take_error()
    assert isinstance(error, ReadFailed) and "did not answer within 0.5 s" in str(error)
    assert len(rings._parked) == 1
    lost = rings._parked[0]
    monkeypatch.undo()
    lost.in_flight = 0
    np.testing.assert_array_equal(driver.read(), blocks)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("call", ["submit", "wait"])
@pytest.mark.parametrize("cause", [OSError(errno.EINVAL, "no"), KeyboardInterrupt()], ids=["refused", "interrupted"])
def test_what_an_emulated_device_raises(tmp_path, open_branch, monkeypatch, ahead, call, cause):
    """The kernel may not take reads, and others read then; all else is the branch's error, and nothing is lost."""
    driver, blocks = filled(open_branch, FlashStore(tmp_path, profile="ufs4.0"))
    method, raised = getattr(aio.Ring, call), []

    def raises_once(*args):
        if not raised:
            raised.append(cause)
            raise cause
        return method(*args)

    monkeypatch.setattr(aio.Ring, call, raises_once)
    fine = not ahead or driver.branch.submit(0, 0, np.zeros((2, 2, 1), np.int32))
    fine = fine and driver.try_read()[0]
    error = driver.branch.take_error()
    assert raised and fine == (isinstance(cause, OSError) and call == "submit")
    assert fine or error.__cause__ is cause or isinstance(error, ReadFailed)
    np.testing.assert_array_equal(driver.read(), blocks)
    rings = driver.branch._volume.reader.rings
    assert not any(ring.lent for stack in (rings.rings, rings.guess_rings) for ring in stack._all)


def test_system_calls_that_are_replaced_are_called(tmp_path, open_branch, quick):
    store = FlashStore(tmp_path)
    store.system = FaultySystem()
    driver, blocks = filled(open_branch, store)
    np.testing.assert_array_equal(driver.read(), blocks)
    assert not quick and "io_submit" in store.system.calls


def test_without_the_compiled_part_threads_read(tmp_path, open_branch, monkeypatch, caplog):
    monkeypatch.setattr(aio, "native", None)
    with caplog.at_level("INFO", logger="absl"):
        driver = open_branch(FlashStore(tmp_path))
    assert driver.branch.engine == "threads" and "compiled part" in caplog.text
    np.testing.assert_array_equal(driver.prefill(), driver.read())


# ---- functions


PAGE = 64


def sealed(payload: np.ndarray, pages: int = 0) -> np.uint64:
    """The checksum of a block that takes so many pages, 0 = all."""
    return np.uint64(checksum(payload[: pages * PAGE or None]) & ~0xFFFF | pages)


def landed(payloads: np.ndarray, sums: np.ndarray, targets: list[int], results: list[int]):
    """`native.land` of one read per payload[n, block_bytes], and what it left in out, done and results."""
    count, size = payloads.shape
    control, events = np.zeros(count, IOCB), np.zeros(count, EVENT)
    pages = (sums & np.uint64(0xFFFF)).astype(int)
    control["nbytes"] = np.where(pages, pages * PAGE, size)
    events["data"], events["result"] = np.arange(count), results
    out, done, seen = np.full((count, size), 77, np.uint8), np.zeros(count, np.uint8), np.zeros(count, np.int64)
    copied = native.land(events.view(np.uint8), control.view(np.uint8), np.arange(count), sums, np.array(targets), seen,
                         done, out, count, count, payloads.ctypes.data, count, size, size, PAGE, aio.XXH3)
    return copied, out, done, seen


@pytest.mark.parametrize("size", [1, 100, 240, 241, 1024, 5000, 16_384])
def test_checksums_are_those_of_the_package(size):
    payloads = np.random.default_rng(size).integers(0, 256, (3, size), np.uint8)
    sums = np.array([sealed(payload) for payload in payloads])
    copied, out, done, _ = landed(payloads, sums, [2, 0, 1], [size] * 3)
    assert copied == 3 and done.all()
    np.testing.assert_array_equal(out[[2, 0, 1]], payloads)


def test_land_copies_whole_sound_wanted_blocks_only():
    payloads = np.random.default_rng(0).integers(0, 256, (5, 512), np.uint8)
    sums = np.array([sealed(payload) for payload in payloads])
    sums[1] += np.uint64(1 << 16)
    results = [512, 512, -errno.EIO, 511, 512]
    copied, out, done, seen = landed(payloads, sums, [0, 1, 2, 3, -1], results)
    assert copied == 1 and done.tolist() == [1, 0, 0, 0, 0] and seen.tolist() == results
    np.testing.assert_array_equal(out[0], payloads[0])
    assert (out[1:] == 77).all()


def test_land_puts_zeros_after_the_pages_that_were_read():
    """Given blocks of 8 pages of which 3, all, and as many as no block has are said to be there."""
    payloads = np.random.default_rng(0).integers(0, 256, (3, 8 * PAGE), np.uint8)
    sums = np.array([sealed(payloads[0], 3), sealed(payloads[1]), sealed(payloads[2], 9)])
    copied, out, done, _ = landed(payloads, sums, [1, 0, 2], [3 * PAGE, 8 * PAGE, 9 * PAGE])
    assert copied == 2 and done.tolist() == [1, 1, 0]
    np.testing.assert_array_equal(out[0], payloads[1])
    np.testing.assert_array_equal(out[1], np.where(np.arange(8 * PAGE) < 3 * PAGE, payloads[0], 0))
    assert (out[2] == 77).all()


def test_control_joins_neighbours_up_to_a_piece():
    """Of the last of them only the pages that it takes are read; what lies between is read with them."""
    extents = np.array([3, 4, 5, 6, 9, 11, 12], np.int32)
    sums = np.array([0, 2, 1, 0, 3, 0xF0000, 2], np.uint64)
    control, starts = np.zeros(7, IOCB), np.zeros(7, np.int64)
    reads = native.control(extents, sums, control.view(np.uint8), starts, 3, 6, 1 << 20, 4096, 1024, 512, 9)
    assert starts[:reads].tolist() == [0, 3, 4, 5, 6]
    assert control["nbytes"][:reads].tolist() == [2 * 4096 + 1024, 4096, 3 * 1024, 4096, 2 * 1024]
    assert control["offset"][:reads].tolist() == [512 + 4096 * extent for extent in (3, 6, 9, 11, 12)]
    assert control["buffer"][:reads].tolist() == [(1 << 20) + 4096 * place for place in (0, 3, 4, 5, 0)]
    assert (control["descriptor"][:reads] == 9).all() and (control["data"][:reads] == np.arange(reads)).all()


class Asked:
    """What `native.fetch` asks of a branch, and is told: two lanes of three blocks, in a file of eight extents."""

    def __init__(self, path, **changes):
        rng = np.random.default_rng(0)
        self.payloads = rng.integers(0, 256, (8, 4096), np.uint8)
        path.write_bytes(bytes(HEADER_BYTES) + self.payloads.tobytes())
        self.arrays = {
            "rows": np.array([7, 5, 6, 2, 4, 1], np.int32), "shift": np.zeros(2, np.int64),
            "pending": np.zeros(6, np.uint8),
            "checksums": np.array([checksum(payload) & ~0xFFFF for payload in self.payloads], np.uint64),
            "block": np.array([[[0, 3, 2], [1, -1, 0]]], np.int32),
            "slot": np.array([[[1, 9, 0], [3, 9, 2]]], np.int32),
            "slots": np.full((1, 2, 4, 1, 4096), 77, np.uint8)} | changes
        self.ring, self.lock = aio.Ring(SystemIO(), 8, 4096, 4096, piece=8), threading.Lock()
        self.descriptor = os.open(path, os.O_RDONLY)
        self.overlaid, self.told, self.refused = [], None, False

    def fetch(self) -> bool:
        arrays = self.arrays
        try:
            return native.fetch(self, 0, 0, arrays["block"], arrays["slot"], arrays["slots"])
        finally:
            assert self.lock.acquire(blocking=False), "whatever happens, the lock is given back"
            self.ring.close(1.0)
            os.close(self.descriptor)

    def guess(self) -> bool:
        try:
            return native.guess(self, 0, 0, self.arrays["block"])
        finally:
            self.ring.close(1.0)
            os.close(self.descriptor)

    def _guess_window(self, layer, generation):
        return self._window(layer, generation)

    def _guessed(self, ring, layer, *numbers):
        self.told = numbers[:3]

    def _window(self, layer, generation):
        arrays = self.arrays
        lanes, extents = (types.SimpleNamespace(**{name: arrays[name]}) for name in ("rows", "checksums"))
        return (self.ring, self.ring.layout, self.lock, lanes, extents, arrays["shift"], arrays["pending"],
                0, 1, 2, 3, 1, 4096, self.descriptor, "B", 5.0, None)

    def _staged(self, places):
        assert self.lock.locked()
        self.overlaid = np.frombuffer(places, np.int64).reshape(-1, 2).tolist()
        return self.overlaid

    def _landed(self, ring, layer, started, numbers, *rest):
        self.told = numbers[1:4]

    def _unused(self, ring):
        self.refused = True

    def check(self, *extents_by_slot: int | None) -> None:
        """Each flat slot has the payload of an extent, None = what it had."""
        for found, extent in zip(self.arrays["slots"].reshape(-1, 4096), extents_by_slot, strict=True):
            np.testing.assert_array_equal(found, 77 if extent is None else self.payloads[extent])


def test_fetch_puts_what_is_wanted_into_its_slots(tmp_path):
    asked = Asked(tmp_path / "file")
    assert asked.fetch() and asked.told == (4, 4, 3) and not asked.refused, "extents 6 and 7 are one read"
    asked.check(6, 7, None, None, None, None, 2, 4)
    assert asked.overlaid == []


def test_fetch_tells_what_is_staged(tmp_path):
    """Rows of blocks 1 and 2 of the first lane and 0 of the second are staged; the first of them is not asked for."""
    asked = Asked(tmp_path / "file", pending=np.array([0, 1, 1, 1, 0, 0], np.uint8))
    assert asked.fetch() and asked.overlaid == [[2, 0], [3, 6]]


def test_fetch_does_not_read_what_is_wholly_staged(tmp_path):
    """Given all of block 2 of the first lane, which was never written, and rows of block 0 of the second."""
    rows, pending = np.array([7, 5, -1, 2, 4, 1], np.int32), np.array([0, 0, 2, 1, 0, 0], np.uint8)
    asked = Asked(tmp_path / "file", rows=rows, pending=pending)
    assert asked.fetch() and asked.told[:2] == (3, 3) and asked.overlaid == [[2, 0], [3, 6]]
    asked.check(None, 7, None, None, None, None, 2, 4)


def test_fetch_leaves_out_what_is_damaged(tmp_path):
    sums = Asked(tmp_path / "file").arrays["checksums"]
    sums[6] += 1 << 16
    asked = Asked(tmp_path / "file", checksums=sums)
    assert asked.fetch() and asked.told[:2] == (4, 3) and asked.ring.missed(4).tolist() == [0]
    asked.check(None, 7, None, None, None, None, 2, 4)


@pytest.mark.parametrize("changes", [
    {"rows": np.array([7, 5, 6, 2], np.int32)}, {"checksums": np.zeros(7, np.uint64)},
    {"slot": np.array([[[4, 9, 0], [3, 9, 2]]], np.int32)}, {"slot": np.array([[[-1, 9, 0], [3, 9, 2]]], np.int32)},
    {"slot": np.zeros((1, 2, 2), np.int32)}, {"slot": np.zeros((2, 1, 3), np.int32)},
    {"block": np.zeros((1, 2, 3), np.int64)}, {"shift": np.zeros(1, np.int64)}, {"pending": np.zeros(5, np.uint8)},
    {"slots": np.zeros((1, 2, 4, 1, 4095), np.uint8)}, {"slots": np.zeros((1, 2, 4, 4096), np.uint8)},
    {"slots": np.zeros((1, 2, 4, 1, 2048), np.float16)},
    {"slots": np.zeros((1, 2, 4, 1, 4096), np.int8)}, {"slot": np.zeros((1, 2, 3), np.float32)},
    {"slots": np.zeros((2, 1, 4, 1, 4096), np.uint8)}, {"slots": np.zeros((1, 2, 8, 1, 4096), np.uint8)[:, :, ::2]},
    {"slots": np.broadcast_to(np.zeros(4096, np.uint8), (1, 2, 4, 1, 4096))},
], ids=["beyond the table", "beyond the file", "slot too large", "negative slot", "fewer slots", "shape", "type",
        "lanes", "pending", "size", "rank", "item", "kind", "index", "batch", "strided", "read-only"])
def test_fetch_leaves_the_unusual_to_others(tmp_path, changes):
    asked = Asked(tmp_path / "file", **changes)
    assert not asked.fetch() and asked.refused and asked.told is None


@pytest.mark.parametrize("method", ["_window", "_staged", "_landed"])
def test_what_a_branch_raises_comes_out_of_fetch(tmp_path, method):
    asked = Asked(tmp_path / "file", pending=np.ones(6, np.uint8))

    def broken(*_):
        raise ZeroDivisionError(method)

    setattr(asked, method, broken)
    with pytest.raises(ZeroDivisionError, match=method):
        asked.fetch()
    assert asked.refused == (method != "_window"), "the ring comes back"


def test_guess_begins_to_read_what_is_in_the_file(tmp_path):
    """Extents 6 and 7 are one read; a block that was never written, and one that is wholly staged, are not read."""
    asked = Asked(tmp_path / "file")
    assert asked.guess() and asked.told == (4, 3, 3) and asked.ring.targets[:4].tolist() == [-1] * 4
    rows, pending = np.array([7, 5, -1, 2, 4, 1], np.int32), np.array([2, 0, 0, 1, 0, 0], np.uint8)
    asked = Asked(tmp_path / "file", rows=rows, pending=pending)
    assert asked.guess() and asked.told == (2, 2, 2) and not asked.refused


def test_a_guess_of_nothing_gives_its_ring_back(tmp_path):
    asked = Asked(tmp_path / "file", block=np.full((1, 2, 3), 3, np.int32))
    assert asked.guess() and asked.told is None and asked.refused


@pytest.mark.parametrize("changes", [
    {"rows": np.array([7, 5, 6, 2], np.int32)}, {"checksums": np.zeros(7, np.uint64)},
    {"block": np.zeros((1, 2, 3), np.int64)}, {"block": np.zeros((1, 2), np.int32)},
    {"block": np.zeros((2, 1, 3), np.int32)}, {"block": np.zeros((1, 2, 5), np.int32)},
], ids=["beyond the table", "beyond the file", "type", "rank", "batch", "too many"])
def test_guess_leaves_the_unusual_to_others(tmp_path, changes):
    asked = Asked(tmp_path / "file", **changes)
    assert not asked.guess() and asked.refused and asked.told is None


@pytest.mark.parametrize("method", ["_guess_window", "_guessed"])
def test_what_a_branch_raises_comes_out_of_guess(tmp_path, method):
    asked = Asked(tmp_path / "file")

    def broken(*_):
        raise ZeroDivisionError(method)

    setattr(asked, method, broken)
    with pytest.raises(ZeroDivisionError, match=method):
        asked.guess()
    assert asked.refused == (method == "_guessed"), "the ring comes back"
