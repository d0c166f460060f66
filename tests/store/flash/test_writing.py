"""Write-behind: which blocks stay in their buffers, and how many bytes reach the device for those that were put."""

import errno

import numpy as np
import pytest

from kvjax.errors import NoSpace, WriteFailed
from kvjax.store.flash.store import FlashStore
from kvjax.store.flash.volume import Volume
from kvjax.store.geometry import PAGE_BYTES
from tests.store.conftest import GEOMETRY, WIDE, settle, skip_without, wait_until

EXTENT = GEOMETRY.extent_bytes


def test_a_hot_block_stays_in_its_buffer(tmp_path, open_branch):
    """Staging holds two layers' worth of one block per stream; one hot block, a new cold one at every token."""
    driver = open_branch(FlashStore(directory=tmp_path, staging_bytes=4 * 2 * GEOMETRY.streams * EXTENT))
    driver.prefill()
    before = driver.branch.stats().blocks_written
    hot, cold = 0, (1, 2, 3, 4, 5)
    for i, block in enumerate(cold):
        driver.append(hot, i % GEOMETRY.block_rows, float(i))
        driver.append(block, 0, 1.0)
    wait_until(lambda: driver.branch.stats().blocks_written > before)
    lineage = driver.branch._lineage
    with driver.branch._volume.lock:
        waiting = {block_id % GEOMETRY.num_blocks for block_id in lineage.queue}
    assert hot in waiting
    driver.branch.flush()
    assert driver.branch.stats().rows_written == 2 * len(cold) * GEOMETRY.streams


@pytest.mark.parametrize("rows", [1, GEOMETRY.block_rows])
def test_write_amplification(tmp_path, open_branch, rows):
    """A block is one write, however many of its rows were put before the buffer went to the device."""
    driver = open_branch(FlashStore(directory=tmp_path))
    for row in range(rows):
        driver.append(2, row, float(row))
    driver.branch.flush()
    stats = driver.branch.stats()
    assert stats.bytes_put == rows * GEOMETRY.streams * GEOMETRY.row_bytes
    assert stats.bytes_written == GEOMETRY.streams * EXTENT
    np.testing.assert_allclose(stats.write_amplification, EXTENT / (rows * GEOMETRY.row_bytes))


def test_blocks_that_lie_side_by_side_are_one_write(tmp_path, open_branch, system):
    """Given new blocks of every stream, which the layout puts one after the other, and later rows for each of them."""
    store = FlashStore(directory=tmp_path)
    store.system = system
    driver = open_branch(store)
    driver.prefill()
    for row in range(2):
        system.calls.clear()
        driver.append(4, row, 1.0 + row, layer=1)
        driver.branch.flush()
        assert system.calls.count("pwrite") == 1
        settle(driver.branch.path)
    assert driver.branch.stats().rows_written == 2 * GEOMETRY.streams
    np.testing.assert_array_equal(driver.read(1)[:, :, 4, :2, 0], np.broadcast_to([1.0, 2.0], (2, 2, 2)))


def test_no_more_is_written_of_neighbours_than_they_fill(tmp_path, open_branch, system):
    """Given new blocks of eight pages with one row each, two pages of them."""
    store = FlashStore(directory=tmp_path)
    store.system = system
    driver = open_branch(store, WIDE)
    driver.prefill()
    before, write, given = driver.branch.stats(), system.pwrite, []
    system.pwrite = lambda descriptor, data, offset: (given.append(len(data)), write(descriptor, data, offset))[1]
    driver.append(4, 0, 1.0, layer=1)
    driver.branch.flush()
    stats = driver.branch.stats()
    assert sum(given) == stats.bytes_written - before.bytes_written == WIDE.streams * 2 * PAGE_BYTES
    assert stats.blocks_short - before.blocks_short == WIDE.streams


def test_a_failure_that_is_over_when_all_is_written_is_not_told(tmp_path, open_branch, system, monkeypatch):
    """Given a branch that waits for its blocks while another one has those that failed tried again."""
    store = FlashStore(directory=tmp_path)
    store.system = system
    driver = open_branch(store)
    driver.prefill()
    driver.append(1, 2, 5.0)
    system.fail("pwrite", errno.EIO, times=1)
    wait, waited = Volume._wait, []

    def tried_again(self, lineage, done):
        self.lock.release()
        wait_until(lambda: lineage.failed)
        self.lock.acquire()
        waited.append(lineage.failed)
        self._retry(lineage)
        wait(self, lineage, done)

    monkeypatch.setattr(Volume, "_wait", tried_again)
    driver.branch.flush()
    monkeypatch.undo()
    assert isinstance(waited[0], WriteFailed) and not driver.branch._lineage.untold
    assert (driver.read()[:, :, 1, 2] == 5.0).all()


