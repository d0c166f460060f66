"""Coded blocks: every bit comes back, and runs are those of the codec in memory."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.ops import runs
from kvjax.ops.runs import Tolerance
from kvjax.store.format import block_runs

ROWS, KEY, VALUE = 11, 12, 20  # bytes
ODD = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1.0], np.float32)
PAYLOADS = np.array([0x7FC00001, 0x7FC00002, 0xFFC00001], np.uint32).view(np.float32)  # NaNs that differ


@st.composite
def blocks(draw):
    """uint8[2, ROWS, KEY + VALUE]: values at random, keys in runs, of numbers that compare strangely."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = rng.integers(0, 256, (2, ROWS, KEY + VALUE), np.uint8)
    table = rng.choice(np.concatenate([ODD, PAYLOADS]), (4, KEY // 4)).view(np.uint8)
    rows[..., :KEY] = table[np.sort(rng.integers(0, 4, (2, ROWS)), axis=-1)]
    return rows


@settings(max_examples=80)
@given(rows=blocks(), kind=st.sampled_from([np.float32, np.float16, np.int8]))
def test_every_bit_comes_back(rows, kind):
    begins = block_runs.begins(rows[..., :KEY].view(kind))
    for block, first in zip(rows, begins, strict=True):
        fresh = [i == 0 or block[i, :KEY].tobytes() != block[i - 1, :KEY].tobytes() for i in range(ROWS)]
        np.testing.assert_array_equal(first, fresh)
        coded = block_runs.encode(block, first, KEY)
        assert coded.size == block_runs.size(first.sum(), ROWS, KEY, VALUE)
        out = np.zeros_like(block)
        block_runs.decode(coded, out, KEY)
        np.testing.assert_array_equal(out, block)
        memory = np.concatenate([coded, np.zeros(block.size, np.uint8)])[:block.size]
        block_runs.decode(memory, memory.reshape(block.shape), KEY)
        np.testing.assert_array_equal(memory.reshape(block.shape), block)


@functools.cache
def _in_memory(tolerance):
    return jax.jit(jax.vmap(lambda key: runs.begins(key, Tolerance(tolerance))))


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32 - 1))
@pytest.mark.parametrize("tolerance", [0.0, 0.25])
def test_runs_are_those_of_the_codec_in_memory(tolerance, seed):
    """Where no NaN and no -0.0 is among the keys; steps of 0.1 and 0.2 make runs that drift away."""
    steps = np.random.default_rng(seed).choice([0.0, 0.1, 0.2], (5, ROWS, 2))
    keys = np.cumsum(steps, axis=1, dtype=np.float32)
    np.testing.assert_array_equal(block_runs.begins(keys, tolerance), _in_memory(tolerance)(keys))


def test_with_a_tolerance_equal_bits_are_equal_whatever_they_mean():
    keys = np.array([np.nan, np.nan, np.inf, np.inf, -np.inf, 1.0, 1.1, -0.0], np.float32).reshape(1, -1, 1)
    assert block_runs.begins(keys, 0.2).tolist() == [[True, False, True, False, True, True, False, True]]
