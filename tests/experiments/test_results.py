"""A workdir holds the results of one configuration."""

import errno
import json
import pathlib

import ml_collections
import pytest

from experiments import common, results
from experiments.results import Run
from kvjax.errors import ConfigError

QUEST, DYNAKV = {"name": "quest", "budget": 64}, {"name": "dynakv", "budget": 64}
GRID = ("methods", "tasks")


def config(**changes) -> ml_collections.ConfigDict:
    return ml_collections.ConfigDict({
        "experiment": "board.evaluate", "model": "", "samples": 8, "tasks": ("needle",), "methods": (QUEST,), **changes
    })


@pytest.fixture
def used(tmp_path):
    """A workdir with a row."""
    Run(config(), str(tmp_path), GRID).log(method="quest@64", accuracy=0.5)
    return str(tmp_path)


@pytest.mark.parametrize("changes", [
    {}, {"tasks": ("needle", "passkey")}, {"methods": (QUEST, DYNAKV)}, {"methods": (DYNAKV,)},
    {"methods": ({"name": "quest", "budget": 64, "page": 4, "label": "small pages"},)},
])
def test_more_of_the_grid_goes_on(used, changes):
    run = Run(config(**changes), used, GRID)
    assert run.logged() == [{"method": "quest@64", "accuracy": 0.5}]
    assert json.loads((run.path / "config.json").read_text()) == json.loads(json.dumps(run.header))


@pytest.mark.parametrize(("changes", "words"), [
    ({"model": "/mine"}, "model was  and is /mine"), ({"samples": 16}, "samples was 8 and is 16"),
    ({"methods": ({**QUEST, "page": 4},)}, "quest@64 was"), ({"added": 1}, "added was None and is 1"),
])
def test_anything_else_is_refused_and_nothing_written(used, changes, words):
    with pytest.raises(ConfigError, match=f"{words}.*another --workdir"):
        Run(config(**changes), used, GRID)
    assert Run(config(), used, GRID).logged()


def test_lines_of_what_comes_again_are_dropped(used):
    run = Run(config(), used, GRID)
    run.keep(step=2)
    run.keep_only(lambda line: line.get("step", 0) < 2)
    assert run.logged() == [{"method": "quest@64", "accuracy": 0.5}] == Run(config(), used, GRID).logged()


@pytest.mark.parametrize("content", ["", "[]", "{}"])
def test_a_configuration_that_is_none_is_named(used, content):
    (pathlib.Path(used) / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json is not the configuration of a run"):
        Run(config(), used, GRID)


def test_a_full_disk_leaves_the_configuration(used, monkeypatch):
    def half(path, text):
        path.write_bytes(text[: len(text) // 2].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "write_text", half)
        with pytest.raises(ConfigError, match="No space left"):
            Run(config(), used, GRID)
    assert Run(config(), used, GRID).logged()


def test_without_rows_or_where_any_field_may_differ_nothing_is_refused(tmp_path, used):
    Run(config(), str(tmp_path / "new"), GRID)
    Run(config(samples=16), str(tmp_path / "new"), GRID)
    Run(config(samples=16), used, None)


def test_a_workdir_says_on_which_machines_its_rows_were_measured(used, monkeypatch, caplog):
    first = results.machine()
    assert first["versions"]["kvjax"] and first["processor"].partition(" x ")[2]
    Run(config(), used, GRID)
    assert not caplog.records
    for cores in (64, 96, 96):
        monkeypatch.setattr(results, "processor", lambda cores=cores: f"{cores} x fast")
        run = Run(config(), used, GRID)
    assert [one["processor"] for one in run.header["before"]] == [first["processor"], "64 x fast"]
    assert json.loads((run.path / "config.json").read_text())["processor"] == "96 x fast"
    assert len(caplog.records) == 2 and "processor was 64 x fast and is 96 x fast" in caplog.text


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_workdir_that_cannot_be_used(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="give a directory"):
        Run(config(), str(tmp_path / name))


def test_two_methods_of_one_label_are_refused():
    with pytest.raises(ConfigError, match="two methods are called quest@64"):
        common.by_label((QUEST, {**QUEST, "page": 4}))
    assert len(common.by_label((QUEST, {**QUEST, "page": 4, "label": "small"}, DYNAKV))) == 3


@pytest.mark.parametrize("torn", [b'{"method": "dyna', b'{"method": "full"}', b"\0\n"], ids=["half", "no_end", "zero"])
def test_a_last_line_that_was_cut_short_is_measured_again(used, torn):
    file = pathlib.Path(used) / "metrics.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + torn)
    run = Run(config(), used, GRID)
    assert len(run.logged()) == 1 and file.read_bytes() == whole
    run.keep(method="full")
    assert [row["method"] for row in run.logged()] == ["quest@64", "full"]


def test_a_summary_that_cannot_be_written_leaves_the_last_one(used, monkeypatch):
    run, write = Run(config(), used, GRID), pathlib.Path.write_text
    run.summary([])
    before = (run.path / "summary.json").read_text()

    def half(path, text):
        write(path, text[:9])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "write_text", half)
    with pytest.raises(OSError, match="No space left"):
        run.summary([{"method": "full"}])
    assert (run.path / "summary.json").read_text() == before
    assert {file.name for file in run.path.iterdir()} == {"config.json", "metrics.jsonl", "summary.json"}


@pytest.mark.parametrize("bad", [b'{"method"\n', b"7\n"])
def test_any_other_line_that_is_no_row_is_named(used, bad):
    file = pathlib.Path(used) / "metrics.jsonl"
    file.write_bytes(bad + file.read_bytes())
    with pytest.raises(ConfigError, match=r"metrics.jsonl, line 1 is not a row"):
        Run(config(), used, GRID)
