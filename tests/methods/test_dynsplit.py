"""DynSplit-KV: where blocks end, that they end there however tokens arrive, and which blocks a query gets."""

import dataclasses
import functools
import itertools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import CAPACITY, DELIMITERS, GROUP, HEADS, METHODS, SIZE, Sim, Stream, selection
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import make_params

from kvjax.calibration.boundaries import boundary_scores
from kvjax.errors import ConfigError, FormatMismatch
from kvjax.inference import prefill
from kvjax.inference.plan import make_plan
from kvjax.methods import DynSplit
from kvjax.methods.dynsplit import SPLITTINGS, delimiter_weights
from kvjax.methods.shared.delimiter_texts import PAPER_MARKS
from kvjax.methods.shared.delimiters import NO_DELIMITER, DelimiterCounts, Delimiters
from kvjax.methods.shared.importance import RAREST
from kvjax.methods.shared.segments import Split, weights_of
from kvjax.models.config import ModelConfig

PROMPT, SENTENCES = METHODS["dynsplit"], METHODS["dynsplit_sentence_mean"]
METHOD = dataclasses.replace(PROMPT, importance="table")
SMALL = {
    name: dataclasses.replace(METHOD, splitting=name, window=6, shortest=2, chunk=5, deviation=2) for name in SPLITTINGS
}


def brute_force(weight, split):
    """Lengths of the blocks of a sequence, by DD-Select as the paper tells it; the last one may be cut off."""
    begin, lengths = 0, []
    while begin < len(weight):
        ends = [n for n in range(split.least, split.most + 1) if begin + n <= len(weight)]
        found = [n for n in ends if weight[begin + n - 1] != NO_DELIMITER]
        reach = max(split.ideal - split.least, split.most - split.ideal, 1)

        def score(n, begin=begin, reach=reach):
            return split.alpha * weight[begin + n - 1] + (1 - split.alpha) * (1 - abs(n - split.ideal) / reach)

        lengths.append(max(found, key=lambda n: (score(n), -n)) if found else split.otherwise)
        begin += lengths[-1]
    return lengths


@functools.partial(jax.jit, static_argnums=(0, 2))
def begins(split, weight, count):
    return split.begins(weight, jnp.int32(0), count)


weights = st.lists(st.sampled_from([NO_DELIMITER] * 4 + [0.0, 0.25, 0.5, 0.75, 1.0]), min_size=40, max_size=40)


@settings(max_examples=80)
@given(weight=weights, name=st.sampled_from(SPLITTINGS))
def test_blocks_end_where_the_paper_says(weight, name):
    split, weight = SMALL[name].split, np.asarray(weight, np.float32)
    found = np.diff(begins(split, weight, 21))
    expected = brute_force(weight, split)
    np.testing.assert_array_equal(found[: len(expected) - 1], expected[:-1])


@pytest.mark.parametrize(("weight", "length"), [
    ([-1, -1, -1, -1, -1], 5), ([-1, -1, -1, 0, -1], 6), ([0.4, -1, 0.2, -1, 0.4], 5), ([0.9, -1, 0.0, -1, -1], 5),
    ([-1, 0.8, 0.2, -1, -1], 4), ([-1, 0.5, -1, 0.5, -1], 4),
])
def test_a_heavy_delimiter_is_worth_a_detour(weight, length):
    """Given C = 5, Delta = 2, alpha = 1/2, of the third to the seventh token one is the last."""
    split = Split(ideal=5, least=3, most=7, alpha=0.5, otherwise=5)
    assert int(split.length(jnp.asarray(weight, jnp.float32))) == length


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_without_weights_the_nearest_delimiter_ends_a_block(alpha):
    split = dataclasses.replace(SMALL["no_weight"], alpha=alpha).split
    assert int(split.length(jnp.asarray([1, -1, -1, 1, 1], jnp.float32))) == 6


@pytest.mark.parametrize(("closeness", "length"), [("linear", 5), ("quadratic", 6), ("inverse", 8)])
def test_the_form_of_the_closeness_decides_what_a_detour_costs(closeness, length):
    """Given heavier ends at one and at three tokens from the ideal end."""
    split = Split(ideal=5, least=2, most=8, alpha=0.5, otherwise=5, closeness=closeness)
    weight = jnp.asarray([-1, -1, -1, 0.24, 0.55, -1, 1], jnp.float32)
    assert int(split.length(weight)) == length


def test_a_block_may_be_longer_where_nothing_but_an_array_bounds_it():
    method = dataclasses.replace(SMALL["no_length"], longest=9, window=9)
    weight = np.full(60, NO_DELIMITER, np.float32)
    weight[[1, 8, 20]] = 0.5, 1.0, 1.0
    np.testing.assert_array_equal(np.diff(begins(method.split, weight, 4)), [9, 5, 7])
    assert plan_rows(method) == 9 and plan_rows(SMALL["no_length"]) == 7


def plan_rows(method):
    """Rows of a block."""
    return method.blocks(CAPACITY, 20)[1]


