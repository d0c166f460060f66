"""The leaderboard: which cells there are, how they are shared out, and runs that stop and go on."""

import json

import ml_collections
import numpy as np
import pytest

import kvjax
from configs.leaderboard import get_config
from experiments import common
from experiments.board import grid, leaderboard, rows
from experiments.board.exams import Exams
from experiments.board.grid import Cell
from kvjax.errors import ConfigError
from kvjax.eval.tasks import asking

DRAWN = {"samples": 3, "continuations": 1, "max_new_tokens": 3, "perplexity_tokens": 0}
CONFIG = ml_collections.ConfigDict(DRAWN | {
    "tasks": ("passkey", "needle"), "lengths": (1000,), "seeds": (0, 1), "budgets": (64, 0.1),
    "question": "after",
    "methods": ({"name": "full", "whole": True}, {"name": "quest", "label": "small pages", "page": 8}),
})


def test_the_grid_has_every_combination_once():
    cells = list(grid.cells(CONFIG))
    assert len({cell.key for cell in cells}) == len(cells) == 2 * 2 * (1 + 2)
    assert {(cell.label, cell.budget) for cell in cells} == {("full", None), ("small pages", 64), ("small pages", 100)}
    assert {cell.method.page for cell in cells if cell.label == "small pages"} == {8}


def test_cells_that_answer_the_same_samples_are_neighbours():
    exams = [cell.exam for cell in grid.cells(CONFIG)]
    assert [exams[i] for i in range(0, 12, 3)] == list(dict.fromkeys(exams))


def test_equal_budgets_are_one_cell():
    config = ml_collections.ConfigDict({**CONFIG, "budgets": (100, 0.1)})
    assert [cell.budget for cell in grid.cells(config)] == [None, 100] * 4


def test_a_part_has_fields_and_methods_of_its_own():
    own = {"tasks": ("vt",), "samples": 2, "methods": ("small pages",)}
    first, second = grid.parts(ml_collections.ConfigDict({**CONFIG, "parts": (own, {"lengths": (500,)})}))
    assert [cell.head["budget"] for cell in grid.cells(first)] == [64, 100] * 2
    assert {(cell.task, cell.drawn[0]) for cell in grid.cells(first)} == {("vt", 2)}
    assert {(cell.task, cell.context, cell.drawn[0]) for cell in grid.cells(second)} == {
        ("passkey", 500, 3), ("needle", 500, 3)}


@pytest.mark.parametrize(("own", "words"), [
    ({"batch": 2}, "no batch of its own"), ({"methods": ("quest",)}, "unknown 'quest'"),
])
def test_a_part_with_anything_else_is_refused(own, words):
    with pytest.raises(ConfigError, match=words):
        grid.parts(ml_collections.ConfigDict({**CONFIG, "parts": (own,)}))


def test_a_method_may_have_budgets_of_its_own():
    methods = ({"name": "quest"}, {"name": "h2o", "budgets": (0.5,)})
    cells = list(grid.cells(ml_collections.ConfigDict({**CONFIG, "methods": methods})))
    assert {(cell.label, cell.budget) for cell in cells} == {("quest", 64), ("quest", 100), ("h2o", 500)}
    assert {cell.method.budget for cell in cells} == {64, 100, 500}


def test_an_empty_table_is_that_of_the_configuration():
    methods = ({"name": "dynsplit", "table": ""}, {"name": "sentencekv", "table": "other.json"}, {"name": "quest"})
    (part,) = grid.parts(ml_collections.ConfigDict({**CONFIG, "methods": methods, "table": "mine.json"}))
    assert [entry.get("table") for entry in part.methods] == ["mine.json", "other.json", None]


def test_a_file_is_looked_for_in_the_folder_and_named_without_it(llm, tmp_path):
    (tmp_path / "gsm8k").mkdir()
    question = {"question": "How many?", "answer": "Two. #### 2"}
    (tmp_path / "gsm8k" / "test.jsonl").write_text(json.dumps(question))
    part = {**CONFIG, "tasks": ("gsm8k:gsm8k/test.jsonl",), "data": str(tmp_path)}
    exams = Exams(llm, ml_collections.ConfigDict(part))
    (cell, *_) = grid.cells(exams.config)
    assert exams.drawn(*cell.exam)[0].answers == ("2",) and str(tmp_path) not in str(cell.head)
    assert grid.with_folder("vt", "data") == "vt" and grid.with_folder("text:/a/b", "data") == "text:/a/b"


