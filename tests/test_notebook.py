"""The notebook is one, installs the library where it is missing, and runs from top to bottom."""

import importlib.util
import json
import pathlib
import re
import subprocess

import matplotlib
import pytest

NOTEBOOK = pathlib.Path(__file__).parents[1] / "experiments" / "colab" / "quickstart.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]


def code_of(name: str):
    source, = ("".join(cell["source"]) for cell in CELLS if cell["id"] == name)
    return compile(source, f"{NOTEBOOK.name}, cell {name}", "exec")


def test_cells_have_names_of_their_own_and_no_output():
    """As version 4.5 of the format has it."""
    names = [cell["id"] for cell in CELLS]
    assert len(set(names)) == len(names) and all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name) for name in names)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in CELLS)


def test_it_installs_the_library_only_where_it_is_missing(monkeypatch):
    calls = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: calls.append(command))
    exec(code_of("install"), {})
    assert not calls
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="set SOURCE"):
        exec(code_of("install"), {})
    source, = ("".join(cell["source"]) for cell in CELLS if cell["id"] == "install")
    exec(source.replace('SOURCE = ""', 'SOURCE = "kvjax.whl"'), {})
    assert [command[1:] for command in calls] == [["-m", "pip", "install", "--quiet", "kvjax.whl"]]


def test_the_quickstart_runs_and_finds_the_key(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    matplotlib.use("agg")
    names: dict = {}
    for cell in CELLS:
        if cell["cell_type"] == "code":
            exec(code_of(cell["id"]), names)
    assert set(names["rows"]) == {"StreamingLLM", "Quest", "DynaKV", "KVSwap"}
    lines = capsys.readouterr().out.splitlines()
    assert sum("29318" in line for line in lines) >= 2, "the answer to both questions"
    assert any(line.startswith("total ") for line in lines), "what the cache takes"
    names["figure"].savefig(tmp_path / "picture.png")