def test_weights_are_looked_up_by_token():
    token = jnp.asarray([[7, 3, -1], [40, 9, 8]])
    found = weights_of(token, jnp.asarray([3, 8, 9]), jnp.asarray([0.5, 0.0, 1.0]))
    np.testing.assert_array_equal(found, [[-1, 0.5, -1], [-1, 1, 0]])


def blocks_of(sim, b, head=0):
    """Positions in each block of one sequence."""
    state = jax.device_get(sim.cache.state)
    return [state.pos[b, head, j, : n].tolist() for j, n in enumerate(state.count[b, head]) if n]


def table_weights(method, token):
    delimiter, weight = delimiter_weights(method.table, method.splitting)
    known = dict(zip(delimiter.tolist(), weight.tolist(), strict=True))
    return np.asarray([known.get(t, NO_DELIMITER) for t in token.tolist()], np.float32)


@pytest.mark.parametrize("method", [SMALL["dynamic"], SMALL["fixed"], SENTENCES], ids=lambda one: one.splitting)
def test_blocks_are_the_same_however_tokens_arrive(method):
    """Given any prompt, after the same number of tokens the blocks are those of brute force over all tokens.

    The other two ways differ from "dynamic" by their numbers; that blocks end where these say is tried above.
    """
    stream = Stream.draw(3)
    for prompt in ([60, 37], [4, 23]):
        sim = Sim(method, stream, prompt)
        sim.run(60 - min(prompt) if min(prompt) > 4 else 70)
        for b, length in enumerate(sim.at):
            known = table_weights(method, stream.token[b, method.sinks : length])
            lengths = brute_force(known, method.split)
            edges = method.sinks + np.cumsum([0, *lengths])
            last = length - method.window + 1
            expected = [list(range(a, min(z, last))) for a, z in itertools.pairwise(edges) if a < last]
            assert blocks_of(sim, b) == blocks_of(sim, b, 1) == expected


@functools.cache
def filled_with_delimiters():
    """A long and a short prompt of marks and words."""
    stream = Stream.draw(3)
    method = dataclasses.replace(PROMPT, window=6, chunk=5, deviation=2)
    sim = Sim(method, dataclasses.replace(stream, k=with_ids(stream)), [88, 50])
    return sim


def with_ids(stream):
    """Keys whose ids are two marks, or no delimiters."""
    key = stream.k.copy()
    ids = np.random.default_rng(5).choice([3, 9, 1, 2], key.shape[:2])
    key[:, :, 0, 0] = (64 * np.round(np.abs(key[:, :, 0, 0]) * 15) + ids + 0.5) / 1000
    return key


def test_each_prompt_weighs_delimiters_by_its_own_attention():
    """And cuts its blocks by these weights, the tokens that come later, too."""
    sim = filled_with_delimiters()
    index, method = jax.device_get(sim.cache.state.index), sim.plan.method
    marks = np.isin(index.delimiter[0], [3, 9])
    for weight in index.weight:
        assert set(weight[marks]) == {0.0, 1.0} and ((weight[~marks] > 0) & (weight[~marks] < 1)).all()
    by_table = METHOD.weights(0)[1]
    assert not np.allclose(index.weight, by_table)
    sim.run(8)
    for b, length in enumerate(sim.at):
        known = dict(zip(index.delimiter[b].tolist(), index.weight[b].tolist(), strict=True))
        token = sim.stream.token[b, method.sinks : length].tolist()
        lengths = brute_force(np.asarray([known.get(t, NO_DELIMITER) for t in token], np.float32), method.split)
        edges, last = method.sinks + np.cumsum([0, *lengths]), length - method.window + 1
        expected = [list(range(a, min(z, last))) for a, z in itertools.pairwise(edges) if a < last]
        assert blocks_of(sim, b) == blocks_of(sim, b, 1) == expected


def test_weights_of_a_prompt_are_those_of_a_table_made_from_it():
    """Given a model of one layer, over whose heads alone a table takes means, and prompts of two lengths."""
    config = ModelConfig(
        family="llama", vocab_size=64, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=4, num_kv_heads=2,
        head_dim=8, max_position=128,
    )
    params, rng = make_params(config), np.random.default_rng(0)
    table = Delimiters.load(DELIMITERS)
    tokens = rng.choice([*table.tokens, *range(40, 46)], (2, 120)).astype(np.int32)
    length = np.asarray([120, 90], np.int32)
    method = DynSplit(table=DELIMITERS, budget=48, window=12)
    state, _ = prefill.prefill(make_plan(config, method, 2, 128), params, tokens, length)
    for row, count, weight in zip(tokens, length, state.layers[0].state.index.weight, strict=True):
        counts = DelimiterCounts(64)
        counts.add(row[:count], boundary_scores(config, params, row[:count]))
        expected = counts.table("", dict(zip(table.tokens, table.texts, strict=True)), RAREST).weights()
        np.testing.assert_allclose(weight, expected[list(table.tokens)], atol=2e-4)
        assert 0 < np.median(weight) < 1


