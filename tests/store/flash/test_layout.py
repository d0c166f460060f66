"""Where layouts put blocks: against brute force, and under random histories of placing and releasing."""

import itertools
import os

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvjax.errors import ConfigError, NoSpace
from kvjax.store.flash.layout import LAYOUTS, ClusterMajor, DualHead, Grouped, co_retrieval, correlated_order
from kvjax.store.flash.store import FlashStore
from kvjax.store.format.extents import ExtentPool
from kvjax.store.format.pages import HEADER_BYTES
from kvjax.store.geometry import Geometry
from kvjax.store.prompt import Prompt
from tests.store.conftest import GEOMETRY, Driver

BLOCKS = 40
LANES = Geometry(layers=2, batch=1, kv_heads=2, num_blocks=BLOCKS, block_rows=4, width=6, dtype="float32")
SEGMENT = DualHead.SEGMENT


def make(kind, geometry=LANES, max_bytes=None):
    return kind(geometry, ExtentPool("file", geometry.extent_bytes, max_bytes))


def test_unknown_layouts_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="dual_head, sequential"):
        FlashStore(directory=tmp_path, layout="dual-head")


# ---- correlation

retrievals = st.lists(st.lists(st.integers(0, 8), max_size=4, unique=True).map(lambda row: (row + [9] * 4)[:4]),
                      max_size=12)


def brute_force(retrieved, known) -> np.ndarray:
    """Eq. 8 as a matrix, a pair at a time; 9 is "no block"."""
    matrix = np.zeros((9, 9))
    for row in retrieved:
        for i, j in itertools.permutations(set(row) & set(known), 2):
            matrix[i, j] += 1
    return matrix / max(1, matrix.sum())


@hypothesis.given(retrievals, st.sets(st.integers(0, 8)))
def test_co_retrieval_is_equation_8(retrieved, known):
    known = np.array(sorted(known), np.int64)
    pairs, probability = co_retrieval(np.array(retrieved, np.int64).reshape(-1, 4), known)
    expected = brute_force(retrieved, known.tolist())
    found = np.zeros((9, 9))
    found[pairs[:, 0], pairs[:, 1]] = found[pairs[:, 1], pairs[:, 0]] = probability
    np.testing.assert_allclose(found, expected)
    assert (np.diff(probability) <= 0).all()


@hypothesis.given(retrievals, st.sets(st.integers(0, 8)))
def test_pools_are_a_greedy_matching(retrieved, known):
    """No two blocks of different pools are more correlated than both are with their own partners."""
    known = np.array(sorted(known), np.int64)
    order = known[correlated_order(known, np.array(retrieved, np.int64).reshape(-1, 4))].tolist()
    assert sorted(order) == known.tolist()
    chance = brute_force(retrieved, known.tolist())
    own = {i: chance[i, j] for a in range(0, len(order), 2) for i, j in itertools.permutations(order[a:a + 2], 2)}
    for i, j in itertools.combinations(order, 2):
        assert chance[i, j] <= max(own.get(i, 0), own.get(j, 0)) + 1e-12


def test_pools_are_chained_by_correlation():
    """Retrievals along a line put the line on flash, whatever the numbers of its blocks."""
    line = np.array([5, 2, 7, 0, 3, 6, 1, 4])
    retrieved = [line[i:i + 2] for i in range(7) for _ in range(3 - i % 2)]
    order = correlated_order(np.arange(8), np.array(retrieved)).tolist()
    assert order in (line.tolist(), line[::-1].tolist())


# ---- placement

def test_grouped_takes_the_lowest_free_extents():
    layout = make(Grouped)
    assert layout.place_prompt(np.array([3, 4, 50]), None).tolist() == [0, 1, 2]
    layout.extents.release(np.array([1]))
    assert [layout.place(7), layout.place(8)] == [1, 3]


def test_cluster_major_puts_a_block_where_its_number_says():
    layout = make(ClusterMajor)
    assert layout.place_prompt(np.array([3, 4, 50]), None).tolist() == [3, 4, 50]
    assert [layout.place(5), layout.place(4)] == [5, 4 + LANES.total_blocks], "a copy goes to a further table"