def test_parts_do_not_overlap():
    cells = list(grid.cells(CONFIG))
    grid.check_apart(cells)
    with pytest.raises(ConfigError, match="two parts of the grid have small pages at needle"):
        grid.check_apart([*cells, cells[-1]])


def test_shards_share_out_the_grid_by_what_is_read():
    cells = list(grid.cells(CONFIG))
    parts = [grid.take_shard(cells, f"{i}/5") for i in range(5)]
    assert sorted((cell.head for part in parts for cell in part), key=str) == sorted(
        (cell.head for cell in cells), key=str
    )
    assert [len({cell.exam for cell in part}) for part in parts] == [1, 1, 1, 1, 0]
    for wrong in ("5/5", "-1/5", "1", "a/b"):
        with pytest.raises(ConfigError, match="shard="):
            grid.take_shard(cells, wrong)


METHODS = ({"name": "full", "whole": True}, {"name": "quest", "window": 8})


@pytest.fixture(scope="module")
def llm():
    return common.load_model("")


@pytest.fixture
def exams(llm):
    return Exams(llm, ml_collections.ConfigDict(DRAWN | {
        "store": "host", "batch": 2, "recall_k": 4, "recall_every": 1, "hold_bytes": 1 << 28, "methods": METHODS,
        "tasks": ("multi_request", "mqar"), "lengths": (250,), "budgets": (64,), "seeds": (0,), "question": "after",
    }))


def cell_of(task, budget=64, context=250, **settings):
    return Cell((("name", "quest"), ("window", 8), *settings.items()), "quest", task, context, budget, 0)


@pytest.mark.parametrize("task", ["multi_request", "mqar"])
def test_any_task_is_a_column(exams, task, tmp_path):
    row = leaderboard.measure(exams, cell_of(task), tmp_path)
    assert row["method"] == "quest" and row["task"] == task and row["bytes_read_per_token"] > 0
    assert row["select_ms"] > 0
    assert 0 < row["attended_tokens"] <= 64 and 0 < row["output_error"] < 2 and 0 < row["recall"] <= 1
    assert row["samples"] == (1 if task == "mqar" else 3) and 0 <= row["accuracy"] <= 1


def test_contexts_are_kept_for_the_next_method_while_a_batch_fits_beside_them(exams):
    first, second = [exams.read([tuple(range(1, n))], 250) for n in (40, 50)]
    assert exams.read([tuple(range(1, 40))], 250) is first and exams.read([tuple(range(1, 50))], 250) is second
    exams.config.hold_bytes = exams.need(250) + first.nbytes
    exams.read([tuple(range(1, 60))], 250)
    assert exams.read([tuple(range(1, 50))], 250) is second  # used last, so the first had to go
    assert exams.read([tuple(range(1, 40))], 250) is not first


def test_a_context_that_repeats_in_a_batch_is_read_once(exams, monkeypatch):
    reads = counted(monkeypatch)
    one, other = tuple(range(1, 40)), tuple(range(1, 60))
    both = exams.read([one, other, other], 250)
    assert reads == [2]
    apart = exams.llm.read([list(one), list(other)], capacity=exams.capacity(250))
    assert both.length.tolist() == [39, 59, 59]
    for mine, layer in zip(both.layers, apart.layers, strict=True):
        for name in ("x", "key", "value", "out"):
            np.testing.assert_array_equal(getattr(mine, name), np.asarray(getattr(layer, name))[[0, 1, 1]])


def counted(monkeypatch) -> list[int]:
    """Returns a list that grows by the number of contexts of each `LLM.read`."""
    reads, read = [], kvjax.LLM.read

    def counting(self, context, **settings):
        reads.append(len(context))
        return read(self, context, **settings)

    monkeypatch.setattr(kvjax.LLM, "read", counting)
    return reads


def test_few_contexts_with_many_questions_fill_a_batch(exams):
    exams.config.batch = 8
    (batch,) = exams.batches("multi_request", 250, 0)
    assert [len(asked) for asked in batch.items] == [1, 1, 1] and batch.different == 1 and batch.span == (0, 3)
    assert [one.answers for asked in batch.items for one in asked] == [
        one.answers for one in exams.drawn("multi_request", 250, 0)]


