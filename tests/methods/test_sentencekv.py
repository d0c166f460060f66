"""SentenceKV: which tokens of the prompt are kept, in which sentence, and what stands for it."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from harness import CAPACITY, HEADS, METHODS, Sim, Stream, attention_weights

from kvjax.errors import ConfigError
from kvjax.methods import SentenceKV

METHOD = METHODS["sentencekv"]
SENTENCE_ENDS = {3, 30, 60}  # of tests/methods/shared/table.json
PROMPTS = (70, 45)


def sentences(token, start, stop):
    """Ranges of positions: to the first sentence end from the `shortest`-th token on, or chunk + deviation long."""
    found, begin = [], start
    while begin < stop:
        ends = [p for p in range(begin + METHOD.shortest - 1, begin + METHOD.chunk + METHOD.deviation)
                if p < len(token) and token[p] in SENTENCE_ENDS]
        end = ends[0] + 1 if ends else begin + METHOD.chunk + METHOD.deviation
        found.append(range(begin, min(end, stop)))
        begin = end
    return found


def kept_of(stream, b, head, length, spec):
    """The prompt's tokens with most votes."""
    rows = [attention_weights(stream, b, at, [range(at + 1)] * HEADS)[head].mean(0)
            for at in range(length - METHOD.observation, length)]
    observation_scores = sum(np.pad(row, (0, length - len(row))) for row in rows)
    positions = range(spec.sinks, length - spec.ring)
    return set(sorted(positions, key=lambda p: -observation_scores[p])[: int(METHOD.keep * spec.selected_rows)])


@pytest.mark.parametrize("steps", [0, 20])
def test_kept_tokens_are_in_their_sentences_with_the_mean_of_their_keys(steps):
    stream = Stream.draw(0)
    sim = Sim(METHOD, stream, PROMPTS)
    for _ in range(steps):
        sim.step()
    state, spec = jax.device_get(sim.cache.state), sim.plan.spec
    for b, length in enumerate(PROMPTS):
        for head in range(HEADS):
            later = set(range(length - spec.ring, length - spec.ring + steps))
            kept = kept_of(stream, b, head, length, spec) | later
            for block, sentence in enumerate(sentences(stream.token[b], spec.sinks, length - spec.ring + steps)):
                mine = [p for p in sentence if p in kept]
                assert state.pos[b, head, block, : state.count[b, head, block]].tolist() == mine
                total = stream.k[b, mine, head].sum(0)
                np.testing.assert_allclose(state.index.vectors.total[b, head, :, block], total, atol=1e-4)


def test_without_a_factor_nothing_is_dropped():
    method = dataclasses.replace(METHOD, keep=None)
    assert METHOD.evicts and not method.evicts
    sim = Sim(method, Stream.draw(1), PROMPTS)
    for b, length in enumerate(PROMPTS):
        assert sorted(sim.places(b, 0)["blocks"]) == list(range(2, length - 4))


def test_a_factor_that_covers_the_prompt_changes_nothing():
    """Compared with one that keeps nothing back, the choice of blocks being the same."""
    stream = Stream.draw(2)
    wide = dataclasses.replace(METHOD, keep=float(CAPACITY), max_blocks=12)
    np.testing.assert_array_equal(
        Sim(wide, stream, PROMPTS).run(15), Sim(dataclasses.replace(wide, keep=None), stream, PROMPTS).run(15)
    )


@pytest.mark.parametrize(
    "change", [{"keep": 0.5}, {"keep": math.inf}, {"splitting": "dynamic"}, {"observation": 0}], ids=str
)
def test_impossible_settings_are_refused(change):
    with pytest.raises(ConfigError, match="sentencekv"):
        dataclasses.replace(METHOD, **change)


def test_a_budget_without_room_for_a_sentence_is_refused():
    sizes = {"kv_heads": 2, "group": 2, "head_dim": 8, "capacity": 96}
    with pytest.raises(ConfigError, match="leaves nothing to keep"):
        dataclasses.replace(METHOD, budget=METHOD.sinks + METHOD.window).spec(**sizes)


def test_it_needs_a_table():
    with pytest.raises(ConfigError, match="needs table="):
        SentenceKV().weights(0)
