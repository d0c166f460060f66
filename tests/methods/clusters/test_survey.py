"""What is known of all clusters in one pass: against NumPy."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.methods.clusters import survey as surveys

ROWS = 4
survey = jax.jit(functools.partial(surveys.survey, block_rows=ROWS))


def made_up(seed, blocks, kind):
    """Distances, of which rounding makes some negative and many may be equal; clusters may all be full or empty."""
    rng = np.random.default_rng(seed)
    squared = rng.normal(1, 1, blocks) if kind == "any" else rng.integers(-1, 3, blocks) * 0.5
    squared = np.where(rng.random(blocks) < 0.1, rng.choice([0.0, -0.0, np.inf]), squared).astype(np.float32)
    fewest, most = (int(one) for one in rng.choice([0, 1, ROWS], 2))
    count = rng.integers(min(fewest, most), max(fewest, most) + 1, blocks).astype(np.int32)
    return squared, count, (rng.random(blocks) < rng.choice([0, 0.2])) & (count > 0)


def nearest(squared, among):
    return np.flatnonzero(among & (squared == squared[among].min()))[0] if among.any() else len(squared) - 1


@pytest.mark.parametrize("kind", ["any", "few"])
@pytest.mark.parametrize("blocks", [1, 7, 48])
@given(seed=st.integers(0, 10**6))
def test_a_survey(blocks, kind, seed):
    squared, count, split = made_up(seed, blocks, kind)
    found = survey(squared, count, split)
    free, room = nearest(0 * count, count == 0), (count > 0) & (count < ROWS)
    assert (found.keys, found.used, found.flagged) == (count.sum(), (count > 0).sum(), split.sum())
    assert (found.free, found.nearest) == (free, nearest(squared, count > 0))
    assert found.nearest_flagged == nearest(squared, split)
    assert found.roomy == (nearest(squared, room) if room.any() else free)


def test_surveys_of_many_heads_are_those_of_each_alone():
    heads = [made_up(seed, 9001, "any") for seed in range(6)]
    found = jax.jit(jax.vmap(survey))(*map(np.stack, zip(*heads, strict=True)))
    for i, head in enumerate(heads):
        assert [int(one[i]) for one in jax.tree.leaves(found)] == [int(one) for one in jax.tree.leaves(survey(*head))]
