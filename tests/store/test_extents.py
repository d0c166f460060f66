"""The allocator of extents."""

import numpy as np
import pytest

from kvjax.errors import NoSpace
from kvjax.store.extents import ExtentPool


def test_free_extents_are_taken_lowest_first():
    pool = ExtentPool("file", 4096, None)
    assert pool.allocate(6).tolist() == [0, 1, 2, 3, 4, 5]
    for extent in (4, 1, 3):
        pool.release(np.array([extent], np.int32))
    assert pool.allocate(4).tolist() == [1, 3, 4, 6]


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
    pool = ExtentPool("file", 4096, 4096 * 4)
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
