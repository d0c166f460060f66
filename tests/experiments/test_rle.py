"""The model that the codecs are measured in, and how runs are counted."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import dense, make_params

from experiments import rle as experiment
from experiments import rle_model
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
