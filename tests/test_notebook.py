"""Each notebook is one, installs the library where it is missing, and runs from top to bottom."""

import importlib.util
import json
import pathlib
import re
import subprocess

import matplotlib
import pytest

FOLDER = pathlib.Path(__file__).parents[1] / "experiments" / "colab"
CELLS = {file.stem: json.loads(file.read_text())["cells"] for file in FOLDER.glob("*.ipynb")}
each = pytest.mark.parametrize("notebook", sorted(CELLS))


def code_of(notebook: str, name: str):
    source, = ("".join(cell["source"]) for cell in CELLS[notebook] if cell["id"] == name)
    return compile(source, f"{notebook}, cell {name}", "exec")


def run(notebook: str, monkeypatch, directory) -> dict:
    """Runs a notebook with its temporary files in a directory; returns its names."""
    monkeypatch.setenv("TMPDIR", str(directory))
    monkeypatch.setattr("tempfile.tempdir", str(directory))
    matplotlib.use("agg")
    names: dict = {}
    for cell in CELLS[notebook]:
        if cell["cell_type"] == "code":
            exec(code_of(notebook, cell["id"]), names)
    names["figure"].savefig(directory / "picture.png")
    return names


@each
def test_cells_have_names_of_their_own_and_no_output(notebook):
    """As version 4.5 of the format has it."""
    cells = CELLS[notebook]
    names = [cell["id"] for cell in cells]
    assert len(set(names)) == len(names) and all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name) for name in names)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


@each
def test_it_installs_the_library_only_where_it_is_missing(notebook, monkeypatch):
    calls = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: calls.append(command))
    exec(code_of(notebook, "install"), {})
    assert not calls
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="set SOURCE"):
        exec(code_of(notebook, "install"), {})
    source, = ("".join(cell["source"]) for cell in CELLS[notebook] if cell["id"] == "install")
    exec(source.replace('SOURCE = ""', 'SOURCE = "kvjax.whl"'), {})
    assert [command[1:] for command in calls] == [["-m", "pip", "install", "--quiet", "kvjax.whl"]]


def test_the_quickstart_runs_and_finds_the_key(capsys, tmp_path, monkeypatch):
    names = run("quickstart", monkeypatch, tmp_path)
    assert set(names["rows"]) == {"StreamingLLM", "Quest", "DynaKV", "KVSwap"}
    lines = capsys.readouterr().out.splitlines()
    assert sum("29318" in line for line in lines) >= 2, "the answer to both questions"
    assert any(line.startswith("total ") for line in lines), "what the cache takes"


def test_the_one_for_tpus_runs_on_a_single_device_and_finds_the_key(capsys, tmp_path, monkeypatch):
    names = run("tpu", monkeypatch, tmp_path)
    assert names["mesh"] is None and set(names["rows"]) == {"Full", "Quest", "DynaKV"}
    lines = capsys.readouterr().out.splitlines()
    assert any("Full 1 of 1 keys" in line for line in lines)
    assert any(line.startswith("total ") for line in lines), "what the cache takes"
