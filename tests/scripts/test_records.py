"""JSON of what programs cost: a grid in parts keeps the records of its other parts."""

import json

from scripts.records import keep

KEYS = ("method", "tokens")


def record(method, tokens, size):
    return {"method": method, "tokens": tokens, "bytes": size}


def test_records_that_are_made_anew_replace_their_earlier_ones(tmp_path):
    file = tmp_path / "new" / "summary.json"
    first = [record("full", 1, 10), record("quest", 1, 20)]
    assert keep(file, first, KEYS) == first
    again = [record("quest", 1, 25), record("quest", 2, 30)]
    expected = [first[0], *again]
    found = keep(file, again, KEYS, lambda every: {"sum": sum(one["bytes"] for one in every)})
    assert found == expected
    content = json.loads(file.read_text())
    assert content["programs"] == expected
    assert content["sum"] == 65
    assert content["jax"]
