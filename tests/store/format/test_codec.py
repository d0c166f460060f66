"""The codec of a store: what is coded, what is read, what is refused, and that every bit comes back."""

import contextlib
import dataclasses
import errno
import os
import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.errors import ChecksumMismatch, ConfigError, FormatMismatch, NoSpace, ShortRead
from kvjax.store.flash.store import FlashStore
from kvjax.store.format.codec import make_codec
from kvjax.store.format.pages import HEADER_BYTES
from kvjax.store.geometry import PAGE_BYTES, Geometry
from kvjax.store.tools import inspect
from tests.store.conftest import GEOMETRY, WIDE, Driver, inspect_header, plant_runs, settle, still_works
from tests.store.faults import FaultySystem
from tests.store.flash.test_history import History

EXTENT = WIDE.extent_bytes
SOME = {  # each with three pages or more, and the last one with padding
    "float32": Geometry(1, 1, 1, 4, 16, 256, "float32"), "bfloat16": Geometry(1, 1, 1, 4, 24, 256, "bfloat16"),
    "float16": Geometry(1, 1, 1, 4, 33, 202, "float16"), "int8": Geometry(1, 1, 1, 4, 100, 136, "int8"),
}


# ---- the codec alone

def images(geometry: Geometry, seed: int, count: int = 5) -> np.ndarray:
    """uint8[count, extent_bytes] blocks of any bits, in each of which some number of rows share keys."""
    rng = np.random.default_rng(seed)
    made = np.zeros((count, geometry.extent_bytes), np.uint8)
    rows = made[:, :geometry.block_bytes].reshape(count, geometry.block_rows, geometry.row_bytes)
    rows[:] = rng.integers(0, 256, rows.shape)
    for block in rows:
        run = np.sort(rng.integers(0, rng.integers(1, geometry.block_rows + 1), geometry.block_rows))
        block[:, :geometry.row_bytes // 2] = block[run, :geometry.row_bytes // 2]
    return made


def landed(coded: np.ndarray, sizes: np.ndarray, geometry: Geometry) -> tuple[np.ndarray, list[memoryview]]:
    """Memory in which only what was written came back, and its payloads."""
    memory = np.full_like(coded, 0xEE)
    for place, image, size in zip(memory, coded, sizes, strict=True):
        place[:size] = image[:size]
    return memory, [place.data[:geometry.block_bytes] for place in memory]


@pytest.mark.parametrize("name", ["raw", "rle"])
@pytest.mark.parametrize("dtype", SOME)
@settings(max_examples=40)
@given(seed=st.integers(0, 2**32 - 1))
def test_every_bit_comes_back_and_a_flipped_one_is_noticed(name, dtype, seed):
    geometry = SOME[dtype]
    codec, made = make_codec(name, geometry), images(geometry, seed)
    before = made.copy()
    coded, sums = codec.encode(made)
    np.testing.assert_array_equal(made, before)
    sizes = codec.sizes(sums)
    assert (sizes % PAGE_BYTES == 0).all() and (sizes <= geometry.extent_bytes).all()
    memory, payloads = landed(coded, sizes, geometry)
    assert codec.decode(payloads, sums).all()
    np.testing.assert_array_equal(memory[:, :geometry.block_bytes], made[:, :geometry.block_bytes])
    rng = np.random.default_rng(seed)
    memory, payloads = landed(coded, sizes, geometry)
    at = int(rng.integers(min(sizes[2], geometry.block_bytes)))
    memory[2, at] ^= 1 << int(rng.integers(8))
    assert codec.decode(payloads, sums).tolist() == [True, True, False, True, True]


def test_only_blocks_that_save_pages_are_coded():
    codec, geometry = make_codec("rle", SOME["float32"]), SOME["float32"]  # 4 pages, keys of 512 bytes
    made = images(geometry, 0, 17)
    rows = made[:, :geometry.block_bytes].reshape(17, 16, geometry.row_bytes)
    for runs, block in enumerate(rows[1:], 1):  # block i has i runs
        keys = np.random.default_rng(runs).integers(0, 256, (16, 512), np.uint8)
        block[:, :512] = keys[np.minimum(range(16), runs - 1)]
    sizes = codec.sizes(codec.encode(made)[1])[1:] // PAGE_BYTES
    assert sizes.tolist() == [3] * 7 + [4] * 9, "eight keys would fit but for the two bytes that say where runs begin"
    one_page = make_codec("rle", GEOMETRY)
    assert one_page.sizes(one_page.encode(np.zeros((2, 4096), np.uint8))[1]).tolist() == [4096] * 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), tolerance=st.sampled_from([0.05, 0.2]))
