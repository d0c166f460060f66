"""Oracle: the tokens it selects are the exact top-k by attention."""

import jax.numpy as jnp
import numpy as np
import pytest
from harness import CAPACITY, GROUP, HEADS, SIZE, Sim, Stream, attention_over, attention_weights

import kvjax
from kvjax.methods import Oracle

METHOD = Oracle(budget=24, sinks=2, window=4)


def middle(sim, length):
    """Positions between sinks and ring, which is what the oracle chooses from."""
    spec = sim.plan.spec
    return np.arange(spec.sinks, max(spec.sinks, length - spec.ring))


def attention_sums(stream, b, at, head, positions):
    """Softmax over the positions of each query head, summed over the group, in float64."""
    q = stream.q[b, at].astype(np.float64).reshape(HEADS, GROUP, SIZE)[head]
    scores = q @ stream.k[b, positions, head].astype(np.float64).T / np.sqrt(SIZE)
    weight = np.exp(scores - scores.max(-1, keepdims=True))
    return (weight / weight.sum(-1, keepdims=True)).sum(0)


@pytest.mark.parametrize("seed", range(3))
def test_the_selection_is_the_exact_top_k_by_summed_softmax(seed):
    stream = Stream.draw(seed)
    sim = Sim(METHOD, stream, [60, 35])
    for _ in range(30):
        at = sim.at.copy()
        _, report = sim.step()
        for b in range(2):
            positions = middle(sim, at[b])
            for head in range(HEADS):
                best = np.argsort(-attention_sums(stream, b, at[b], head, positions))[:18]  # 24 less sinks and window
                assert set(np.asarray(report.selected[b, head])) == set(positions[best])


def test_everything_is_selected_while_it_fits():
    sim = Sim(METHOD, Stream.draw(3), [15, 23])
    _, report = sim.step()
    for b, length in enumerate([15, 23]):
        for head in range(HEADS):
            assert set(np.asarray(report.selected[b, head])) - {-1} == set(middle(sim, length))


def test_no_selection_of_the_same_size_keeps_more_attention():
    """Given other sets of 18 tokens, none has a larger summed weight."""
    rng, stream = np.random.default_rng(0), Stream.draw(4)
    sim = Sim(METHOD, stream, [CAPACITY - 1, CAPACITY - 1])
    _, report = sim.step()
    positions = middle(sim, CAPACITY - 1)
    weight = dict(zip(positions, attention_sums(stream, 0, CAPACITY - 1, 0, positions), strict=True))
    kept = sum(weight[p] for p in np.asarray(report.selected[0, 0]))
    others = [sum(weight[p] for p in rng.permutation(positions)[:18]) for _ in range(200)]
    assert kept >= max(others)


def test_heads_are_weighed_by_capped_scores():
    """Gemma 2's: a bound far below the scores makes all heads' weights nearly equal."""
    stream, at, cap = Stream.draw(5), CAPACITY - 1, 0.3
    sizes = {"kv_heads": HEADS, "group": GROUP, "head_dim": SIZE, "capacity": CAPACITY}
    cache = kvjax.init_cache(METHOD, batch=1, soft_cap=cap, **sizes)
    keys, values = (jnp.asarray(array[:1, :at]) for array in (stream.k, stream.v))
    cache = kvjax.prefill_cache(cache, keys, values, np.array([at]))
    found, _ = kvjax.attend(cache, *(jnp.asarray(array[:1, at]) for array in (stream.q, stream.k, stream.v)))
    spec = cache.plan.spec
    positions = np.arange(spec.sinks, at - spec.ring)
    weights = attention_weights(stream, 0, at, [positions] * HEADS, cap=cap)[:, :, positions].sum(1)
    ends = [*range(spec.sinks), *range(at - spec.ring, at + 1)]
    kept = [[*ends, *positions[np.argsort(-weight)[: spec.selected_rows]]] for weight in weights]
    np.testing.assert_allclose(found[0], attention_over(stream, 0, at, kept, cap=cap), atol=2e-5)
