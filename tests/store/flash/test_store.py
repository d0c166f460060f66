"""What is particular to the flash store: the file, its extents, write-behind, O_DIRECT, threads."""

import errno
import gc
import math
import os
import pathlib
import subprocess
import sys
import threading

import numpy as np
import pytest

from kvjax.errors import ConfigError, WriteFailed
from kvjax.store.flash.store import FlashStore
from kvjax.store.format.pages import HEADER_BYTES
from kvjax.store.geometry import Geometry
from tests.store.conftest import GEOMETRY, Driver, inspect_header, settle, wait_until
from tests.store.faults import FaultySystem
from tests.store.flash.test_history import History

EXTENT = GEOMETRY.extent_bytes


def extents_of(driver: Driver) -> int:
    """Extents in the file, used or free."""
    return (os.path.getsize(driver.branch.path) - HEADER_BYTES) // EXTENT


@pytest.mark.parametrize("layout", ["grouped", "sequential"])
def test_settling_waits_for_the_device_and_tells_what_it_refused(tmp_path, open_branch, layout):
    store = FlashStore(file=tmp_path / "cache.kv", layout=layout)
    store.system = FaultySystem()
    driver = open_branch(store)
    blocks = driver.prefill()
    store.system.fail("sync", errno.EIO, times=1)
    with pytest.raises(WriteFailed, match="syncing"):
        driver.branch.settle()
    driver.branch.settle()
    np.testing.assert_array_equal(driver.read(), blocks)


# ---- the file

def test_store_touches_no_disk(tmp_path):
    FlashStore(file=tmp_path / "missing" / "cache.kv")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("setting", [{"threads": 0}, {"timeout": 0.0}, {"timeout": math.inf}, {"timeout": math.nan},
                                     {"timeout": 1e12}, {"max_bytes": 0}, {"staging_bytes": -1}, {"threads": 2.5},
                                     {"threads": True}, {"timeout": "1"}, {"direct": None}, {"scratch": 3},
                                     {"engine": "aio", "codec": "rle"}])
def test_impossible_settings(unchecked, tmp_path, setting):
    with pytest.raises(ConfigError):
        FlashStore(directory=tmp_path, **setting)


def test_a_relative_path_outlives_a_change_of_directory(tmp_path, open_branch, monkeypatch):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    named, temporary = open_branch(FlashStore(file="cache.kv", scratch="other")), open_branch(FlashStore(directory="."))
    monkeypatch.chdir("other")
    named.prefill()
    assert named.branch.save() == 1
    temporary.branch.close()
    assert {path.name for path in tmp_path.iterdir()} == {"other", "cache.kv"}


def test_named_file_stays_and_can_be_replaced(tmp_path, open_branch):
    path = tmp_path / "cache.kv"
    for seed in range(2):
        driver = open_branch(FlashStore(file=path))
        blocks = driver.prefill(seed=seed)
        np.testing.assert_array_equal(driver.read(), blocks)
        driver.branch.close()
        assert inspect_header(path).geometry == GEOMETRY
        assert inspect_header(path).fingerprint == "fingerprint"
        assert path.stat().st_size == HEADER_BYTES + 24 * EXTENT


def test_directory_gets_temporary_files(tmp_path, open_branch):
    store = FlashStore(directory=tmp_path)
    first, second = open_branch(store), open_branch(store)
    assert len(list(tmp_path.iterdir())) == 2 and first.branch.path != second.branch.path
    child = first.branch.fork()
    first.branch.close()
    assert os.path.exists(first.branch.path), "the fork still needs it"
    child.close()
    second.branch.close()
    assert not list(tmp_path.iterdir())


def test_forgotten_branch_takes_file_and_threads_along(tmp_path):
    before = threading.active_count()
    driver = Driver(FlashStore(directory=tmp_path).create(GEOMETRY, ""))
    driver.append(0, 0, 1.0)
    driver.read()
    assert threading.active_count() > before
    del driver
    gc.collect()
    assert not list(tmp_path.iterdir())
    wait_until(lambda: threading.active_count() <= before)


