"""The slot table against Python models of every policy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.cache import residency
from kvjax.errors import ConfigError
from kvjax.inference.plan import Slots

HEADS, SLOTS, BLOCKS, WIDTH = 2, 5, 9, 4  # WIDTH: blocks that one step may need
COUNT = np.random.default_rng(0).integers(1, 5, (HEADS, BLOCKS)).astype(np.int32)  # rows of each block
_plan = jax.jit(residency.plan, static_argnums=(3, 4))


@jax.jit
def _note_written(table, block):
    slot = jnp.where(block < BLOCKS, residency.locate(table, block), SLOTS)  # BLOCKS: none
    return residency.note_written(table, slot)


def plan(table, need, policy, even=False):
    """`residency.plan`, brought to the host."""
    return jax.device_get(_plan(jax.tree.map(jnp.asarray, table), jnp.asarray(need), jnp.asarray(COUNT), policy, even))


def note_written(table, block):
    """The table after blocks[HEADS, n] were written."""
    return jax.device_get(_note_written(jax.tree.map(jnp.asarray, table), jnp.asarray(block)))


@dataclasses.dataclass
class Entry:
    """A resident block of the model."""

    filled: int
    used: int
    uses: int = 0
    written: int = -1


@dataclasses.dataclass
class Model:
    """One head's cache."""

    head: int
    entries: dict[int, Entry] = dataclasses.field(default_factory=dict)

    def value(self, policy, block):
        """What makes a block worth keeping."""
        entry = self.entries[block]
        if policy == "cluster":
            newest = sorted(e.written for e in self.entries.values())[-max(1, SLOTS // residency.RESERVED) :]
            reserved = entry.written >= 0 and entry.written >= newest[0]
            return reserved, -COUNT[self.head, block], entry.used
        return {"fifo": (entry.filled,), "lru": (entry.used,), "lfu": (entry.uses, entry.used)}[policy]

    def check_and_follow(self, policy, wanted, resident, step):
        """Judges which blocks left for `wanted` ones, then does the same; ties may be broken either way."""
        missing = [block for block in wanted if block not in self.entries]
        gone = set(self.entries) - resident
        assert resident == (set(self.entries) - gone) | set(wanted), "hits stay, missing blocks come, nothing else does"
        assert len(gone) == max(0, len(self.entries) + len(missing) - SLOTS), "nothing leaves while a slot is empty"
        assert not gone & set(wanted), "a needed block is pinned"
        leave, stay = ([self.value(policy, b) for b in some] for some in (gone, set(self.entries) - gone - set(wanted)))
        assert not leave or not stay or max(leave) <= min(stay), "the least valuable leave"
        for block in gone:
            del self.entries[block]
        self.entries.update({block: Entry(step, step) for block in missing})
        for block in wanted:
            self.entries[block].used = step
            self.entries[block].uses += 1


@st.composite
def needs(draw):
    """What one step needs: up to WIDTH different blocks per head, in any columns."""
    rows = []
    for _ in range(HEADS):
        blocks = draw(st.lists(st.integers(0, BLOCKS - 1), max_size=WIDTH, unique=True))
        rows.append(draw(st.permutations(blocks + [BLOCKS] * (WIDTH - len(blocks)))))
    return np.array(rows, np.int32)


def resident(table, head):
    """Blocks that the table says are in memory; each at most once."""
    blocks = [int(b) for b in table.block[head] if b < BLOCKS]
    assert len(set(blocks)) == len(blocks)
    return set(blocks)


@pytest.mark.parametrize("policy", residency.POLICIES)
@settings(max_examples=60)
@given(steps=st.lists(st.tuples(needs(), st.booleans(), st.lists(st.integers(0, BLOCKS), min_size=HEADS,
                                                                 max_size=HEADS)), min_size=1, max_size=25))
def test_slots_follow_the_model_of_the_policy(policy, steps):
    """Given any needs, of which some fail to be read, and writes, hits, evictions and slots are those of the model."""
    table, models = jax.device_get(residency.empty(HEADS, SLOTS, BLOCKS)), [Model(head) for head in range(HEADS)]
    for number, (need, success, written) in enumerate(steps, 1):
        found = plan(table, need, policy)
        for head, model in enumerate(models):
            wanted, held = [int(b) for b in need[head] if b < BLOCKS], resident(table, head)
            assert {int(b) for b in found.read[head] if b < BLOCKS} == set(wanted) - held, "misses are read, hits not"
            if success:
                model.check_and_follow(policy, wanted, resident(found.success, head), number)
                if written[head] in model.entries:
                    model.entries[written[head]].written = number
            else:
                lost = held - resident(found.failure, head)
                assert not lost & set(wanted), "a needed block is not overwritten"
                for block in lost:
                    del model.entries[block]
        table = note_written(found.success, np.array(written, np.int32)[:, None]) if success else found.failure


@settings(max_examples=60)
@given(
    before=st.lists(needs(), max_size=6), need=needs(), policy=st.sampled_from(list(residency.POLICIES)),
    even=st.booleans(),
)
def test_every_needed_block_gets_a_slot_of_its_own_that_holds_it(before, need, policy, even):
    table = after(before, policy)
    found = plan(table, need, policy, even)
    for head in range(HEADS):
        slots = [int(s) for s, b in zip(found.slot[head], need[head], strict=True) if b < BLOCKS]
        blocks = [int(b) for b in need[head] if b < BLOCKS]
        assert len(set(slots)) == len(slots)
        assert [int(found.success.block[head, s]) for s in slots] == blocks


@settings(max_examples=60)
@given(before=st.lists(needs(), max_size=6), need=needs(), policy=st.sampled_from(list(residency.POLICIES)))
def test_blocks_are_read_in_the_columns_in_which_they_are_needed(before, need, policy):
    table = after(before, policy)
    found = plan(table, need, policy)
    for head in range(HEADS):
        missing = ~np.isin(need[head], list(resident(table, head))) & (need[head] < BLOCKS)
        np.testing.assert_array_equal(found.read[head], np.where(missing, need[head], BLOCKS))


@settings(max_examples=60)
@given(
    before=st.lists(needs(), max_size=6), need=needs(), policy=st.sampled_from(list(residency.POLICIES)),
    even=st.booleans(),
)
def test_after_a_failure_no_slot_claims_what_may_be_half_read(before, need, policy, even):
    """Slots that were being filled are empty; all others hold what they held."""
    table = after(before, policy)
    found = plan(table, need, policy, even)
    for head in range(HEADS):
        filling = {int(s) for s, b in zip(found.slot[head], found.read[head], strict=True) if b < BLOCKS}
        expected = [BLOCKS if s in filling else int(b) for s, b in enumerate(table.block[head])]
        np.testing.assert_array_equal(found.failure.block[head], expected)
        assert not resident(found.failure, head) & {int(b) for b in found.read[head] if b < BLOCKS}


@settings(max_examples=60)
@given(before=st.lists(needs(), max_size=6), need=needs(), policy=st.sampled_from(list(residency.POLICIES)))
def test_even_heads_reuse_as_many_blocks_as_the_one_that_finds_the_fewest(before, need, policy):
    """Each head keeps the first ones that it needs; one head alone reuses all it finds."""
    table = after(before, policy)
    found = plan(table, need, policy, even=True)
    held = [[int(b) for b in need[head] if int(b) in resident(table, head)] for head in range(HEADS)]
    fewest = min(map(len, held))
    for head in range(HEADS):
        read = {int(b) for b in found.read[head] if b < BLOCKS}
        assert [int(b) for b in need[head] if b < BLOCKS and int(b) not in read] == held[head][:fewest]


def after(needs_before, policy):
    """The table after these needs, all of them read."""
    table = jax.device_get(residency.empty(HEADS, SLOTS, BLOCKS))
    for need in needs_before:
        table = plan(table, need, policy).success
    return table


def row(*blocks):
    """The same needs for all heads."""
    return np.array([[*blocks, *[BLOCKS] * (WIDTH - len(blocks))]] * HEADS, np.int32)


@pytest.mark.parametrize(("policy", "evicted"), [("fifo", 0), ("lru", 1), ("lfu", 2)])
def test_each_policy_gives_up_another_block(policy, evicted):
    """Given 0, 1, 1, 2, 3, 4, 0: 0 came first, 1 was needed longest ago, and 2 is the oldest needed only once."""
    table = after([row(b) for b in (0, 1, 1, 2, 3, 4, 0)], policy)
    assert resident(plan(table, row(5), policy).success, 0) == set(range(6)) - {evicted}


def test_cluster_gives_up_the_largest_block_unless_it_was_written_lately():
    """Given five blocks in memory, all slots in use, the one with most rows goes; the one written last stays."""
    before = [row(b) for b in range(SLOTS)]
    for head in range(HEADS):
        by_size = sorted(range(SLOTS), key=lambda block: (-COUNT[head, block], block))
        table = after(before, "cluster")
        assert resident(plan(table, row(5), "cluster").success, head) == {*range(6)} - {by_size[0]}
        table = note_written(table, row(by_size[0])[:, :1])
        assert resident(plan(table, row(5), "cluster").success, head) == {*range(6)} - {by_size[1]}


def test_an_unknown_policy_is_refused_by_name():
    with pytest.raises(ConfigError, match="unknown residency policy 'mru'; use one of fifo, lru"):
        Slots(policy="mru")


@pytest.mark.parametrize("policy", residency.POLICIES)
def test_a_needed_block_is_kept_however_old_it_is(policy):
    table = after([row(b) for b in (0, 1, 2, 3, 4)], policy)
    assert resident(plan(table, row(7, 0, 8, 1), policy).success, 0) == {0, 1, 4, 7, 8}


def test_locate_gives_the_slot_or_the_number_of_slots():
    table = jax.tree.map(jnp.asarray, after([row(3, 4), row(6)], "lru"))
    where = np.asarray(residency.locate(table, jnp.asarray(row(6, 5, 3, 4))))
    for head in range(HEADS):
        assert where[head, 1] == SLOTS
        np.testing.assert_array_equal(np.asarray(table.block)[head, where[head, [0, 2, 3]]], [6, 3, 4])