def test_keys_within_the_tolerance_values_exact(dtype, seed, tolerance):
    """And what was decoded once is coded to the same bytes again: errors do not add up."""
    geometry, rng = SOME[dtype], np.random.default_rng(seed)
    made = np.zeros((3, geometry.extent_bytes), np.uint8)
    rows = made[:, :geometry.block_bytes].view(geometry.numpy_dtype).reshape(3, geometry.block_rows, geometry.width)
    rows[:] = rng.normal(size=rows.shape)
    half = geometry.width // 2
    rows[:, 1:, :half] = rows[:, :1, :half] + rng.uniform(-0.15, 0.15, rows[:, 1:, :half].shape).astype(rows.dtype)
    codec = make_codec("rle", geometry, tolerance)
    coded, sums = codec.encode(made)
    memory, payloads = landed(coded, codec.sizes(sums), geometry)
    assert codec.decode(payloads, sums).all()
    found = memory[:, :geometry.block_bytes].view(geometry.numpy_dtype).reshape(rows.shape)
    np.testing.assert_array_equal(found[..., half:], rows[..., half:])
    off = np.abs(found[..., :half].astype(np.float32) - rows[..., :half].astype(np.float32))
    assert off.max() <= np.float32(tolerance)
    assert (codec.sizes(sums) < geometry.extent_bytes).all() == (off.max() > 0) == (tolerance == 0.2)
    memory[:, geometry.block_bytes:] = 0
    np.testing.assert_array_equal(codec.encode(memory)[1], sums)


# ---- through a store

@pytest.fixture(params=["buffered", "direct", "eager"])
def coded(request, tmp_path, open_branch) -> Driver:
    """A branch in a named file, in whose blocks some runs are planted."""
    direct, staging = request.param != "buffered", 0 if request.param == "eager" else 64 << 20
    return open_branch(FlashStore(file=tmp_path / "cache.kv", codec="rle", direct=direct, staging_bytes=staging), WIDE)


def pages_of(driver: Driver, layer: int = 0) -> np.ndarray:
    """int[B, K, NB] pages that each block of a layer takes in the file."""
    volume, extents = driver.branch._volume, driver.branch._lineage.table.everything().reshape(2, -1)[layer]
    return volume.codec.sizes(volume.extents.checksums[extents]).reshape(2, 2, 6) // PAGE_BYTES


def test_runs_are_read_and_written_in_fewer_bytes(coded, tmp_path, open_branch):
    blocks = coded.prefill()
    runs = 1 + (blocks[..., 1:, :1024] != blocks[..., :-1, :1024]).any(-1).sum(-1)
    expected = np.minimum(8, 4 + runs + 1)  # values take four pages, each run one, and four bits one more
    assert set(expected.flat) == {6, 7, 8}
    np.testing.assert_array_equal(pages_of(coded), expected)
    np.testing.assert_array_equal(coded.read(), blocks)
    stats = coded.branch.stats()
    assert stats.bytes_read == stats.bytes_written == expected.sum() * PAGE_BYTES < 24 * EXTENT
    assert stats.blocks_short == (expected < 8).sum() and stats.blocks_written == stats.blocks_read == 24
    assert coded.branch.engine == "threads"
    plain = open_branch(FlashStore(directory=tmp_path), WIDE)
    plain.prefill()
    plain.read()
    assert plain.branch.stats().bytes_read == 24 * EXTENT and plain.branch.stats().blocks_short == 0


