"""Saved caches: what a file gives back, to whom, and what a save costs."""

import contextlib
import dataclasses
import errno
import os
import pathlib
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from kvjax.errors import (
    ChecksumMismatch,
    ConfigError,
    FormatMismatch,
    NoSpace,
    NothingSaved,
    StaleCache,
    StoreClosed,
    StoreLocked,
    WriteFailed,
)
from kvjax.store.flash import FlashStore
from kvjax.store.format import HEADER_BYTES, VERSION
from tests.store.conftest import GEOMETRY, Driver, still_works, wait_until
from tests.store.faults import FaultySystem
from tests.store.test_history import History

EXTENT = GEOMETRY.extent_bytes
ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache.kv"


@pytest.fixture
def reopen(path):
    """reopen(**settings) -> Driver on the saved file; whatever is still open is closed at the end."""
    drivers = []

    def make(read_only=False, system=None, **settings) -> Driver:
        store = FlashStore(path, **settings)
        if system is not None:
            store.system = system
        drivers.append(Driver(store.open(GEOMETRY, "fingerprint", read_only=read_only)))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.branch.take_error()
        with contextlib.suppress(OSError):
            driver.branch.close()


@pytest.fixture
def saved(path, open_branch) -> np.ndarray:
    """A closed file with save 1 (prefill), save 2 (block 0 changed) and an unsaved row; the blocks of save 2."""
    driver = open_branch(FlashStore(path))
    driver.prefill()
    assert driver.branch.save(b"first") == 1
    driver.append(0, 0, 5.0)
    assert driver.branch.save(b"second") == 2
    expected = driver.read()
    driver.append(0, 1, 6.0)
    driver.append(5, 0, 7.0)
    driver.branch.close()
    return expected


# ---- opening

@pytest.mark.parametrize("read_only", [False, True])
def test_a_file_opens_at_its_newest_save(saved, reopen, read_only):
    driver = reopen(read_only)
    np.testing.assert_array_equal(driver.read(), saved)
    assert driver.branch.generation == 1
    assert [save[0] for save in driver.branch.saves()] == [2, 1]
    assert driver.branch.saves()[0].metadata == b"second" and driver.branch.saves()[1].metadata == b"first"
    still_works(driver, saved)