def test_correlated_blocks_share_a_pool():
    layout = make(DualHead)
    retrieved = np.full((1, 2, 2, 3), BLOCKS, np.int32)
    retrieved[0, :, 0, :2] = [1, 30]
    retrieved[0, :, 1, 1:] = [0, 20]
    ids = np.concatenate([np.arange(40), 40 + np.array([0, 10, 20])])
    extents = dict(zip(ids.tolist(), layout.place_prompt(ids, retrieved).tolist(), strict=True))
    assert extents[1] ^ 1 == extents[30] and extents[40] ^ 1 == extents[60]
    assert sorted(extents.values()) == [*range(40), *range(3 * SEGMENT, 3 * SEGMENT + 3)], "streams start on shelves"


def test_a_split_takes_the_empty_half_of_a_pool_and_then_a_pool():
    layout = make(DualHead)
    layout.place_prompt(np.arange(3), None)
    assert [layout.place(3), layout.place(4), layout.place(5), layout.place(6)] == [3, 4, 5, 6]
    assert layout.place(BLOCKS) == SEGMENT, "another stream has its own shelf"
    layout.extents.release(np.array([1, 4, 5]))
    assert [layout.place(7), layout.place(8)] == [1, 7], "half-empty pools first"
    assert layout.place(9) == 4, "then freed pools"


def test_a_lane_goes_on_with_its_shelves_in_a_file_that_is_opened_again():
    """Given two streams, of which the second has a pool with an empty half."""
    layout = make(DualHead)
    table = np.full(LANES.total_blocks, -1, np.int32)
    ids = np.append(np.arange(SEGMENT), BLOCKS + np.arange(3))
    table[ids] = layout.place_prompt(ids, None)
    opened = DualHead(LANES, layout.extents)
    opened.restore(ids, table[ids])
    assert [opened.place(BLOCKS + 3), opened.place(BLOCKS + 4)] == [SEGMENT + 3, SEGMENT + 4]
    assert opened.place(SEGMENT) == 2 * SEGMENT, "the first stream's is full"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_added_lies_alike_whether_or_not_a_file_was_opened_again(tmp_path, open_branch, layout):
    """Given blocks added after a save, by who made it and by who opened it; read-only, they lie elsewhere."""
    found = []
    for name, again in (("kept.kv", False), ("opened.kv", True)):
        driver = open_branch(FlashStore(file=tmp_path / name, layout=layout))
        driver.append(0, 0, 1.0)
        driver.branch.save()
        if again:
            driver.branch.close()
            driver = Driver(FlashStore(file=tmp_path / name, layout=layout).open())
        for block in (1, 2, 3):
            driver.append(block, 0, 1.0 + block)
        driver.branch.flush()
        found.append(driver.branch._lineage.table.everything())
        driver.branch.close()
    np.testing.assert_array_equal(*found)


def test_shelves_without_blocks_go_to_other_streams():
    layout = make(DualHead)
    extents = layout.place_prompt(np.arange(20), None)
    layout.extents.release(extents)
    assert layout.place(BLOCKS) == 0
    assert layout.place(0) == SEGMENT


@pytest.mark.parametrize("kind", LAYOUTS.values(), ids=LAYOUTS)
def test_a_prompt_that_does_not_fit_takes_nothing(kind):
    layout = make(kind, max_bytes=4096 * 30)
    with pytest.raises(NoSpace):
        layout.place_prompt(np.arange(31), None)
    assert not layout.extents.occupied(np.arange(100)).any()
    assert layout.place_prompt(np.arange(20), None).size == 20


