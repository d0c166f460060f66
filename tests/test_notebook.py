"""The notebook runs from top to bottom."""

import json
import pathlib

import matplotlib

NOTEBOOK = pathlib.Path(__file__).parents[1] / "experiments" / "colab" / "quickstart.ipynb"


def test_the_quickstart_runs_and_finds_the_key(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    matplotlib.use("agg")
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    names: dict = {}
    for number, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, cell {number}", "exec"), names)
    assert set(names["rows"]) == {"streaming_llm", "quest", "dynakv"}
    assert capsys.readouterr().out.count("29318") >= 2, "the answer to both questions"