def test_batches_are_cut_so_that_they_fit_in_memory(exams):
    exams.config.update(tasks=("needle",), batch=8, samples=5)
    need = exams.need(250)
    exams.config.hold_bytes = 3 * need - 1
    assert [batch.span for batch in exams.batches("needle", 250, 0)] == [(0, 2), (2, 4), (4, 5)]
    assert exams.held(250) == 2 * need
    exams.config.hold_bytes = need - 1
    with pytest.raises(ConfigError, match=r"hold_bytes.* raise it"):
        exams.batches("needle", 250, 0)


def test_a_batch_takes_no_more_memory_than_is_said(exams, tmp_path):
    """Counts what exists while `full` answers, which keeps everything in slots and in the store."""
    whole = Cell((("name", "full"),), "full", "multi_request", 250, None, 0)
    (batch, *_) = exams.batches(*whole.exam)
    with exams.cached(whole, batch, tmp_path, probed=True) as (cache, tally):
        fork = cache.fork()
        stored = sum(one.resident_bytes + one.branch.stored_bytes for one in (cache, fork))
        probed = sum(table.nbytes for table in (*tally.probe.keys, *tally.probe.values))
        reading = sum(kept.nbytes for kept in exams.kept.values())
        held = exams.held(250)
        assert 0.6 * held < stored + probed + reading <= held
        fork.close()


def test_a_question_within_the_prompt_is_answered_from_there(exams):
    drawn = exams.drawn("multi_request", 250, 0)[:1]
    (within,) = asking.within_prompt(drawn)
    assert within.context == drawn[0].context + drawn[0].question and within.question == ()
    answers = []
    for batch in (asking.batches(exams.llm, one, 1)[0] for one in (drawn, [within])):
        cache = exams.llm.prefill(asking.contexts(batch), method=kvjax.Full(), capacity=asking.capacity(batch))
        answers.append(asking.ask(exams.llm, cache, batch).tokens[0])
    assert answers[0] == answers[1]


def test_needles_in_what_was_decoded_are_a_row_by_place_with_segments(exams, tmp_path):
    exams.config.update(tasks=("decoded_needles",), lengths=(60,), perplexity_tokens=600, batch=4, recall_every=40)
    (batch,) = exams.batches("decoded_needles", 60, 0)
    assert len(batch.items) == 1 and batch.decoded == 600  # shared out, the text would be decoded three times
    row = leaderboard.measure(exams, cell_of("decoded_needles", context=60), tmp_path)
    assert [depth for depth, _ in row["by_depth"]] == pytest.approx([1 / 6, 1 / 2, 5 / 6])
    assert [score for _, score in row["by_depth"]] == row["scores"] and len(row["nll_by_segment"]) == 2
    assert all(0 < recall <= 1 for recall in row["recall_by_segment"]) and len(row["recall_by_segment"]) == 2


@pytest.mark.parametrize(("changes", "words"), [
    ({"samples": 0}, "samples=0"), ({"samples": -1}, "samples=-1"), ({"batch": 0}, "batch=0"),
    ({"continuations": 0}, "continuations=0"), ({"seeds": (-1,)}, "seeds="), ({"lengths": (256.5,)}, "lengths="),
    ({"tasks": ()}, "tasks is empty"), ({"lengths": ()}, "lengths is empty"), ({"store": "disk"}, "unknown store"),
    ({"methods": ({"name": "quest", "replay": True},)}, "no use for a method's replay"),
    ({"methods": ({"name": "quest", "budget": 64, "slots": {"count": 99}},), "store": "memory"}, "slots are for"),
    ({"methods": ({"name": "pqcache", "parts": 3},)}, "parts=3"), ({"methods": ({"name": "full"},)}, "attends every"),
    ({"hold_bytes": 0}, "hold_bytes=0"), ({"parts": ({"tasks": ()},)}, "tasks is empty"),
    ({"methods": ({"label": "mine"},)}, "unknown method None"), ({"methods": ("quest",)}, "'quest' is not a method"),
])
def test_settings_that_make_no_grid_are_refused(changes, words):
    config = get_config("smoke")
    config.update(changes)
    with pytest.raises(ConfigError, match=words):
        leaderboard.run(config, "unused")