def test_exit_removes_temporary_files(tmp_path):
    program = f"""
from kvjax.store.geometry import Geometry
from kvjax.store.flash.store import FlashStore
branch = FlashStore(directory={str(tmp_path)!r}).create(Geometry(1, 1, 1, 1, 1, 2, "int8"), "")
import os
assert os.path.exists(branch.path)
"""
    root = pathlib.Path(__file__).resolve().parents[3]
    subprocess.run([sys.executable, "-c", program], check=True, cwd=root)
    assert not list(tmp_path.iterdir())


# ---- extents

def test_fork_copies_blocks_only_when_they_are_written(tmp_path, open_branch):
    driver = open_branch(FlashStore(directory=tmp_path))
    driver.prefill()
    child = Driver(driver.branch.fork())
    assert extents_of(driver) == 24
    child.append(1, 0, 1.0)
    child.branch.flush()
    assert extents_of(driver) == 28
    child.append(1, 1, 1.0)
    child.branch.flush()
    assert extents_of(driver) == 28, "the copy is the child's own by now"
    child.branch.close()


def test_closed_branches_give_extents_back(tmp_path, open_branch):
    driver = open_branch(FlashStore(directory=tmp_path))
    blocks = driver.prefill()
    for seed in range(3):
        child = Driver(driver.branch.fork())
        child.prefill(seed=seed)
        child.branch.close()
    grandchild = driver.branch.fork()
    Driver(grandchild).prefill(seed=9)
    del grandchild
    driver.prefill(layer=1)
    assert extents_of(driver) == 48
    np.testing.assert_array_equal(driver.read(), blocks)


def test_replaced_blocks_give_extents_back(tmp_path, open_branch):
    driver = open_branch(FlashStore(directory=tmp_path))
    for seed in range(4):
        driver.prefill(seed=seed)
    assert extents_of(driver) == 48, "the new layer is written before the old one goes"
    child = Driver(driver.branch.fork())
    child.append(1, 0, 1.0)
    child.branch.flush()
    driver.branch.close()
    child.prefill(layer=1)
    assert extents_of(child) == 48, "the 24 of the last prefill, less 4 and more 4, leave 24 free"
    child.branch.close()


def test_failed_copies_leak_no_extents(tmp_path, open_branch):
    store = FlashStore(directory=tmp_path)
    store.system = FaultySystem()
    driver = open_branch(store)
    driver.prefill()
    child = Driver(driver.branch.fork())
    child.append(1, 0, 1.0)
    store.system.fail("pwrite", errno.ENOSPC, times=3)
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            child.branch.flush()
    child.branch.flush()
    assert extents_of(driver) == 28
    child.branch.close()


def test_empty_blocks_take_no_extent(tmp_path, open_branch):
    driver = open_branch(FlashStore(directory=tmp_path))
    counts = np.zeros((2, 2, 6), np.int32)
    counts[:, 0, 2] = 3
    driver.branch.write_layer(0, driver.full(), counts)
    assert extents_of(driver) == 2


# ---- reading

def test_neighbours_are_read_at_once(tmp_path, open_branch, engine):
    driver = open_branch(FlashStore(directory=tmp_path, engine=engine, threads=1))
    driver.prefill()
    settle(driver.branch.path)
    driver.read()
    assert driver.branch.stats().reads == 1
    assert driver.branch.stats().bytes_read == 24 * EXTENT


def test_large_reads_go_through_several_arenas(tmp_path, open_branch, monkeypatch):
    monkeypatch.setattr("kvjax.store.io.workers.ArenaStack.MAX_BYTES", 5 * EXTENT)
    driver = open_branch(FlashStore(directory=tmp_path, engine="threads", threads=2))
    np.testing.assert_array_equal(driver.prefill(), driver.read())
    assert driver.branch.stats().reads == 5


