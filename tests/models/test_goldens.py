"""Our transformer against what transformers computed from the same checkpoints (scripts/make_goldens.py)."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import dense, through_the_cache

import kvjax
from kvjax.models import checkpoint
from kvjax.models.config import FAMILIES
from kvjax.models.hf_config import read_config
from kvjax.models.transformer import Transformer

GOLDENS = sorted(path.parent for path in pathlib.Path(__file__).parents[1].glob("goldens/*/golden.npz"))
over_goldens = pytest.mark.parametrize("directory", GOLDENS, ids=[path.name for path in GOLDENS])


@functools.cache
def load(directory):
    config, params = checkpoint.load(directory, read_config(directory))
    return Transformer(config), params


def positions_of(tokens):
    return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)


@functools.partial(jax.jit, static_argnames=("model", "length"))
def greedy(model, params, tokens, length):
    """The tokens [T] continued to `length`; later places of the buffer do not reach earlier logits."""

    def step(n, buffer):
        logits = model.apply({"params": params}, buffer, positions_of(buffer))
        return buffer.at[0, n].set(jnp.argmax(logits[0, n - 1]).astype(jnp.int32))

    buffer = jnp.zeros((1, length), jnp.int32).at[0, : len(tokens)].set(tokens)
    return jax.lax.fori_loop(len(tokens), length, step, buffer)[0]


def test_goldens_cover_every_family():
    assert {read_config(directory).family for directory in GOLDENS} == set(FAMILIES)


@over_goldens
def test_logits(directory):
    model, params = load(directory)
    golden = np.load(directory / "golden.npz")
    logits = dense(params, golden["tokens"], model.config)
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=1e-4)


@over_goldens
def test_logits_of_a_prompt_and_of_each_token_decoded_after_it(directory):
    """Through the cache: half of each row is read at once, and the rest token by token."""
    model, params = load(directory)
    golden = np.load(directory / "golden.npz")
    tokens, half = golden["tokens"], golden["tokens"].shape[1] // 2
    logits = through_the_cache(kvjax.LLM(model.config, params), tokens, half)
    np.testing.assert_allclose(logits, golden["logits"][:, half - 1 : -1], rtol=0, atol=1e-4)


@over_goldens
def test_greedy_answers_through_the_cache(directory):
    model, params = load(directory)
    golden = np.load(directory / "golden.npz")
    prompt, expected = golden["tokens"][0].tolist(), golden["greedy"].tolist()
    llm = kvjax.LLM(dataclasses.replace(model.config, eos_token_ids=()), params)
    result = llm.generate(prompt[-1:], llm.prefill(prompt[:-1]), max_new_tokens=len(expected))
    assert result.tokens == [expected]


@over_goldens
def test_greedy_continuation(directory):
    model, params = load(directory)
    golden = np.load(directory / "golden.npz")
    prompt, expected = golden["tokens"][0], golden["greedy"]
    tokens = greedy(model, params, jnp.asarray(prompt), len(prompt) + len(expected))
    np.testing.assert_array_equal(tokens[len(prompt) :], expected)
