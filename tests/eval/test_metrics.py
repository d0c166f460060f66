"""Measures of a selection against brute force in float64."""

import dataclasses

import harness
import jax.numpy as jnp
import numpy as np
import pytest
from harness import GROUP, HEADS, SIZE

from kvjax.eval import metrics
from kvjax.methods import Full, Quest

QUEST = harness.plan_of(Quest(budget=24, sinks=2, window=4, page=4))
TOKENS, AT, K = 40, 30, 5  # rows beyond AT are padding
rng = np.random.default_rng(0)
Q, KEY, VALUE = (rng.normal(size=s).astype(np.float32) for s in ((HEADS, GROUP, SIZE), *[(TOKENS, HEADS, SIZE)] * 2))
SELECTED = np.array([[5, 9, 20, -1], [3, 25, -1, -1]], np.int32)
ATTENDED = [{0, 1, 27, 28, 29, 30, 5, 9, 20}, {0, 1, 27, 28, 29, 30, 3, 25}]


def scores():
    return np.einsum("kgd,tkd->kgt", Q.astype(np.float64), KEY[: AT + 1]) / np.sqrt(SIZE)


def softmax(x):
    weight = np.exp(x - x.max(-1, keepdims=True))
    return weight / weight.sum(-1, keepdims=True)


def measured(measure, *args):
    exact = metrics.exact_scores(QUEST, Q, KEY, jnp.int32(AT))
    attended = metrics.attended_mask(QUEST, SELECTED, jnp.int32(AT), TOKENS)
    return np.asarray(measure(exact, attended, *args))


def test_sinks_window_and_selection_are_attended():
    mask = np.asarray(metrics.attended_mask(QUEST, SELECTED, jnp.int32(AT), TOKENS))
    assert [set(np.flatnonzero(row)) for row in mask[:, 0]] == ATTENDED


def test_what_is_hidden_from_a_query_head_it_does_not_attend():
    hidden = np.zeros((HEADS, GROUP, SELECTED.shape[-1]), bool)
    hidden[0, 1] = True
    mask = np.asarray(metrics.attended_mask(QUEST, SELECTED, jnp.int32(AT), TOKENS, hidden))
    attended = [[set(np.flatnonzero(row)) for row in head] for head in mask]
    assert attended == [[ATTENDED[0], ATTENDED[0] - set(SELECTED[0].tolist())], [ATTENDED[1]] * GROUP]
    exact = metrics.exact_scores(QUEST, Q, KEY, jnp.int32(AT))
    mass, all_see = metrics.attention_mass(exact, mask), measured(metrics.attention_mass)
    assert mass[0, 1] < all_see[0, 1]
    np.testing.assert_allclose(np.delete(np.ravel(mass), 1), np.delete(np.ravel(all_see), 1), rtol=1e-6)


def test_a_method_that_attends_all_attends_every_token_so_far():
    plan = harness.plan_of(Full(page=4))
    mask = np.asarray(metrics.attended_mask(plan, np.zeros((HEADS, 0), np.int32), jnp.int32(AT), TOKENS))
    np.testing.assert_array_equal(mask[:, 0], np.broadcast_to(np.arange(TOKENS) <= AT, (HEADS, TOKENS)))


def test_what_a_sliding_window_hides_counts_nowhere():
    plan = dataclasses.replace(QUEST, spec=dataclasses.replace(QUEST.spec, sliding=8))
    mask = np.asarray(metrics.attended_mask(plan, SELECTED, jnp.int32(AT), TOKENS))
    assert [set(np.flatnonzero(row)) for row in mask[:, 0]] == [{27, 28, 29, 30}, {25, 27, 28, 29, 30}]
    exact = np.asarray(metrics.exact_scores(plan, Q, KEY, jnp.int32(AT)))
    np.testing.assert_array_equal((exact > -1e29).all((0, 1)), (np.arange(TOKENS) > AT - 8) & (np.arange(TOKENS) <= AT))
    assert np.isnan(metrics.recall(plan, exact, mask, jnp.int32(AT), k=5)).all(), "there are four candidates"


def test_recall_is_the_share_of_the_best_keys_between_sinks_and_window():
    found = measured(lambda *args: metrics.recall(QUEST, *args, jnp.int32(AT), K))
    for head in range(HEADS):
        for g in range(GROUP):
            best = 2 + np.argsort(-scores()[head, g, 2:27])[:K]
            assert found[head, g] == pytest.approx(len(set(best) & ATTENDED[head]) / K)


@pytest.mark.parametrize("k", [26, 1000])
def test_recall_of_more_keys_than_there_are_is_not_a_number(k):
    assert np.isnan(measured(lambda *args: metrics.recall(QUEST, *args, jnp.int32(AT), k))).all()


def test_attention_mass_is_the_softmax_weight_of_the_attended_tokens():
    mass = measured(metrics.attention_mass)
    for head in range(HEADS):
        expected = softmax(scores()[head])[:, sorted(ATTENDED[head])].sum(-1)
        np.testing.assert_allclose(mass[head], expected, rtol=1e-5)


def test_numbers_in_bfloat16_are_measured_in_float32():
    q, key, value = (jnp.asarray(x, jnp.bfloat16) for x in (Q, KEY, VALUE))
    found = metrics.exact_scores(QUEST, q, key, jnp.int32(AT))
    wide = [np.asarray(x, np.float32) for x in (q, key, value)]
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, metrics.exact_scores(QUEST, *wide[:2], jnp.int32(AT)), rtol=1e-5, atol=1e-5)
    attended = metrics.attended_mask(QUEST, SELECTED, jnp.int32(AT), TOKENS)
    np.testing.assert_allclose(metrics.output_error(found, attended, value),
                               metrics.output_error(found, attended, wide[2]), rtol=1e-5)


def test_output_error_is_relative_to_full_attention():
    error = measured(metrics.output_error, VALUE)
    for head in range(HEADS):
        kept, value = sorted(ATTENDED[head]), VALUE[: AT + 1, head].astype(np.float64)
        full, part = softmax(scores()[head]) @ value, softmax(scores()[head][:, kept]) @ value[kept]
        expected = np.linalg.norm(part - full, axis=-1) / np.linalg.norm(full, axis=-1)
        np.testing.assert_allclose(error[head], expected, rtol=1e-4)
