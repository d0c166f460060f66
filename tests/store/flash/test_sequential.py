"""The layout in token order: what lies where in the logs, what is read, what a split writes."""

import numpy as np
import pytest

from kvjax.errors import ChecksumMismatch, ConfigError
from kvjax.store.flash.sequential import log_geometry
from kvjax.store.flash.store import FlashStore
from kvjax.store.format.pages import HEADER_BYTES
from kvjax.store.geometry import Geometry
from kvjax.store.prompt import Prompt

# Rows of 512 bytes: 8 tokens to a page of a log.
GEOMETRY = Geometry(layers=1, batch=1, kv_heads=2, num_blocks=6, block_rows=8, width=128, dtype="float32")


@pytest.fixture
def driver(tmp_path, open_branch):
    return open_branch(FlashStore(file=tmp_path / "cache.kv", layout="sequential", threads=2), GEOMETRY)


def prefill_striped(driver) -> np.ndarray:
    """Token t goes to row t // 4 of block t % 4; returns blocks."""
    assert driver.branch.engine in ("aio", "threads")
    blocks = driver.full()
    counts = np.broadcast_to(np.array([8, 8, 8, 8, 0, 0], np.int32), (1, 2, 6))
    pos = np.broadcast_to(np.arange(8)[None] * 4 + np.arange(6)[:, None], (1, 2, 6, 8)).astype(np.int32)
    driver.branch.write_layer(0, blocks, counts, Prompt(pos))
    blocks[:, :, 4:] = 0
    return blocks


def read(driver, wanted: list[int]) -> np.ndarray:
    block = np.broadcast_to(np.array(wanted, np.int32), (1, 2, len(wanted)))
    slots = np.full((1, 2, len(wanted), 8, 128), 7, np.float32)
    order = np.broadcast_to(np.arange(len(wanted), dtype=np.int32), block.shape)
    assert driver.branch.read_into(0, driver.branch.generation, block, order, slots), driver.branch.take_error()
    return slots


def put_blocks(driver, block: list[int], rows: np.ndarray) -> None:
    index = np.broadcast_to(np.array(block, np.int32), (1, 2, len(block)))
    assert driver.branch.put_blocks(0, driver.branch.generation, index, rows), driver.branch.take_error()
    driver.commit()


def test_the_logs_have_room_for_every_row():
    logs = log_geometry(GEOMETRY)
    assert (logs.num_blocks, logs.block_rows) == (6, 8)
    wide = log_geometry(Geometry(1, 1, 1, 3, 5, 2048, "float32"))
    assert (wide.num_blocks, wide.block_rows) == (15, 1)
    assert "tokens of log page 5" in logs.describe(11)


def test_tokens_count_as_put(driver):
    prefill_striped(driver)
    before = driver.branch.stats().bytes_put
    assert before == 2 * 32 * GEOMETRY.row_bytes
    driver.append(4, 0, 1.0)
    assert driver.branch.stats().bytes_put - before == 2 * GEOMETRY.row_bytes


def test_files_are_not_opened(tmp_path):
    with pytest.raises(ConfigError, match="sequential"):
        FlashStore(file=tmp_path / "cache.kv", layout="sequential").open()


def test_tokens_lie_in_the_file_in_their_order(driver, tmp_path):
    blocks = prefill_striped(driver)
    for head in range(2):
        log = np.fromfile(tmp_path / "cache.kv", np.float32, 32 * 128, offset=HEADER_BYTES + 4096 * 6 * head)
        tokens = blocks[0, head, :4].swapaxes(0, 1).reshape(32, 128)
        np.testing.assert_array_equal(log.reshape(32, 128), tokens)


def test_a_scattered_block_is_read_from_every_page_that_has_a_row_of_it(driver):
    blocks = prefill_striped(driver)
    np.testing.assert_array_equal(read(driver, [2]), blocks[:, :, 2:3])
    stats = driver.branch.stats()
    assert stats.bytes_read == 2 * 4 * 4096, "all four pages of either head, for an eighth of their rows"
    assert stats.blocks_read == 2


