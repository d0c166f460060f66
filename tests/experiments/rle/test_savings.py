"""The model that the codecs are measured in, and how runs are counted."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import dense, make_params

import kvjax
from experiments.rle import (
    dictionary,
    likelihood,
    sizes,
)
from experiments.rle import (
    flash as rle_flash,
)
from experiments.rle import (
    model as rle_model,
)
from experiments.rle import (
    overhead as rle_overhead,
)
from experiments.rle import (
    table as rle_table,
)
from kvjax.models.config import ModelConfig
from kvjax.ops.runs import Tolerance, decode, size

CONFIG = ModelConfig(
    family="llama", vocab_size=16, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, max_position=128,
)
TOKENS = np.random.default_rng(0).integers(0, 16, 40).astype(np.int32)


@pytest.fixture(scope="module")
def llm():
    return SimpleNamespace(config=CONFIG, params=make_params(CONFIG, sharper=1))


@pytest.fixture(scope="module")
def plain(llm):
    return rle_model.run(llm, TOKENS)


def test_without_a_codec_it_is_the_model(llm, plain):
    logits = dense(llm.params, TOKENS[None], CONFIG)[0]
    expected = -jax.nn.log_softmax(logits)[np.arange(39), TOKENS[1:]]
    np.testing.assert_allclose(plain.nats, expected, atol=2e-5)


def sorted_by_two(tolerance):
    return rle_model.RunsSorted(tolerance, 2)


@pytest.mark.parametrize("recoding", [rle_model.RunsBefore, rle_model.RunsAfter, sorted_by_two])
def test_runs_without_tolerance_change_no_bit(llm, plain, recoding):
    found = rle_model.run(llm, TOKENS, recoding(Tolerance(jnp.float32(0), jnp.float32(0))))
    np.testing.assert_array_equal(found.key, plain.key)
    np.testing.assert_array_equal(found.nats, plain.nats)


WIDE = Tolerance(jnp.float32(100), jnp.float32(0))


def test_a_tolerance_has_its_price(llm, plain):
    found = rle_model.run(llm, TOKENS, rle_model.RunsBefore(WIDE)).nats
    assert np.abs(found - plain.nats).max() > 1e-4


def test_a_layer_or_a_head_is_recoded_alone(llm, plain):
    """The layers before it do not change; all at once are the recoding itself."""
    whole, parts = rle_model.RunsBefore(WIDE), dict(
        (tuple(place.values()), rle_model.run(llm, TOKENS, rle_model.Only(rle_model.RunsBefore(WIDE), on)))
        for place, on in likelihood.masks(2, 2)
    )
    assert list(parts) == [(0,), (0, 0), (0, 1), (1,), (1, 0), (1, 1)]
    assert len({part.nats.tobytes() for part in parts.values()} | {plain.nats.tobytes()}) == 7
    np.testing.assert_array_equal(parts[1,].key, plain.key)
    assert np.abs(parts[0,].key[1] - plain.key[1]).max() > 1e-4
    for on, expected in ((True, rle_model.run(llm, TOKENS, whole)), (False, plain)):
        found = rle_model.run(llm, TOKENS, rle_model.Only(whole, np.full((2, 2), on)))
        np.testing.assert_array_equal(found.nats, expected.nats)


def test_errors_are_those_of_paired_differences():
    plain = np.asarray([[1.0, 3.0], [5.0, 7.0]])
    found = likelihood.change(plain + np.asarray([[0.1, 0.2], [0.3, 0.4]]), plain)
    assert found["delta_nll"] == pytest.approx(0.25) and found["relative_delta_nll"] == pytest.approx(0.25 / 4)
    assert found["delta_nll_error"] == pytest.approx(np.std([0.1, 0.2, 0.3, 0.4], ddof=1) / 2)
    assert found["perplexity"] == pytest.approx(np.exp(4.25))


@pytest.mark.parametrize("part", ["key", "value", "row"])
def test_the_first_layers_keys_and_values_are_decided_by_the_token(plain, part):
    """So a dictionary by token id is lossless there, and only there."""
    parts = {"key": plain.key, "value": plain.value, "row": np.concatenate([plain.key, plain.value], axis=-1)}
    first, second = (np.asarray(layer[:, 0]) for layer in parts[part])
    length, token = jnp.int32(len(TOKENS)), jnp.asarray(TOKENS)
    runs = dictionary.by_token(jnp.asarray(first), token, length, 16)
    assert int(runs.runs) == len(set(TOKENS.tolist())) and int(runs.refused) == 0
    np.testing.assert_array_equal(decode(runs), first)
    assert not np.array_equal(decode(dictionary.by_token(jnp.asarray(second), token, length, 16)), second)


SIZES = SimpleNamespace(
    itemsize=2, cluster=8, bits=(4,), tolerances=(0.0, 0.01), histogram=(1, 2, 3, 5), span=8, lengths=(24,)
)


def test_runs_are_counted_by_length():
    key = np.asarray([0, 1, 1, 1, 2, 2, 5, 5], np.float32).reshape(1, 1, 1, 8, 1)
    lengths = sizes.run_lengths(key, {"absolute": 0.0})
    assert lengths[0, 0, 0].tolist() == [1, 3, 2, 2]
    assert sizes.histogram(lengths.ravel(), (1, 2, 3, 5)) == [1, 2, 1, 0]


def test_rows_of_runs_have_bytes_and_heads():
    """Two heads: keys in threes, and keys that come again but never in a row."""
    rng = np.random.default_rng(0)
    table = rng.normal(size=(8, 4)).astype(np.float32)
    key = np.stack([np.repeat(table, 3, axis=0), np.tile(table, (3, 1))])[None, None]
    rows = [sizes.runs_row("code", case, 24, 4, SIZES) for case in sizes.cases(key + 9, key, SIZES)]
    found = {(row["method"], *(row.get(name) for name in ("absolute", "relative", "steps"))): row for row in rows}
    assert len(found) == len(rows) == 3 * 3 + 2 * 2
    runs = found["rle_before", 0.0, None, None]
    assert runs["runs_per_token_by_layer_and_head"] == [[8 / 24, 1.0]]
    assert runs["histogram_by_layer_and_head"] == [[[0, 0, 8, 0], [24, 0, 0, 0]]] and runs["histogram"] == [24, 0, 8, 0]
    coded = size(24, 8, 4, 2).coded + size(24, 24, 4, 2).coded
    assert (runs["key_bytes"], runs["key_bytes_coded"]) == (2 * 24 * 8, coded) and runs["kv_bytes"] == 4 * 24 * 8
    assert runs["kv_bytes_coded"] == 2 * 24 * 8 + coded and runs["saved"] == 1 - coded / (2 * 24 * 8)
    assert found["rle_sorted", 0.0, None, None]["runs_per_token_by_layer_and_head"] == [[8 / 24, 8 / 24]]
    lowbit = found["int4_sorted_rle", None, None, 0.0]
    assert lowbit["key_bytes_coded"] <= 2 * (size(24, 8, 2, 1).coded + 8)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_a_step_is_the_distance_of_neighbouring_codes(bits):
    """Given eight keys of each code, ascending: one step joins each eight with the next, none joins nothing."""
    levels = 2**bits - (bits > 2)  # an odd number of them but for two bits
    key = np.repeat(np.linspace(-1, 1, levels, dtype=np.float32), 8).reshape(1, 1, 1, -1, 1)
    settings = SimpleNamespace(**{**vars(SIZES), "bits": (bits,)})
    runs = {case.tolerance["steps"]: case.lengths[0, 0, 0].tolist() for case in sizes.cases(key, key, settings)
            if case.method == f"int{bits}_rle"}
    assert runs[0.0] == [8] * levels and set(runs[1.0][:-1]) == {16}


def test_dictionary_rows_say_where_the_token_decides():
    rng = np.random.default_rng(1)
    token = np.arange(24)[None] % 5
    decided = np.repeat(rng.normal(size=(5, 4))[token][:, None], 2, axis=1)
    key = np.stack([decided, rng.normal(size=decided.shape)], axis=1).astype(np.float32)
    rows = {(row["method"], row["layer"]): row for row in sizes.dictionary_rows("code", key, -key, token, SIZES)}
    for name, width in (("key", 4), ("value", 4), ("row", 8)):
        first, second = rows[f"dictionary_{name}", 0], rows[f"dictionary_{name}", 1]
        assert first["lossless_by_token"] and not second["lossless_by_token"]
        assert first["bytes_coded"] == 2 * size(24, 5, width, 2).coded and first["bytes"] == 2 * 24 * width * 2
        assert second["different_per_token"] == 1 and second["saved"] < 0 < first["saved"]


def test_the_table_has_the_sources_figures_beside_ours(capsys):
    row = {"task": "runs/chat", "method": "rle_before", "context": 64, "absolute": 0.01, "runs_per_token": 0.9,
           "key_bytes_coded": 2048.0, "saved": 0.1, "kv_saved": 0.05, "histogram": [1234, 5, 0]}
    cost = {"task": "likelihood/chat", "method": "rle_before", "context": 64, "absolute": 0.01,
            "relative_delta_nll": 0.00123, "relative_error": 0.0004}
    shorter = row | {"context": 32}
    relative, left_out = row | {"absolute": None, "relative": 0.01}, shorter | {"absolute": 0.05}
    rle_table.print_table([row, cost, relative, shorter, left_out], (1, 2, 5))
    head, *lines, overhead = capsys.readouterr().out.splitlines()
    histograms = [line.split() for line in lines[3:]]
    assert [line.split() for line in lines[:3]] == [
        ["chat", "rle_before", "64", "0.01", "abs", "0.900", "2", "10.0", "5.0", "62", "0.123", "0.040", "0.08"],
        ["chat", "rle_before", "64", "0.01", "rel", "0.900", "2", "10.0", "5.0", "/", "/", "/", "/"],
        ["chat", "rle_before", "32", "0.01", "abs", "0.900", "2", "10.0", "5.0", "62", "/", "/", "0.08"],
    ]
    assert histograms[0][-3:] == ["1", "2-4", "5-"] and len(histograms) == 3
    assert histograms[2] == ["chat", "rle_before", "0.01", "rel", "1,234", "5", "0"]
    assert "2.8 %" in overhead and all(len(line) == len(head) for line in lines[:3])


def test_planted_runs_are_read_in_fewer_bytes_and_change_no_bit(llm, tmp_path):
    """Pages of four times 4 KB; that of the last tokens is not full, and its empty rows are a run, too."""
    model = kvjax.LLM(CONFIG, llm.params)
    token = np.random.default_rng(0).integers(0, 16, 620).astype(np.int32)
    method = {"name": "quest", "budget": 300, "page": 256, "sinks": 2, "window": 4}
    flash = SimpleNamespace(methods=(method,), dtypes=("float32",), planted=(1, 8), steps=6)
    rows = list(rle_flash.rows(model, "code", token, tmp_path, SimpleNamespace(flash=flash)))
    found = {(row["planted"], row["codec"]): row for row in rows}
    assert len(rows) == 4 and all(row["equal"] and row["pages_per_block"] == 4 for row in rows)
    assert found[1, "rle"]["runs_per_token"] == 1 and 0.12 < found[8, "rle"]["runs_per_token"] < 0.13
    assert found[1, "raw"]["short_share"] == found[1, "rle"]["short_share"] == pytest.approx(1 / 3)
    assert found[8, "rle"]["short_share"] == 1
    assert found[8, "rle"]["bytes_read_per_token"] < found[1, "rle"]["bytes_read_per_token"]
    assert found[8, "raw"]["bytes_read_per_token"] >= found[1, "rle"]["bytes_read_per_token"]


def test_a_tokens_time_is_compared_with_that_of_the_codec_turned_off(llm, capsys):
    model = kvjax.LLM(CONFIG, llm.params)
    rows = list(rle_overhead.measure(model, 40, SimpleNamespace(runs=(1, 4), repeats=3), bandwidth=1e9))
    assert [row["run"] for row in rows] == [1, 4] and rows[0]["plain_ms"] == rows[1]["plain_ms"]
    for row in rows:
        share = (row["token_ms"] - row["plain_ms"]) / row["step_ms"]
        assert row["token_of_step"] == pytest.approx(share) and min(row["append_us"], row["encode_us"]) > 0
    assert rows[0]["limit_ms"] == pytest.approx(1.6 * rows[1]["limit_ms"])  # 1 + 1 over 1 + 1 / 4
    rle_overhead.print_table(rows)
    assert len(capsys.readouterr().out.splitlines()) == 3
