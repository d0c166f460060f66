"""The scripts in `examples/` run, and agree with dense attention where they say so."""

import re

import pytest

from examples import attend_linen, attend_nnx

EXAMPLES = {"linen": attend_linen, "nnx": attend_nnx}
every_example = pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)


@every_example
def test_a_full_budget_gives_dense_attention_and_a_smaller_one_selects(example, capsys):
    whole, small = example.main().values()
    assert whole < 1e-4 < small
    pages = re.findall(r"^  in head \d the pages ([#.]+)$", capsys.readouterr().out, re.M)
    full, selected = pages[: example.HEADS], pages[example.HEADS :]
    assert set(full) == {"#" * (example.PROMPT // example.PAGE)}
    for row in selected:
        assert row[0] == "#" and row[-1] == "#" and row.count("#") <= 48 // example.PAGE + 1  # sinks and window
    assert selected[0] == selected[1] != selected[2] == selected[3]  # query heads of one KV head attend the same pages
