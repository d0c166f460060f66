"""InfLLM: local scores, representatives and relevance against brute force."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import GROUP, HEADS, METHODS, SIZE, Sim, Stream, selection

import kvjax
from kvjax.errors import ConfigError
from kvjax.methods import InfLLM
from kvjax.methods.infllm import local_scores

METHOD = METHODS["infllm"]


def brute_force_scores(stream, b, head, length, window):
    """float64[length]: attention that each token gets from queries that have it in their window."""
    k = stream.k[b, :length, head].astype(np.float64)
    q = stream.q[b, :length].reshape(length, HEADS, GROUP, SIZE)[:, head].astype(np.float64)
    total = np.zeros(length)
    for at in range(length):
        first = max(0, at - window + 1)
        score = q[at] @ k[first : at + 1].T / np.sqrt(SIZE)
        weight = np.exp(score - score.max(-1, keepdims=True))
        total[first : at + 1] += (weight / weight.sum(-1, keepdims=True)).sum(0)
    return total


@pytest.mark.parametrize(("length", "window"), [(40, 7), (37, 4), (5, 9), (1, 2)])
def test_local_scores_of_a_prompt(length, window):
    stream, tokens = Stream.draw(0, batch=1), 48
    q = stream.q[0, :tokens].reshape(tokens, HEADS, GROUP, SIZE).transpose(1, 2, 0, 3)
    found = jax.jit(local_scores, static_argnums=3)(q, stream.k[0, :tokens].swapaxes(0, 1), jnp.int32(length), window)
    found = np.asarray(found)
    for head in range(HEADS):
        expected = brute_force_scores(stream, 0, head, length, window)
        np.testing.assert_allclose(found[head, :length], expected, atol=1e-4)
    np.testing.assert_array_equal(found[:, length:], 0)


@pytest.fixture(scope="module")
def runs():
    """Two prompts and 25 tokens more: simulation, state before them and after."""
    sim = Sim(METHOD, Stream.draw(1), [60, 3])
    start = jax.device_get(sim.cache.state)
    sim.run(25)
    return sim, start, jax.device_get(sim.cache.state)


def check_representatives(sim, state, b, head, score):
    """Each block is stood for by its tokens of the largest scores."""
    for block in np.flatnonzero(state.count[b, head]):
        pos = state.pos[b, head, block, : state.count[b, head, block]]
        best = pos[np.argsort(-score[pos], kind="stable")][: METHOD.representatives]
        margin = np.sort(score[pos])[::-1]
        if len(pos) > METHOD.representatives and margin[1] - margin[2] < 1e-4:
            continue
        mine = state.index.key[b, head, block]
        expected = sim.stream.k[b, best, head]
        order, other = (np.lexsort(rows.T) for rows in (mine[: len(best)], expected))
        if len(best) < len(mine):
            mine = mine[np.abs(mine).sum(-1) > 0]
            order = np.lexsort(mine.T)
        np.testing.assert_allclose(mine[order], expected[other], atol=1e-6)
        stored = np.sort(state.index.score[b, head, block])[::-1][: len(best)]
        np.testing.assert_allclose(stored, np.sort(score[best])[::-1], atol=2e-4)


def test_representatives_of_a_prompt(runs):
    sim, start, _ = runs
    for head in range(HEADS):
        check_representatives(sim, start, 0, head, brute_force_scores(sim.stream, 0, head, 60, METHOD.window))


def decoded_scores(stream, b, head, prompt, length, window, attended):
    """Local scores after decoding: each step's attention over what it attended, summed over the group, normalised."""
    total = np.zeros(length)
    total[:prompt] = brute_force_scores(stream, b, head, prompt, window)
    for at in range(prompt, length):
        pos = attended[at]
        q = stream.q[b, at].reshape(HEADS, GROUP, SIZE)[head].astype(np.float64)
        score = q @ stream.k[b, pos, head].T.astype(np.float64) / np.sqrt(SIZE)
        weight = np.exp(score - score.max(-1, keepdims=True))
        weight = (weight / weight.sum(-1, keepdims=True)).sum(0)
        weight = np.where(pos > at - window, weight, 0)
        total[pos] += GROUP * weight / weight.sum()
    return total