class Placing(RuleBasedStateMachine):
    """Blocks of a few branches come and go; every block has an extent of its own, and pools stay with one stream."""

    @initialize(kind=st.sampled_from(list(LAYOUTS)))
    def start(self, kind):
        self.layout = make(LAYOUTS[kind])
        self.blocks = []  # (block id, extent)
        self.others = []
        self.prompts = [0] * 4  # of each stream
        self.released = False

    def stream(self, block_id):
        return block_id // BLOCKS

    @rule(layer=st.integers(0, 1), blocks=st.sets(st.integers(0, 2 * BLOCKS - 1)), seed=st.integers(0, 5))
    def place_prompt(self, layer, blocks, seed):
        ids = np.array(sorted(blocks), np.int64) + layer * 2 * BLOCKS
        retrieved = np.random.default_rng(seed).integers(0, BLOCKS + 1, (1, 8, 2, 4), np.int32)
        self.blocks += zip(ids.tolist(), self.layout.place_prompt(ids, retrieved).tolist(), strict=True)
        for stream in {self.stream(block_id) for block_id in ids.tolist()}:
            self.prompts[stream] += 1

    @rule(block_id=st.integers(0, LANES.total_blocks - 1))
    def place(self, block_id):
        self.blocks.append((block_id, self.layout.place(block_id)))

    @rule(count=st.integers(1, 5))
    def somebody_else_allocates(self, count):
        self.others += self.layout.extents.allocate(count).tolist()

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def release(self, data):
        gone = data.draw(st.sets(st.sampled_from(range(len(self.blocks))), min_size=1))
        self.layout.extents.release(np.array([self.blocks[i][1] for i in sorted(gone)]))
        self.blocks = [entry for i, entry in enumerate(self.blocks) if i not in gone]
        self.released = True

    @invariant()
    def every_block_has_its_own_extent(self):
        taken = sorted([extent for _, extent in self.blocks] + self.others)
        assert len(set(taken)) == len(taken)
        extents = self.layout.extents
        assert np.flatnonzero(extents.occupied(np.arange(extents.end))).tolist() == taken

    @invariant()
    def a_shelf_belongs_to_one_stream(self):
        if isinstance(self.layout, DualHead):
            owners = {(extent // SEGMENT, self.stream(block)) for block, extent in self.blocks}
            assert len(owners) == len({shelf for shelf, _ in owners})

    @invariant()
    def little_is_left_empty(self):
        """Without releases: less than a shelf for each prompt and each stream."""
        if isinstance(self.layout, DualHead) and not self.released and not self.others:
            for stream in range(4):
                mine = [extent // SEGMENT for block, extent in self.blocks if self.stream(block) == stream]
                assert len(set(mine)) * SEGMENT - len(mine) < SEGMENT * (self.prompts[stream] + 1)


TestPlacing = Placing.TestCase
TestPlacing.settings = hypothesis.settings(max_examples=30, stateful_step_count=15)


# ---- on flash

@pytest.mark.parametrize("kind", [*LAYOUTS, "sequential"])
def test_a_prompt_reads_back_and_its_extents_are_where_they_should(tmp_path, open_branch, kind):
    driver = open_branch(FlashStore(directory=tmp_path, layout=kind))
    rng = np.random.default_rng(0)
    shape = (GEOMETRY.batch, GEOMETRY.kv_heads, GEOMETRY.num_blocks)
    counts = rng.integers(0, 5, shape, np.int32)
    pos = rng.permuted(np.tile(np.arange(24, dtype=np.int32), (2, 2, 1)), axis=-1).reshape(*shape, 4)
    blocks = driver.full()
    expected = np.where(np.arange(4)[:, None] < counts[..., None, None], blocks, 0)
    for layer in range(2):
        retrieved = rng.integers(0, 7, (2, driver.branch.samples, 2, 3), np.int32)
        driver.branch.write_layer(layer, blocks.copy(), counts, Prompt(pos, retrieved))
    np.testing.assert_array_equal(driver.read(0), expected)
    np.testing.assert_array_equal(driver.read(1), expected)


def test_correlated_blocks_are_read_at_once(tmp_path, open_branch):
    reads = {}
    retrieved = np.full((2, 8, 2, 2), [0, 5], np.int32)
    block = np.broadcast_to(np.array([0, 5], np.int32), (2, 2, 2))
    for kind in ("cluster_major", "dual_head"):
        driver = open_branch(FlashStore(directory=tmp_path, layout=kind, threads=1))
        blocks = driver.full()
        counts, pos = np.full(blocks.shape[:3], 4, np.int32), np.zeros(blocks.shape[:4], np.int32)
        driver.branch.write_layer(0, blocks, counts, Prompt(pos, retrieved))
        slots = np.zeros((2, 2, 2, 4, 6), np.float32)
        assert driver.branch.read_into(0, 0, block, np.broadcast_to(np.arange(2, dtype=np.int32), (2, 2, 2)), slots)
        np.testing.assert_array_equal(slots, blocks[:, :, [0, 5]])
        reads[kind] = driver.branch.stats().reads
    assert reads == {"cluster_major": 5, "dual_head": 4}, "5 of one stream and 0 of the next are neighbours by chance"


def test_holes_of_a_layout_take_no_space(tmp_path, open_branch):
    driver = open_branch(FlashStore(file=tmp_path / "cache.kv", layout="cluster_major"))
    driver.append(5, 0, 1.0, layer=1)
    driver.branch.flush()
    found = os.stat(tmp_path / "cache.kv")
    assert found.st_size == HEADER_BYTES + GEOMETRY.total_blocks * GEOMETRY.extent_bytes
    assert found.st_blocks * 512 < found.st_size / 2, "the tests want a file system with sparse files"
