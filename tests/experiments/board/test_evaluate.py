"""Differences of losses, and which combinations are timed."""

import ml_collections
import numpy as np
import pytest
from scipy import stats

from configs.evaluate import get_config
from configs.kvswap_paper import get_config as kvswap_config
from configs.throughput import get_config as timed_config
from experiments import common
from experiments.board import evaluate
from experiments.speed import made_up, throughput
from kvjax.errors import CheckpointError, ConfigError, KvjaxError
from kvjax.eval import intervals


def row(method, losses, **other):
    nll = float(np.mean(losses))
    return {"task": "perplexity", "context": 64, "seed": 0, "method": method, "nll": nll, "nll_by_text": losses} | other


def test_a_loss_has_its_difference_to_the_full_cache_with_an_interval_over_texts():
    full, other = [1.0, 3.0, 2.0, 5.0], [1.1, 3.3, 1.9, 5.5]
    found = evaluate.with_differences([row("full", full), row("quest", other), row("quest", other, context=128)])
    test = stats.ttest_rel(other, full)
    low, high = found[1]["delta_nll_interval"]
    assert found[1]["delta_nll"] == pytest.approx(0.2)
    assert (low, high) == pytest.approx(test.confidence_interval(0.95))
    assert found[0]["delta_nll"] == 0 and "delta_nll" not in found[2]


def test_a_method_is_timed_only_where_it_says():
    config = ml_collections.ConfigDict({
        "contexts": (8, 16), "batches": (1, 4), "stores": ("memory", "flash"),
        "methods": (
            {"name": "full", "only": {"stores": ("memory",)}},
            {"name": "quest", "only": {"contexts": (16,), "batches": (4,)}},
        ),
    })
    found = [(context, batch, store, one["name"]) for context, batch, store, one in throughput._combinations(config)]
    assert found == [
        (8, 1, "memory", "full"), (8, 4, "memory", "full"), (16, 1, "memory", "full"), (16, 4, "memory", "full"),
        (16, 4, "memory", "quest"), (16, 4, "flash", "quest"),
    ]


def test_what_is_left_of_the_full_score_has_an_interval_of_paired_samples():
    full, mine = [1.0] * 90 + [0.0] * 10, [1.0] * 87 + [0.0] * 9 + [1.0] + [0.0] * 3
    found = evaluate.share_of(mine, full)
    assert found["share_of_full"] == pytest.approx(88 / 90) and found["samples"] == 100
    low, high = found["share_interval"]
    apart = intervals.paired_bootstrap(mine, full)
    assert (low, high) == pytest.approx((1 + apart[0] / 0.9, 1 + apart[1] / 0.9)) and low < 88 / 90 < high
    low, high = evaluate.share_of(full, full)["share_interval"]
    assert 0.95 < low < 1 < high


def test_nothing_is_a_share_of_a_score_of_0():
    assert evaluate.share_of([0.0, 1.0], [0.0, 0.0]) == {"samples": 2}


def test_a_score_has_its_difference_to_the_full_cache_on_the_same_samples():
    """Given questions after and within the prompt, each is compared with its own."""
    def answers(method, scores, **other):
        return {"task": "needle", "context": 64, "seed": 0, "method": method, "scores": scores,
                **evaluate.accuracy(scores), "question": "after", **other}

    full, within, mine = [1.0] * 9 + [0.0], [0.0] * 10, [1.0] * 7 + [0.0] * 3
    rows = evaluate.with_differences([answers("full", full), answers("full", within, question="within"),
                                      answers("quest", mine), answers("quest", mine, question="within"),
                                      answers("quest", mine, seed=1)])
    assert [row.get("delta_accuracy") for row in rows] == pytest.approx([None, None, -0.2, 0.7, None])
    assert rows[2]["delta_accuracy_interval"] == intervals.paired_bootstrap(mine, full)


@pytest.mark.parametrize(("changes", "words"), [
    ({"samples": 0}, "samples=0"), ({"batch": 0}, "batch=0"), ({"seed": -1}, "seed=-1"),
    ({"tasks": ()}, "tasks is empty"),
    ({"methods": ({"name": "quest", "slots": {"count": 9}},)}, "no use for a method's slots"),
])
def test_settings_that_make_no_evaluation_are_refused(changes, words):
    config = get_config("smoke")
    config.update(changes)
    with pytest.raises(ConfigError, match=words):
        evaluate.run(config, "unused")