def test_representatives_of_decoded_blocks():
    sim = Sim(METHOD, Stream.draw(2), [60, 3])
    spec, attended = sim.plan.spec, [[{}, {}] for _ in range(2)]
    for _ in range(25):
        at = sim.at.copy()
        _, report = sim.step()
        for b in range(2):
            tail = np.r_[0 : min(spec.sinks, at[b]), max(spec.sinks, at[b] - spec.ring) : at[b] + 1]
            for head in range(HEADS):
                chosen = np.asarray(report.selected)[b, head]
                attended[b][head][at[b]] = np.concatenate([chosen[chosen >= 0], tail])
    state = jax.device_get(sim.cache.state)
    for b, prompt in enumerate([60, 3]):
        for head in range(HEADS):
            score = decoded_scores(sim.stream, b, head, prompt, sim.at[b], METHOD.window, attended[b][head])
            check_representatives(sim, state, b, head, score)


@pytest.mark.parametrize("rule", ["softmax_mean", "softmax_max"])
@pytest.mark.parametrize("shared", [True, False])
def test_blocks_without_all_their_tokens_have_no_part_in_a_softmax(runs, shared, rule):
    """Given queries of very different sizes, so that a block more in the softmax of each would change the order."""
    sim, _, state = runs
    method = dataclasses.replace(METHOD, shared=shared, aggregation=rule)
    key, count = state.index.key[0].astype(np.float64).sum(2), state.count[0]
    for seed in range(8):
        q = np.random.default_rng(seed).normal(size=(HEADS, GROUP, SIZE)).astype(np.float32) / 4
        q[:, 0] -= key.mean(1) / 8  # all products of this query are negative
        found = selection(sim, 0, q, method).block
        score = np.einsum("kgd,knd->kgn", q.astype(np.float64), key) / np.sqrt(SIZE)
        weight = np.exp(np.where(count[:, None] == 4, score, -np.inf))
        share = weight / weight.sum(-1, keepdims=True)
        share = share.reshape(1, -1, share.shape[-1]) if shared else share
        relevance = np.broadcast_to(share.mean(1) if rule == "softmax_mean" else share.max(1), count.shape)
        for head in range(HEADS):
            opened = np.flatnonzero((count[head] > 0) & (count[head] < 4))
            full = np.flatnonzero(count[head] == 4)
            expected = [*opened, *full[np.argsort(-relevance[head, full], kind="stable")]]
            np.testing.assert_array_equal(found[head], expected[: sim.plan.spec.max_blocks])


@pytest.mark.parametrize("shared", [True, False])
def test_blocks_are_ranked_by_the_sum_over_representatives(runs, shared):
    sim, _, state = runs
    method = InfLLM(budget=24, sinks=2, window=4, block=4, representatives=2, shared=shared)
    spec = sim.plan.spec
    q = np.random.default_rng(3).normal(size=(HEADS, GROUP, SIZE)).astype(np.float32)
    found = selection(sim, 0, q, method).block
    relevance = np.einsum("kgd,knrd->kn", q.astype(np.float64), state.index.key[0])
    relevance = np.broadcast_to(relevance.sum(0), relevance.shape) if shared else relevance
    for head in range(HEADS):
        count = state.count[0, head]
        opened = np.flatnonzero((count > 0) & (count < 4))
        full = np.flatnonzero(count == 4)
        expected = [*opened, *full[np.argsort(-relevance[head, full], kind="stable")]][: spec.max_blocks]
        np.testing.assert_array_equal(found[head], expected)
    assert (found[0] == found[1]).all() == shared


def test_a_prompt_without_its_queries_is_refused():
    cache = kvjax.init_cache(METHOD, batch=1, kv_heads=HEADS, group=GROUP, head_dim=SIZE, capacity=40)
    stream, length = Stream.rows(4, 5), jnp.asarray([20])
    q, key, value = (jnp.asarray(array[:1, :20]) for array in (stream.q, stream.k, stream.v))
    with pytest.raises(ConfigError, match="queries of all 20 tokens"):
        kvjax.prefill_cache(cache, key, value, length)
    filled = kvjax.prefill_cache(cache, key, value, length, q)
    beside = Sim(METHOD, stream, [20, 20])
    np.testing.assert_array_equal(filled.layer.state.index.key[0, :, :4], beside.cache.state.index.key[0, :, :4])


def test_more_representatives_than_tokens_are_refused():
    with pytest.raises(ConfigError, match="representatives=9"):
        InfLLM(block=8, representatives=9)
    with pytest.raises(ConfigError, match="observation=3"):
        InfLLM(observation=3)
