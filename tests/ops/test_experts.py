"""Mixtures of experts against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax

from kvjax.ops import experts

HIDDEN, SIZE = 12, 10


def drawn(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def weights_of(count):
    return drawn(1, count, SIZE, HIDDEN), drawn(2, count, HIDDEN, SIZE)


@functools.partial(jax.jit, static_argnames=("each", "normalise"))
def mixed(up, down, x, scores, each, normalise=True):
    def expert(number, rows):
        return jnp.tanh(rows @ up[number].T) @ down[number].T

    chosen, weight = experts.route(scores, each, normalise)
    return experts.mix(expert, len(up), x, chosen, weight)


def exactly(up, down, x, scores, each, normalise=True):
    """Every token through its experts, one after another, in float64."""
    share = softmax(np.float64(scores), axis=-1)
    out = np.zeros(x.shape)
    for t, row in enumerate(share):
        best = np.argsort(-row, kind="stable")[:each]
        total = row[best].sum() if normalise else 1.0
        for e in best:
            out[t] += row[e] / total * (np.tanh(np.float64(x[t]) @ up[e].T) @ down[e].T)
    return out


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("count, each", [(1, 1), (5, 2), (7, 3), (7, 7), (60, 4)])
@pytest.mark.parametrize("tokens", [1, 2, 3, 17, 300])
def test_every_token_goes_through_its_experts(tokens, count, each, normalise):
    up, down = weights_of(count)
    x, scores = drawn(3, tokens, HIDDEN), drawn(4, tokens, count)
    found = mixed(up, down, x, scores, each, normalise)
    np.testing.assert_allclose(found, exactly(up, down, x, scores, each, normalise), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("tokens", [1, 9, 200])
def test_no_token_is_dropped_if_all_choose_the_same_experts(tokens):
    up, down = weights_of(6)
    x, scores = drawn(3, tokens, HIDDEN), np.tile(drawn(4, 1, 6), (tokens, 1))
    np.testing.assert_allclose(mixed(up, down, x, scores, 2), exactly(up, down, x, scores, 2), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("tokens", [2, 5, 33, 300])
def test_a_token_does_not_see_the_others(tokens):
    up, down = weights_of(5)
    x, scores = drawn(3, tokens, HIDDEN), drawn(4, tokens, 5)
    found = np.asarray(mixed(up, down, x, scores, 2))
    x[1:], scores[1:] = drawn(5, tokens - 1, HIDDEN), drawn(6, tokens - 1, 5)
    changed = np.asarray(mixed(up, down, x, scores, 2))
    np.testing.assert_array_equal(changed[0], found[0])
    assert (changed[1:] != found[1:]).any(axis=-1).all()


def test_experts_that_no_token_chose_are_not_read():
    """One that is not a number would make every sum that it enters one, too, even with a weight of 0."""
    up, down = weights_of(6)
    x, scores = drawn(3, 40, HIDDEN), drawn(4, 40, 6)
    scores[:, 3] = -50
    found = mixed(up, down, x, scores, 2)
    up[3] = down[3] = np.nan
    np.testing.assert_array_equal(mixed(up, down, x, scores, 2), found)


@pytest.mark.parametrize("tokens", [1, 20])
def test_memory_of_a_mixture_does_not_grow_with_the_experts(tokens):
    """A gather of all chosen experts' weights, or weights that XLA widens first, would take several times as much."""

    def temporary(count):
        each = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((count, 256, 512), (count, 512, 256))]
        x = jax.ShapeDtypeStruct((tokens, 512), jnp.bfloat16)
        scores = jax.ShapeDtypeStruct((tokens, count), jnp.float32)
        return mixed.lower(*each, x, scores, 4).compile().memory_analysis().temp_size_in_bytes

    expert = 2 * 256 * 512
    assert temporary(64) < temporary(8) + expert < 6 * expert


def test_a_mixture_is_differentiated():
    up, down = weights_of(5)
    x, scores = drawn(3, 9, HIDDEN), drawn(4, 9, 5)

    def total(scale):
        return jnp.sum(mixed(up * scale, down, x, scores, 2))

    step = 1e-2
    slope = (total(1 + step) - total(1 - step)) / (2 * step)
    np.testing.assert_allclose(jax.grad(total)(1.0), slope, rtol=1e-2)


@pytest.mark.parametrize("tokens, each, count, rows", [(1, 2, 8, 1), (1, 8, 128, 1), (4, 2, 8, 4), (512, 2, 8, 64),
                                                       (64, 8, 128, 8)])
def test_tiles_grow_with_the_tokens_of_an_expert(tokens, each, count, rows):
    assert experts.tile_rows(tokens, each, count) == rows
