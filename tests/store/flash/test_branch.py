"""What every store promises, run on all of them."""

import dataclasses
import threading
import time
import types

import numpy as np
import pytest

from kvjax.errors import FormatMismatch, ReadFailed, StaleCache, StoreClosed
from kvjax.store import interface, transaction
from kvjax.store.geometry import DTYPES
from kvjax.store.host import HostBranch
from tests.store.conftest import GEOMETRY, Driver


def test_unwritten_blocks_are_zero(driver):
    assert not driver.read().any()


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_prefill_comes_back(store, open_branch, dtype):
    driver = open_branch(store, dataclasses.replace(GEOMETRY, dtype=dtype))
    blocks = driver.prefill(layer=1)
    np.testing.assert_array_equal(driver.read(layer=1), blocks)
    assert not driver.read(layer=0).any()


def test_rows_beyond_the_count_are_zero(driver):
    blocks = driver.full()
    counts = np.random.default_rng(1).integers(0, 5, blocks.shape[:3]).astype(np.int32)
    before = blocks.copy()
    driver.branch.write_layer(0, blocks, counts)
    valid = np.arange(4) < counts[..., None]
    np.testing.assert_array_equal(driver.read(), np.where(valid[..., None], blocks, 0))
    np.testing.assert_array_equal(blocks, before)


def test_second_prefill_starts_clean(driver):
    driver.prefill(seed=0)
    driver.append(1, 2, 5.0)
    blocks = driver.full(seed=1)
    counts = np.zeros(blocks.shape[:3], np.int32)
    counts[:, :, 3] = 4
    driver.branch.write_layer(0, blocks, counts)
    found = driver.read()
    np.testing.assert_array_equal(found[:, :, 3], blocks[:, :, 3])
    assert not np.delete(found, 3, axis=2).any()


def test_only_asked_slots_change(driver):
    blocks = driver.prefill()
    block = np.array([[[2, 6], [6, 6]], [[-1, 0], [99, 5]]], np.int32)
    slot = np.array([[[1, 0], [0, 0]], [[0, 0], [0, 2]]], np.int32)
    slots = np.full((2, 2, 3, 4, 6), 7, np.float32)
    assert driver.branch.read_into(0, 0, block, slot, slots)
    expected = np.full_like(slots, 7)
    expected[0, 0, 1], expected[1, 0, 0], expected[1, 1, 2] = blocks[0, 0, 2], blocks[1, 0, 0], blocks[1, 1, 5]
    np.testing.assert_array_equal(slots, expected)


def test_one_block_may_be_read_to_two_slots(driver):
    blocks = driver.prefill()
    block, slot = np.full((2, 2, 2), 3, np.int32), np.tile(np.arange(2, dtype=np.int32), (2, 2, 1))
    slots = np.zeros((2, 2, 2, 4, 6), np.float32)
    assert driver.branch.read_into(0, 0, block, slot, slots)
    np.testing.assert_array_equal(slots, np.stack([blocks[:, :, 3]] * 2, axis=2))


def test_rows_are_seen_from_the_commit_on(driver):
    blocks = driver.prefill()
    assert driver.put_row(2, 1, 5.0)
    np.testing.assert_array_equal(driver.read(), blocks)
    driver.commit()
    blocks[:, :, 2, 1] = 5.0
    assert driver.branch.generation == 1
    np.testing.assert_array_equal(driver.read(), blocks)
    driver.branch.flush()
    np.testing.assert_array_equal(driver.read(), blocks)


def test_rows_of_a_new_block_stand_on_zeros(driver):
    driver.append(4, 0, 1.0)
    driver.append(4, 2, 2.0)
    for _ in range(2):
        found = driver.read()
        assert (found[:, :, 4, 0] == 1).all() and (found[:, :, 4, 2] == 2).all()
        assert np.count_nonzero(found) == 2 * driver.row(1).size
        driver.branch.flush()


def test_sentinels_put_nothing(driver):
    branch, rows = driver.branch, driver.row(9.0)
    block = np.array([[1, 6], [-1, 1]], np.int32)
    row = np.array([[4, 0], [0, -1]], np.int32)
    assert branch.put_rows(0, 0, block, row, rows)
    assert branch.put_blocks(0, 0, np.full((2, 2, 3), 6, np.int32), np.ones((2, 2, 3, 4, 6), np.float32))
    driver.commit()
    assert not driver.read().any()


