"""The compiled part of reads in a store: when it is used, and what it leaves to others."""

import ctypes
import errno
import gc
import os
import time

import numpy as np
import pytest

from kvjax.errors import ReadFailed, StoreError
from kvjax.store.flash.branch import FlashBranch
from kvjax.store.flash.store import FlashStore
from kvjax.store.io import aio
from tests.store.conftest import GEOMETRY, settle, skip_without, wait_until
from tests.store.faults import FaultySystem

native = pytest.importorskip("kvjax.store.native._compiled")


@pytest.fixture(autouse=True)
def _needs_aio(tmp_path):
    skip_without("aio", tmp_path)


@pytest.fixture(params=["aio", "mmap"])
def compiled(request, tmp_path) -> str:
    """Each engine whose usual read is one call."""
    skip_without(request.param, tmp_path)
    return request.param


@pytest.fixture
def quick(monkeypatch):
    """How many blocks each `native.fetch` copied, of those it read itself and of a guess, while events are recorded."""
    fetches, told = [], FlashBranch._landed

    def counted(self, layer, started, landed, *rest):
        guess, own = (np.count_nonzero(ring._done[:asked]) if asked else 0 for ring, asked, *_ in landed)
        fetches.append((own, guess) if landed[0][0] else own)
        told(self, layer, started, landed, *rest)

    monkeypatch.setattr(FlashBranch, "_landed", counted)
    monkeypatch.setattr(FlashBranch, "events", [])
    return fetches


def filled(open_branch, store):
    """A branch whose blocks are on the device, and the blocks."""
    driver = open_branch(store)
    blocks = driver.prefill()
    settle(driver.branch.path)
    return driver, blocks


def test_the_usual_read_is_one_call(tmp_path, open_branch, compiled, monkeypatch):
    driver, blocks = filled(open_branch, FlashStore(directory=tmp_path, engine=compiled))
    for method in ("_landed", "_load"):
        monkeypatch.setattr(FlashBranch, method, None)
    np.testing.assert_array_equal(driver.read(), blocks)
    stats = driver.branch.stats()
    assert stats.blocks_read == blocks[..., 0, 0].size and stats.reads >= 1
    assert 0 < stats.io_seconds <= stats.read_seconds and stats.wait_seconds <= stats.io_seconds


@pytest.mark.parametrize("whole", [False, True])
def test_staged_rows_and_blocks_lie_over_what_is_read(tmp_path, open_branch, compiled, quick, whole):
    driver, blocks = filled(open_branch, FlashStore(directory=tmp_path, engine=compiled))
    new = np.ones((2, 2, 1, *blocks.shape[3:]), GEOMETRY.numpy_dtype)
    index, expected = np.zeros((2, 2), np.int32), blocks.copy()
    if whole:
        assert driver.branch.put_blocks(0, 0, index[..., None], new)
        expected[:, :, :1] = new
    else:
        assert driver.branch.put_rows(0, 0, index, index + 1, new[:, :, 0, 0])
        expected[:, :, 0, 1] = 1
    driver.branch.commit(0)
    np.testing.assert_array_equal(driver.read(), expected)
    driver.branch.flush()
    settle(driver.branch.path)
    np.testing.assert_array_equal(driver.read(), expected)
    assert quick == [blocks[..., 0, 0].size - (4 if whole else 0), blocks[..., 0, 0].size], "what is whole is not read"


def test_what_does_not_come_at_the_first_try_is_read_again_alone(tmp_path, open_branch, compiled, monkeypatch):
    driver, blocks = filled(open_branch, FlashStore(directory=tmp_path, engine=compiled))
    told = FlashBranch._landed

    def torn(self, layer, started, landed, *rest):
        ring, slots = landed[1][0], rest[-1]
        ring._done[[0, 3]] = 0
        slots.reshape(-1, *slots.shape[3:])[ring.targets[[0, 3]]] = 0
        told(self, layer, started, landed, *rest)

    monkeypatch.setattr(FlashBranch, "_landed", torn)
    driver.branch.events = []
    np.testing.assert_array_equal(driver.read(), blocks)
    assert driver.branch.stats().blocks_read == blocks[..., 0, 0].size + 2


def test_what_the_kernel_puts_off_again_and_again_is_left_to_threads(tmp_path, open_branch, quick):
    """Given a block that was written a moment ago, as it was, and is not on the device; all blocks are one read."""
    path = tmp_path / "dirty.kv"
    driver, blocks = filled(open_branch, FlashStore(file=path))
    with open(path, "r+b") as file:
        offset = driver.branch._volume.extents.offset(driver.branch._lineage.table.extent(0))
        os.pwrite(file.fileno(), os.pread(file.fileno(), GEOMETRY.extent_bytes, offset), offset)
    np.testing.assert_array_equal(driver.read(), blocks)
    assert quick == [0] and driver.branch.stats().blocks_read == blocks[..., 0, 0].size