def test_blocks_without_runs_are_as_they_were(coded, tmp_path, open_branch):
    plain = open_branch(FlashStore(file=tmp_path / "raw.kv"), WIDE)
    blocks = np.random.default_rng(0).normal(size=(2, 2, 6, 4, 2048)).astype(np.float32)
    for driver in (coded, plain):
        driver.branch.write_layer(0, blocks.copy(), np.full((2, 2, 6), 4, np.int32))
        np.testing.assert_array_equal(driver.read(), blocks)
    assert coded.branch.stats().blocks_short == 0
    ours, raw = (pathlib.Path(one.branch.path).read_bytes()[HEADER_BYTES:] for one in (coded, plain))
    assert ours == raw


def test_a_block_grows_and_shrinks_where_it_is(coded):
    """Rows that break a run, and make it again; staged ones lie over coded ones, and so do those of a fork."""
    expected = coded.prefill()
    expected[:, :, 2] = plant_runs(np.full_like(expected[:, :, 2], 9.0))
    index = np.full((2, 2, 1), 2, np.int32)
    assert coded.branch.put_blocks(0, 0, index, expected[:, :, 2:3].copy())
    coded.commit()
    size = None
    for row, value, pages in ((1, 5.0, 8), (1, 9.0, 6), (3, 5.0, 7), (2, 5.0, 7), (3, 9.0, 8)):
        coded.append(2, row, value)
        expected[:, :, 2, row] = value
        np.testing.assert_array_equal(coded.read(), expected)
        coded.branch.flush()
        np.testing.assert_array_equal(coded.read(), expected)
        assert (pages_of(coded)[:, :, 2] == pages).all()
        size, before = os.path.getsize(coded.branch.path), size
        assert before in (None, size)
    child = Driver(coded.branch.fork())
    still_works(child, expected)
    np.testing.assert_array_equal(coded.read(), expected)
    child.branch.close()


def test_a_block_that_is_not_full_is_coded_only_if_that_saves_more(coded):
    """Codes two rows of four, which take four pages, and whose keys could be one: all four values stay."""
    blocks = coded.full()
    blocks[..., 1, :1024] = blocks[..., 0, :1024]
    counts = np.full(blocks.shape[:3], 2, np.int32)
    coded.branch.write_layer(0, blocks.copy(), counts)
    blocks[..., 2:, :] = 0
    assert (pages_of(coded) == 4).all()
    np.testing.assert_array_equal(coded.read(), blocks)


def test_what_is_read_ahead_is_decoded(coded):
    blocks = coded.prefill()
    settle(coded.branch.path)
    everything = np.broadcast_to(np.arange(6, dtype=np.int32), (2, 2, 6))
    assert coded.branch.submit(0, 0, everything)
    np.testing.assert_array_equal(coded.read(), blocks)
    assert coded.branch.stats().prefetch_used == 24