@pytest.mark.parametrize(("context", "dtype", "words"), [(250, "int3", "int3"), (8, "float32", "fit")])
def test_what_no_budget_would_mend_ends_the_run(exams, context, dtype, words):
    with pytest.raises(ConfigError, match=words):
        leaderboard.check_fit(exams, [cell_of("multi_request", context=context, dtype=dtype)])


def test_only_a_budget_that_does_not_fit_is_a_row(exams, tmp_path, monkeypatch):
    cell = cell_of("multi_request", budget=9)
    assert "budget" in leaderboard.measure(exams, cell, tmp_path)["refused"]
    monkeypatch.setitem(exams.config, "store", "disk")
    with pytest.raises(ConfigError, match="unknown store"):
        leaderboard.measure(exams, cell, tmp_path)


# --------------------------------------------------------------------------------------- rows from lines


def line_of(cell, span, **measured):
    seconds = {"steps": 10, "sequences": span[1] - span[0]}
    line = {**cell.head, "drawn": cell.drawn, "store": "host", "span": span, "seconds": seconds, **measured}
    return json.loads(json.dumps(line))


def test_a_row_is_made_of_the_lines_of_its_batches(exams):
    cell = cell_of("multi_request")
    lines = [line_of(cell, (2, 3), scores=[1.0], cost={"attended_tokens": 30.0, "recall": None}),
             line_of(cell, (0, 2), scores=[1.0, 0.0], cost={"attended_tokens": 20.0, "recall": 0.5}),
             line_of(cell_of("multi_request", budget=32), (1, 2), scores=[0.0], cost={})]
    row = rows.row_of(exams, cell, rows.filed(lines))
    assert row["scores"] == [1.0, 0.0, 1.0] and row["accuracy"] == pytest.approx(2 / 3) and row["samples"] == 3
    assert row["attended_tokens"] == (30.0 + 2 * 20.0) / 3  # the second batch has decoded twice as many tokens
    assert row["recall"] == 0.5
    assert row["texts"] == [0, 0, 0] and row["drawn"] == list(cell.drawn)
    assert rows.row_of(exams, cell, rows.filed(lines[1:])) is None


def test_a_batch_that_was_cut_otherwise_counts_only_where_it_fits(exams):
    cell = cell_of("multi_request")
    lines = [line_of(cell, span, scores=[0.0] * (span[1] - span[0]), cost={}) for span in ((0, 2), (1, 2), (0, 1))]
    assert rows.row_of(exams, cell, rows.filed(lines)) is None
    lines.append(line_of(cell, (1, 3), scores=[1.0, 1.0], cost={}))
    assert rows.row_of(exams, cell, rows.filed(lines))["scores"] == [0.0, 1.0, 1.0]


def test_lines_of_other_samples_do_not_count(exams):
    cell = cell_of("multi_request")
    other = Cell(cell.settings, cell.label, cell.task, 250, 64, 0, drawn=(32, 1, 3, 0))
    line = line_of(other, (0, 3), scores=[1.0] * 3, cost={})
    assert rows.row_of(exams, cell, rows.filed([line])) is None


def test_losses_and_hits_are_those_of_all_batches(exams):
    cell = Cell((("name", "quest"),), "quest", "perplexity", 250, 64, 0)
    exams.config.update(continuations=3, perplexity_tokens=2)
    lines = [line_of(cell, (0, 2), losses=[[1.0, 2.0], [3.0, 4.0]], hits=[[True, False]] * 2, cost={}),
             line_of(cell, (2, 3), losses=[[5.0, 6.0]], hits=[[True, True]], cost={})]
    row = rows.row_of(exams, cell, rows.filed(lines))
    assert row["nll"] == 3.5 and row["nll_by_text"] == [1.5, 3.5, 5.5] and row["samples"] == 6


# ------------------------------------------------------------------------------------------ whole runs


def small(**changes):
    config = get_config("smoke")
    config.update(samples=4, batch=2, continuations=3, lengths=(250,), max_new_tokens=2, **changes)
    config.methods = METHODS
    return config