def test_another_process_reads_the_same_bytes(saved, path):
    program = f"""
import numpy as np
from kvjax.store.flash import FlashStore
from tests.store.conftest import Driver
driver = Driver(FlashStore({str(path)!r}).open())
driver.append(3, 3, 8.0)
driver.branch.save(b"third")
np.save({str(path) + ".npy"!r}, driver.read())
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
    saved[:, :, 3, 3] = 8.0
    np.testing.assert_array_equal(np.load(str(path) + ".npy"), saved)
    with contextlib.closing(FlashStore(path).open()) as branch:
        np.testing.assert_array_equal(Driver(branch).read(), saved)


def test_one_writer_and_many_readers(saved, reopen, path):
    writer, readers = reopen(), [reopen(read_only=True) for _ in range(2)]
    with pytest.raises(StoreLocked, match="in use"):
        reopen()
    with pytest.raises(StoreLocked):
        FlashStore(path).create(GEOMETRY, "")
    writer.append(1, 1, 1.0)
    for value, reader in enumerate(readers):
        reader.append(2, 2, float(value))
        reader.branch.flush()
    for value, reader in enumerate(readers):
        expected = saved.copy()
        expected[:, :, 2, 2] = value
        np.testing.assert_array_equal(reader.read(), expected)
    saved[:, :, 1, 1] = 1.0
    np.testing.assert_array_equal(writer.read(), saved)


def test_a_reader_needs_no_right_to_write(saved, reopen, path, tmp_path):
    before = path.read_bytes()
    path.chmod(0o400)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    driver = reopen(read_only=True, scratch=scratch)
    child = Driver(driver.branch.fork())
    still_works(child, saved)
    np.testing.assert_array_equal(driver.read(), saved)
    assert len(list(scratch.iterdir())) == 1
    with pytest.raises(WriteFailed, match="read-only"):
        child.branch.save()
    child.branch.close()
    driver.branch.close()
    assert not list(scratch.iterdir()) and path.read_bytes() == before


def test_a_reader_wants_a_directory_for_what_it_adds(saved, reopen, tmp_path):
    with pytest.raises(ConfigError, match="missing"):
        reopen(read_only=True, scratch=tmp_path / "missing")
    assert not (tmp_path / "missing").exists()


def test_no_request_spans_shared_and_private_extents(path, open_branch, reopen):
    writer = open_branch(FlashStore(path))
    expected = writer.prefill()
    for _ in range(40):  # a record behind the blocks, one before them, so that the last extent is a block's
        writer.branch.save()
    driver = reopen(read_only=True, threads=1)
    last, split = driver.branch._volume.extents.end, driver.branch._volume.file._split
    assert split == driver.branch._volume.extents.offset(last)
    driver.append(5, 0, 3.0)
    driver.branch.flush()
    expected[:, :, 5, 0] = 3.0
    np.testing.assert_array_equal(driver.read(), expected)
    assert driver.branch._lineage.table.everything().max() >= last


@pytest.mark.parametrize("read_only", [False, True])
def test_another_model_or_shape_is_refused(saved, path, read_only):
    store = FlashStore(path)
    with pytest.raises(FormatMismatch, match="'other'"):
        store.open(GEOMETRY, "other", read_only=read_only)
    with pytest.raises(FormatMismatch, match="num_blocks=7"):
        store.open(dataclasses.replace(GEOMETRY, num_blocks=7), "fingerprint", read_only=read_only)
    store.open(read_only=read_only).close()


def test_what_is_no_saved_store_is_refused(tmp_path, path):
    with pytest.raises(StoreClosed, match="does not exist"):
        FlashStore(path).open()
    for read_only in (False, True):
        with pytest.raises(FormatMismatch, match=str(tmp_path)):
            FlashStore(tmp_path).open(read_only=read_only)
    FlashStore(path).create(GEOMETRY, "").close()
    with pytest.raises(NothingSaved, match="never saved"):
        FlashStore(path).open()
    page = bytearray(path.read_bytes())
    page[8] = VERSION + 7
    path.write_bytes(page)
    with pytest.raises(FormatMismatch, match=f"version {VERSION + 7}"):
        FlashStore(path).open()
    path.write_text("precious")
    with pytest.raises(FormatMismatch, match="not a kvjax"):
        FlashStore(path).open()
    assert path.read_text() == "precious"


def test_a_failed_opening_leaves_no_lock(saved, path):
    with pytest.raises(FormatMismatch):
        FlashStore(path).open(fingerprint="other")
    FlashStore(path).open().close()


def test_a_failed_read_only_opening_leaves_no_file_and_no_descriptor(saved, path, tmp_path):
    """Given a system that cannot do what the store insists on, once the private file is there."""
    scratch, system = tmp_path / "scratch", FaultySystem()
    scratch.mkdir()
    system.fail("io_setup", errno.EAGAIN)
    store = FlashStore(path, engine="aio", scratch=scratch)
    store.system = system
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match="engine='aio' cannot be used"):
        store.open(read_only=True)
    assert len(os.listdir("/proc/self/fd")) == before and not list(scratch.iterdir())


def test_temporary_files_are_not_saved(tmp_path, open_branch):
    driver = open_branch(FlashStore(tmp_path))
    with pytest.raises(ConfigError, match="temporary"):
        driver.branch.save()


# ---- superseded readers

def test_a_reader_of_a_superseded_save_gets_its_bytes_or_a_stale_cache(saved, reopen):
    writer, reader = reopen(), reopen(read_only=True)
    for turn in range(4):
        writer.prefill(seed=turn + 10)
        writer.branch.save()
        ok, blocks = reader.try_read()
        if turn == 0:
            assert ok, "the last save but one is kept"
        if ok:
            np.testing.assert_array_equal(blocks, saved)
        else:
            assert type(reader.branch.take_error()) is StaleCache
    assert not ok, "its extents were used again by now"
    np.testing.assert_array_equal(reopen(read_only=True).read(), writer.read())


def test_readers_that_come_while_a_writer_saves(saved, reopen, path):
    """Each finds a whole save, at whatever moment it looks, and reads that or is told that it is too old."""
    writer = reopen()

    def work() -> None:
        for seed in range(25):
            writer.prefill(seed=seed)
            writer.branch.save(b"%d" % seed)

    def look() -> bool:
        with contextlib.closing(FlashStore(path, threads=1).open(read_only=True)) as branch:
            metadata, reader = branch.saves()[0].metadata, Driver(branch)
            ok, blocks = reader.try_read()
            if ok:
                expected = reader.full(int(metadata)) if metadata.isdigit() else saved
                np.testing.assert_array_equal(blocks, expected)
            else:
                assert type(branch.take_error()) is StaleCache
            return ok

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        look()
    thread.join()
    assert look(), "nobody saves any more"


def test_damage_is_no_stale_cache(saved, reopen, path):
    reader = reopen(read_only=True)
    with open(path, "r+b") as file:
        file.seek(HEADER_BYTES + 20 * EXTENT)
        file.write(b"oops")
    assert not reader.try_read()[0]
    assert type(reader.branch.take_error()) is ChecksumMismatch


# ---- copy-on-write and space

def test_saved_blocks_are_not_overwritten(path, open_branch, reopen):
    driver = open_branch(FlashStore(path))
    expected = driver.prefill()
    driver.branch.save()
    for value in range(3):
        for block in range(6):
            driver.append(block, 0, float(value))
        driver.branch.flush()
    reader = reopen(read_only=True)
    np.testing.assert_array_equal(reader.read(), expected)


def test_the_file_stays_small(path, open_branch, monkeypatch):
    """Two saves are kept; the blocks of older ones are used again, and the log is compacted."""
    monkeypatch.setattr("kvjax.store.log.MAX_RECORDS", 8)
    driver = open_branch(FlashStore(path))
    driver.prefill()
    sizes, records = [], []
    for value in range(40):
        driver.append(value % 6, value % 4, float(value))
        driver.branch.save(b"metadata")
        sizes.append(os.path.getsize(path))
        records.append(len(driver.branch._volume.log.saves()[0].places))
    assert max(records) == 5 and records.count(1) == 8, "a complete record whenever four changes follow the last"
    assert sizes[-1] == sizes[15] <= HEADER_BYTES + (24 + 4 * 3 + 2 * 6) * EXTENT


def test_changes_that_outweigh_a_complete_record_become_one(path, open_branch):
    driver = open_branch(FlashStore(path))
    driver.prefill()
    records = []
    for value in range(5):
        driver.prefill(seed=value)
        driver.branch.save()
        records.append(len(driver.branch._volume.log.saves()[0].places))
    assert records == [1, 2, 3, 1, 2]


def test_a_save_costs_what_changed(tmp_path, open_branch):
    geometry = dataclasses.replace(GEOMETRY, num_blocks=2000)
    driver = open_branch(FlashStore(tmp_path / "large.kv"), geometry)
    driver.prefill()
    driver.branch.save()
    log = driver.branch._volume.log
    driver.append(7, 0, 1.0)
    driver.branch.save()
    complete, change = (place.bytes for place in log.saves()[0].places)
    assert complete > 8000 * 16 and change == 40 + 4 * 16


def test_closed_branches_leave_saved_blocks(path, open_branch, reopen):
    driver = open_branch(FlashStore(path))
    expected = driver.prefill()
    child = Driver(driver.branch.fork())
    driver.branch.save()
    driver.branch.close()
    child.prefill(seed=1)
    child.prefill(layer=1)
    np.testing.assert_array_equal(reopen(read_only=True).read(), expected)
    child.branch.close()


def test_any_branch_may_be_saved_and_the_last_one_counts(path, open_branch, reopen):
    driver = open_branch(FlashStore(path))
    driver.prefill()
    child = Driver(driver.branch.fork())
    child.append(0, 0, 1.0)
    child.branch.save(b"child")
    driver.append(0, 0, 2.0)
    driver.branch.save(b"parent")
    child.branch.close()
    driver.branch.close()
    again = reopen()
    assert (again.read()[:, :, 0, 0] == 2.0).all()
    assert [save.metadata for save in again.branch.saves()] == [b"parent", b"child"]


def test_saving_under_a_limit(path, open_branch, reopen):
    driver = open_branch(FlashStore(path, max_bytes=HEADER_BYTES + 26 * EXTENT))
    expected = driver.prefill()
    driver.branch.save()
    driver.append(0, 0, 1.0)
    with pytest.raises(NoSpace, match="max_bytes"):
        driver.branch.save()
    np.testing.assert_array_equal(reopen(read_only=True).read(), expected)
    expected[:, :, 0, 0] = 1.0
    np.testing.assert_array_equal(driver.read(), expected)
    driver.branch._volume.extents._max_bytes = None
    driver.branch.save()
    np.testing.assert_array_equal(reopen(read_only=True).read(), expected)


# ---- random histories

@pytest.mark.parametrize("seed", range(3))
def test_random_history_with_saves(path, open_branch, seed):
    """As `test_history`, and now and then the file is saved, and at last closed and opened again."""
    history = History(open_branch(FlashStore(path, threads=2, staging_bytes=40 * 4096 * (seed % 2))), seed)
    for _ in range(6):
        for _ in range(40):
            history.step()
        line = history.lines[-1]
        line.driver.branch.save()
        contents = dict(line.blocks)
        check_equals(FlashStore(path).open(read_only=True), contents)
    for line in history.lines:
        line.driver.branch.close()
    again = FlashStore(path).open()
    check_equals(again, contents)
    history = History(Driver(again), seed + 100)
    history.lines[0].blocks = contents
    for _ in range(80):
        history.step()
    history.check_everything()
    for line in history.lines:
        line.driver.branch.close()


def check_equals(branch, contents: dict) -> None:
    for layer in range(2):
        found = Driver(branch).read(layer)
        for b, k, n in np.ndindex(2, 2, 6):
            np.testing.assert_array_equal(found[b, k, n], contents.get((layer, b, k, n), 0 * found[b, k, n]))
    if branch._volume.file.read_only:
        branch.close()


# ---- group commit

def test_saves_that_wait_share_their_syncs(path, open_branch, system, reopen):
    store = FlashStore(path)
    store.system = system
    driver = open_branch(store)
    driver.prefill()
    children = [Driver(driver.branch.fork()) for _ in range(5)]
    for value, child in enumerate(children):
        child.append(0, 0, float(value + 1))
        child.branch.flush()
    syncs = system.calls.count("sync")
    system.hang("sync")
    numbers = {}
    threads = [threading.Thread(target=lambda i=i, one=one: numbers.update({i: one.branch.save(b"%d" % i)}))
               for i, one in enumerate(children)]
    threads[0].start()
    wait_until(lambda: system.calls.count("sync") > syncs)
    for thread in threads[1:]:
        thread.start()
    wait_until(lambda: len(driver.branch._volume._saves) == 4)
    system.heal()
    for thread in threads:
        thread.join()
    assert system.calls.count("sync") - syncs == 4, "two for the first, two for the four that waited"
    assert sorted(numbers.values()) == [1, 2, 3, 4, 5] and numbers[0] == 1
    last = max(numbers, key=numbers.get)
    reader = reopen(read_only=True)
    assert reader.branch.saves()[0].metadata == b"%d" % last
    assert (reader.read()[:, :, 0, 0] == last + 1).all()
    for child in children:
        child.branch.close()


# ---- what fails while saving

@pytest.fixture
def writer(path, open_branch, system) -> tuple[Driver, np.ndarray]:
    """A branch saved once, with one more row, on a system that can be made to fail; and the saved blocks."""
    store = FlashStore(path, timeout=5.0)
    store.system = system
    driver = open_branch(store)
    expected = driver.prefill()
    driver.branch.save(b"good")
    driver.append(2, 2, 9.0)
    driver.branch.flush()
    return driver, expected


@pytest.mark.parametrize("step", ["record", "superblock"])
@pytest.mark.parametrize("code, kind", [(errno.ENOSPC, NoSpace), (errno.EIO, WriteFailed)])
def test_a_failed_save_leaves_the_last_one_and_can_be_repeated(writer, system, reopen, step, code, kind):
    driver, expected = writer
    system.fail("pwrite", code, skip=int(step == "superblock"))
    for _ in range(3):
        with pytest.raises(kind, match=step):
            driver.branch.save()
        system.fail("pwrite", code, skip=int(step == "superblock"))
    np.testing.assert_array_equal(reopen(read_only=True).read(), expected)
    system.heal()
    used = driver.branch._volume.extents.end
    assert driver.branch.save() == (2 if step == "record" else 5), "a number that may be on the device is not reused"
    assert driver.branch._volume.extents.end <= used + 1, "failed saves leak nothing"
    expected[:, :, 2, 2] = 9.0
    np.testing.assert_array_equal(reopen(read_only=True).read(), expected)
    still_works(driver, expected)


@pytest.mark.parametrize("skip", [0, 1])
def test_after_a_failed_sync_nothing_more_is_saved(writer, system, reopen, skip):
    driver, expected = writer
    system.fail("sync", errno.EIO, skip=skip, times=1)
    for _ in range(2):
        with pytest.raises(WriteFailed, match="nothing more can be saved"):
            driver.branch.save()
    assert system.calls.count("sync") == 3 + skip + 1, "creation, the first save, and up to the one that failed"
    newer = expected.copy()
    newer[:, :, 2, 2] = 9.0
    found = reopen(read_only=True).read()
    np.testing.assert_array_equal(found, newer if skip else expected)
    still_works(driver, newer)


def test_a_failure_of_the_last_step_keeps_both_outcomes_whole(writer, system, reopen):
    """The superblock was written but not confirmed: whichever of the two is found, its blocks are intact."""
    driver, expected = writer
    system.fail("sync", errno.EIO, skip=1, times=1)
    with pytest.raises(WriteFailed):
        driver.branch.save()
    for turn in range(6):
        driver.prefill(seed=turn)
        driver.prefill(layer=1, seed=turn)
    expected[:, :, 2, 2] = 9.0
    np.testing.assert_array_equal(reopen(read_only=True).read(), expected)


def test_a_device_that_hangs(path, open_branch, system, reopen):
    store = FlashStore(path, timeout=0.2)
    store.system = system
    driver = open_branch(store)
    expected = driver.prefill()
    system.hang("sync")
    with pytest.raises(WriteFailed, match=r"0\.2 s"):
        driver.branch.save(b"first")
    with pytest.raises(WriteFailed, match=r"0\.2 s"):
        driver.branch.save(b"never begun")
    np.testing.assert_array_equal(driver.read(), expected)
    system.heal()
    wait_until(lambda: driver.branch.saves())
    assert driver.branch.save(b"second") == 2
    np.testing.assert_array_equal(reopen(read_only=True).read(), expected)


def test_tokens_are_committed_while_a_save_waits_for_the_device(path, open_branch, system, reopen):
    store = FlashStore(path)
    store.system = system
    driver = open_branch(store)
    expected = driver.prefill()
    syncs = system.calls.count("sync")
    system.hang("sync")
    thread = threading.Thread(target=driver.branch.save)
    thread.start()
    wait_until(lambda: system.calls.count("sync") > syncs)
    driver.append(0, 0, 1.0)
    assert (driver.read()[:, :, 0, 0] == 1.0).all()
    system.heal()
    thread.join()
    np.testing.assert_array_equal(reopen(read_only=True).read(), expected)
    expected[:, :, 0, 0] = 1.0
    still_works(driver, expected)


def test_a_slow_device_slows_commits_down_and_loses_nothing(path, open_branch, system, reopen):
    store = FlashStore(path, staging_bytes=2 * EXTENT)
    store.system = system
    driver = open_branch(store)
    expected = driver.prefill()
    write = system.pwrite
    system.pwrite = lambda *args: (time.sleep(0.002), write(*args))[1]
    for step in range(12):
        driver.append(step % 6, step % 4, float(step))
        expected[:, :, step % 6, step % 4] = step
        assert driver.branch._volume.staged_bytes <= (2 + 4) * EXTENT, "the limit, and the blocks of one token"
        np.testing.assert_array_equal(driver.read(), expected)
    driver.branch.save()
    np.testing.assert_array_equal(reopen(read_only=True).read(), expected)


def test_a_removed_file_is_not_saved(writer, path):
    driver, _ = writer
    os.rename(path, str(path) + ".away")
    with pytest.raises(StoreClosed, match="removed"):
        driver.branch.save()
    os.rename(str(path) + ".away", path)
    assert driver.branch.save() == 2


@pytest.mark.parametrize("operation, code, kind", [
    ("open", errno.EROFS, WriteFailed), ("open", errno.EACCES, WriteFailed), ("lock", errno.ENOLCK, WriteFailed),
    ("preadv", errno.EIO, OSError),
])
def test_an_opening_that_fails_can_be_repeated(saved, reopen, system, operation, code, kind):
    system.fail(operation, code)
    with pytest.raises(kind, match=r"cache\.kv"):
        reopen(system=system)
    system.heal()
    still_works(reopen(system=system), saved)


def test_a_stormy_system_saves_and_opens(path, open_branch, reopen):
    store = FlashStore(path)
    store.system = FaultySystem(7, storm=0.5)
    driver = open_branch(store)
    expected = driver.prefill()
    for value in range(5):
        driver.append(0, 0, float(value))
        driver.branch.save()
    expected[:, :, 0, 0] = 4.0
    np.testing.assert_array_equal(reopen(read_only=True, system=FaultySystem(8, storm=0.5)).read(), expected)
