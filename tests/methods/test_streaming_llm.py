"""StreamingLLM: attends the sinks and the newest tokens, and nothing else."""

import numpy as np
import pytest
from harness import HEADS, Sim, Stream, attention_over

from kvjax.errors import ConfigError
from kvjax.methods import StreamingLLM

METHOD = StreamingLLM(budget=12, sinks=2)


def expected(at):
    """Sinks and the last budget - sinks tokens, the newest one `at` included."""
    return sorted({p for p in range(at + 1) if p < METHOD.sinks or p > at - (METHOD.budget - METHOD.sinks)})


@pytest.mark.parametrize("prompt", [(60, 30), (13, 12), (1, 5)], ids=["long", "as_the_budget", "short"])
def test_attention_is_over_sinks_and_the_newest_tokens_exactly(prompt):
    stream = Stream.draw(0)
    sim = Sim(METHOD, stream, prompt)
    for _ in range(25):
        at = sim.at.copy()
        out, report = sim.step()
        for b in range(2):
            positions = expected(at[b])
            np.testing.assert_allclose(out[b], attention_over(stream, b, at[b], [positions] * HEADS), atol=2e-5)
            assert (np.asarray(report.attended[b]) == len(positions)).all()


def test_attended_positions_are_sinks_and_the_newest_tokens():
    sim = Sim(METHOD, Stream.draw(1), [40, 20])
    for _ in range(25):
        before = [[sim.places(b, head) for head in range(HEADS)] for b in range(2)]
        at = sim.at.copy()
        sim.step()
        for b in range(2):
            for places in before[b]:
                assert sorted(places["sinks"] + places["window"] + [at[b]]) == expected(at[b])
                assert not places["held"] and not places["blocks"]


def test_a_dropped_token_has_no_influence():
    stream = Stream.draw(2)
    other = Stream(stream.q, stream.k.copy(), stream.v.copy())
    other.k[:, 2:20] += 5
    other.v[:, 2:20] += 5
    np.testing.assert_array_equal(Sim(METHOD, stream, [40, 40]).run(5), Sim(METHOD, other, [40, 40]).run(5))


@pytest.mark.parametrize("settings", [{"budget": None}, {"budget": 5, "sinks": 4}], ids=["no_budget", "no_window"])
def test_impossible_budgets_are_refused(settings):
    with pytest.raises(ConfigError, match="budget"):
        StreamingLLM(**settings).spec(kv_heads=1, group=1, head_dim=8, capacity=100)