@pytest.mark.parametrize("size", [512 << 10, 1 << 20])
def test_extents_that_are_longer_than_a_piece_are_read(tmp_path, open_branch, size):
    """Given two and three neighbours, of which an arena holds one or two, and more threads than there are blocks."""
    for blocks in (2, 3):
        geometry = Geometry(layers=1, batch=1, kv_heads=1, num_blocks=blocks, block_rows=8, width=size // 32,
                            dtype="float32")
        driver = open_branch(FlashStore(directory=tmp_path, engine="threads", threads=4), geometry)
        np.testing.assert_array_equal(driver.prefill(), driver.read())


def test_direct_reads_see_buffered_writes(tmp_path, open_branch, engine):
    driver = open_branch(FlashStore(directory=tmp_path, engine=engine, threads=2))
    expected = driver.prefill()
    assert driver.branch.direct == (engine != "mmap"), "the tests want a filesystem with O_DIRECT"
    for i in range(20):
        driver.append(i % 6, i % 4, float(i))
        expected[:, :, i % 6, i % 4] = i
        driver.branch.flush()
        np.testing.assert_array_equal(driver.read(), expected)


@pytest.mark.parametrize("operation", ["open_direct", "preadv_direct"])
def test_refused_direct_reads_fall_back_visibly(tmp_path, open_branch, caplog, operation):
    """Given a filesystem that refuses to open a file with O_DIRECT, or to read it so."""
    store = FlashStore(directory=tmp_path)
    store.system = FaultySystem()
    store.system.fail(operation, errno.EINVAL)
    with caplog.at_level("WARNING", logger="absl"):
        driver = open_branch(store)
        blocks = driver.prefill()
        for _ in range(2):
            np.testing.assert_array_equal(driver.read(), blocks)
    assert not driver.branch.direct and driver.branch.engine == "threads"
    assert len([record for record in caplog.records if "O_DIRECT" in record.message]) == 1