def test_a_split_moves_no_row(driver):
    blocks = prefill_striped(driver)
    written = driver.branch.stats()
    halves = np.zeros((1, 2, 2, 8, 128), np.float32)
    halves[:, :, 0, :5], halves[:, :, 1, :3] = blocks[:, :, 1, ::2][:, :, [0, 1, 2, 3, 3]], blocks[:, :, 1, 1:7:2]
    put_blocks(driver, [1, 4], halves)
    driver.branch.flush()
    np.testing.assert_array_equal(read(driver, [1, 4]), halves)
    assert driver.branch.stats().bytes_written == written.bytes_written
    halves[:, :, 1, 3] = 42.0
    put_blocks(driver, [1, 4], halves)
    driver.branch.flush()
    np.testing.assert_array_equal(read(driver, [1, 4]), halves)
    assert driver.branch.stats().rows_written == 2, "the one new row of each head"


def test_a_row_of_the_same_token_is_known_to_be_there(driver):
    """A step may append a row to a block and split the block at once."""
    blocks = prefill_striped(driver)
    index = np.zeros((1, 2), np.int32)
    assert driver.branch.put_rows(0, 0, index + 4, index, driver.row(5.0))
    halves = np.zeros((1, 2, 2, 8, 128), np.float32)
    halves[:, :, 0, 0], halves[:, :, 1, 0] = 5.0, blocks[:, :, 0, 3]
    put_blocks(driver, [4, 0], halves)
    driver.branch.flush()
    np.testing.assert_array_equal(read(driver, [4, 0]), halves)
    assert driver.branch.stats().rows_written == 2


def test_a_full_log_takes_the_places_of_rows_that_are_gone(driver):
    prefill_striped(driver)
    last = np.zeros((1, 2, 6, 8, 128), np.float32)
    for turn in range(40):
        fresh = np.random.default_rng(turn).normal(size=(1, 2, 2, 8, 128)).astype(np.float32)
        at = [turn % 6, (turn * 5 + 1) % 6]
        fresh[:, :, 0, :4] = last[:, :, at[0], 4:]  # half of the rows are there already
        put_blocks(driver, at, fresh)
        for block, rows in zip(at, fresh.swapaxes(0, 2), strict=True):
            last[:, :, block] = rows.swapaxes(0, 1)
        if turn >= 6:
            np.testing.assert_array_equal(read(driver, list(range(6))), last)


def test_a_failed_commit_changes_nothing_and_can_be_repeated(driver):
    blocks = prefill_striped(driver)
    pages = driver.branch._pages

    def refuse(records):
        raise OSError("the device is gone")

    publish, pages._publish = pages._publish, refuse
    changed = driver.full(seed=3)[:, :, :2]
    index = np.broadcast_to(np.array([0, 1], np.int32), (1, 2, 2))
    assert driver.branch.put_blocks(0, 0, index, changed)
    with pytest.raises(OSError, match="gone"):
        driver.commit()
    np.testing.assert_array_equal(read(driver, [0, 1]), blocks[:, :, :2])
    pages._publish = publish
    driver.commit()
    np.testing.assert_array_equal(read(driver, [0, 1]), changed)


def test_damage_is_noticed_and_named(driver, tmp_path):
    prefill_striped(driver)
    with open(tmp_path / "cache.kv", "r+b") as file:
        file.seek(HEADER_BYTES + 4096 * 7 + 100)
        file.write(b"damage")
    block = np.zeros((1, 2, 1), np.int32)
    assert not driver.branch.read_into(0, 0, block, block, np.zeros((1, 2, 1, 8, 128), np.float32))
    error = driver.branch.take_error()
    assert isinstance(error, ChecksumMismatch) and "head 1, tokens of log page 1" in str(error)
