"""Each way a device or a user can fail: its typed error, a usable branch, the right bytes once the cause is gone."""

import concurrent.futures
import contextlib
import errno
import os
import pathlib
import subprocess

import numpy as np
import pytest

from kvjax.errors import (
    ChecksumMismatch,
    NoSpace,
    ReadFailed,
    ShortRead,
    StoreError,
    WriteFailed,
)
from kvjax.store.flash.store import FlashStore
from kvjax.store.format.pages import HEADER_BYTES
from tests.store.conftest import (
    GEOMETRY,
    WIDE,
    Driver,
    drop_pages,
    settle,
    skip_without,
    still_works,
    wait_until,
)

EXTENT = GEOMETRY.extent_bytes


def fails_to_read(driver: Driver, kind: type[StoreError], *words: str) -> None:
    ok, _ = driver.try_read()
    error = driver.branch.take_error()
    assert not ok and type(error) is kind
    for word in (driver.branch.path, *words):
        assert word in str(error)


# ---- reading

def test_truncated_file(fragile):
    path = fragile.branch.path
    end = os.path.getsize(path)
    with open(path, "rb") as file:
        lost = file.read()[end - EXTENT - 100:]
    os.truncate(path, end - EXTENT - 100)
    direct = fragile.branch.direct
    fails_to_read(fragile, ShortRead, "truncated", "block", "offset")
    assert fragile.branch.direct == direct
    with open(path, "r+b") as file:
        file.seek(end - EXTENT - 100)
        file.write(lost)
    still_works(fragile)


def test_flipped_bit(fragile):
    offset = HEADER_BYTES + 7 * EXTENT + 13
    with open(fragile.branch.path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))
    where = f"offset {HEADER_BYTES + 7 * EXTENT}"
    fails_to_read(fragile, ChecksumMismatch, "layer 0, sequence 0, head 1, block 1", where)
    fails_to_read(fragile, ChecksumMismatch, "head 1, block 1")
    with open(fragile.branch.path, "r+b") as file:
        file.seek(offset)
        file.write(bytes([byte]))
    still_works(fragile)


def test_damaged_block_takes_no_rows(fragile):
    with open(fragile.branch.path, "r+b") as file:
        file.seek(HEADER_BYTES)
        good = file.read(4)
        file.seek(HEADER_BYTES)
        file.write(b"oops")
    fragile.append(0, 3, 1.0)
    with pytest.raises(ChecksumMismatch, match="layer 0, sequence 0, head 0, block 0"):
        fragile.branch.flush()
    with open(fragile.branch.path, "r+b") as file:
        file.seek(HEADER_BYTES)
        file.write(good)
    fragile.branch.flush()
    expected = fragile.full()
    expected[:, :, 0, 3] = 1.0
    still_works(fragile, expected)


def test_read_error(fragile, system):
    system.fail("preadv", errno.EIO, times=1)
    fails_to_read(fragile, ReadFailed, "Input/output error", "layer 0")
    still_works(fragile)


class Disk:
    """A mounted filesystem on a block device that can lose most of what it has, and get it back; needs root.

    Attributes:
      directory: where it is mounted.
    """

    SIZE, LEFT = 64 << 20, 1 << 20

    def __init__(self, at: pathlib.Path, undo: contextlib.ExitStack):
        self.directory, self._image, self._whole = at / "mounted", at / "image", b""
        self.directory.mkdir()
        with open(self._image, "wb") as file:
            file.truncate(self.SIZE)
        self._run("mkfs.ext4", "-q", "-O", "^has_journal", self._image)
        self._device = self._run("losetup", "--find", "--show", self._image)
        undo.callback(self._run, "losetup", "--detach", self._device)
        self._run("mount", self._device, self.directory)
        undo.callback(self._run, "umount", "--lazy", self.directory)

    @staticmethod
    def _run(*command) -> str:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def lose(self) -> None:
        """Reads of the device fail from here on, but for what lies at its beginning."""
        self._whole = self._image.read_bytes()
        os.truncate(self._image, self.LEFT)
        self._run("losetup", "--set-capacity", self._device)

    def recover(self) -> None:
        with open(self._image, "r+b") as file:
            file.write(self._whole)
        self._run("losetup", "--set-capacity", self._device)


@pytest.fixture
def disk(tmp_path):
    with contextlib.ExitStack() as undo:
        try:
            made = Disk(tmp_path, undo)
        except (OSError, subprocess.CalledProcessError) as cause:
            pytest.skip(f"no filesystem can be mounted here: {cause}")
        yield made


