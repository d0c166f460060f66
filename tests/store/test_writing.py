"""Write-behind: which blocks stay in their buffers, and how many bytes reach the device for those that were put."""

import errno

import numpy as np
import pytest

from kvjax.errors import WriteFailed
from kvjax.store.flash import FlashStore
from tests.store.conftest import GEOMETRY, settle, skip_without, wait_until

EXTENT = GEOMETRY.extent_bytes


def test_a_hot_block_stays_in_its_buffer(tmp_path, open_branch):
    """Staging holds two layers' worth of one block per lane; one hot block, a new cold one at every token."""
    driver = open_branch(FlashStore(tmp_path, staging_bytes=4 * 2 * GEOMETRY.lanes * EXTENT))
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
    assert driver.branch.stats().rows_written == 2 * len(cold) * GEOMETRY.lanes


@pytest.mark.parametrize("rows", [1, GEOMETRY.block_rows])
def test_write_amplification(tmp_path, open_branch, rows):
    """A block is one write, however many of its rows were put before the buffer went to the device."""
    driver = open_branch(FlashStore(tmp_path))
    for row in range(rows):
        driver.append(2, row, float(row))
    driver.branch.flush()
    stats = driver.branch.stats()
    assert stats.bytes_put == rows * GEOMETRY.lanes * GEOMETRY.row_bytes
    assert stats.bytes_written == GEOMETRY.lanes * EXTENT
    np.testing.assert_allclose(stats.write_amplification, EXTENT / (rows * GEOMETRY.row_bytes))


def test_a_block_is_read_from_memory_until_the_device_has_it(tmp_path, open_branch, system):
    """Given blocks that are in the file and not yet on the device, and that get a second row meanwhile."""
    skip_without("aio", tmp_path)
    store = FlashStore(tmp_path, staging_bytes=3 * GEOMETRY.lanes * EXTENT)
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
    assert driver.branch.stats().rows_written == 2 * GEOMETRY.lanes


def test_blocks_that_the_device_refuses_stay_in_memory(tmp_path, open_branch, system):
    """Given blocks that the file takes and its device does not, of which some have an extent, and some none yet."""
    skip_without("aio", tmp_path)
    store = FlashStore(tmp_path)
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
    block = np.full((*expected.shape[:2], 1), 4, np.int32)
    out = np.zeros((*expected.shape[:2], 1, *expected.shape[3:]), np.float32)
    assert driver.branch.read_into(1, driver.branch.generation, block, np.zeros_like(block), out)
    assert (out[:, :, 0, 0] == 6.0).all()
