"""The compiled part of asynchronous reads: when it is used, what it leaves to others, and what it refuses."""

import errno
import os

import numpy as np
import pytest

from kvjax.errors import ReadFailed, StoreError
from kvjax.store import aio
from kvjax.store.flash import FlashStore
from kvjax.store.format import checksum
from kvjax.store.linux import EVENT, IOCB
from tests.store.conftest import GEOMETRY, settle, skip_without
from tests.store.faults import FaultySystem

native = pytest.importorskip("kvjax.store.native")


@pytest.fixture(autouse=True)
def _needs_aio(tmp_path):
    skip_without("aio", tmp_path)


@pytest.fixture
def quick(monkeypatch):
    """How many blocks each `Ring.read` copied."""
    copied, read = [], aio.Ring.read

    def counted(self, *args):
        found = read(self, *args)
        copied.append(found.copied)
        return found

    monkeypatch.setattr(aio.Ring, "read", counted)
    return copied


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
    read = aio.Ring.read

    def torn(self, out, count, *args):
        landed = read(self, out, count, *args)
        self._done[[0, 3]] = 0
        for target in self.targets[[0, 3]]:
            out.reshape(-1, GEOMETRY.block_bytes)[target] = 0
        return landed._replace(copied=landed.copied - 2)

    monkeypatch.setattr(aio.Ring, "read", torn)
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


def test_what_was_read_ahead_is_used(tmp_path, open_branch, quick):
    driver, blocks = filled(open_branch, FlashStore(tmp_path))
    block = np.tile(np.arange(GEOMETRY.num_blocks, dtype=np.int32), (2, 2, 1))
    assert driver.branch.submit(0, 0, block)
    np.testing.assert_array_equal(driver.read(), blocks)
    assert not quick and driver.branch.stats().prefetch_used > 0


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
    monkeypatch.setattr(aio.native, "read", lambda *_: (0, 3, 0, 0, 3, 0.0, 0.0, 0.5))
    monkeypatch.setattr(aio.Ring, "wait", lambda *_: 0)
    assert not driver.try_read()[0]
    error = driver.branch.take_error()
    assert isinstance(error, ReadFailed) and "did not answer within 0.5 s" in str(error)
    assert len(rings._parked) == 1
    lost = rings._parked[0]
    monkeypatch.undo()
    lost.in_flight = 0
    np.testing.assert_array_equal(driver.read(), blocks)


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


def resolved(**changes):
    """`native.resolve` over two lanes of three blocks, and its outputs."""
    given = {
        "block": np.array([[0, 3, 2], [1, -1, 0]], np.int32), "slot": np.array([[1, 9, 0], [3, 9, 2]], np.int32),
        "rows": np.array([7, 5, 6, 2, 4, 1], np.int32), "shift": np.zeros(2, np.int64),
        "pending": np.zeros(6, np.uint8), "checksums": np.arange(8, dtype=np.uint64) * 10,
    } | changes
    outputs = np.zeros(6, np.int32), np.zeros(6, np.uint64), np.zeros(6, np.int64)
    staged = np.zeros((6, 2), np.int64)
    count, marked = native.resolve(*given.values(), *outputs, staged, 2, 3, 4, 0)
    return count, *(output[:max(count, 0)].tolist() for output in outputs), staged[:marked].tolist()


def test_resolve_sorts_by_extent_and_leaves_out_what_nobody_wants():
    assert resolved() == (4, [2, 4, 6, 7], [20, 40, 60, 70], [6, 7, 0, 1], [])


def test_resolve_tells_what_is_staged():
    """Rows of blocks 1 and 2 of the first lane and 0 of the second are staged; the first of them is not asked for."""
    assert resolved(pending=np.array([0, 1, 1, 1, 0, 0], np.uint8))[-1] == [[2, 0], [3, 6]]


def test_resolve_does_not_read_what_is_wholly_staged():
    """Given all of block 2 of the first lane, which was never written, and rows of block 0 of the second."""
    rows, pending = np.array([7, 5, -1, 2, 4, 1], np.int32), np.array([0, 0, 2, 1, 0, 0], np.uint8)
    assert resolved(rows=rows, pending=pending) == (3, [2, 4, 7], [20, 40, 70], [6, 7, 1], [[2, 0], [3, 6]])


@pytest.mark.parametrize("changes", [
    {"rows": np.array([7, 5, -1, 2, 4, 1], np.int32)}, {"checksums": np.zeros(7, np.uint64)},
    {"slot": np.array([[4, 9, 0], [3, 9, 2]], np.int32)}, {"slot": np.array([[-1, 9, 0], [3, 9, 2]], np.int32)},
], ids=["never written", "beyond the file", "slot too large", "negative slot"])
def test_resolve_leaves_the_unusual_to_others(changes):
    assert resolved(**changes)[0] == -1


@pytest.mark.parametrize("changes", [
    {"slot": np.zeros((2, 2), np.int32)}, {"shift": np.zeros(1, np.int64)}, {"pending": np.zeros(5, np.uint8)},
    {"block": np.zeros((2, 3), np.int64)},
], ids=["slots", "lanes", "pending", "type"])
def test_resolve_refuses_what_does_not_fit_together(changes):
    with pytest.raises(ValueError, match=r"sizes do not agree|items of 8 bytes"):
        resolved(**changes)