def test_a_kernel_without_another_ring_leaves_reading_to_threads(tmp_path, open_branch, monkeypatch, caplog):
    driver, blocks = filled(open_branch, FlashStore(directory=tmp_path))

    def refused(_):
        raise OSError(errno.EAGAIN, "no more")

    monkeypatch.setattr(aio.RingStack, "take", refused)
    np.testing.assert_array_equal(driver.read(), blocks)
    assert driver.branch.engine == "threads" and "refuses asynchronous reads" in caplog.text


def guessed(driver, size: int):
    """Lets the first `size` blocks of every stream be read ahead; how many blocks that are."""
    block = np.tile(np.arange(size, dtype=np.int32), (2, 2, 1))
    assert driver.branch.submit(0, driver.branch.generation, block)
    return block.size


@pytest.mark.parametrize("settings", [{}, {"profile": "emmc"}, {"engine": "mmap"}], ids=["aio", "emmc", "mmap"])
@pytest.mark.parametrize("missing", [0, 1, GEOMETRY.num_blocks])
def test_what_was_read_ahead_is_used(tmp_path, open_branch, quick, settings, missing):
    driver, blocks = filled(open_branch, FlashStore(directory=tmp_path, **settings))
    before, ahead = driver.branch.stats(), guessed(driver, GEOMETRY.num_blocks - missing)
    np.testing.assert_array_equal(driver.read(), blocks)
    stats, late = driver.branch.stats(), 4 * missing
    assert quick == [(late, ahead)] if ahead else quick == [late]
    assert (stats.prefetched, stats.prefetch_used) == (ahead, ahead)
    assert stats.mispredicted == (late if ahead else 0) and stats.blocks_read - before.blocks_read == ahead + late
    np.testing.assert_array_equal(driver.read(), blocks)
    assert driver.branch.stats().prefetched == ahead, "a guess is used once"


def test_a_guess_of_what_has_changed_is_not_used(tmp_path, open_branch, compiled, quick):
    """Given a guess, block 1 of each stream gets other contents, and lies elsewhere when it is asked for."""
    driver, blocks = filled(open_branch, FlashStore(directory=tmp_path, engine=compiled))
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


def test_a_later_guess_takes_the_place_of_an_earlier_one(tmp_path, open_branch, compiled, quick):
    driver, blocks = filled(open_branch, FlashStore(directory=tmp_path, engine=compiled))
    rings = driver.branch._volume.reader.rings.guess_rings
    guessed(driver, 3)
    guessed(driver, 1)
    np.testing.assert_array_equal(driver.read(), blocks)
    assert quick == [(4 * (GEOMETRY.num_blocks - 1), 4)]
    back = [*rings._idle, *rings._parked]
    assert len(back) == len(rings._all) == len(set(map(id, back))), "each ring came back once"


def test_what_came_damaged_with_a_guess_is_read_again(tmp_path, open_branch, monkeypatch):
    """Given a bit that is wrong where the guess was read to."""
    driver, blocks = filled(open_branch, FlashStore(directory=tmp_path))
    before, ahead, window = driver.branch.stats(), guessed(driver, GEOMETRY.num_blocks), aio.Guess.window

    def flipped(guess):
        memory = (ctypes.c_uint8 * GEOMETRY.block_bytes).from_address(guess.ring.arena.address)
        wait_until(lambda: bytes(memory) == blocks[0, 0, 0].tobytes())
        memory[0] ^= 1
        return window(guess)

    monkeypatch.setattr(aio.Guess, "window", flipped)
    np.testing.assert_array_equal(driver.read(), blocks)
    assert driver.branch.stats().blocks_read - before.blocks_read == ahead + 1


@pytest.mark.parametrize("end", ["closed", "forgotten"])
def test_a_guess_that_nobody_asks_for_gives_its_ring_back(tmp_path, open_branch, compiled, end):
    driver, _ = filled(open_branch, FlashStore(directory=tmp_path, engine=compiled))
    rings = driver.branch._volume.reader.rings.guess_rings
    guessed(driver, 2)
    ring, = rings._all
    if end == "closed":
        driver.branch.close()
        assert ring._closed and not driver.branch._reads.guesses
    else:
        driver.branch._reads.guesses.clear()
        gc.collect()
        assert list(rings._parked) == [ring]


def test_a_guess_of_more_reads_than_may_be_in_flight(tmp_path, open_branch, quick, monkeypatch):
    monkeypatch.setattr(aio.RingStack, "GUESS_DEPTH", 1)
    driver, blocks = filled(open_branch, FlashStore(directory=tmp_path))
    before, block = driver.branch.stats(), np.tile(np.arange(0, GEOMETRY.num_blocks, 2, dtype=np.int32), (2, 2, 1))
    assert driver.branch.submit(0, 0, block)
    np.testing.assert_array_equal(driver.read(), blocks)
    stats, left = driver.branch.stats(), blocks[..., 0, 0].size - block.size
    assert quick == [(left, block.size)] and stats.prefetch_used == block.size and stats.reads - before.reads > 2


