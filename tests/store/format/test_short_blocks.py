"""Blocks with pages of zeros at their end take fewer pages: what is written, read and kept of them."""

import numpy as np
import pytest

from kvjax.store.flash.store import FlashStore
from kvjax.store.format.codec import make_codec
from kvjax.store.geometry import PAGE_BYTES
from tests.store.conftest import WIDE, Driver, settle
from tests.store.conftest import engine as engine

ROW_PAGES = WIDE.row_bytes // PAGE_BYTES  # two, of a block's eight


def images(counts) -> np.ndarray:
    """uint8[n, extent_bytes] blocks of so many rows."""
    made = np.random.default_rng(0).integers(1, 256, (len(counts), WIDE.block_rows, WIDE.row_bytes), np.uint8)
    made[np.arange(WIDE.block_rows) >= np.asarray(counts)[:, None]] = 0
    return made.reshape(len(counts), -1)


@pytest.fixture
def driver(tmp_path, open_branch, engine) -> Driver:
    return open_branch(FlashStore(file=tmp_path / "cache.kv", engine=engine), WIDE)


def prefill(driver: Driver) -> tuple[np.ndarray, np.ndarray]:
    """Random blocks[B, K, NB, C, width] of which 0 to 4 rows are valid, and how many."""
    blocks = np.abs(driver.full()) + 1
    counts = np.random.default_rng(1).integers(0, 5, blocks.shape[:3]).astype(np.int32)
    driver.branch.write_layer(0, blocks.copy(), counts)
    settle(driver.branch.path)
    blocks[np.arange(WIDE.block_rows) >= counts[..., None]] = 0
    return blocks, counts


def pages_read(driver: Driver, *block: int) -> int:
    """Pages that one read of these blocks of stream 0 takes."""
    wanted = np.full((2, 2, len(block)), -1, np.int32)
    wanted[0, 0] = block
    slots = np.zeros((2, 2, len(block), WIDE.block_rows, WIDE.width), WIDE.numpy_dtype)
    before = driver.branch.stats().bytes_read
    place = np.tile(np.arange(len(block), dtype=np.int32), (2, 2, 1))
    assert driver.branch.read_into(0, driver.branch.generation, wanted, place, slots), driver.branch.take_error()
    return (driver.branch.stats().bytes_read - before) // PAGE_BYTES


def test_a_block_takes_its_pages_up_to_the_last_that_is_not_zeros():
    """One of zeros takes one."""
    codec = make_codec("raw", WIDE)
    _, sums = codec.encode(images([0, 1, 3, 4]))
    assert (codec.sizes(sums) // PAGE_BYTES).tolist() == [1, ROW_PAGES, 3 * ROW_PAGES, 4 * ROW_PAGES]


def test_what_lies_beyond_its_pages_does_not_matter_and_what_they_are_does():
    codec, made = make_codec("raw", WIDE), images([1, 1, 2, 4])
    _, sums = codec.encode(made)
    found = made.copy()
    found[0, ROW_PAGES * PAGE_BYTES:] = 0xEE
    found[1, ROW_PAGES * PAGE_BYTES - 1] ^= 1
    payloads = [image.data for image in found]
    assert codec.decode(payloads, sums).tolist() == [True, False, True, True]
    np.testing.assert_array_equal(found[[0, 2, 3]], made[[0, 2, 3]])
    for pages in (1, 3, 8, 9, 0xFFFF):  # none is what was sealed
        assert not codec.decode(payloads[2:3], sums[2:3] & ~np.uint64(0xFFFF) | np.uint64(pages)).any()


def test_every_bit_comes_back_and_fewer_are_moved(driver):
    blocks, counts = prefill(driver)
    written = driver.branch.stats()
    np.testing.assert_array_equal(driver.read(), blocks)
    stats = driver.branch.stats()
    assert written.blocks_short == (counts[counts > 0] < 4).sum() > 0
    useful = counts.sum() * WIDE.row_bytes
    assert useful <= stats.bytes_read <= written.bytes_written <= (counts > 0).sum() * WIDE.extent_bytes


def test_one_block_is_read_alone_and_neighbours_with_what_lies_between(driver):
    blocks = np.abs(driver.full()) + 1
    counts = np.full(blocks.shape[:3], 1, np.int32)
    driver.branch.write_layer(0, blocks, counts)
    settle(driver.branch.path)
    stream = driver.branch._lineage.table.everything()[: WIDE.num_blocks]
    assert (np.diff(stream) == 1).all(), "neighbours"
    assert pages_read(driver, 2) == ROW_PAGES
    assert pages_read(driver, 2, 4) == 2 * ROW_PAGES
    assert pages_read(driver, 2, 3) == 4 * ROW_PAGES + ROW_PAGES


def test_a_block_takes_more_pages_as_it_fills(driver):
    """In place, from one row to four."""
    blocks = np.abs(driver.full()) + 1
    driver.branch.write_layer(0, blocks.copy(), np.full(blocks.shape[:3], 1, np.int32))
    blocks[..., 1:, :] = 0
    extent = driver.branch._lineage.table.extent(0)
    for row in range(1, 4):
        driver.append(0, row, 7.0 + row)
        driver.branch.flush()
        settle(driver.branch.path)
        blocks[:, :, 0, row] = 7.0 + row
        assert pages_read(driver, 0) == (row + 1) * ROW_PAGES
        np.testing.assert_array_equal(driver.read(), blocks)
    assert driver.branch._lineage.table.extent(0) == extent


def test_a_rewritten_block_takes_fewer(driver):
    """Writes as the half of a split that stays is written; what was there is not read, nor taken for rows."""
    blocks = driver.prefill()
    half = blocks[:, :, :1].copy()
    half[..., 2:, :] = 0
    half[..., :2, :] += 200
    assert driver.branch.put_blocks(0, 0, np.zeros((2, 2, 1), np.int32), half)
    driver.commit()
    driver.branch.flush()
    settle(driver.branch.path)
    assert pages_read(driver, 0) == 2 * ROW_PAGES
    blocks[:, :, :1] = half
    np.testing.assert_array_equal(driver.read(), blocks)