def test_threads_that_are_refused_together_warn_once(tmp_path, open_branch, caplog):
    store = FlashStore(directory=tmp_path, engine="threads", threads=2)
    store.system = FaultySystem()
    driver = open_branch(store)
    blocks = driver.prefill()
    store.system.hang("preadv_direct")
    store.system.fail("preadv_direct", errno.EINVAL)
    block = np.tile(np.arange(0, 6, 2, dtype=np.int32), (2, 2, 1))
    slots = np.zeros((2, 2, 3, 4, 6), np.float32)
    with caplog.at_level("WARNING", logger="absl"):
        thread = threading.Thread(target=driver.branch.read_into, args=(0, 0, block, block // 2, slots))
        thread.start()
        wait_until(lambda: store.system.calls.count("preadv_direct") == 2)
        store.system.release()
        thread.join()
    np.testing.assert_array_equal(slots, blocks[:, :, ::2])
    assert len([record for record in caplog.records if "O_DIRECT" in record.message]) == 1


# ---- write-behind

def test_rows_of_a_block_become_one_write(tmp_path, open_branch):
    driver = open_branch(FlashStore(directory=tmp_path))
    driver.prefill()
    for row in range(4):
        driver.append(2, row, 1.0)
    before = driver.branch.stats().blocks_written
    driver.branch.flush()
    stats = driver.branch.stats()
    assert stats.blocks_written - before == 4 and stats.rows_written == 16


def test_staging_is_bounded(tmp_path, open_branch):
    store = FlashStore(directory=tmp_path, staging_bytes=4 * EXTENT, timeout=1.5)
    store.system = FaultySystem()
    driver = open_branch(store)
    store.system.hang("pwrite")
    driver.append(0, 0, 1.0)
    driver.append(1, 0, 1.0)
    assert driver.put_row(2, 0, 1.0)
    with pytest.raises(OSError, match="no block was written"):
        driver.commit()
    assert driver.branch.generation == 2
    store.system.heal()
    driver.commit()
    driver.branch.flush()
    assert (driver.read()[:, :, :3, 0] == 1.0).all()


def test_forgotten_branches_leave_the_staging(tmp_path, open_branch):
    driver = open_branch(FlashStore(directory=tmp_path, staging_bytes=64 * EXTENT))
    for _ in range(8):
        child = Driver(driver.branch.fork())
        for block in range(4):  # 16 blocks in 4 streams: a quarter, so that they linger
            child.append(block, 0, 1.0)
        del child
    driver.append(0, 0, 1.0)
    assert driver.branch.stats().blocks_written == 0
    wait_until(lambda: driver.branch._volume.staged_bytes == 4 * EXTENT)


class HalfWritten(FaultySystem):
    """Stops a write in the middle and lets a read happen there.

    The first read after `arm` starts `write` in a thread, goes on when half of the first block is written, and lets the
    rest be written when it has its bytes.
    """

    def __init__(self):
        super().__init__()
        self.half, self.rest = threading.Event(), threading.Event()
        self.write, self.started = None, False

    def arm(self, write) -> None:
        self.write = write

    def preadv(self, descriptor, views, offset):
        self._begin()
        got = super().preadv(descriptor, views, offset)
        if self.half.is_set():
            self.rest.set()
        return got

    def io_submit(self, context, pointers):
        self._begin()
        return super().io_submit(context, pointers)

    def copy_mapped(self, address, to):
        self._begin()
        got = super().copy_mapped(address, to)
        if self.half.is_set():
            self.rest.set()
        return got

    def _begin(self):
        write, self.write = self.write, None
        if write is not None:
            self.started = True
            threading.Thread(target=write).start()
            assert self.half.wait(10)

    def pwrite(self, descriptor, data, offset):
        if self.started and not self.half.is_set():
            done = super().pwrite(descriptor, data[:40], offset)
            self.half.set()
            assert self.rest.wait(10)
            return done
        return super().pwrite(descriptor, data, offset)


def count_reads(system: FaultySystem) -> int:
    """Reads so far, also through a map."""
    return system.calls.count("preadv") + system.calls.count("populate")


@pytest.mark.parametrize("kind", ["buffered", "threads", "aio", "mmap"])
def test_torn_block_is_read_again(tmp_path, open_branch, kind):
    """With aio the half-written block is one that threads have to read."""
    engine = "threads" if kind == "buffered" else kind
    store = FlashStore(directory=tmp_path, direct=kind != "buffered", engine=engine, threads=1)
    store.system = HalfWritten()
    driver = open_branch(store)
    expected = driver.prefill()
    settle(driver.branch.path)
    rows = driver.full(seed=5)[:, :, :1]
    assert driver.branch.put_rows(0, 0, np.zeros((2, 2), np.int32), np.zeros((2, 2), np.int32), rows[:, :, 0, 0])
    driver.commit()
    expected[:, :, 0, 0] = rows[:, :, 0, 0]
    reads = count_reads(store.system)
    store.system.arm(driver.branch.flush)
    np.testing.assert_array_equal(driver.read(), expected)
    assert store.system.half.is_set()
    assert count_reads(store.system) > reads + 1
    driver.branch.flush()
    np.testing.assert_array_equal(driver.read(), expected)


def test_branches_of_one_file_work_in_parallel(tmp_path, open_branch, engine):
    driver = open_branch(FlashStore(directory=tmp_path, engine=engine, threads=3, staging_bytes=12 * EXTENT))
    driver.prefill()
    failures = []

    def work(seed: int, child: Driver, blocks: dict) -> None:
        history = History(child, seed)
        history.lines[0].blocks = blocks
        try:
            for _ in range(120):
                history.step()
            history.check_everything()
            for line in history.lines:
                line.driver.branch.close()
        except BaseException as failure:
            failures.append(failure)

    start = {(0, b, k, n): driver.full()[b, k, n] for b, k, n in np.ndindex(2, 2, 6)}
    threads = [threading.Thread(target=work, args=(seed, Driver(driver.branch.fork()), dict(start)))
               for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    np.testing.assert_array_equal(driver.read(), driver.full())
