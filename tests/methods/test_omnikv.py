"""OmniKV: one layer chooses by the largest weight of any head, and the layers after it use its choice."""

import dataclasses

import numpy as np
import pytest
import tiny
from harness import HEADS, METHODS, Sim, Stream, attention_weights

from kvjax import decode

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
    plan, state, _, _ = tiny.start(params, tokens, dataclasses.replace(METHOD, dense_layers=0, reuse=2))
    assert state.layers[1].state.index == ()  # no keys are kept for choosing
    for i in range(10):
        done = decode.step(plan, params, state, tokens[np.arange(2), np.asarray(tiny.PROMPT) + i])
        state = done.state
        np.testing.assert_array_equal(done.reports[0].selected, done.reports[1].selected)
