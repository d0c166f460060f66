"""The model that the codecs are measured in, and how runs are counted."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import dense, make_params

import kvjax
from experiments import rle as experiment
from experiments import rle_flash, rle_model
from kvjax.codecs import dictionary, rle
from kvjax.codecs.rle import Tolerance
from kvjax.models.config import ModelConfig

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
    np.testing.assert_allclose(plain[1], expected, atol=2e-5)


@pytest.mark.parametrize("recoding", [rle_model.RunsBefore, rle_model.RunsAfter])
def test_runs_without_tolerance_change_no_bit(llm, plain, recoding):
    keys, nll = rle_model.run(llm, TOKENS, recoding(Tolerance(jnp.float32(0), jnp.float32(0))))
    np.testing.assert_array_equal(keys, plain[0])
    np.testing.assert_array_equal(nll, plain[1])


def test_a_tolerance_has_its_price(llm, plain):
    _, nll = rle_model.run(llm, TOKENS, rle_model.RunsBefore(Tolerance(jnp.float32(100), jnp.float32(0))))
    assert np.abs(nll - plain[1]).max() > 1e-4


def test_the_first_layers_keys_are_decided_by_the_token(plain):
    """So a dictionary by token id is lossless there, and only there."""
    first, second = (np.asarray(layer[:, 0]) for layer in plain[0])
    length, token = jnp.int32(len(TOKENS)), jnp.asarray(TOKENS)
    runs = dictionary.by_token(jnp.asarray(first), token, length, 16)
    assert int(runs.runs) == len(set(TOKENS.tolist())) and int(runs.refused) == 0
    np.testing.assert_array_equal(rle.decode(runs), first)
    assert not np.array_equal(rle.decode(dictionary.by_token(jnp.asarray(second), token, length, 16)), second)


def test_runs_are_counted_by_length():
    begins = np.asarray([[1, 1, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0]], bool)
    assert experiment.histogram(begins, (1, 2, 3, 5)) == [1, 1, 1, 1]


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
    assert found[1, "raw"]["coded_share"] == 0 and found[1, "rle"]["coded_share"] == pytest.approx(1 / 3)
    assert found[8, "rle"]["coded_share"] == 1
    assert found[8, "rle"]["bytes_read_per_token"] < found[1, "rle"]["bytes_read_per_token"]
    assert found[8, "raw"]["bytes_read_per_token"] >= found[1, "rle"]["bytes_read_per_token"]
