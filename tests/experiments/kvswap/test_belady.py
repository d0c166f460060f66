"""Belady's optimum against brute force over every choice of victims, and as a bound of the policies."""

import functools
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.kvswap.belady import fewest_misses
from kvjax.errors import ConfigError

BLOCKS, NONE = 5, 5


def brute_force(steps, slots):
    """Fewest misses over all ways to keep at most `slots` blocks after each step."""

    @functools.cache
    def least(at, resident):
        if at == len(steps):
            return 0
        wanted = frozenset(steps[at])
        others = resident - wanted
        kept = min(slots - len(wanted), len(others))
        choices = (frozenset(some) for size in range(kept + 1) for some in itertools.combinations(others, size))
        return len(wanted - resident) + min(least(at + 1, wanted | some) for some in choices)

    return least(0, frozenset())


def padded(steps):
    width = max([1, *map(len, steps)])
    return np.array([[*step, *[NONE] * (width - len(step))] for step in steps]).reshape(len(steps), width)


@settings(max_examples=150)
@given(
    steps=st.lists(st.lists(st.integers(0, BLOCKS - 1), max_size=3, unique=True), max_size=9),
    slots=st.integers(3, BLOCKS),
)
def test_nothing_reads_fewer_blocks(steps, slots):
    assert fewest_misses(padded(steps), slots, BLOCKS) == brute_force(steps, slots)


def test_a_block_that_is_never_needed_again_leaves_first():
    """Given slots for 0 and 1 and then a 2, keeping the one that comes back saves a read."""
    assert fewest_misses(np.array([[0], [1], [2], [0], [2]]), 2, BLOCKS) == 3


def test_enough_slots_leave_the_first_reads_alone():
    need = np.random.default_rng(0).permuted(np.tile(np.arange(BLOCKS), (30, 1)), axis=1)[:, :3]
    assert fewest_misses(need, BLOCKS, BLOCKS) == np.unique(need).size


def test_too_few_slots_for_one_step_are_refused():
    with pytest.raises(ConfigError, match="needs 3 blocks but slots=2"):
        fewest_misses(np.array([[0, 1, 2]]), 2, BLOCKS)
