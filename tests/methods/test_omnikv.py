"""OmniKV: one layer chooses by the largest weight of any head, and the layers after it use its choice."""

import dataclasses

import numpy as np
import pytest
import tiny
from harness import HEADS, METHODS, Sim, Stream, attention_weights

from kvjax.cache.pool import MemoryPool
from kvjax.inference import decode
from kvjax.store.flash.store import FlashStore

METHOD = METHODS["omnikv"]


@pytest.mark.parametrize("seed", range(2))
def test_tokens_are_those_with_the_largest_weight_of_any_head(seed):
    stream = Stream.draw(seed)
    sim = Sim(METHOD, stream, [60, 35])
    spec = sim.plan.spec
    for _ in range(20):
        at = sim.at.copy()
        _, report = sim.step()
        for b in range(2):
            positions = np.arange(spec.sinks, at[b] - spec.ring)
            weight = attention_weights(stream, b, at[b], [positions] * HEADS).max((0, 1))
            best = sorted(positions, key=lambda p: -weight[p])[: spec.selected_rows]
            for head in range(HEADS):
                assert set(np.asarray(report.selected[b, head])) == set(best)


def test_the_layers_after_a_filter_layer_use_its_choice(params, tokens):
    method = dataclasses.replace(METHOD, dense_layers=0, reuse=2, dense_filters=False)
    plan, state, _, _ = tiny.start(params, tokens, method)
    assert state.layers[1].state.index == ()  # no keys are kept for choosing
    for i in range(10):
        done = decode.step(plan, params, state, tokens[np.arange(2), np.asarray(tiny.PROMPT) + i])
        state = done.state
        np.testing.assert_array_equal(done.reports[0].selected, done.reports[1].selected)


@pytest.mark.parametrize("driver", ["staged", "fused"])
def test_filter_layers_attend_everything_and_the_others_what_they_choose(params, tokens, driver, tmp_path):
    method = dataclasses.replace(METHOD, dense_layers=0, reuse=2)
    spec, logits = tiny.start(params, tokens, method)[0].layers[1].spec, []
    for store in (None, FlashStore(directory=tmp_path)):
        plan, state, _, _ = tiny.start(params, tokens, method, store)
        assert isinstance(state.layers[0].pool, MemoryPool)  # the filter layer's blocks are never on the store
        for i in range(10):
            at = np.asarray(tiny.PROMPT) + i
            done = decode.step(plan, params, state, tokens[np.arange(2), at], driver=driver)
            state = done.state
            attended = [np.asarray(report.attended) for report in done.reports]
            np.testing.assert_array_equal(attended[0], np.broadcast_to(at[:, None] + 1, attended[0].shape))
            np.testing.assert_array_equal(attended[1], np.minimum(attended[0], spec.budget))
        logits.append(done.logits)
    np.testing.assert_array_equal(*logits)


def test_with_a_budget_for_everything_it_is_full_attention(params, tokens):
    method = dataclasses.replace(METHOD, dense_layers=0, reuse=2, budget=tiny.CAPACITY)
    outputs = []
    for one in (method, METHODS["full"]):
        plan, state, _, _ = tiny.start(params, tokens, one)
        outputs.append(tiny.decoded(plan, params, state, tokens, 6)[1])
    np.testing.assert_allclose(*outputs, atol=1e-4)
