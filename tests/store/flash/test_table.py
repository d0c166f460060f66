"""Tables that share streams: against plain arrays, with every owner count checked."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.store.flash.table import StreamPool, Table
from kvjax.store.format.extents import ExtentPool
from tests.store.conftest import GEOMETRY

SMALL = dataclasses.replace(GEOMETRY, batch=1, num_blocks=3)  # 2 layers of 2 streams of 3 blocks
LAYER = SMALL.streams * SMALL.num_blocks


@dataclasses.dataclass
class Model:
    """A table beside the array it should equal."""

    table: Table
    extents: np.ndarray


class World:
    """Random operations on a family of tables over one pool."""

    def __init__(self):
        self.extents = ExtentPool("file", 4096, None)
        self.streams = StreamPool(SMALL, self.extents)
        self.models = [Model(Table.empty(self.streams), np.full(SMALL.total_blocks, -1, np.int32))]

    def put(self, model: Model, block_id: int) -> None:
        """As the writer does: in place where nobody else needs the extent, else in a new one."""
        model.table.unshare(block_id)
        old = model.table.extent(block_id)
        assert old == model.extents[block_id]
        needed_elsewhere = any(old in other.extents for other in self.models if other is not model)
        if old >= 0:
            assert self.extents.is_shared(old) == needed_elsewhere
        if old < 0 or needed_elsewhere:
            model.extents[block_id] = self.extents.allocate(1)[0]
            model.table.put(block_id, int(model.extents[block_id]))

    def replace(self, model: Model, mask: int) -> None:
        layer = np.full(LAYER, -1, np.int32)
        filled = np.array([i for i in range(LAYER) if mask >> i & 1], np.int64)
        layer[filled] = self.extents.allocate(filled.size)
        start = mask % 2 * LAYER
        model.table.replace_layer(start, layer)
        model.extents[start:start + LAYER] = layer

    def share(self, model: Model) -> None:
        self.models.append(Model(model.table.share(), model.extents.copy()))

    def release(self, model: Model) -> None:
        if len(self.models) > 1:
            model.table.release()
            self.models = [other for other in self.models if other is not model]

    def check(self) -> None:
        everything = np.arange(SMALL.total_blocks)
        for model in self.models:
            np.testing.assert_array_equal(model.table.extents(everything), model.extents)
            np.testing.assert_array_equal(model.table.everything(), model.extents)
        used = {extent for model in self.models for extent in model.extents.tolist()} - {-1}
        owned = self.extents.occupied(np.arange(self.extents.end))
        assert owned.sum() == len(used), "no extent leaks, none is free and used"
        older, newer = self.models[0], self.models[-1]
        ids, extents = newer.table.changes_since(older.table)
        expected = np.flatnonzero(newer.extents != older.extents)
        np.testing.assert_array_equal(ids, expected)
        np.testing.assert_array_equal(extents, newer.extents[expected])


steps = st.tuples(st.sampled_from(["put", "put", "put", "replace", "share", "release"]), st.integers(0, 1000))


@settings(max_examples=60)
@given(st.lists(steps, max_size=40))
def test_any_history_equals_plain_arrays(history):
    world = World()
    for name, number in history:
        model = world.models[number % len(world.models)]
        if name == "put":
            world.put(model, number % SMALL.total_blocks)
        elif name == "replace":
            world.replace(model, number % (1 << LAYER))
        else:
            getattr(world, name)(model)
        world.check()
    for model in world.models:
        model.table.release()
    assert not world.extents.occupied(np.arange(world.extents.end)).any()


def test_a_table_made_from_extents_owns_them():
    pool = ExtentPool("file", 4096, None)
    streams = StreamPool(SMALL, pool)
    extents = np.full(SMALL.total_blocks, -1, np.int32)
    extents[[0, 4, 11]] = [7, 2, 5]
    pool.restore(extents[extents >= 0], np.arange(3, dtype=np.uint64))
    table = Table.of(streams, np.flatnonzero(extents >= 0), extents[extents >= 0])
    assert pool.end == 8 and pool.allocate(5).tolist() == [0, 1, 3, 4, 6]
    table.release()
    assert pool.allocate(3).tolist() == [2, 5, 7]


@pytest.mark.parametrize("blocks", [64, 4096])
def test_sharing_copies_no_stream(blocks):
    """What a fork allocates depends on the number of streams, not on how long they are."""
    pool = ExtentPool("file", 4096, None)
    streams = StreamPool(dataclasses.replace(SMALL, num_blocks=blocks), pool)
    table = Table.of(streams, np.arange(4 * blocks), pool.allocate(4 * blocks))
    before = streams.rows
    shared = table.share()
    assert streams.rows is before and shared._streams.size == 4
    shared.unshare(0)
    assert [int(a != b) for a, b in zip(table._streams, shared._streams, strict=True)] == [1, 0, 0, 0]
