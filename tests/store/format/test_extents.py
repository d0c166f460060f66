"""The allocator of extents."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.errors import NoSpace
from kvjax.store.format import extents
from kvjax.store.format.extents import ExtentPool
from kvjax.store.format.pages import HEADER_BYTES


def test_free_extents_are_taken_lowest_first():
    pool = ExtentPool("file", 4096, None)
    assert pool.allocate(6).tolist() == [0, 1, 2, 3, 4, 5]
    for extent in (4, 1, 3):
        pool.release(np.array([extent], np.int32))
    assert pool.allocate(4).tolist() == [1, 3, 4, 6]


@given(st.lists(st.tuples(st.sampled_from(["one", "some", "run", "claim", "give"]), st.integers(0, 6)), max_size=80))
def test_the_lowest_free_extents_are_found_whatever_came_before(steps):
    with mock.patch.object(extents, "_WINDOW", 3):
        pool, used = ExtentPool("file", 4096, None), set()
        for kind, number in steps:
            free = sorted(set(range(pool.end + 20)) - used)
            if kind == "give":
                taken = sorted(used)[number::3]
                pool.release(np.array(taken, np.int32))
                used -= set(taken)
                continue
            if kind == "run":
                runs = (range(i, i + number + 1) for i in free if i + number < pool.end)
                behind = range(pool.end, pool.end + number + 1)
                wanted = next((run for run in runs if not used & set(run)), behind)
                found = pool.allocate_run(number + 1)
            elif kind == "claim":
                wanted = free[number::7][:3]
                found = pool.claim(np.array(wanted))
            else:
                wanted = free[: 1 if kind == "one" else number]
                found = pool.allocate(len(wanted))
            assert found.tolist() == list(wanted)
            used |= set(wanted)


def test_shared_extents_are_free_when_the_last_owner_goes():
    pool = ExtentPool("file", 4096, None)
    extents = pool.allocate(2)
    pool.share(extents)
    assert pool.is_shared(0)
    pool.release(extents)
    assert not pool.is_shared(0)
    assert pool.allocate(1).tolist() == [2]
    pool.release(extents[:1])
    assert pool.allocate(1).tolist() == [0]


def test_limit_counts_the_header_and_spares_what_is_there():
    pool = ExtentPool("file", 4096, HEADER_BYTES + 4096 * 3)
    pool.allocate(2)
    with pytest.raises(NoSpace, match="2 more blocks"):
        pool.allocate(2)
    assert pool.allocate(1).tolist() == [2]
    pool.release(np.array([1], np.int32))
    assert pool.allocate(1).tolist() == [1]


def test_checksums_survive_growth():
    pool = ExtentPool("file", 4096, None)
    extents = pool.allocate(60)
    pool.checksums[extents] = np.arange(60)
    pool.allocate(1000)
    assert pool.checksums[:60].tolist() == list(range(60))


def test_runs_are_neighbours_lowest_first():
    pool = ExtentPool("file", 4096, None)
    pool.allocate(10)
    pool.release(np.array([1, 3, 4, 6, 7, 8], np.int32))
    assert pool.allocate_run(2).tolist() == [3, 4]
    assert pool.allocate_run(3).tolist() == [6, 7, 8]
    assert pool.allocate_run(2).tolist() == [10, 11]
    assert pool.allocate_run(1).tolist() == [1]
    assert pool.end == 12 and pool.occupied(np.arange(12)).all()


def test_runs_obey_the_limit():
    pool = ExtentPool("file", 4096, HEADER_BYTES + 4096 * 3)
    pool.allocate(2)
    with pytest.raises(NoSpace):
        pool.allocate_run(2)
    assert pool.allocate_run(1).tolist() == [2]


def test_private_extents_begin_behind_a_gap():
    pool = ExtentPool("file", 4096, HEADER_BYTES + 4096)
    pool.restore(np.array([0, 5]), np.array([1, 2], np.uint64))
    pool.share(np.array([0, 5]))
    pool.leave_shared()
    assert pool.allocate(1).tolist() == [7], "1..4 belong to somebody else, 6 is the gap"
    with pytest.raises(NoSpace):
        pool.allocate(1)