def rows_of(workdir):
    """Returns the rows of a summary without what depends on time."""
    written = json.loads((workdir / "summary.json").read_text())["rows"]
    return [{key: value for key, value in row.items() if key != "select_ms"} for row in written]


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("undisturbed")
    leaderboard.run(small(), str(workdir))
    return rows_of(workdir)


@pytest.mark.parametrize("lines", [1, 6])
def test_a_run_that_was_killed_goes_on_without_repeating_a_line(lines, undisturbed, tmp_path, monkeypatch):
    measured, measure = [], leaderboard.measure_batch

    def failing(exams, cell, batch, *rest):
        if len(measured) == lines:
            raise Killed
        measured.append((cell.key, batch.span))
        return measure(exams, cell, batch, *rest)

    monkeypatch.setattr(leaderboard, "measure_batch", failing)
    with pytest.raises(Killed):
        leaderboard.run(small(), str(tmp_path))
    log = tmp_path / "metrics.jsonl"
    log.write_bytes(log.read_bytes() + b'{"method": "full", "ta')  # killed while it wrote
    first, measured[:] = list(measured), []
    monkeypatch.setattr(leaderboard, "measure_batch", lambda *args: (
        measured.append((args[1].key, args[2].span)) or measure(*args)))
    leaderboard.run(small(), str(tmp_path))
    assert len(set(first + measured)) == len(first + measured) == 2 * (2 + 2)
    assert rows_of(tmp_path) == undisturbed


def test_a_context_is_read_once_for_all_methods_and_budgets(tmp_path, monkeypatch):
    reads = counted(monkeypatch)
    leaderboard.run(small(budgets=(48, 64)), str(tmp_path))
    assert reads == [2, 2, 2, 1]  # four pass keys, three texts


def test_a_run_says_first_what_it_holds_and_takes(tmp_path, capsys):
    leaderboard.run(small(estimate_only=True), str(tmp_path))
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("holds at most ") and " MiB of activations and caches" in printed[0]
    named = {line.rsplit(maxsplit=1)[0].strip() for line in printed[1:-1]}
    assert named >= {"reading", "full", "quest", "passkey at 250", "perplexity at 250"}
    assert printed[-1].startswith("in all ") and "hours" in printed[-1]
    assert not (tmp_path / "metrics.jsonl").exists()


def test_programs_are_dropped_before_a_process_runs_out_of_maps(tmp_path, monkeypatch):
    dropped, maps = [], tmp_path / "maps"
    monkeypatch.setattr(leaderboard, "_MAPS", maps)
    monkeypatch.setattr(leaderboard.jax, "clear_caches", lambda: dropped.append(1))
    leaderboard.drop_programs()  # where there is no such file
    maps.write_text("a map\n" * leaderboard._MOST_MAPS)
    leaderboard.drop_programs()
    assert not dropped
    maps.write_text("a map\n" * (leaderboard._MOST_MAPS + 1))
    leaderboard.drop_programs()
    assert dropped


def test_segments_are_printed_with_their_method_and_budget(capsys):
    rows_of_two = [{"method": "quest", "budget": 64, "task": "decoded_needles", "nll_by_segment": [1.25, 2.5],
                    "recall_by_segment": [0.5, None]}, {"method": "full", "budget": None, "task": "needle"}]
    leaderboard.print_segments(rows_of_two)
    loss, recall = capsys.readouterr().out.splitlines()
    assert loss.split()[:2] == ["quest", "64"] and loss.split()[-2:] == ["1.250", "2.500"]
    assert recall.split()[-2:] == ["0.500", "-"]


@pytest.mark.parametrize(("lengths", "names"), [
    ((64,), ["report.html"]), ((64, 256), ["report_64.html", "report_256.html"]),
])
def test_each_length_has_a_report_of_its_own(lengths, names, tmp_path, capsys):
    cells = [{"method": "quest", "task": "needle", "context": length, "budget": 32, "seed": 0, "question": "after",
              "store": "host", "accuracy": length / 256, "samples": 8} for length in lengths]
    pages = leaderboard.write_pages(tmp_path, {"config": {}}, cells)
    assert [page.name for page in pages] == names
    printed = capsys.readouterr().out
    for length, page in zip(lengths, pages, strict=True):
        assert f"contexts of {length} tokens" in page.read_text() and f"contexts of {length} tokens" in printed
        assert f"{length / 256:11.3f}" in printed