def test_a_device_that_hangs_with_a_guess_is_one_error(tmp_path, open_branch, monkeypatch):
    driver, blocks = filled(open_branch, FlashStore(directory=tmp_path, profile="emmc", timeout=1.5))
    guessed(driver, 2)
    with monkeypatch.context() as changed:
        changed.setattr(aio.Ring, "wait", lambda *_: 0)
        started = time.monotonic()
        assert not driver.try_read()[0]
        assert time.monotonic() - started < 5
    error = driver.branch.take_error()
    assert isinstance(error, ReadFailed) and "did not answer within 1.5 s" in str(error)
    np.testing.assert_array_equal(driver.read(), blocks)


def test_a_fork_does_not_take_the_guess_of_its_parent(tmp_path, open_branch, compiled):
    driver, blocks = filled(open_branch, FlashStore(directory=tmp_path, engine=compiled))
    ahead = guessed(driver, 2)
    fork = type(driver)(driver.branch.fork())
    driver.append(0, 0, 5.0)
    np.testing.assert_array_equal(fork.read(), blocks)
    expected = blocks.copy()
    expected[:, :, 0, 0] = 5.0
    np.testing.assert_array_equal(driver.read(), expected)
    assert fork.branch.stats().prefetch_used == 0 and driver.branch.stats().prefetch_used == ahead
    fork.branch.close()


def test_a_block_that_was_never_written_is_zeros(tmp_path, open_branch, compiled, quick):
    driver = open_branch(FlashStore(directory=tmp_path, engine=compiled))
    blocks = driver.full()
    counts = np.full(blocks.shape[:3], GEOMETRY.block_rows, np.int32)
    counts[:, :, 1] = 0
    driver.branch.write_layer(0, blocks, counts)
    driver.branch.flush()
    settle(driver.branch.path)
    blocks[:, :, 1] = 0
    np.testing.assert_array_equal(driver.read(), blocks)
    assert quick == [np.count_nonzero(counts)]


def test_a_damaged_block_is_not_copied(tmp_path, open_branch, compiled, quick):
    path = tmp_path / "damaged.kv"
    driver, blocks = filled(open_branch, FlashStore(file=path, engine=compiled))
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
    driver, blocks = filled(open_branch, FlashStore(directory=tmp_path, timeout=1.5))
    rings = driver.branch._volume.reader._rings.rings
    told = FlashBranch._landed

    def stuck(self, layer, started, landed, *rest):
        landed[1][0].in_flight = 3
        told(self, layer, started, landed, *rest)

    monkeypatch.setattr(FlashBranch, "_landed", stuck)
    driver.branch.events = []
    monkeypatch.setattr(aio.Ring, "wait", lambda *_: 0)
    assert not driver.try_read()[0]
    error = driver.branch.take_error()
    assert isinstance(error, ReadFailed) and "did not answer within 1.5 s" in str(error)
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
    driver, blocks = filled(open_branch, FlashStore(directory=tmp_path, profile="ufs4.0"))
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


def test_ctrl_c_while_blocks_are_waited_for_loses_no_ring(tmp_path, open_branch, compiled, monkeypatch):
    """It is raised as the first Python function after the wait is entered: before a line of it has run."""
    driver, blocks = filled(open_branch, FlashStore(directory=tmp_path, engine=compiled))
    give_back, raised = FlashBranch._give_back, []

    def interrupted_once(*args):
        if not raised:
            raised.append(True)
            raise KeyboardInterrupt
        give_back(*args)

    monkeypatch.setattr(FlashBranch, "_give_back", interrupted_once)
    assert not driver.try_read()[0] and raised
    assert isinstance(driver.branch.take_error().__cause__, KeyboardInterrupt)
    assert not any(ring.lent for ring in driver.branch._volume.reader.rings.rings._all)
    np.testing.assert_array_equal(driver.read(), blocks)


def test_a_read_that_fails_gives_its_ring_back_once(tmp_path, open_branch, compiled, monkeypatch, quick):
    """By the second time somebody else may have it."""
    driver, blocks = filled(open_branch, FlashStore(directory=tmp_path, engine=compiled))
    give_back, given = FlashBranch._give_back, []
    monkeypatch.setattr(FlashBranch, "_give_back", lambda *args: (given.append(args[1]), give_back(*args)))
    with monkeypatch.context() as changed:
        changed.setattr(FlashBranch, "_landed", None)
        assert not driver.try_read()[0]
    assert isinstance(driver.branch.take_error().__cause__, TypeError) and len(given) == len(set(map(id, given))) == 1
    np.testing.assert_array_equal(driver.read(), blocks)


def test_system_calls_that_are_replaced_are_called(tmp_path, open_branch, quick):
    store = FlashStore(directory=tmp_path)
    store.system = FaultySystem()
    driver, blocks = filled(open_branch, store)
    np.testing.assert_array_equal(driver.read(), blocks)
    assert not quick and "io_submit" in store.system.calls


def test_without_the_compiled_part_threads_read(tmp_path, open_branch, monkeypatch, caplog):
    monkeypatch.setattr(aio, "native", None)
    with caplog.at_level("INFO", logger="absl"):
        driver = open_branch(FlashStore(directory=tmp_path))
    assert driver.branch.engine == "threads" and "compiled part" in caplog.text
    np.testing.assert_array_equal(driver.prefill(), driver.read())
