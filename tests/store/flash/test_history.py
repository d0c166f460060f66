"""Random histories of forks, compared step by step with a dictionary."""

import dataclasses

import numpy as np
import pytest

from kvjax.store.flash.store import FlashStore
from kvjax.store.host import HostStore
from tests.store.conftest import GEOMETRY, Driver
from tests.store.faults import FaultySystem

STORES = {
    "host": lambda path, seed: HostStore(),
    "buffered": lambda path, seed: FlashStore(directory=path, direct=False, threads=2),
    "direct": lambda path, seed: FlashStore(directory=path, staging_bytes=40 * 4096),
    "threads": lambda path, seed: FlashStore(directory=path, engine="threads", threads=3, staging_bytes=40 * 4096),
    "eager": lambda path, seed: FlashStore(directory=path, threads=2, staging_bytes=0),
    "cluster_major": lambda path, seed: FlashStore(directory=path, threads=2, staging_bytes=0, layout="cluster_major"),
    "dual_head": lambda path, seed: FlashStore(directory=path, threads=2, staging_bytes=0, layout="dual_head"),
    "sequential": lambda path, seed: FlashStore(directory=path, threads=2, staging_bytes=20 * 4096,
                                                layout="sequential"),
    "stormy": lambda path, seed: _stormy(path, seed),
}


def _stormy(path, seed: int) -> FlashStore:
    store = FlashStore(directory=path, threads=2, staging_bytes=20 * 4096, direct=bool(seed % 2))
    store.system = FaultySystem(seed, storm=0.3)
    return store


@dataclasses.dataclass
class Line:
    """A branch beside what it should hold: blocks by (layer, b, k, block), and those of the open transaction."""

    driver: Driver
    blocks: dict
    open: dict = dataclasses.field(default_factory=dict)

    def block(self, key) -> np.ndarray:
        """A copy of a block as the open transaction would leave it."""
        found = self.open.get(key, self.blocks.get(key))
        geometry = self.driver.geometry
        return np.zeros((geometry.block_rows, geometry.width), np.float32) if found is None else found.copy()


class History:
    """One operation per `step`, on any live branch of one store."""

    def __init__(self, driver: Driver, seed: int):
        self.rng = np.random.default_rng(seed)
        self.lines = [Line(driver, {})]
        self.width = driver.geometry.width

    def step(self) -> None:
        line = self.lines[self.rng.integers(len(self.lines))]
        names = ["put_rows"] * 4 + ["put_blocks"] * 2 + ["commit"] * 3 + ["read"] * 4 + [
            "abort", "fork", "flush", "prefill", "close"]
        getattr(self, str(self.rng.choice(names)))(line)

    def put_rows(self, line: Line) -> None:
        layer, block, row = int(self.rng.integers(2)), self._index(0, 8, (2, 2)), self._index(0, 6, (2, 2))
        rows, branch = self._payload(2, 2, self.width), line.driver.branch
        assert branch.put_rows(layer, branch.generation, block, row, rows), branch.take_error()
        for b, k in np.ndindex(2, 2):
            if block[b, k] < 6 and row[b, k] < 4:
                key = (layer, b, k, int(block[b, k]))
                line.open[key] = line.block(key)
                line.open[key][row[b, k]] = rows[b, k]

    def put_blocks(self, line: Line) -> None:
        layer, block = int(self.rng.integers(2)), self._index(0, 12, (2, 2, 3))
        rows, branch = self._payload(2, 2, 3, 4, self.width), line.driver.branch
        assert branch.put_blocks(layer, branch.generation, block, rows), branch.take_error()
        for b, k, e in np.ndindex(2, 2, 3):
            if block[b, k, e] < 6:
                line.open[(layer, b, k, int(block[b, k, e]))] = rows[b, k, e]

    def commit(self, line: Line) -> None:
        line.driver.commit()
        line.blocks.update(line.open)
        line.open.clear()

    def abort(self, line: Line) -> None:
        line.driver.branch.abort(line.driver.branch.generation)
        line.open.clear()

    def prefill(self, line: Line) -> None:
        self.abort(line)
        layer, counts = int(self.rng.integers(2)), self._index(0, 5, (2, 2, 6))
        blocks = self._payload(2, 2, 6, 4, self.width)
        line.driver.branch.write_layer(layer, blocks, counts)
        for b, k, n in np.ndindex(2, 2, 6):
            blocks[b, k, n, counts[b, k, n]:] = 0
            line.blocks[(layer, b, k, n)] = blocks[b, k, n]

    def fork(self, line: Line) -> None:
        if len(self.lines) < 4:
            self.lines.append(Line(Driver(line.driver.branch.fork()), dict(line.blocks)))

    def close(self, line: Line) -> None:
        if len(self.lines) > 1:
            line.driver.branch.close()
            self.lines.remove(line)

    def flush(self, line: Line) -> None:
        line.driver.branch.flush()

    def read(self, line: Line) -> None:
        layer, slots = int(self.rng.integers(2)), np.full((2, 2, 5, 4, self.width), -1, np.float32)
        block = np.stack([self.rng.permutation(9)[:5] for _ in range(4)]).reshape(2, 2, 5).astype(np.int32)
        slot = np.stack([self.rng.permutation(5) for _ in range(4)]).reshape(2, 2, 5).astype(np.int32)
        expected, branch = slots.copy(), line.driver.branch
        for b, k, n in np.ndindex(2, 2, 5):
            if block[b, k, n] < 6:
                key = (layer, b, k, int(block[b, k, n]))
                expected[b, k, slot[b, k, n]] = line.blocks.get(key, 0)
        assert branch.read_into(layer, branch.generation, block, slot, slots), branch.take_error()
        np.testing.assert_array_equal(slots, expected)

    def check_everything(self) -> None:
        for line in self.lines:
            for layer in range(2):
                found = line.driver.read(layer)
                for b, k, n in np.ndindex(2, 2, 6):
                    np.testing.assert_array_equal(found[b, k, n], line.blocks.get((layer, b, k, n), 0 * found[b, k, n]))

    def _index(self, low: int, high: int, shape) -> np.ndarray:
        return self.rng.integers(low, high, shape, np.int32)

    def _payload(self, *shape) -> np.ndarray:
        return self.rng.integers(1, 1000, shape).astype(np.float32)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", list(STORES))
def test_random_history_equals_a_dictionary(tmp_path, open_branch, kind, seed):
    history = History(open_branch(STORES[kind](tmp_path, seed), GEOMETRY), seed)
    for _ in range(150):
        history.step()
    history.check_everything()
    for line in list(history.lines):
        history.flush(line)
    history.check_everything()
    for line in history.lines:
        line.driver.branch.close()