def test_order_within_a_transaction_holds(driver):
    driver.prefill()
    assert driver.put_row(3, 0, 1.0)
    blocks = driver.full(seed=2)[:, :, :2]
    assert driver.branch.put_blocks(0, 0, np.tile(np.array([3, 6], np.int32), (2, 2, 1)), blocks)
    assert driver.put_row(3, 1, 2.0)
    driver.commit()
    expected = blocks[:, :, 0].copy()
    expected[:, :, 1] = 2.0
    np.testing.assert_array_equal(driver.read()[:, :, 3], expected)


def test_a_failure_is_what_was_kept_and_ctrl_c_as_itself(driver):
    with pytest.raises(ReadFailed, match="layer 0 could not be read, and the store kept no reason"):
        raise driver.branch.failure("layer 0")
    driver.branch.keep(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        raise driver.branch.failure("layer 0")


@pytest.mark.skipif(transaction.native is None, reason="kvjax was installed without its compiled part")
def test_layers_that_are_written_at_once_are_all_there(driver, monkeypatch):
    """Given threads that may be interrupted right after rows were taken, as XLA's may be."""
    taken = transaction.native.put_rows

    def slow(*args):
        count = taken(*args)
        time.sleep(0.05)
        return count

    monkeypatch.setattr(transaction, "native", types.SimpleNamespace(put_rows=slow))
    threads = [threading.Thread(target=driver.put_row, args=(1, 0, 1.0 + layer), kwargs={"layer": layer})
               for layer in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    driver.commit()
    for layer in range(2):
        assert (driver.read(layer)[:, :, 1, 0] == 1.0 + layer).all()


def test_arguments_are_copied(driver):
    rows, block = driver.row(3.0), np.zeros((2, 2), np.int32)
    assert driver.branch.put_rows(0, 0, block, block, rows)
    rows[:], block[:] = 0, 5
    driver.commit()
    assert (driver.read()[:, :, 0, 0] == 3.0).all()


def test_abort_drops_and_the_retry_is_as_if_nothing_was(driver):
    driver.prefill()
    assert driver.put_row(2, 1, 5.0)
    driver.branch.abort(0)
    driver.append(2, 2, 6.0)
    expected = driver.full()
    expected[:, :, 2, 2] = 6.0
    np.testing.assert_array_equal(driver.read(), expected)


def test_abort_of_a_past_generation_leaves_the_present(driver):
    driver.append(0, 0, 1.0)
    assert driver.put_row(0, 1, 2.0)
    driver.branch.abort(0)
    driver.commit()
    assert (driver.read()[:, :, 0, 1] == 2.0).all()


def test_blocks_come_in_while_no_layer_looks_at_what_is_open(driver):
    """Given two layers that write at once, as XLA may have them do: rows are piled on what was looked at."""
    driver.prefill()
    branch, block = driver.branch, np.full((2, 2, 1), 3, np.int32)
    rows = driver.full()[:, :, 3:4]
    writer = threading.Thread(target=lambda: branch.put_blocks(0, 0, block, rows))
    with branch._piling:
        writer.start()
        writer.join(0.05)
        assert writer.is_alive() and not branch._open
    writer.join(10)
    assert len(branch._open) == 1
    branch.abort(0)


@pytest.mark.parametrize("call", ["read_into", "put_rows", "put_blocks"])
def test_stale_generation_is_saved_and_harmless(driver, call):
    driver.append(0, 0, 1.0)
    before = driver.read()
    index, rows = np.zeros((2, 2), np.int32), driver.row(4.0)
    if call == "read_into":
        ok, slots = driver.try_read(generation=0)
        assert (slots == 77).all()
    elif call == "put_rows":
        ok = driver.branch.put_rows(0, 0, index, index, rows)
    else:
        ok = driver.branch.put_blocks(0, 0, index[..., None], np.ones((2, 2, 1, 4, 6), np.float32))
    assert not ok
    assert not driver.put_row(1, 1, 1.0), "an error nobody took keeps failing"
    assert isinstance(driver.branch.take_error(), StaleCache)
    assert driver.branch.take_error() is None
    driver.commit()
    np.testing.assert_array_equal(driver.read(), before)


def test_stale_commit_raises_and_commits_nothing(driver):
    assert driver.put_row(0, 0, 1.0)
    with pytest.raises(StaleCache, match="generation 3"):
        driver.branch.commit(3)
    assert not driver.read().any()
    driver.commit()
    assert driver.read().any()


def test_ctrl_c_amid_a_commit_leaves_a_whole_token_and_no_old_generation(driver, monkeypatch):
    """Given an interrupt after the first of two records of a token, over a row that was committed before."""
    driver.prefill()
    driver.append(1, 0, 7.0)
    records = []

    class Interrupted(list):
        def __iter__(self):
            for record in super().__iter__():
                if len(records) == 1:
                    records.append(None)
                    raise KeyboardInterrupt
                records.append(record)
                yield record

    whole = np.full((2, 2, 1, 4, 6), 6.0, np.float32)
    assert driver.put_row(1, 1, 5.0) and driver.branch.put_blocks(0, 1, np.full((2, 2, 1), 2, np.int32), whole)
    publish = driver.branch._publish
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(driver.branch, "_publish", lambda prepared: publish(Interrupted(prepared)))
        driver.commit()
    driver.branch.abort(1)
    assert not driver.try_read(generation=1)[0] and isinstance(driver.branch.take_error(), StaleCache)
    expected = driver.full()
    expected[:, :, 1, 0], expected[:, :, 1, 1], expected[:, :, 2] = 7.0, 5.0, 6.0
    for _ in range(2):
        np.testing.assert_array_equal(driver.read(), expected)
        driver.branch.flush()


def test_commit_raises_an_error_nobody_took_then_works(driver):
    assert driver.put_row(0, 0, 1.0)
    assert not driver.try_read(generation=8)[0]
    with pytest.raises(StaleCache):
        driver.commit()
    assert driver.branch.generation == 0
    driver.commit()
    assert (driver.read()[:, :, 0, 0] == 1.0).all()


def _bad_calls(branch):
    block, rows = np.zeros((2, 2, 1), np.int32), np.zeros((2, 2, 6), np.float32)
    slots, index = np.zeros((2, 2, 3, 4, 6), np.float32), block[..., 0]
    return {
        "layer": lambda: branch.read_into(2, 0, block, block, slots),
        "slot": lambda: branch.read_into(0, 0, block, block + 3, slots),
        "negative slot": lambda: branch.read_into(0, 0, block, block - 1, slots),
        "slot shape": lambda: branch.read_into(0, 0, block, index, slots),
        "batch": lambda: branch.read_into(0, 0, block[:1], block[:1], slots),
        "dtype": lambda: branch.read_into(0, 0, block, block, slots.astype(np.float16)),
        "strided": lambda: branch.read_into(0, 0, block, block, slots[:, :, ::-1]),
        "read-only": lambda: branch.read_into(0, 0, block, block, np.broadcast_to(slots[:1], slots.shape)),
        "row width": lambda: branch.put_rows(0, 0, index, index, rows[..., :5]),
        "row dtype": lambda: branch.put_rows(0, 0, index, index, rows.astype(np.int8)),
        "block rows": lambda: branch.put_blocks(0, 0, block, rows[:, :, None]),
        "nonsense": lambda: branch.put_rows(None, 0, "block", index, rows),
    }


@pytest.mark.parametrize("fault", list(_bad_calls(None)))
def test_malformed_calls_never_raise(driver, fault):
    driver.prefill()
    assert not _bad_calls(driver.branch)[fault]()
    error = driver.branch.take_error()
    assert isinstance(error, interface.StoreError if fault == "nonsense" else FormatMismatch)
    assert error.__traceback__ is None, "a traceback would keep XLA's buffers"
    driver.commit()
    np.testing.assert_array_equal(driver.read(), driver.full())


def test_frames_of_all_that_led_to_an_error_are_forgotten():
    """Given one with a cause and another context, and one that is among its own causes."""
    def raised(cause):
        try:
            try:
                raise KeyError("context")
            except KeyError:
                raise ValueError("raised again") from cause
        except ValueError as error:
            return error

    first = raised(raised(None))
    first.__cause__.__cause__ = first
    transaction.forget_frames(first)
    for error in (first, first.__cause__, first.__context__, first.__cause__.__context__):
        assert error.__traceback__ is None


def test_forks_are_independent(driver):
    blocks = driver.prefill()
    driver.append(0, 0, 1.0)
    assert driver.put_row(0, 1, 9.0), "uncommitted: stays behind"
    child = Driver(driver.branch.fork())
    driver.branch.abort(1)
    assert child.branch.generation == 1 and child.branch.handle != driver.branch.handle
    child.append(0, 1, 2.0)
    driver.append(5, 3, 3.0)
    grandchild = Driver(child.branch.fork())
    grandchild.append(0, 1, 4.0)
    blocks[:, :, 0, 0] = 1.0
    for expected, line in ((2.0, child), (4.0, grandchild)):
        mine = blocks.copy()
        mine[:, :, 0, 1] = expected
        np.testing.assert_array_equal(line.read(), mine)
    driver.branch.flush()
    blocks[:, :, 5, 3] = 3.0
    np.testing.assert_array_equal(driver.read(), blocks)
    child.branch.close()
    grandchild.prefill(seed=4)
    np.testing.assert_array_equal(driver.read(), blocks)
    grandchild.branch.close()


def test_a_fork_outlives_its_parent(driver):
    blocks = driver.prefill()
    child = Driver(driver.branch.fork())
    driver.branch.close()
    np.testing.assert_array_equal(child.read(), blocks)
    child.append(0, 0, 1.0)
    child.branch.close()


def test_closed_branch_says_so(driver):
    driver.prefill()
    driver.branch.close()
    driver.branch.close()
    assert not driver.try_read()[0]
    assert isinstance(driver.branch.take_error(), StoreClosed)
    for call in (driver.commit, driver.branch.flush, driver.branch.fork, driver.prefill):
        with pytest.raises(StoreClosed):
            call()


def test_memory_beside_the_blocks_is_told(driver):
    """Tables of every block from the start, and after a read what it landed in: with a map the page cache, which is the
    system's. Of a store in memory nothing."""
    branch, geometry = driver.branch, driver.geometry
    if isinstance(branch, HostBranch):
        assert branch.held_bytes == 0
        return
    driver.prefill()
    branch.settle()
    before = branch.held_bytes
    assert before >= (4 + 1) * geometry.total_blocks  # an extent and a mark of what waits
    driver.read()
    if branch.engine == "mmap":
        assert branch.held_bytes == before
        return
    if geometry.block_bytes >= 4096:  # else the sequential layout reads as many pages as there are rows
        assert branch.held_bytes >= before + geometry.streams * geometry.num_blocks * geometry.block_bytes
    assert branch.held_bytes > before
    read = branch.held_bytes
    assert driver.put_row(0, 1, 5.0)
    branch.commit(branch.generation)
    branch.settle()
    assert branch.held_bytes <= read + 3 * geometry.extent_bytes * geometry.streams


def test_registry_knows_live_branches_only(store):
    branch = store.create(GEOMETRY, "fingerprint")
    handle = branch.handle
    assert interface.lookup(np.int32(handle)) is branch
    branch.close()
    del branch
    assert interface.lookup(handle) is None


def test_registry_forgets_a_branch_that_failed(store):
    branch = store.create(GEOMETRY, "fingerprint")
    handle = branch.handle
    index = np.zeros((2, 2, 1), np.int32)
    assert not branch.read_into(9, 0, index, index, np.zeros((2, 2, 1, 4, 6), np.float32))
    del branch
    assert interface.lookup(handle) is None, "a saved error must not keep its branch alive"


def test_bad_prefill_raises_and_changes_nothing(driver):
    blocks = driver.prefill()
    counts = np.full(blocks.shape[:3], 4, np.int32)
    for bad in (blocks[:1], blocks.astype(np.float16), blocks[..., :5]):
        with pytest.raises(FormatMismatch):
            driver.branch.write_layer(0, bad, counts)
    with pytest.raises(FormatMismatch):
        driver.branch.write_layer(2, blocks, counts)
    with pytest.raises(FormatMismatch):
        driver.branch.write_layer(0, blocks, counts[:, :1])
    np.testing.assert_array_equal(driver.read(), blocks)


def test_stats_count_what_moved(driver):
    driver.prefill()
    driver.read()
    driver.append(0, 0, 1.0)
    driver.branch.flush()
    stats = driver.branch.stats()
    assert stats.blocks_read == 24 and stats.bytes_read >= 24 * GEOMETRY.block_bytes
    assert 1 <= stats.reads <= 24
    assert stats.rows_written == 4 and stats.blocks_written >= 24
    assert stats.bytes_written >= 24 * GEOMETRY.block_bytes and stats.read_seconds > 0
