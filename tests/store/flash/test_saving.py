"""Saving: what a save costs, what it leaves alone, and what may fail."""

import dataclasses
import errno
import os
import threading
import time

import numpy as np
import pytest

from kvjax.errors import (
    NoSpace,
    ShortRead,
    StaleCache,
    StoreClosed,
    WriteFailed,
)
from kvjax.store.flash.store import FlashStore
from kvjax.store.format.pages import HEADER_BYTES
from tests.store.conftest import GEOMETRY, Driver, still_works, wait_until
from tests.store.faults import FaultySystem
from tests.store.flash.test_history import History

EXTENT = GEOMETRY.extent_bytes


# ---- copy-on-write and space

def test_a_save_is_of_the_generation_that_was_asked_for(path, open_branch):
    driver = open_branch(FlashStore(file=path))
    driver.prefill()
    driver.branch.save(b"first", generation=0)
    driver.append(0, 0, 1.0)
    with pytest.raises(StaleCache, match="generation 0"):
        driver.branch.save(b"second", generation=0)
    assert [one.metadata for one in driver.branch.saves()] == [b"first"]


def test_saved_blocks_are_not_overwritten(path, open_branch, reopen):
    driver = open_branch(FlashStore(file=path))
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
    monkeypatch.setattr("kvjax.store.flash.log.MAX_RECORDS", 8)
    driver = open_branch(FlashStore(file=path))
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
    driver = open_branch(FlashStore(file=path))
    driver.prefill()
    records = []
    for value in range(5):
        driver.prefill(seed=value)
        driver.branch.save()
        records.append(len(driver.branch._volume.log.saves()[0].places))
    assert records == [1, 2, 3, 1, 2]


def test_a_save_costs_what_changed(tmp_path, open_branch):
    geometry = dataclasses.replace(GEOMETRY, num_blocks=2000)
    driver = open_branch(FlashStore(file=tmp_path / "large.kv"), geometry)
    driver.prefill()
    driver.branch.save()
    log = driver.branch._volume.log
    driver.append(7, 0, 1.0)
    driver.branch.save()
    complete, change = (place.bytes for place in log.saves()[0].places)
    assert complete > 8000 * 16 and change == 40 + 4 * 16


def test_closed_branches_leave_saved_blocks(path, open_branch, reopen):
    driver = open_branch(FlashStore(file=path))
    expected = driver.prefill()
    child = Driver(driver.branch.fork())
    driver.branch.save()
    driver.branch.close()
    child.prefill(seed=1)
    child.prefill(layer=1)
    np.testing.assert_array_equal(reopen(read_only=True).read(), expected)
    child.branch.close()


def test_any_branch_may_be_saved_and_the_last_one_counts(path, open_branch, reopen):
    driver = open_branch(FlashStore(file=path))
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
    driver = open_branch(FlashStore(file=path, max_bytes=HEADER_BYTES + 26 * EXTENT))
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
    history = History(open_branch(FlashStore(file=path, threads=2, staging_bytes=40 * 4096 * (seed % 2))), seed)
    for _ in range(6):
        for _ in range(40):
            history.step()
        line = history.lines[-1]
        line.driver.branch.save()
        contents = dict(line.blocks)
        check_equals(FlashStore(file=path).open(read_only=True), contents)
    for line in history.lines:
        line.driver.branch.close()
    again = FlashStore(file=path).open()
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
    store = FlashStore(file=path)
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
    store = FlashStore(file=path, timeout=5.0)
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
    store = FlashStore(file=path, timeout=1.5)
    store.system = system
    driver = open_branch(store)
    expected = driver.prefill()
    system.hang("sync")
    with pytest.raises(WriteFailed, match=r"1\.5 s"):
        driver.branch.save(b"first")
    with pytest.raises(WriteFailed, match=r"1\.5 s"):
        driver.branch.save(b"never begun")
    np.testing.assert_array_equal(driver.read(), expected)
    system.heal()
    wait_until(lambda: driver.branch.saves())
    assert driver.branch.save(b"second") == 2
    np.testing.assert_array_equal(reopen(read_only=True).read(), expected)


def test_tokens_are_committed_while_a_save_waits_for_the_device(path, open_branch, system, reopen):
    store = FlashStore(file=path)
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
    store = FlashStore(file=path, staging_bytes=2 * EXTENT)
    store.system = system
    driver = open_branch(store)
    expected = driver.prefill()
    write = system.pwrite
    system.pwrite = lambda *args: (time.sleep(0.002), write(*args))[1]
    for step in range(12):
        driver.append(step % 6, step % 4, float(step))
        expected[:, :, step % 6, step % 4] = step
        with driver.branch._volume.lock:
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


@pytest.mark.parametrize("again", [False, True], ids=["written", "opened"])
@pytest.mark.parametrize("dirty", [False, True])
def test_a_file_that_was_cut_is_not_saved(writer, path, reopen, again, dirty):
    """Given a writer that may have more to write, and a file that loses its last extent: a log record."""
    driver, _ = writer
    if again:
        driver.branch.save()
        driver.branch.close()
        driver = reopen()
    if dirty:
        driver.append(1, 1, 4.0)
    expected = driver.read()
    whole = path.read_bytes()
    os.truncate(path, len(whole) - EXTENT)
    cut = path.read_bytes()
    for _ in range(2):
        with pytest.raises(ShortRead, match=f"{len(whole)} were written; it was truncated"):
            driver.branch.save()
    assert path.read_bytes() == cut, "nothing takes the place of what may be whole"
    with open(path, "r+b") as file:
        file.write(whole)
    driver.branch.save()
    np.testing.assert_array_equal(reopen(read_only=True).read(), expected)


def test_a_file_that_is_cut_amid_a_save_keeps_the_last_one(writer, path, system, reopen):
    """Given a file that is cut behind its blocks once the new record is on the device."""
    driver, expected = writer
    number, sync = driver.branch.saves()[0].sequence, system.sync

    def cut(descriptor):
        sync(descriptor)
        os.truncate(path, path.stat().st_size - EXTENT)

    system.sync = cut
    with pytest.raises(ShortRead, match="truncated"):
        driver.branch.save()
    reader = reopen(read_only=True)
    assert reader.branch.saves()[0].sequence == number
    np.testing.assert_array_equal(reader.read(), expected)


def test_a_stormy_system_saves_and_opens(path, open_branch, reopen):
    store = FlashStore(file=path)
    store.system = FaultySystem(7, storm=0.5)
    driver = open_branch(store)
    expected = driver.prefill()
    for value in range(5):
        driver.append(0, 0, float(value))
        driver.branch.save()
    expected[:, :, 0, 0] = 4.0
    np.testing.assert_array_equal(reopen(read_only=True, system=FaultySystem(8, storm=0.5)).read(), expected)