def test_what_was_written_before_a_failure_is_not_written_again(tmp_path, open_branch, system):
    store = FlashStore(directory=tmp_path)
    store.system = system
    driver = open_branch(store)
    expected = driver.prefill()
    driver.append(1, 2, 5.0)  # lies somewhere else in each stream
    expected[:, :, 1, 2] = 5.0
    system.fail("pwrite", errno.EIO, skip=1)
    with pytest.raises(WriteFailed, match="block 1 at offset"):
        driver.branch.flush()
    np.testing.assert_array_equal(driver.read(), expected)
    system.heal()
    system.calls.clear()
    driver.branch.flush()
    assert system.calls.count("pwrite") == GEOMETRY.streams - 1
    settle(driver.branch.path)
    np.testing.assert_array_equal(driver.read(), expected)
    assert driver.branch.stats().rows_written == GEOMETRY.streams


def test_as_many_blocks_are_written_as_there_is_space_for(tmp_path, open_branch):
    driver = open_branch(FlashStore(directory=tmp_path))
    driver.prefill()
    before, extents = driver.branch.stats().blocks_written, driver.branch._volume.extents
    extents._max_bytes = extents.offset(extents.end + GEOMETRY.streams - 1)
    driver.append(4, 0, 6.0, layer=1)
    with pytest.raises(NoSpace, match="max_bytes"):
        driver.branch.flush()
    assert driver.branch.stats().blocks_written - before == GEOMETRY.streams - 1
    assert (driver.read(1)[:, :, 4, 0] == 6.0).all()
    extents._max_bytes = None
    driver.branch.flush()
    assert driver.branch.stats().blocks_written - before == GEOMETRY.streams
    assert (driver.read(1)[:, :, 4, 0] == 6.0).all()


def test_a_block_is_read_from_memory_until_the_device_has_it(tmp_path, open_branch, system):
    """Given blocks that are in the file and not yet on the device, and that get a second row meanwhile."""
    skip_without("aio", tmp_path)
    store = FlashStore(directory=tmp_path, staging_bytes=3 * GEOMETRY.streams * EXTENT)
    store.system = system
    driver = open_branch(store)
    expected = driver.prefill()
    settle(driver.branch.path)
    lineage = driver.branch._lineage
    system.hang("sync_range")
    driver.append(1, 2, 5.0)
    wait_until(lambda: "sync_range" in system.calls)
    on_the_way = set(lineage.flight)
    driver.append(1, 3, 7.0)
    expected[:, :, 1, 2], expected[:, :, 1, 3] = 5.0, 7.0
    before = driver.branch.stats()
    np.testing.assert_array_equal(driver.read(), expected)
    assert driver.branch.stats().blocks_read - before.blocks_read == expected[..., 0, 0].size - len(on_the_way)
    assert set(lineage.flight) == on_the_way and before.rows_written == 0
    system.release()
    driver.branch.flush()
    settle(driver.branch.path)
    np.testing.assert_array_equal(driver.read(), expected)
    assert driver.branch.stats().rows_written == 2 * GEOMETRY.streams


def test_a_branch_is_told_once_of_all_that_was_refused_together(tmp_path, open_branch, system):
    skip_without("aio", tmp_path)
    store = FlashStore(directory=tmp_path)
    store.system = system
    driver = open_branch(store)
    expected = driver.prefill()
    driver.append(1, 2, 5.0)
    expected[:, :, 1, 2] = 5.0
    system.fail("sync_range", errno.EPERM, skip=2, times=1)
    with pytest.raises(WriteFailed, match="writing back"):
        driver.branch.flush()
    assert not driver.branch._lineage.untold
    np.testing.assert_array_equal(driver.read(), expected)
    driver.branch.flush()


def test_blocks_that_the_device_refuses_stay_in_memory(tmp_path, open_branch, system):
    """Given blocks that the file takes and its device does not, of which some have an extent, and some none yet."""
    skip_without("aio", tmp_path)
    store = FlashStore(directory=tmp_path)
    store.system = system
    driver = open_branch(store)
    expected = driver.prefill()
    settle(driver.branch.path)
    driver.append(1, 2, 5.0)
    driver.append(4, 0, 6.0, layer=1)
    expected[:, :, 1, 2] = 5.0
    system.fail("sync_range", errno.EIO, times=1)
    with pytest.raises(WriteFailed, match="writing back"):
        driver.branch.flush()
    np.testing.assert_array_equal(driver.read(), expected)
    driver.append(1, 3, 7.0)
    expected[:, :, 1, 3] = 7.0
    driver.branch.flush()
    settle(driver.branch.path)
    np.testing.assert_array_equal(driver.read(), expected)
    assert (driver.read(1)[:, :, 4, 0] == 6.0).all()
