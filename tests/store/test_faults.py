"""Each way a device or a user can fail: its typed error, a usable branch, the right bytes once the cause is gone."""

import errno
import os

import numpy as np
import pytest

from kvjax.errors import (
    ChecksumMismatch,
    FormatMismatch,
    NoSpace,
    ReadFailed,
    ShortRead,
    StoreClosed,
    StoreError,
    StoreLocked,
    WriteFailed,
)
from kvjax.store.flash import FlashStore
from tests.store.conftest import GEOMETRY, Driver
from tests.store.faults import FaultySystem

EXTENT = GEOMETRY.extent_bytes


@pytest.fixture
def system():
    system = FaultySystem()
    yield system
    system.heal()


@pytest.fixture(params=[False, True], ids=["buffered", "direct"])
def driver(request, tmp_path, open_branch, system) -> Driver:
    """A prefilled branch in a named file, on a system that can be made to fail."""
    store = FlashStore(tmp_path / "cache.kv", direct=request.param, threads=2, timeout=5.0)
    store.system = system
    driver = open_branch(store)
    driver.prefill()
    return driver


def fails_to_read(driver: Driver, kind: type[StoreError], *words: str) -> None:
    ok, _ = driver.try_read()
    error = driver.branch.take_error()
    assert not ok and type(error) is kind
    for word in (driver.branch.path, *words):
        assert word in str(error)


def still_works(driver: Driver, expected: np.ndarray | None = None) -> None:
    """Reads the expected blocks, adds a row, and reads it too."""
    expected = driver.full() if expected is None else expected
    np.testing.assert_array_equal(driver.read(), expected)
    driver.append(3, 3, 42.0)
    driver.branch.flush()
    expected = expected.copy()
    expected[:, :, 3, 3] = 42.0
    np.testing.assert_array_equal(driver.read(), expected)


# ---- reading

def test_truncated_file(driver):
    path = driver.branch.path
    end = os.path.getsize(path)
    with open(path, "rb") as file:
        lost = file.read()[end - EXTENT - 100:]
    os.truncate(path, end - EXTENT - 100)
    fails_to_read(driver, ShortRead, "truncated", "block", "offset")
    with open(path, "r+b") as file:
        file.seek(end - EXTENT - 100)
        file.write(lost)
    still_works(driver)


def test_flipped_bit(driver):
    offset = 4096 + 7 * EXTENT + 13
    with open(driver.branch.path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))
    fails_to_read(driver, ChecksumMismatch, "layer 0, sequence 0, head 1, block 1", f"offset {4096 + 7 * EXTENT}")
    fails_to_read(driver, ChecksumMismatch, "head 1, block 1")
    with open(driver.branch.path, "r+b") as file:
        file.seek(offset)
        file.write(bytes([byte]))
    still_works(driver)


def test_damaged_block_takes_no_rows(driver):
    with open(driver.branch.path, "r+b") as file:
        file.seek(4096)
        good = file.read(4)
        file.seek(4096)
        file.write(b"oops")
    driver.append(0, 3, 1.0)
    with pytest.raises(ChecksumMismatch, match="layer 0, sequence 0, head 0, block 0"):
        driver.branch.flush()
    with open(driver.branch.path, "r+b") as file:
        file.seek(4096)
        file.write(good)
    driver.branch.flush()
    expected = driver.full()
    expected[:, :, 0, 3] = 1.0
    still_works(driver, expected)


def test_read_error(driver, system):
    system.fail("preadv", errno.EIO, times=1)
    fails_to_read(driver, ReadFailed, "Input/output error", "layer 0")
    still_works(driver)


def test_interrupted_calls_are_repeated(driver, system):
    system.fail("preadv", errno.EINTR, times=3)
    system.fail("pwrite", errno.EINTR, times=3)
    still_works(driver)
    assert driver.branch.take_error() is None