@pytest.mark.parametrize(("changes", "words"), [
    ({"methods": ({"name": "quest", "budget": 8},)}, "budget=8"), ({"lengths": (256, 5)}, "do not fit in 5 tokens"),
    ({"methods": ({"name": "quest", "dtype": "int3"},)}, "int3"),
    ({"methods": ({"name": "shadowkv"},), "tasks": ("perplexity",), "lengths": (30,)}, "where there are 30"),
])
def test_what_does_not_fit_is_found_before_anything_is_written(tmp_path, changes, words):
    config = get_config("smoke")
    config.update(changes)
    with pytest.raises(KvjaxError, match=words):
        evaluate.run(config, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_prompts_are_those_that_are_read(monkeypatch):
    """Given a task, tokens and capacity are what `measure` fills caches with, batch by batch."""
    config, filled, llm = get_config("smoke"), [], common.load_model("")
    stream = common.held_out_tokens(llm)

    def prefill(contexts, capacity, **settings):
        filled.append(([len(one) for one in contexts], capacity))
        raise InterruptedError

    monkeypatch.setattr(llm, "prefill", prefill)
    for task in config.tasks:
        with pytest.raises(InterruptedError):
            evaluate.measure(llm, {"name": "full"}, task, 256, stream, config)
        assert evaluate.prompts(llm, stream, task, 256, config) == [filled.pop()]


@pytest.mark.parametrize(("changes", "words"), [
    ({"steps": 0}, "steps=0"), ({"batches": (0,)}, "batches="), ({"contexts": (0,)}, "contexts="),
    ({"stores": ()}, "stores is empty"), ({"methods": ({"name": "quest", "slots": {"size": 9}},)}, "no setting size"),
    ({"models": ("reference", "nope")}, "unknown shape 'nope'"), ({"stores": ("memory", "x")}, "unknown store 'x'"),
    ({"rounds": 0}, "rounds=0"), ({"drivers": ("staged", "nope")}, "unknown driver 'nope'"),
    ({"dtype": "int7"}, "int7"),
    ({"methods": ({"name": "quest", "budget": 8},)}, "budget=8"),
    ({"models": ("cache-path",), "methods": ({"name": "kvswap", "sigma": 1024},)}, "sigma"),
    ({"slots": 2, "stores": ("host",), "methods": ({"name": "quest", "budget": 128},)}, "slots=2"),
    ({"methods": ({"name": "pqcache", "parts": 3},), "stores": ("memory",)}, "parts=3"),
    ({"methods": ({"name": "quest", "only": {"context": (9,)}},)}, "'context'"), ({"outputs": (9999,)}, "outputs="),
    ({"methods": ({"name": "h2o", "budget": 64},)}, "h2o@64 cannot be timed on made-up prompts"),
])
def test_settings_with_which_nothing_can_be_timed_are_refused(tmp_path, monkeypatch, changes, words):
    monkeypatch.setattr(made_up, "random_params", lambda *args: pytest.fail("weights were made"))
    config = timed_config("smoke")
    config.update(changes)
    with pytest.raises(ConfigError, match=words):
        throughput.run(config, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("replayed", "changes", "error", "words"), [
    (True, {"model": "/nowhere"}, CheckpointError, "/nowhere"), (0.1, {}, ConfigError, "a step cannot select"),
])
def test_what_cannot_be_replayed_is_found_before_anything_is_written(tmp_path, replayed, changes, error, words):
    config = kvswap_config("smoke")
    config.methods = ({"name": "kvswap", "budget": 500, "replay": replayed},)
    config.replay.update(changes)
    with pytest.raises(error, match=words):
        throughput.run(config, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_summary_has_the_rows_that_were_asked_for():
    rows = [row("full", [1.0]), row("quest", [2.0]), row("full", [1.0], context=128)]
    assert evaluate.asked_for(rows, [("perplexity", 64, "quest"), ("perplexity", 128, "full")]) == rows[1:]