def test_the_paper_has_thirteen_candidates():
    """The table of the tests has the five that are among eight delimiters."""
    token, weight = dataclasses.replace(METHOD, candidates="paper").weights(0)
    assert token.tolist() == [3, 9, 21, 30, 60] and weight.max() == 1 and weight.min() == 0
    assert len(PAPER_MARKS) == 13
    with pytest.raises(ConfigError, match="candidates='all'"):
        dataclasses.replace(Delimiters.load(DELIMITERS), texts=("\n",) * 8).among(PAPER_MARKS)


@functools.cache
def decoded(vectors):
    """A long and a short prompt and 20 tokens more, on which the aggregation has no influence."""
    sim = Sim({"minmax": METHOD, "mean": SENTENCES}[vectors], Stream.draw(1), [60, 30])
    sim.run(20)
    return sim


@pytest.mark.parametrize("vectors", ["minmax", "mean"])
@pytest.mark.parametrize("rule", ["max", "softmax_mean"])
def test_blocks_are_selected_as_brute_force_ranks_them(vectors, rule):
    sim, rng = decoded(vectors), np.random.default_rng(0)
    for b in range(2):
        q = rng.normal(size=(HEADS, GROUP, SIZE)).astype(np.float32)
        spec = sim.plan.spec
        found = selection(sim, b, q, dataclasses.replace(sim.plan.method, aggregation=rule)).block
        for head in range(HEADS):
            keys = [sim.stream.k[b, block, head] for block in blocks_of(sim, b, head)]
            expected = brute_force_ranking(keys, q[head], vectors, rule)[: spec.max_blocks]
            np.testing.assert_array_equal(found[head, : len(expected)], expected)
            assert (found[head, len(expected) :] == spec.num_blocks).all()


def brute_force_ranking(blocks, q, vectors, rule):
    """Blocks of one head, best first."""
    if vectors == "mean":
        score = np.stack([q @ block.mean(0) for block in blocks], axis=1)
    else:
        score = np.stack([np.maximum(q * block.min(0), q * block.max(0)).sum(-1) for block in blocks], axis=1)
    score = score / np.sqrt(SIZE)
    if rule == "softmax_mean":
        return np.argsort(-np.asarray(jax.nn.softmax(score)).mean(0), kind="stable")
    return np.argsort(-score.max(0), kind="stable")


def test_unknown_tokens_are_no_delimiters():
    plan = harness.plan_of(METHOD)
    index = METHOD.init(plan.spec, METHOD.weights(0))
    assert (np.asarray(weights_of(jnp.full(4, -1), index.delimiter, index.weight)) == NO_DELIMITER).all()


@pytest.mark.parametrize(("wrong", "cause"), [
    ({"splitting": "paragraph"}, "one of"), ({"vectors": "median"}, "one of"), ({"deviation": 4}, "deviation=4"),
    ({"window": 2}, "tokens that decide"), ({"alpha": 1.5}, "alpha"), ({"shortest": 0}, "shortest"),
    ({"importance": "text"}, "prompt, table"), ({"candidates": "13"}, "all, paper"), ({"closeness": "near"}, "linear"),
    ({"longest": 8}, "'sentence' or 'no_length'"), ({"longest": 3, "splitting": "no_length"}, "at least chunk"),
    ({"importance": "prompt", "observation": 7}, "importance='table'"),
])
def test_impossible_settings_are_refused(wrong, cause):
    with pytest.raises(ConfigError, match=cause):
        dataclasses.replace(METHOD, **wrong)


def test_a_table_of_another_model_is_refused():
    METHOD.check_model("made-up")
    with pytest.raises(FormatMismatch, match="those of the model 'made-up'"):
        METHOD.check_model("another")
    DynSplit(splitting="fixed").check_model("another")


def test_weights_of_the_file_are_used_where_asked_for_alone():
    """Given an empty cache."""
    index = [method.init(harness.plan_of(method).spec, method.weights(0)) for method in (PROMPT, METHOD)]
    assert set(np.asarray(index[0].weight)) == {1.0}
    np.testing.assert_array_equal(index[1].weight, METHOD.weights(0)[1])


@pytest.mark.parametrize(("change", "observed"), [
    ({}, None), ({"observation": 64}, 64), ({"splitting": "no_length"}, None), ({"importance": "table"}, 0),
    ({"splitting": "no_weight"}, 0), ({"splitting": "fixed"}, 0),
], ids=str)
def test_a_prompt_computes_queries_only_where_they_weigh_delimiters(change, observed):
    assert dataclasses.replace(PROMPT, **change).observed == observed


def test_a_missing_table_is_named(tmp_path):
    with pytest.raises(ConfigError, match="needs table="):
        DynSplit().weights(0)
    with pytest.raises(ConfigError, match=r"none\.json"):
        DynSplit(table=str(tmp_path / "none.json")).weights(0)
    no_ends = dataclasses.replace(Delimiters.load(DELIMITERS), texts=(",",) * 8)
    no_ends.save(tmp_path / "table.json")
    with pytest.raises(ConfigError, match="sentence"):
        DynSplit(table=str(tmp_path / "table.json"), splitting="sentence").weights(0)
    assert DynSplit(splitting="fixed").weights(0)[0].tolist() == [-1]
