"""A small cache, the stores to try it on, and a few lines that every store test would repeat."""

import contextlib
import dataclasses
import os
import time

import numpy as np
import pytest

from kvjax.errors import ConfigError
from kvjax.store.flash.store import FlashStore
from kvjax.store.format.pages import PAGE_BYTES, Header
from kvjax.store.geometry import Geometry
from kvjax.store.host import HostStore
from kvjax.store.interface import Branch
from tests.store.faults import FaultySystem

GEOMETRY = Geometry(layers=2, batch=2, kv_heads=2, num_blocks=6, block_rows=4, width=6, dtype="float32")
WIDE = dataclasses.replace(GEOMETRY, width=2048)  # blocks of 8 pages, keys of one


def plant_runs(rows: np.ndarray) -> np.ndarray:
    """rows[..., C, width] with one key for all rows of some blocks, for all but the last of others."""
    keys, kind = rows[..., :rows.shape[-1] // 2], rows[..., -1, -1].astype(int) % 3
    for some, stop in ((kind == 0, rows.shape[-2]), (kind == 1, rows.shape[-2] - 1)):
        keys[some, :stop] = keys[some, :1]
    return rows


def inspect_header(path) -> Header:
    """The header of a store file, without opening it as a store."""
    with open(path, "rb") as file:
        return Header.unpack(file.read(PAGE_BYTES), str(path))


def wait_until(condition) -> None:
    """Waits up to ten seconds for what another thread will do."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def settle(path) -> None:
    """Brings a file to its device: asynchronous reads leave to threads what is still being written there."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def drop_pages(path) -> None:
    """Has the page cache forget a file, but for pages that are mapped."""
    settle(path)
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


@dataclasses.dataclass
class Driver:
    """A branch with calls in whole-cache terms, where every callback must succeed."""

    branch: Branch

    @property
    def geometry(self) -> Geometry:
        return self.branch.geometry

    def full(self, seed: int = 0) -> np.ndarray:
        """Random blocks[B, K, NB, C, width] of one layer, some with runs if they are wide enough to be coded."""
        g = self.geometry
        shape = (g.batch, g.kv_heads, g.num_blocks, g.block_rows, g.width)
        blocks = np.random.default_rng(seed).integers(-100, 100, shape).astype(g.numpy_dtype)
        return plant_runs(blocks) if self.geometry.width == WIDE.width else blocks

    def prefill(self, layer: int = 0, seed: int = 0) -> np.ndarray:
        blocks = self.full(seed)
        self.branch.write_layer(layer, blocks, np.full(blocks.shape[:3], self.geometry.block_rows, np.int32))
        return blocks

    def try_read(self, layer: int = 0, generation: int | None = None) -> tuple[bool, np.ndarray]:
        """All blocks of a layer, through slots in reverse order."""
        g = self.geometry
        block = np.tile(np.arange(g.num_blocks, dtype=np.int32), (g.batch, g.kv_heads, 1))
        slots = np.full((g.batch, g.kv_heads, g.num_blocks + 1, g.block_rows, g.width), 77).astype(g.numpy_dtype)
        generation = self.branch.generation if generation is None else generation
        ok = self.branch.read_into(np.int32(layer), np.int32(generation), block, g.num_blocks - block, slots)
        return ok, slots[:, :, :0:-1]

    def read(self, layer: int = 0) -> np.ndarray:
        ok, blocks = self.try_read(layer)
        assert ok, self.branch.take_error()
        return blocks

    def row(self, value: float) -> np.ndarray:
        """rows[B, K, width] of one value."""
        g = self.geometry
        return np.full((g.batch, g.kv_heads, g.width), value).astype(g.numpy_dtype)

    def put_row(self, block: int, row: int, value: float, layer: int = 0) -> bool:
        """The same row of the same block in every stream."""
        g = self.geometry
        index = np.full((g.batch, g.kv_heads), block, np.int32)
        return self.branch.put_rows(layer, self.branch.generation, index, np.full_like(index, row), self.row(value))

    def commit(self) -> None:
        self.branch.commit(self.branch.generation)

    def append(self, block: int, row: int, value: float, layer: int = 0) -> None:
        assert self.put_row(block, row, value, layer), self.branch.take_error()
        self.commit()


def still_works(driver: Driver, expected: np.ndarray | None = None) -> None:
    """Reads the expected blocks, adds a row, and reads it too."""
    expected = driver.full() if expected is None else expected
    np.testing.assert_array_equal(driver.read(), expected)
    driver.append(3, 3, 42.0)
    driver.branch.flush()
    expected = expected.copy()
    expected[:, :, 3, 3] = 42.0
    np.testing.assert_array_equal(driver.read(), expected)


@pytest.fixture
def open_branch(tmp_path):
    """open_branch(store, geometry) -> Driver; whatever is still open is closed at the end."""
    drivers = []

    def make(store, geometry: Geometry = GEOMETRY) -> Driver:
        drivers.append(Driver(store.create(geometry, "fingerprint")))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.branch.take_error()
        driver.branch.close()


def skip_without(engine: str, directory) -> None:
    """Skips a test where files in the directory cannot be read in this way."""
    store = FlashStore(directory=directory, engine=engine)
    try:
        store.create(GEOMETRY, "").close()
    except ConfigError as reason:
        pytest.skip(str(reason))


@pytest.fixture(params=["aio", "threads", "mmap"])
def engine(request, tmp_path) -> str:
    """Each way to read."""
    skip_without(request.param, tmp_path)
    return request.param


@pytest.fixture(params=["host", "buffered", "threads", "aio", "mmap", "eager", "coded"])
def store(request, tmp_path):
    """Every kind of store; `eager` writes each committed block at once, and `coded` those with runs in fewer pages."""
    if request.param == "host":
        return HostStore()
    if request.param == "coded":
        request.getfixturevalue("small_pages")
        return FlashStore(directory=tmp_path, codec="rle", direct=False, threads=2, staging_bytes=0)
    if request.param in ("threads", "aio", "mmap"):
        skip_without(request.param, tmp_path)
        return FlashStore(directory=tmp_path, engine=request.param, threads=2)
    return FlashStore(directory=tmp_path, direct=False, threads=2,
                      staging_bytes=0 if request.param == "eager" else 64 << 20)


@pytest.fixture
def driver(store, open_branch) -> Driver:
    return open_branch(store)


@pytest.fixture
def system():
    system = FaultySystem()
    yield system
    system.heal()


@pytest.fixture(params=["buffered", "threads", "aio", "mmap"])
def fragile(request, tmp_path, open_branch, system) -> Driver:
    """A prefilled branch in a named file, on a system that can be made to fail."""
    engine = "threads" if request.param == "buffered" else request.param
    skip_without(engine, tmp_path)
    store = FlashStore(file=tmp_path / "cache.kv", engine=engine, direct=request.param != "buffered", threads=2,
                       timeout=5.0)
    store.system = system
    driver = open_branch(store)
    driver.prefill()
    settle(driver.branch.path)
    return driver


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache.kv"


@pytest.fixture
def reopen(path):
    """reopen(**settings) -> Driver on the saved file; whatever is still open is closed at the end."""
    drivers = []

    def make(read_only=False, system=None, **settings) -> Driver:
        store = FlashStore(file=path, **settings)
        if system is not None:
            store.system = system
        drivers.append(Driver(store.open(GEOMETRY, "fingerprint", read_only=read_only)))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.branch.take_error()
        with contextlib.suppress(OSError):
            driver.branch.close()


@pytest.fixture
def saved(path, open_branch) -> np.ndarray:
    """A closed file with save 1 (prefill), save 2 (block 0 changed) and an unsaved row; the blocks of save 2."""
    driver = open_branch(FlashStore(file=path))
    driver.prefill()
    assert driver.branch.save(b"first") == 1
    driver.append(0, 0, 5.0)
    assert driver.branch.save(b"second") == 2
    expected = driver.read()
    driver.append(0, 1, 6.0)
    driver.append(5, 0, 7.0)
    driver.branch.close()
    return expected
