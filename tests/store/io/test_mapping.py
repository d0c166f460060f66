"""Reads through a map of the file: pages that are not there, files that change, and systems that cannot."""

import errno
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from kvjax.errors import ConfigError, ReadFailed, ShortRead
from kvjax.store.flash.branch import FlashBranch
from kvjax.store.flash.store import FlashStore
from kvjax.store.io import filemap, mapping
from kvjax.store.io.profiles import PROFILES
from kvjax.store.io.system import SystemIO
from tests.store.conftest import GEOMETRY, WIDE, Driver, drop_pages, skip_without, still_works
from tests.store.faults import FaultySystem

EXTENT = GEOMETRY.extent_bytes
MAPS = pathlib.Path("/proc/self/maps")


@pytest.fixture(autouse=True)
def _needs_mmap(tmp_path):
    skip_without("mmap", tmp_path)


class OneAtATime(SystemIO):
    """System calls that are the kernel's, of which C does not know that: blocks are read by threads."""


def mapped(open_branch, path, system: SystemIO | None = None, geometry=GEOMETRY, **settings) -> Driver:
    """A branch whose reads go through a map: in one call of C where the system's calls are not replaced."""
    store = FlashStore(file=path, engine="mmap", **settings)
    if system is not None:
        store.system = system
    return open_branch(store, geometry)


every_way = pytest.mark.parametrize("system", [None, OneAtATime()], ids=["compiled", "threads"])


# ---- pages that are not there


@every_way
@pytest.mark.parametrize("cut", [EXTENT, EXTENT + 100, 100, 5 * EXTENT])
def test_a_file_that_was_truncated_is_a_typed_error(tmp_path, open_branch, system, cut):
    """Given a file that ends with an extent, or within a page, of which the system would give zeros."""
    driver = mapped(open_branch, tmp_path / "cache.kv", system, WIDE)
    path, blocks = driver.branch.path, driver.full()
    blocks[:, :, -1] = 5  # the last block is full, and so is its last page
    driver.branch.write_layer(0, blocks, np.full(blocks.shape[:3], WIDE.block_rows, np.int32))
    end = os.path.getsize(path)
    whole = pathlib.Path(path).read_bytes()
    np.testing.assert_array_equal(driver.read(), blocks)
    os.truncate(path, end - cut)
    assert not driver.try_read()[0]
    error = driver.branch.take_error()
    assert type(error) is ShortRead and path in str(error) and "truncated" in str(error) and "layer 0" in str(error)
    pathlib.Path(path).write_bytes(whole)
    still_works(driver, blocks)


class CutMeanwhile(SystemIO):
    """A file that is truncated when its pages have been brought in, once `path` is set."""

    path: str | None = None

    def populate(self, address, size):
        super().populate(address, size)
        if self.path is not None:
            os.truncate(self.path, 3 * 4096)


def test_pages_that_go_before_they_are_copied_are_a_typed_error(tmp_path, open_branch):
    system = CutMeanwhile()
    driver = mapped(open_branch, tmp_path / "cache.kv", system)
    driver.prefill()
    system.path = driver.branch.path
    assert not driver.try_read()[0]
    assert type(driver.branch.take_error()) is ShortRead


def test_a_file_that_is_cut_again_and_again_ends_no_process(tmp_path):
    """Given another process's truncation at any point of a compiled read, which gives what was written or an error."""
    program = f"""
import os, sys, threading
import numpy as np
from kvjax.errors import StoreError
from kvjax.store.flash.store import FlashStore
from tests.store.conftest import WIDE, Driver
driver = Driver(FlashStore(file={str(tmp_path / "cache.kv")!r}, engine="mmap").create(WIDE, ""))
blocks, path = driver.prefill(), driver.branch.path
with open(path, "rb") as file:
    whole = file.read()
done = threading.Event()
def cut():
    with open(path, "r+b", buffering=0) as file:
        while not done.is_set():
            os.truncate(path, len(whole) // 3)
            file.seek(0)
            file.write(whole)
thread = threading.Thread(target=cut)
thread.start()
wrong = 0
try:
    for _ in range(200):
        ok, found = driver.try_read()
        wrong += ok and not np.array_equal(found, blocks)
        assert ok or isinstance(driver.branch.take_error(), StoreError)
finally:
    done.set()
    thread.join()
assert not wrong
np.testing.assert_array_equal(driver.read(), blocks)
"""
    root = pathlib.Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("operation", ["populate", "copy_mapped"])
def test_pages_that_the_map_does_not_give_are_read_with_their_own_answer(tmp_path, open_branch, operation):
    system = FaultySystem()
    driver = mapped(open_branch, tmp_path / "cache.kv", system)
    blocks = driver.prefill()
    system.calls.clear()
    np.testing.assert_array_equal(driver.read(), blocks)
    assert "populate" in system.calls and "preadv" not in system.calls, "all blocks come through the map"
    system.fail(operation, errno.EFAULT)
    np.testing.assert_array_equal(driver.read(), blocks)
    assert "preadv" in system.calls
    system.fail("preadv", errno.EIO)
    assert not driver.try_read()[0]
    error = driver.branch.take_error()
    assert type(error) is ReadFailed and "Input/output error" in str(error)