def test_a_device_that_fails(disk, engine):
    """Given a real one, and system calls that nobody replaced, so that C reads where it can."""
    skip_without(engine, disk.directory)
    driver = Driver(FlashStore(file=disk.directory / "cache.kv", engine=engine).create(WIDE, ""))
    blocks = driver.prefill()
    drop_pages(driver.branch.path)
    disk.lose()
    fails_to_read(driver, ReadFailed, "Input/output error", "layer 0", "offset")
    disk.recover()
    np.testing.assert_array_equal(driver.read(), blocks)
    driver.branch.close()


def test_interrupted_calls_are_repeated(fragile, system):
    system.fail("preadv", errno.EINTR, times=3)
    system.fail("pwrite", errno.EINTR, times=3)
    still_works(fragile)
    assert fragile.branch.take_error() is None


def test_reads_that_hang(tmp_path, open_branch, system, engine):
    store = FlashStore(directory=tmp_path, engine=engine, threads=2, timeout=1.5)
    store.system = system
    driver = open_branch(store)
    blocks = driver.prefill()
    settle(driver.branch.path)
    block = np.tile(np.arange(0, 6, 2, dtype=np.int32), (2, 2, 1))  # every other one: many requests
    slots = np.full((2, 2, 3, 4, 6), 77, np.float32)
    system.hang("preadv")
    assert not driver.branch.read_into(0, 0, block, block // 2, slots)
    error = driver.branch.take_error()
    assert type(error) is ReadFailed and "1.5 s" in str(error)
    system.heal()
    again = np.zeros_like(slots)
    assert driver.branch.read_into(0, 0, block, block // 2, again)
    np.testing.assert_array_equal(again, blocks[:, :, ::2])
    assert (slots == 77).all(), "a late read must not touch memory that was given up"


def test_first_error_is_the_one_kept(fragile, system):
    system.fail("preadv", errno.EIO, times=1)
    assert not fragile.try_read()[0]
    assert not fragile.try_read(generation=7)[0]
    assert type(fragile.branch.take_error()) is ReadFailed
    still_works(fragile)


# ---- writing

@pytest.mark.parametrize("code, kind", [(errno.ENOSPC, NoSpace), (errno.EDQUOT, NoSpace), (errno.EIO, WriteFailed)])
def test_failed_flush_keeps_the_rows(fragile, system, code, kind):
    fragile.append(1, 2, 5.0)
    system.fail("pwrite", code)
    for _ in range(2):
        with pytest.raises(kind, match="block 1"):
            fragile.branch.flush()
    expected = fragile.full()
    expected[:, :, 1, 2] = 5.0
    np.testing.assert_array_equal(fragile.read(), expected)
    fragile.append(1, 1, 6.0)
    assert_reported(fragile, kind)
    system.heal()
    expected[:, :, 1, 1] = 6.0
    fragile.branch.flush()
    still_works(fragile, expected)


def assert_reported(driver: Driver, kind: type[StoreError]) -> None:
    """The retry that a commit set off fails in the background, and the next flush says so."""
    with pytest.raises(kind):
        driver.branch.flush()


@pytest.fixture
def behind(tmp_path, open_branch, system) -> tuple[Driver, np.ndarray]:
    """A branch whose writer has failed behind its back, on a device that is full; and what it holds."""
    store = FlashStore(file=tmp_path / "cache.kv", staging_bytes=64 * EXTENT)
    store.system = system
    driver = open_branch(store)
    driver.prefill()
    system.fail("pwrite", errno.ENOSPC)
    for block in range(5):  # past a quarter of the staging the writer begins
        assert driver.put_row(block, 0, 5.0)
    driver.commit()
    wait_until(lambda: driver.branch._lineage.untold)
    expected = driver.full()
    expected[:, :, :5, 0] = 5.0
    return driver, expected


CALLS = {"commit": lambda branch: branch.commit(branch.generation), "flush": lambda branch: branch.flush(),
         "fork": lambda branch: branch.fork().close(), "save": lambda branch: branch.save(),
         "close": lambda branch: branch.close()}


@pytest.mark.parametrize("call", [call for call in CALLS if call != "close"])
def test_failure_behind_is_reported_by_the_next_call_that_writes(behind, system, call):
    driver, expected = behind
    np.testing.assert_array_equal(driver.read(), expected)
    with pytest.raises(NoSpace, match="No space left"):
        CALLS[call](driver.branch)
    np.testing.assert_array_equal(driver.read(), expected)
    system.heal()
    driver.commit()
    still_works(driver, expected)


@pytest.mark.parametrize("call", CALLS)
def test_failure_behind_that_is_over_is_reported_by_none(behind, system, call):
    driver, expected = behind
    system.heal()
    CALLS[call](driver.branch)
    assert driver.branch.stats().rows_written == 5 * GEOMETRY.streams, "all of it was tried again"
    if call != "close":
        still_works(driver, expected)


def test_what_fails_late_belongs_to_the_call_that_failed(tmp_path, open_branch, system, monkeypatch):
    """Given a flush of which some blocks cannot be written, and the device then refuses those that were."""
    skip_without("aio", tmp_path)
    monkeypatch.setattr("kvjax.store.flash.writer.Writer.MOST_UNFINISHED", 6)
    store = FlashStore(directory=tmp_path)
    store.system = system
    driver = open_branch(store)
    expected = driver.prefill()
    for block in range(0, 6, 2):  # none beside another
        assert driver.put_row(block, 1, 5.0)
    driver.commit()
    expected[:, :, ::2, 1] = 5.0
    system.fail("pwrite", errno.EIO, skip=2, times=1)
    system.fail("sync_range", errno.EIO, times=1)
    system.hang("sync_range")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        flush = pool.submit(driver.branch.flush)
        wait_until(lambda: driver.branch._lineage.failed is not None)
        assert not concurrent.futures.wait([flush], 0.2).done, "what is on its way belongs to it, too"
        system.release()
        assert isinstance(flush.exception(), WriteFailed) and "writing layer 0" in str(flush.exception())
    driver.append(1, 0, 6.0)
    expected[:, :, 1, 0] = 6.0
    driver.branch.flush()
    still_works(driver, expected)


def test_half_written_block_is_whole_again_after_the_retry(fragile, system):
    fragile.append(0, 0, 5.0)
    system.fail("pwrite", errno.EIO, times=1)
    with open(fragile.branch.path, "r+b") as file:
        with pytest.raises(WriteFailed):
            fragile.branch.flush()
        file.seek(HEADER_BYTES)
        file.write(b"\xff" * 50)  # what a write that failed half-way leaves behind
    expected = fragile.full()
    expected[:, :, 0, 0] = 5.0
    np.testing.assert_array_equal(fragile.read(), expected)
    fragile.branch.flush()
    still_works(fragile, expected)


def test_full_staging_raises_before_it_commits(tmp_path, open_branch, system):
    store = FlashStore(directory=tmp_path, staging_bytes=2 * EXTENT)
    store.system = system
    driver = open_branch(store)
    system.fail("pwrite", errno.ENOSPC)
    driver.append(0, 0, 1.0)
    wait_until(lambda: driver.branch._lineage.untold)
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
    store = FlashStore(directory=tmp_path, staging_bytes=2 * EXTENT)
    store.system = system
    driver = open_branch(store)
    other = Driver(driver.branch.fork())
    system.fail("pwrite", errno.ENOSPC)
    driver.append(0, 0, 1.0)
    wait_until(lambda: driver.branch._lineage.untold)
    assert other.put_row(0, 0, 2.0)
    with pytest.raises(NoSpace):
        other.commit()
    system.heal()
    other.commit()  # what was in the way is tried again, and its branch has nothing to do for it
    assert (other.read()[:, :, 0, 0] == 2.0).all() and (driver.read()[:, :, 0, 0] == 1.0).all()
    other.branch.close()


@pytest.mark.parametrize("operation, skip", [("pwrite", 0), ("pwrite", 1), ("preadv", 0), ("preadv", 1)])
def test_rows_that_come_while_their_block_is_being_written(tmp_path, open_branch, system, operation, skip):
    # four streams are past a quarter: the writer begins
    store = FlashStore(directory=tmp_path, staging_bytes=4 * EXTENT)
    store.system = system
    driver = open_branch(store)
    expected = driver.prefill()
    system.calls.clear()
    system.hang(operation)
    driver.append(0, 1, 1.0)
    wait_until(lambda: operation in system.calls)
    driver.append(0, 2, 2.0)
    expected[:, :, 0, 1:3] = np.array([1.0, 2.0])[:, None]
    if operation == "pwrite":
        np.testing.assert_array_equal(driver.read(), expected)
    system.fail(operation, errno.EIO, skip=skip)
    system.release()
    wait_until(lambda: driver.branch._lineage.untold)
    system.heal()
    np.testing.assert_array_equal(driver.read(), expected)
    still_works(driver, expected)


def test_max_bytes(tmp_path, open_branch):
    driver = open_branch(FlashStore(directory=tmp_path, max_bytes=HEADER_BYTES + 25 * EXTENT))
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


def test_failed_prefill_changes_nothing(fragile, system):
    system.fail("pwrite", errno.ENOSPC, times=1)
    with pytest.raises(NoSpace, match="layer 0"):
        fragile.prefill(seed=1)
    np.testing.assert_array_equal(fragile.read(), fragile.full())
    still_works(fragile, fragile.prefill(seed=1))


def test_close_raises_what_failed_and_closes(fragile, system):
    fragile.append(0, 0, 1.0)
    system.fail("pwrite", errno.EIO)
    with pytest.raises(WriteFailed):
        fragile.branch.close()
    fragile.branch.close()
    system.heal()
    Driver(FlashStore(file=fragile.branch.path).create(GEOMETRY, "")).branch.close()
