"""Blocks of a saved file, memory-mapped."""

import dataclasses
import os

import numpy as np
import pytest

import kvjax
from kvjax.errors import ChecksumMismatch, FormatMismatch, NothingSaved, ShortRead, StoreClosed
from kvjax.store.flash.recovery import whole_saves
from kvjax.store.flash.store import FlashStore
from kvjax.store.format.pages import HEADER_BYTES
from kvjax.store.tools import mapped as mapping
from kvjax.store.tools.mapped import open_saved
from tests.store.conftest import GEOMETRY, WIDE, plant_runs


def saved(open_branch, path, geometry=GEOMETRY, **settings):
    """A saved file in which layer 0 is written, and its blocks [B, K, NB, C, width]."""
    driver = open_branch(FlashStore(file=path, **settings), geometry)
    blocks = driver.prefill()
    driver.branch.save()
    return driver, blocks


def layer(mapped, number=0):
    """All blocks of a layer `[B, K, NB, C, width]`."""
    _, *shape = mapped.extents.shape
    return np.stack([mapped.block(number, *at) for at in np.ndindex(*shape)]).reshape(
        *shape, mapped.codec.geometry.block_rows, -1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_blocks_are_what_was_saved(tmp_path, open_branch, dtype):
    _, blocks = saved(open_branch, tmp_path / "a.kv", dataclasses.replace(GEOMETRY, dtype=dtype))
    mapped = open_saved(tmp_path / "a.kv")
    np.testing.assert_array_equal(layer(mapped), blocks)
    assert not layer(mapped, 1).any() and (mapped.extents[1] == -1).all()


def test_blocks_lie_in_the_file_and_cannot_be_changed(tmp_path, open_branch):
    saved(open_branch, tmp_path / "a.kv")
    mapped = open_saved(tmp_path / "a.kv")
    with pytest.raises(IndexError, match="negative"):
        mapped.block(0, 0, 0, -1)
    block = mapped.block(0, 0, 0, 0)
    assert np.shares_memory(block, mapped._bytes)
    with pytest.raises(ValueError, match="read-only"):
        block[:] = 0


def test_blocks_in_runs_are_decoded(tmp_path, open_branch):
    _, blocks = saved(open_branch, tmp_path / "a.kv", WIDE, codec="rle")
    mapped = open_saved(tmp_path / "a.kv")
    assert (mapped.codec.sizes(mapped.sums[0].reshape(-1)) < WIDE.extent_bytes).any()
    np.testing.assert_array_equal(layer(mapped), blocks)
    assert (blocks == plant_runs(blocks.copy())).all()


def test_copies_cannot_be_changed_either(tmp_path, open_branch):
    saved(open_branch, tmp_path / "a.kv", WIDE, codec="rle")
    mapped = open_saved(tmp_path / "a.kv")
    sums = mapped.sums[0]
    short = np.argwhere(mapped.codec.sizes(sums.reshape(-1)).reshape(sums.shape) < WIDE.extent_bytes)
    with pytest.raises(ValueError, match="read-only"):
        mapped.block(0, *short[0].tolist())[:] = 0


def test_a_file_beyond_two_gigabytes_that_is_cut_is_refused(tmp_path, open_branch, monkeypatch):
    saved(open_branch, tmp_path / "a.kv")

    def far(file, codec):
        found = whole_saves(file, codec)[0]
        ids, extents, sums = found.blocks
        vars(found)["blocks"] = ids, np.full_like(extents, 1 << 21), sums
        return [found]

    monkeypatch.setattr(mapping, "whole_saves", far)
    with pytest.raises(ShortRead, match="restore a whole copy"):
        open_saved(tmp_path / "a.kv")


def test_a_save_stays_as_it_is_while_the_cache_goes_on(tmp_path, open_branch):
    driver, blocks = saved(open_branch, tmp_path / "a.kv")
    mapped = open_saved(tmp_path / "a.kv")
    driver.append(2, 0, 1.0)
    driver.branch.save()
    np.testing.assert_array_equal(layer(mapped), blocks)
    assert open_saved(tmp_path / "a.kv").sequence == mapped.sequence + 1
    assert not np.array_equal(layer(open_saved(tmp_path / "a.kv")), blocks)


def test_what_is_damaged_is_named(tmp_path, open_branch):
    saved(open_branch, tmp_path / "a.kv")
    mapped = open_saved(tmp_path / "a.kv")
    offset = HEADER_BYTES + int(mapped.extents[0, 1, 0, 2]) * GEOMETRY.extent_bytes
    with open(tmp_path / "a.kv", "r+b") as file:
        file.seek(offset + 3)
        file.write(b"\xff")
    with pytest.raises(ChecksumMismatch, match=f"sequence 1, head 0, block 2 at offset {offset}"):
        mapped.block(0, 1, 0, 2)
    mapped.block(0, 1, 0, 1)


def test_other_files_are_refused(tmp_path, open_branch):
    with pytest.raises(StoreClosed, match="does not exist"):
        open_saved(tmp_path / "none.kv")
    (tmp_path / "text").write_text("no store" * 1000)
    with pytest.raises(FormatMismatch, match="not a kvjax store"):
        open_saved(tmp_path / "text")
    open_branch(FlashStore(file=tmp_path / "new.kv")).prefill()
    with pytest.raises(NothingSaved):
        open_saved(tmp_path / "new.kv")


def test_a_file_that_is_cut_is_refused_before_it_is_mapped(tmp_path, open_branch, monkeypatch):
    """Here after its log was read, which usually lies behind the blocks and is what is cut."""
    saved(open_branch, tmp_path / "a.kv")

    def cut(file, codec):
        found = whole_saves(file, codec)
        os.truncate(file.path, found[0].end(codec) - 1)
        return found

    monkeypatch.setattr(mapping, "whole_saves", cut)
    with pytest.raises(ShortRead, match="save 1 needs"):
        open_saved(tmp_path / "a.kv")


def test_the_cache_of_a_model_can_be_looked_at(tmp_path, params, tokens):
    from tiny import CONFIG

    llm = kvjax.LLM(CONFIG, params)
    cache = llm.prefill(tokens[0, :40].tolist(), method=kvjax.Quest(budget=24, sinks=2, window=4, page=4),
                        store=FlashStore(file=tmp_path / "blocks.kv"), capacity=64)
    cache.save(tmp_path)
    reading = llm.read(tokens[0, :40].tolist())
    mapped = open_saved(tmp_path / "blocks.kv")
    key, value = np.split(mapped.block(layer=1, sequence=0, head=1, block=3), 2, axis=-1)
    at = 2 + 3 * 4
    np.testing.assert_array_equal(key, reading.layers[1].key[0, at : at + 4, 1])
    np.testing.assert_array_equal(value, reading.layers[1].value[0, at : at + 4, 1])
    cache.close()
