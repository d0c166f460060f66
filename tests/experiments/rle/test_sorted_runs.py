"""Runs of sorted keys: what is equal is found wherever it stands, and every token keeps its own key."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.rle import sorted_runs
from kvjax.ops import attention
from kvjax.ops.runs import Tolerance, decode, scores

TOKENS, SIZE = 48, 6


@functools.partial(jax.jit, static_argnums=3)
def encode(key, length, tolerance, clusters):
    return sorted_runs.encode(key, length, tolerance, clusters, jax.random.key(0))


def repeated(seed=0):
    """Nine keys, each many times and never twice in a row."""
    rng = np.random.default_rng(seed)
    row = np.concatenate([rng.permutation(8), np.arange(TOKENS - 8) % 9])
    return jnp.asarray(rng.normal(size=(9, SIZE))[row], jnp.float32), row


@pytest.mark.parametrize(("length", "clusters"), [(TOKENS, 4), (TOKENS, 16), (30, 4), (0, 4)])
def test_equal_keys_are_one_run_wherever_they_stand_and_none_is_lost(length, clusters):
    key, row = repeated()
    runs = encode(key, jnp.int32(length), Tolerance(), clusters)
    assert (int(runs.runs), int(runs.tokens), int(runs.refused)) == (len(set(row[:length])), length, 0)
    np.testing.assert_array_equal(decode(runs)[:length], key[:length])
    np.testing.assert_array_equal(np.sort(runs.count)[::-1][: int(runs.runs)], np.sort(np.bincount(row[:length]))[::-1][
        : int(runs.runs)])


def test_with_a_tolerance_keys_are_off_by_no_more_and_runs_fewer():
    key = repeated()[0] + 0.02 * jax.random.normal(jax.random.key(1), (TOKENS, SIZE))
    few, many = (encode(key, jnp.int32(TOKENS), Tolerance(jnp.float32(limit)), 4) for limit in (0.1, 0.0))
    assert int(many.runs) == TOKENS and 9 <= int(few.runs) < TOKENS // 2
    assert float(jnp.abs(decode(few) - key).max()) <= 0.1


def test_scores_of_sorted_runs_are_scores_of_keys():
    key, _ = repeated()
    q = jax.random.normal(jax.random.key(2), (2, SIZE))
    found = scores(q, encode(key, jnp.int32(40), Tolerance(), 4))[:, :40]
    np.testing.assert_allclose(found, attention.scores_of(q, key[:40], jnp.ones(40, bool)), rtol=2e-5, atol=1e-5)