@every_way
def test_pages_come_from_the_device(tmp_path, open_branch, system):
    driver = mapped(open_branch, tmp_path / "cache.kv", system)
    blocks = driver.prefill()
    drop_pages(driver.branch.path)
    np.testing.assert_array_equal(driver.read(), blocks)


# ---- files that change


@every_way
def test_the_map_grows_with_the_file(tmp_path, open_branch, monkeypatch, system):
    """Given a map of a few extents, each layer and each fork lies beyond it, and old maps go."""
    monkeypatch.setattr(filemap, "LEAST_BYTES", 4 * EXTENT)
    driver = mapped(open_branch, tmp_path / "cache.kv", system)
    first = driver.branch._volume.file.map
    blocks = [driver.prefill(layer, seed=layer) for layer in range(2)]
    forks = [Driver(driver.branch.fork()) for _ in range(3)]
    for value, fork in enumerate(forks):
        for block in range(GEOMETRY.num_blocks):
            fork.append(block, 1, float(value))
        fork.branch.flush()
    for _ in range(2):
        for layer in range(2):
            np.testing.assert_array_equal(driver.read(layer), blocks[layer])
        for value, fork in enumerate(forks):
            assert (fork.read()[:, :, :, 1] == value).all()
    now = driver.branch._volume.file.map
    assert now.size >= os.path.getsize(driver.branch.path) > first.size
    del first
    assert MAPS.read_text().count(driver.branch.path) == 1
    for fork in forks:
        fork.branch.close()


def test_a_file_that_outgrows_its_address_space_is_read_without_a_map(tmp_path, open_branch, monkeypatch, caplog):
    class Narrow(FaultySystem):
        def map(self, descriptor, size):
            if size > 8 * EXTENT:
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            return super().map(descriptor, size)

    monkeypatch.setattr(filemap, "LEAST_BYTES", 4 * EXTENT)
    system = Narrow()
    driver = mapped(open_branch, tmp_path / "cache.kv", system)
    blocks = driver.prefill()
    for _ in range(2):
        np.testing.assert_array_equal(driver.read(), blocks)
    assert caplog.text.count("Cannot allocate memory") == 1


@every_way
def test_closing_unmaps_the_file(tmp_path, open_branch, system):
    driver = mapped(open_branch, tmp_path / "cache.kv", system)
    driver.prefill()
    driver.read()
    assert driver.branch.path in MAPS.read_text()
    driver.branch.close()
    assert driver.branch.path not in MAPS.read_text()


def test_a_saved_file_is_read_through_a_map_and_so_is_what_is_added(saved, reopen):
    """Given a read-only branch, whose additions lie in a second file."""
    system = FaultySystem()
    driver = reopen(read_only=True, system=system, engine="mmap")
    system.calls.clear()
    still_works(driver, saved)
    assert driver.branch.engine == "mmap" and not driver.branch.direct
    assert "populate" in system.calls


def test_coded_blocks_are_read_through_a_map(tmp_path, open_branch):
    system = FaultySystem()
    driver = mapped(open_branch, tmp_path / "cache.kv", system, WIDE, codec="rle")
    blocks = driver.prefill()
    system.calls.clear()
    np.testing.assert_array_equal(driver.read(), blocks)
    assert driver.branch.stats().blocks_short > 0
    assert "populate" in system.calls and "preadv" not in system.calls


def test_without_the_compiled_part_threads_read_through_the_map(tmp_path, open_branch, monkeypatch):
    monkeypatch.setattr(mapping, "native", None)
    monkeypatch.setattr(FlashBranch, "_landed", None)
    driver = mapped(open_branch, tmp_path / "cache.kv")
    np.testing.assert_array_equal(driver.prefill(), driver.read())
    assert driver.branch.engine == "mmap" and driver.branch._volume.reader.rings is None


# ---- where it cannot be


@pytest.mark.parametrize("operation, code, words", [
    ("map", errno.ENODEV, "No such device"), ("populate", errno.EINVAL, r"MADV_POPULATE_READ\): Invalid argument"),
    ("copy_mapped", errno.EPERM, r"process_vm_readv\): Operation not permitted"),
])
def test_a_system_that_cannot_is_refused_with_the_reason(tmp_path, operation, code, words):
    store = FlashStore(directory=tmp_path, engine="mmap")

    def refused(*_):
        raise OSError(code, os.strerror(code))

    setattr(store.system, operation, refused)
    with pytest.raises(ConfigError, match=f"engine='mmap' cannot be used: .*{words}.*engine=None"):
        store.create(GEOMETRY, "")
    assert not list(tmp_path.iterdir())


def test_pages_larger_than_the_files_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(filemap.mmap, "PAGESIZE", 1 << 16)
    with pytest.raises(ConfigError, match="pages of 65536 bytes"):
        FlashStore(directory=tmp_path, engine="mmap").create(GEOMETRY, "")


@pytest.mark.parametrize("profile", PROFILES)
def test_an_emulated_device_has_no_page_cache(tmp_path, profile):
    with pytest.raises(ConfigError, match=f"page cache.*{profile}"):
        FlashStore(directory=tmp_path, engine="mmap", profile=profile)