class RunHistory(History):
    """A history of blocks with runs; rows that come one by one have one of two keys."""

    def _payload(self, *shape):
        rows = super()._payload(*shape)
        if len(shape) > 3:
            return plant_runs(rows)
        rows[..., :shape[-1] // 2] = self.rng.integers(1, 3, (*shape[:-1], 1))
        return rows


@pytest.mark.parametrize("layout", ["grouped", "dual_head"])
@pytest.mark.parametrize("seed", range(3))
def test_random_history_equals_a_dictionary(tmp_path, open_branch, seed, layout):
    """Forks, splits, rows and prompts under a storm of interrupted calls."""
    store = FlashStore(directory=tmp_path, codec="rle", threads=2, staging_bytes=20 * EXTENT * (seed % 2),
                       direct=seed != 1,
                       layout=layout)
    store.system = FaultySystem(seed, storm=0.2)
    history = RunHistory(open_branch(store, WIDE), seed)
    for _ in range(100):
        history.step()
    for line in list(history.lines):
        history.flush(line)
    history.check_everything()
    assert sum(line.driver.branch.stats().blocks_short for line in history.lines) > 0
    for line in history.lines:
        line.driver.branch.close()


# ---- saving, opening, inspection

@pytest.fixture
def saved(tmp_path, open_branch):
    """A file with two saves, and the blocks of the second."""
    driver = open_branch(FlashStore(file=tmp_path / "cache.kv", codec="rle"), WIDE)
    driver.prefill()
    driver.branch.save(b"first")
    driver.append(2, 0, 1.0)
    driver.branch.save(b"second")
    blocks = driver.read()
    driver.branch.close()
    return tmp_path / "cache.kv", blocks


@pytest.mark.parametrize("layout", ["grouped", "sequential"])
def test_blocks_of_values_alone_are_not_coded_as_keys(tmp_path, layout):
    store, alone = FlashStore(directory=tmp_path, codec="rle", layout=layout), dataclasses.replace(GEOMETRY, keys=False)
    with pytest.raises(ConfigError, match="values alone"):
        store.create(alone, "fingerprint")


@pytest.mark.parametrize("codec", [None, "rle"])
@pytest.mark.parametrize("read_only", [False, True])
def test_a_saved_file_opens_in_its_codec(saved, codec, read_only):
    path, blocks = saved
    assert inspect_header(path).codec == "rle"
    with contextlib.closing(FlashStore(file=path, codec=codec).open(WIDE, "fingerprint",
                                                                    read_only=read_only)) as branch:
        assert branch.codec == "rle"
        driver = Driver(branch)
        still_works(driver, blocks)
        before = branch.stats().blocks_short
        driver.prefill(layer=1)
        branch.settle()
        assert branch.stats().blocks_short > before, "what a reader adds is coded too"


def test_another_codec_is_refused(saved, tmp_path, open_branch):
    with pytest.raises(FormatMismatch, match="codec 'rle', not in 'raw'"):
        FlashStore(file=saved[0], codec="raw").open()
    driver = open_branch(FlashStore(file=tmp_path / "raw.kv"), WIDE)
    driver.branch.save()
    driver.branch.close()
    with pytest.raises(FormatMismatch, match="codec 'raw', not in 'rle'"):
        FlashStore(file=tmp_path / "raw.kv", codec="rle").open()
    with pytest.raises(ConfigError, match="tolerance"):
        FlashStore(file=tmp_path / "raw.kv", tolerance=0.1).open()
    FlashStore(file=tmp_path / "raw.kv").open().close()


@pytest.mark.parametrize("setting", [
    {"codec": "zip"}, {"tolerance": -0.1}, {"tolerance": np.inf}, {"tolerance": np.nan}, {"tolerance": 0.1},
    {"codec": "raw", "tolerance": 0.1}, {"codec": "rle", "engine": "aio"},
])
def test_impossible_settings(tmp_path, setting):
    with pytest.raises(ConfigError, match=next(name for name in ("engine", "tolerance", "codec") if name in setting)):
        FlashStore(directory=tmp_path, **setting).create(WIDE, "")
    assert not list(tmp_path.iterdir())


def test_packed_keys_take_no_tolerance(tmp_path):
    with pytest.raises(ConfigError, match="int8"):
        FlashStore(directory=tmp_path, codec="rle", tolerance=0.1).create(SOME["int8"], "")


def test_inspection_reads_coded_blocks(saved, capsys):
    path, _ = saved
    assert inspect.main([str(path)]) == 0
    out = capsys.readouterr().out
    assert "codec rle" in out and "28 blocks verified, 0 damaged" in out
    assert "24 of the newest save, 4 of the one before, 2 of the log, 0 free" in out
    coded, total = (int(word) for word in out.split("pages         ")[1].split()[:3:2])
    assert 8 < coded < total == 24
    with open(path, "r+b") as file:
        file.seek(HEADER_BYTES + 4 * EXTENT + 100)
        file.write(b"oops")
    assert inspect.main([str(path)]) == 1
    assert "head 0, block 4 of save 2" in capsys.readouterr().out


# ---- faults

def test_a_flipped_bit_in_a_coded_block(coded):
    blocks = coded.prefill()
    settle(coded.branch.path)
    pages = pages_of(coded).reshape(-1)
    block = int(np.argmax(pages < 8))
    start, name = HEADER_BYTES + coded.branch._lineage.table.extent(block) * EXTENT, WIDE.describe(block)
    for offset in (0, 1, 5000, int(pages[block]) * PAGE_BYTES - 1):
        with flipped(coded.branch.path, start + offset):
            ok, _ = coded.try_read()
            error = coded.branch.take_error()
            assert not ok and type(error) is ChecksumMismatch
            assert name in str(error) and f"offset {start}" in str(error)
            fork = Driver(coded.branch.fork())
            fork.append(block % 6, 0, 1.0)
            for give_up in (fork.branch.flush, fork.branch.close):
                with pytest.raises(ChecksumMismatch, match=name):
                    give_up()
    with flipped(coded.branch.path, start + int(pages[block]) * PAGE_BYTES):
        np.testing.assert_array_equal(coded.read(), blocks)


@contextlib.contextmanager
def flipped(path, offset: int):
    """A file with another byte at an offset, within it or behind its end."""
    with open(path, "r+b") as file:
        file.seek(offset)
        good = file.read(1)
        file.seek(offset)
        file.write(bytes([good[0] ^ 4]) if good else b"x")
        file.flush()
        yield
        file.seek(offset)
        file.write(good or b"\0")


def test_a_truncated_file(coded):
    coded.prefill()
    end = os.path.getsize(coded.branch.path)
    assert (end - HEADER_BYTES) % EXTENT, "the last block is coded, and nothing lies behind it"
    os.truncate(coded.branch.path, end - 100)
    assert not coded.try_read()[0]
    assert type(coded.branch.take_error()) is ShortRead


def test_failed_writes_are_made_again(tmp_path, open_branch, system):
    store = FlashStore(directory=tmp_path, codec="rle")
    store.system = system
    driver = open_branch(store, WIDE)
    expected = driver.prefill()
    driver.append(1, 2, 5.0)
    expected[:, :, 1, 2] = 5.0
    system.fail("pwrite", errno.ENOSPC, times=2)
    for _ in range(2):
        with pytest.raises(NoSpace, match="block 1"):
            driver.branch.flush()
        np.testing.assert_array_equal(driver.read(), expected)
    still_works(driver, expected)


# ---- a tolerance

def test_a_tolerance_moves_keys_and_no_values(tmp_path, open_branch):
    driver = open_branch(FlashStore(directory=tmp_path, codec="rle", tolerance=0.1), WIDE)
    expected = driver.full()
    expected[..., 1:, :1024] = expected[..., :1, :1024] + np.float32(0.09)
    driver.branch.write_layer(0, expected.copy(), np.full((2, 2, 6), 4, np.int32))
    driver.append(3, 3, 7.0)
    driver.branch.flush()
    expected[:, :, 3, 3] = 7.0
    found = driver.read()
    np.testing.assert_array_equal(found[..., 1024:], expected[..., 1024:])
    off = np.abs(found[..., :1024] - expected[..., :1024])
    assert 0.08 < off.max() <= 0.1 + 1e-5 and (off[:, :, :, 0] == 0).all() and (off[:, :, 3, 3] == 0).all()
    assert (pages_of(driver)[:, :, 3] == 7).all() and driver.branch.stats().bytes_read < 24 * EXTENT
