"""Choosing tokens: against NumPy's softmax, top-k and nucleus."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.special import softmax

from kvjax.errors import ConfigError
from kvjax.inference.sampling import Sampling, sample

VOCAB, DRAWS = 12, 20_000
LOGITS = np.random.default_rng(0).normal(size=VOCAB).astype(np.float32) * 1.5


def draw(sampling, logits=LOGITS, draws=DRAWS, seed=0):
    """Tokens drawn from the same logits, one per row."""
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (draws, len(logits)))
    return np.asarray(sample(sampling, rows, jax.random.key(seed)))


def top(logits, count):
    """The `count` most likely tokens."""
    return set(np.argsort(-logits)[:count].tolist())


def nucleus(logits, mass):
    """The smallest set of most likely tokens whose probability reaches `mass`."""
    order = np.argsort(-logits)
    reached = np.cumsum(softmax(logits.astype(np.float64))[order])
    return set(order[: np.searchsorted(reached, mass) + 1].tolist())


def assert_frequencies(tokens, probability):
    """Chi-square over the tokens that can occur, at a level that a wrong distribution cannot meet."""
    possible = probability > 0
    found = np.bincount(tokens, minlength=VOCAB)
    assert not found[~possible].any()
    assert possible.sum() == 1 or stats.chisquare(found[possible], DRAWS * probability[possible]).pvalue > 1e-3


def only(logits, kept):
    """Logits of the kept tokens; -inf elsewhere."""
    return np.where(np.isin(np.arange(VOCAB), list(kept)), logits.astype(np.float64), -np.inf)


def test_temperature_zero_takes_the_most_likely_token():
    logits = np.random.default_rng(1).normal(size=(50, VOCAB)).astype(np.float32)
    np.testing.assert_array_equal(sample(Sampling(), jnp.asarray(logits), jax.random.key(0)), logits.argmax(-1))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax_at_the_temperature(temperature):
    assert_frequencies(draw(Sampling(temperature)), softmax(LOGITS.astype(np.float64) / temperature))


@pytest.mark.parametrize("count", [1, 3, VOCAB, 100])
def test_top_k_draws_from_the_k_most_likely_tokens(count):
    kept = top(LOGITS, count)
    tokens = draw(Sampling(temperature=2.0, top_k=count))
    assert set(tokens.tolist()) == kept
    assert_frequencies(tokens, softmax(only(LOGITS / 2, kept)))


@pytest.mark.parametrize("mass", [0.01, 0.3, 0.8, 0.95, 1.0])
def test_top_p_draws_from_the_smallest_set_that_reaches_the_mass(mass):
    kept = nucleus(LOGITS, mass)
    tokens = draw(Sampling(temperature=1.0, top_p=mass))
    assert set(tokens.tolist()) == kept
    assert_frequencies(tokens, softmax(only(LOGITS, kept)))


@settings(max_examples=25)
@given(seed=st.integers(0, 1000))
def test_top_p_keeps_the_set_of_numpy_for_any_logits(seed):
    """Given nearly flat logits, 20,000 draws show every token of the set."""
    logits = np.random.default_rng(seed).uniform(-0.5, 0.5, VOCAB).astype(np.float32)
    assert set(draw(Sampling(temperature=1.0, top_p=0.6), logits, seed=seed).tolist()) == nucleus(logits, 0.6)


def test_top_p_acts_on_what_top_k_and_the_temperature_left():
    """The mass is that of the five tokens at temperature 2, not of all at temperature 1."""
    left = only(LOGITS / 2, top(LOGITS, 5))
    kept = nucleus(left, 0.7)
    assert kept != nucleus(LOGITS, 0.7) and kept != nucleus(LOGITS / 2, 0.7)
    assert set(draw(Sampling(temperature=2.0, top_k=5, top_p=0.7)).tolist()) == kept


@pytest.mark.parametrize("mass", [1.0, 0.9])
def test_top_k_does_not_sort_the_vocabulary(mass):
    """XLA makes a sort of a top-k of which a part is used, at 8 ms for 49,152 tokens instead of 0.1."""
    rows, key = jnp.zeros((1, 1000)), jax.random.key(0)

    def compiled(sampling):
        return jax.jit(lambda rows, key: sample(sampling, rows, key)).lower(rows, key).compile().as_text()

    assert " sort(" not in compiled(Sampling(1.0, top_k=20, top_p=mass))
    assert " sort(" in compiled(Sampling(1.0, top_p=0.9)), "what the test looks for is there where it is expected"


def test_top_k_keeps_k_of_equal_logits():
    """Takes equal logits, as those of sixteen bits often are."""
    ties = np.array([1, 3, 3, 0, 3, 2], np.float32)
    assert set(draw(Sampling(1.0, top_k=1), ties).tolist()) == {1}
    assert set(draw(Sampling(1.0, top_k=2), ties).tolist()) == {1, 2}


@pytest.mark.parametrize(("logits", "mass", "kept"), [
    (np.zeros(8), 0.25, {0, 1}), (np.array([0, 3, *np.zeros(6)]), 0.8, {0, 1, 2}), (np.array([1, 1, 4]), 0.9, {2}),
    (np.array([1, 1, 4]), 0.95, {0, 2}),
])
@pytest.mark.parametrize("count", [None, 8])
def test_top_p_keeps_no_more_than_it_needs_of_equal_logits(logits, mass, kept, count):
    assert set(draw(Sampling(1.0, top_p=mass, top_k=count), logits.astype(np.float32)).tolist()) == kept


def test_a_row_does_not_depend_on_the_rest_of_the_batch():
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(8, VOCAB)), jnp.float32)
    for sampling in (Sampling(), Sampling(1.0), Sampling(1.5, top_k=6, top_p=0.9)):
        together = sample(sampling, logits, jax.random.key(3))
        other = sample(sampling, logits.at[4:].multiply(-1), jax.random.key(3))
        np.testing.assert_array_equal(together[:4], other[:4])
        np.testing.assert_array_equal(together[:3], sample(sampling, logits[:3], jax.random.key(3)))


def test_rows_with_equal_logits_draw_independently():
    """Given pairs of rows, both members agree as often as chance has it."""
    pairs = draw(Sampling(1.0)).reshape(-1, 2)
    chance = np.square(softmax(LOGITS.astype(np.float64))).sum()
    assert abs((pairs[:, 0] == pairs[:, 1]).mean() - chance) < 5 * np.sqrt(chance / len(pairs))


def test_same_key_same_tokens_and_another_key_others():
    one = draw(Sampling(1.0), draws=50, seed=4)
    np.testing.assert_array_equal(one, draw(Sampling(1.0), draws=50, seed=4))
    assert (one != draw(Sampling(1.0), draws=50, seed=5)).any()


@pytest.mark.parametrize("settings", [
    {"temperature": -0.1}, {"temperature": float("nan")}, {"temperature": float("inf")}, {"top_k": 0}, {"top_k": -3},
    {"temperature": 1e39}, {"top_p": 1e-46}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_p": -0.5}, {"top_p": float("nan")},
], ids=str)
def test_bad_settings_are_refused_by_name(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Sampling(**settings)
