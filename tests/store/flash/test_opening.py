"""Opening a saved file: what it gives back, to whom, and while others save."""

import contextlib
import dataclasses
import errno
import os
import pathlib
import subprocess
import sys
import threading

import numpy as np
import pytest

from kvjax.errors import (
    ChecksumMismatch,
    ConfigError,
    FormatMismatch,
    NothingSaved,
    StaleCache,
    StoreClosed,
    StoreLocked,
    WriteFailed,
)
from kvjax.store.flash.store import FlashStore
from kvjax.store.format.pages import HEADER_BYTES, VERSION
from tests.store.conftest import GEOMETRY, Driver, still_works
from tests.store.faults import FaultySystem

EXTENT = GEOMETRY.extent_bytes
ROOT = pathlib.Path(__file__).resolve().parents[3]


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
from kvjax.store.flash.store import FlashStore
from tests.store.conftest import Driver
driver = Driver(FlashStore(file={str(path)!r}).open())
driver.append(3, 3, 8.0)
driver.branch.save(b"third")
np.save({str(path) + ".npy"!r}, driver.read())
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
    saved[:, :, 3, 3] = 8.0
    np.testing.assert_array_equal(np.load(str(path) + ".npy"), saved)
    with contextlib.closing(FlashStore(file=path).open()) as branch:
        np.testing.assert_array_equal(Driver(branch).read(), saved)


def test_one_writer_and_many_readers(saved, reopen, path):
    writer, readers = reopen(), [reopen(read_only=True) for _ in range(2)]
    with pytest.raises(StoreLocked, match="in use"):
        reopen()
    with pytest.raises(StoreLocked):
        FlashStore(file=path).create(GEOMETRY, "")
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
    writer = open_branch(FlashStore(file=path))
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
    store = FlashStore(file=path)
    with pytest.raises(FormatMismatch, match="'other'"):
        store.open(GEOMETRY, "other", read_only=read_only)
    with pytest.raises(FormatMismatch, match="num_blocks=7"):
        store.open(dataclasses.replace(GEOMETRY, num_blocks=7), "fingerprint", read_only=read_only)
    store.open(read_only=read_only).close()


def test_what_is_no_saved_store_is_refused(tmp_path, path):
    with pytest.raises(StoreClosed, match="does not exist"):
        FlashStore(file=path).open()
    for read_only in (False, True):
        with pytest.raises(ConfigError, match="give file= to open a saved one"):
            FlashStore(directory=tmp_path).open(read_only=read_only)
    FlashStore(file=path).create(GEOMETRY, "").close()
    with pytest.raises(NothingSaved, match="never saved"):
        FlashStore(file=path).open()
    page = bytearray(path.read_bytes())
    page[8] = VERSION + 7
    path.write_bytes(page)
    with pytest.raises(FormatMismatch, match=f"version {VERSION + 7}"):
        FlashStore(file=path).open()
    path.write_text("precious")
    with pytest.raises(FormatMismatch, match="not a kvjax"):
        FlashStore(file=path).open()
    assert path.read_text() == "precious"


def test_a_failed_opening_leaves_no_lock(saved, path):
    with pytest.raises(FormatMismatch):
        FlashStore(file=path).open(fingerprint="other")
    FlashStore(file=path).open().close()


def test_a_failed_read_only_opening_leaves_no_file_and_no_descriptor(saved, path, tmp_path):
    """Given a system that cannot do what the store insists on, once the private file is there."""
    scratch, system = tmp_path / "scratch", FaultySystem()
    scratch.mkdir()
    system.fail("io_setup", errno.EAGAIN)
    store = FlashStore(file=path, engine="aio", scratch=scratch)
    store.system = system
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match="engine='aio' cannot be used"):
        store.open(read_only=True)
    assert len(os.listdir("/proc/self/fd")) == before and not list(scratch.iterdir())


def test_temporary_files_are_not_saved(tmp_path, open_branch):
    driver = open_branch(FlashStore(directory=tmp_path))
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
    with pytest.raises(StaleCache, match="open it again"):  # as rows are added to a block that nobody read
        reader.append(0, 0, 1.0)
        reader.branch.flush()
    np.testing.assert_array_equal(reopen(read_only=True).read(), writer.read())


def test_readers_that_come_while_a_writer_saves(saved, reopen, path):
    """Each finds a whole save, at whatever moment it looks, and reads that or is told that it is too old."""
    writer = reopen()

    def work() -> None:
        for seed in range(25):
            writer.prefill(seed=seed)
            writer.branch.save(b"%d" % seed)

    def look() -> bool:
        with contextlib.closing(FlashStore(file=path, threads=1).open(read_only=True)) as branch:
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


# ---- what fails while opening

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