def test_reads_that_hang(tmp_path, open_branch, system):
    store = FlashStore(tmp_path, threads=2, timeout=0.1)
    store.system = system
    driver = open_branch(store)
    blocks = driver.prefill()
    block = np.tile(np.arange(0, 6, 2, dtype=np.int32), (2, 2, 1))  # every other one: many requests
    slots = np.full((2, 2, 3, 4, 6), 77, np.float32)
    system.hang("preadv")
    assert not driver.branch.read_into(0, 0, block, block // 2, slots)
    error = driver.branch.take_error()
    assert type(error) is ReadFailed and "0.1 s" in str(error)
    system.heal()
    again = np.zeros_like(slots)
    assert driver.branch.read_into(0, 0, block, block // 2, again)
    np.testing.assert_array_equal(again, blocks[:, :, ::2])
    assert (slots == 77).all(), "a late read must not touch memory that was given up"


def test_first_error_is_the_one_kept(driver, system):
    system.fail("preadv", errno.EIO, times=1)
    assert not driver.try_read()[0]
    assert not driver.try_read(generation=7)[0]
    assert type(driver.branch.take_error()) is ReadFailed
    still_works(driver)


# ---- writing

@pytest.mark.parametrize("code, kind", [(errno.ENOSPC, NoSpace), (errno.EDQUOT, NoSpace), (errno.EIO, WriteFailed)])
def test_failed_flush_keeps_the_rows(driver, system, code, kind):
    driver.append(1, 2, 5.0)
    system.fail("pwrite", code)
    for _ in range(2):
        with pytest.raises(kind, match="block 1"):
            driver.branch.flush()
    expected = driver.full()
    expected[:, :, 1, 2] = 5.0
    np.testing.assert_array_equal(driver.read(), expected)
    driver.append(1, 1, 6.0)
    assert_reported(driver, kind)
    system.heal()
    expected[:, :, 1, 1] = 6.0
    driver.branch.flush()
    still_works(driver, expected)


def assert_reported(driver: Driver, kind: type[StoreError]) -> None:
    """The retry that a commit set off fails in the background, and the next flush says so."""
    with pytest.raises(kind):
        driver.branch.flush()


@pytest.mark.parametrize("report", ["read", "commit"])
def test_failure_behind_is_reported_by_the_next_call(tmp_path, open_branch, system, report):
    store = FlashStore(tmp_path, staging_bytes=64 * EXTENT)
    store.system = system
    driver = open_branch(store)
    driver.prefill()
    system.fail("pwrite", errno.ENOSPC)
    for block in range(5):  # past a quarter of the staging the writer begins
        assert driver.put_row(block, 0, 5.0)
    driver.commit()
    while driver.branch._errors.first is None:
        pass
    if report == "read":
        fails_to_read(driver, NoSpace, "No space left")
    else:
        with pytest.raises(NoSpace):
            driver.commit()
    expected = driver.full()
    expected[:, :, :5, 0] = 5.0
    np.testing.assert_array_equal(driver.read(), expected)
    system.heal()
    driver.commit()
    still_works(driver, expected)


def test_half_written_block_is_whole_again_after_the_retry(driver, system):
    driver.append(0, 0, 5.0)
    system.fail("pwrite", errno.EIO, times=1)
    with open(driver.branch.path, "r+b") as file:
        with pytest.raises(WriteFailed):
            driver.branch.flush()
        file.seek(4096)
        file.write(b"\xff" * 50)  # what a write that failed half-way leaves behind
    expected = driver.full()
    expected[:, :, 0, 0] = 5.0
    np.testing.assert_array_equal(driver.read(), expected)
    driver.branch.flush()
    still_works(driver, expected)


def test_full_staging_raises_before_it_commits(tmp_path, open_branch, system):
    store = FlashStore(tmp_path, staging_bytes=2 * EXTENT)
    store.system = system
    driver = open_branch(store)
    system.fail("pwrite", errno.ENOSPC)
    driver.append(0, 0, 1.0)
    assert driver.put_row(1, 0, 2.0)
    for _ in range(2):
        with pytest.raises(NoSpace):
            driver.commit()
        assert driver.branch.generation == 1
    system.heal()
    driver.commit()
    found = driver.read()
    assert (found[:, :, 0, 0] == 1.0).all() and (found[:, :, 1, 0] == 2.0).all()


def test_full_staging_of_another_branch(tmp_path, open_branch, system):
    store = FlashStore(tmp_path, staging_bytes=2 * EXTENT)
    store.system = system
    driver = open_branch(store)
    other = Driver(driver.branch.fork())
    system.fail("pwrite", errno.ENOSPC)
    driver.append(0, 0, 1.0)
    while driver.branch._errors.first is None:
        pass
    assert other.put_row(0, 0, 2.0)
    with pytest.raises(NoSpace):
        other.commit()
    system.heal()
    with pytest.raises(NoSpace):
        driver.branch.flush()
    driver.branch.flush()
    other.commit()
    assert (other.read()[:, :, 0, 0] == 2.0).all() and (driver.read()[:, :, 0, 0] == 1.0).all()
    other.branch.close()


def test_max_bytes(tmp_path, open_branch):
    driver = open_branch(FlashStore(tmp_path, max_bytes=4096 + 25 * EXTENT))
    blocks = driver.prefill()
    with pytest.raises(NoSpace, match="max_bytes"):
        driver.prefill(layer=1)
    child = Driver(driver.branch.fork())
    child.append(0, 0, 1.0)
    with pytest.raises(NoSpace, match="max_bytes"):
        child.branch.flush()
    np.testing.assert_array_equal(driver.read(), blocks)
    driver.branch.close()
    child.branch.flush()
    blocks[:, :, 0, 0] = 1.0
    np.testing.assert_array_equal(child.read(), blocks)
    child.branch.close()


def test_failed_prefill_changes_nothing(driver, system):
    system.fail("pwrite", errno.ENOSPC, times=1)
    with pytest.raises(NoSpace, match="layer 0"):
        driver.prefill(seed=1)
    np.testing.assert_array_equal(driver.read(), driver.full())
    still_works(driver, driver.prefill(seed=1))


def test_close_raises_what_failed_and_closes(driver, system):
    driver.append(0, 0, 1.0)
    system.fail("pwrite", errno.EIO)
    with pytest.raises(WriteFailed):
        driver.branch.close()
    driver.branch.close()
    system.heal()
    Driver(FlashStore(driver.branch.path).create(GEOMETRY, "")).branch.close()


# ---- the file as a whole

def test_removed_file(driver):
    path = driver.branch.path
    os.rename(path, path + ".away")
    np.testing.assert_array_equal(driver.read(), driver.full())
    with pytest.raises(StoreClosed, match="removed"):
        driver.branch.flush()
    os.rename(path + ".away", path)
    still_works(driver)


def test_locked_file(driver):
    store = FlashStore(driver.branch.path)
    with pytest.raises(StoreLocked, match=r"cache\.kv is in use"):
        store.create(GEOMETRY, "")
    still_works(driver)
    driver.branch.close()
    store.create(GEOMETRY, "").close()


@pytest.mark.parametrize("kind", ["text", "pipe"])
def test_foreign_file(tmp_path, kind):
    path = tmp_path / "notes.txt"
    os.mkfifo(path) if kind == "pipe" else path.write_text("precious")
    with pytest.raises(FormatMismatch, match=r"notes\.txt"):
        FlashStore(path).create(GEOMETRY, "")
    assert kind == "pipe" or path.read_text() == "precious"


@pytest.mark.parametrize("place", ["missing/cache.kv", "file/cache.kv"])
def test_places_without_a_directory(tmp_path, place):
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteFailed, match="existing, writable directory"):
        FlashStore(tmp_path / place).create(GEOMETRY, "")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_directory(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(WriteFailed, match="writable directory"):
        FlashStore(tmp_path).create(GEOMETRY, "")


@pytest.mark.parametrize("operation, code, kind", [
    ("open", errno.EROFS, WriteFailed),
    ("open", errno.ENOSPC, NoSpace),
    ("lock", errno.ENOLCK, WriteFailed),
    ("free_bytes", 0, NoSpace),
    ("pwrite", errno.ENOSPC, NoSpace),
])
def test_failed_creation_leaves_nothing(tmp_path, system, operation, code, kind):
    store = FlashStore(tmp_path / "cache.kv")
    store.system = system
    system.fail(operation, code)
    with pytest.raises(kind, match=r"cache\.kv"):
        store.create(GEOMETRY, "")
    assert not list(tmp_path.iterdir())
    system.heal()
    store.create(GEOMETRY, "").close()


def test_more_than_the_device_holds_is_refused(tmp_path):
    with pytest.raises(NoSpace, match="lower max_bytes"):
        FlashStore(tmp_path, max_bytes=1 << 60).create(GEOMETRY, "")
    assert not list(tmp_path.iterdir())
