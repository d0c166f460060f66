"""The leaderboard: which cells there are and how they are shared out."""

import ml_collections
import pytest

import kvjax
from configs.leaderboard import get_config
from experiments import common
from experiments.board import leaderboard
from kvjax.errors import ConfigError
from kvjax.eval.tasks import asking

CONFIG = ml_collections.ConfigDict({
    "tasks": ("passkey", "needle"), "lengths": (1000,), "seeds": (0, 1), "budgets": (64, 0.1),
    "question": "after",
    "methods": ({"name": "full", "whole": True}, {"name": "quest", "label": "small pages", "page": 8}),
})


def test_the_grid_has_every_combination_once():
    cells = list(leaderboard.cells(CONFIG))
    assert len({tuple(cell.head.items()) for cell in cells}) == len(cells) == 2 * 2 * (1 + 2)
    assert {(cell.label, cell.budget) for cell in cells} == {("full", None), ("small pages", 64), ("small pages", 100)}
    assert {cell.method.page for cell in cells if cell.label == "small pages"} == {8}


def test_shards_share_out_the_grid():
    cells = list(leaderboard.cells(CONFIG))
    parts = [leaderboard.take_shard(cells, f"{i}/5") for i in range(5)]
    assert sorted((cell.head for part in parts for cell in part), key=str) == sorted(
        (cell.head for cell in cells), key=str
    )
    assert [len({(cell.label, cell.budget) for cell in part}) for part in parts] == [1, 1, 1, 0, 0]
    for wrong in ("5/5", "-1/5", "1", "a/b"):
        with pytest.raises(ConfigError, match="shard="):
            leaderboard.take_shard(cells, wrong)


@pytest.fixture(scope="module")
def exams():
    return leaderboard.Exams(common.load_model(""), ml_collections.ConfigDict({
        "store": "host", "samples": 3, "continuations": 1, "batch": 2, "recall_k": 4, "max_new_tokens": 3,
        "perplexity_tokens": 0, "tasks": ("multi_request", "mqar"), "seeds": (0,), "question": "after",
        "keep_bytes": 1 << 21,
    }))


@pytest.mark.parametrize("task", ["multi_request", "mqar"])
def test_any_task_is_a_column(exams, task, tmp_path):
    cell = leaderboard.Cell((("name", "quest"), ("window", 8)), "quest", task, 250, 64, 0)
    row = leaderboard.measure(exams, cell, tmp_path)
    assert row["method"] == "quest" and row["task"] == task and row["bytes_read_per_token"] > 0
    assert row["select_ms"] > 0
    assert 0 < row["attended_tokens"] <= 64 and 0 < row["output_error"] < 2 and 0 < row["recall"] <= 1
    assert row["samples"] == (16 if task == "mqar" else 3) and 0 <= row["accuracy"] <= 1


def test_contexts_are_read_once_while_they_fit(exams):
    exams.kept.clear()
    first, second = [exams.read([range(1, n)], 2048) for n in (40, 50)]
    assert exams.read([range(1, 40)], 2048) is first and exams.read([range(1, 50)], 2048) is second
    huge = exams.read([range(1, 600)] * 2, 2048)
    assert huge.nbytes > exams.config.keep_bytes and exams.read([range(1, 600)] * 2, 2048) is not huge


def test_a_question_within_the_prompt_is_answered_from_there(exams):
    drawn = exams.drawn("multi_request", 250, 0)[:1]
    (within,) = asking.within_prompt(drawn)
    assert within.context == drawn[0].context + drawn[0].question and within.question == ()
    answers = []
    for batch in (asking.batches(exams.llm, one, 1)[0] for one in (drawn, [within])):
        cache = exams.llm.prefill(asking.contexts(batch), method=kvjax.Full(), capacity=asking.capacity(batch))
        answers.append(asking.ask(exams.llm, cache, batch)[1][0].tokens)
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("changes", "words"), [
    ({"samples": 0}, "samples=0"), ({"samples": -1}, "samples=-1"), ({"batch": 0}, "batch=0"),
    ({"continuations": 0}, "continuations=0"), ({"seeds": (-1,)}, "seeds="), ({"lengths": (256.5,)}, "lengths="),
    ({"tasks": ()}, "tasks is empty"), ({"lengths": ()}, "lengths is empty"), ({"store": "disk"}, "unknown store"),
    ({"methods": ({"name": "quest", "replay": True},)}, "no use for a method's replay"),
    ({"methods": ({"name": "quest", "budget": 64, "slots": {"count": 99}},), "store": "memory"}, "slots are for"),
    ({"methods": ({"name": "pqcache", "parts": 3},)}, "parts=3"), ({"methods": ({"name": "full"},)}, "attends every"),
    ({"methods": ({"label": "mine"},)}, "unknown method None"), ({"methods": ("quest",)}, "'quest' is not a method"),
])
def test_settings_that_make_no_grid_are_refused(changes, words):
    config = get_config("smoke")
    config.update(changes)
    with pytest.raises(ConfigError, match=words):
        leaderboard.run(config, "unused")


@pytest.mark.parametrize(("context", "dtype", "words"), [(250, "int3", "int3"), (8, "float32", "fit")])
def test_what_no_budget_would_mend_ends_the_run(exams, context, dtype, words):
    job = leaderboard.Cell((("name", "quest"), ("dtype", dtype)), "quest", "multi_request", context, 64, 0)
    with pytest.raises(ConfigError, match=words):
        leaderboard.check_fit(exams, [job])


def test_only_a_budget_that_does_not_fit_is_a_row(exams, tmp_path, monkeypatch):
    cell = leaderboard.Cell((("name", "quest"), ("window", 8)), "quest", "multi_request", 250, 9, 0)
    assert "budget" in leaderboard.measure(exams, cell, tmp_path)["refused"]
    monkeypatch.setitem(exams.config, "store", "disk")
    with pytest.raises(ConfigError, match="unknown store"):
        leaderboard.measure(exams, cell, tmp_path)


def test_a_summary_has_the_cells_that_were_asked_for():
    cells = list(leaderboard.cells(CONFIG))
    rows = [{**cell.head, "accuracy": 1.0} for cell in cells]
    assert leaderboard.asked_for(rows, cells[3:]) == rows[3:]
