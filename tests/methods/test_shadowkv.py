"""ShadowKV: what keys are made of, against NumPy; outliers; what blocks hold."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CAPACITY, CONFIG, start

import kvjax
from kvjax.cache import state as caching
from kvjax.cache.types import Context, WindowEviction
from kvjax.errors import ConfigError, PromptError
from kvjax.inference.plan import make_plan, store_geometry
from kvjax.methods import ShadowKV
from kvjax.ops import rotary
from kvjax.store.flash.store import FlashStore
from tests.inference.test_decode import teacher_forced

METHOD = ShadowKV(budget=24, sinks=2, window=4, chunk=4, outliers=1)
FREQS = rotary.inverse_frequencies(CONFIG.head_dim, CONFIG.rope)
START, STORED = 2, 33  # the middle part of a prompt: eight chunks and a token


def spec_of(method):
    return make_plan(CONFIG, method, 1, CAPACITY).layers[0].spec


def rotated(key, pos):
    """key[K, N, D] turned to pos[N]."""
    return np.asarray(rotary.rotate(jnp.asarray(key).swapaxes(0, 1), jnp.asarray(pos), FREQS).swapaxes(0, 1))


@pytest.fixture(scope="module")
def raw():
    """Keys before rotation, of two heads and 40 tokens: two directions explain most."""
    rng = np.random.default_rng(0)
    key = rng.normal(size=(40, 2)) @ rng.normal(size=(2, 16)) + 0.1 * rng.normal(size=(40, 16))
    return key.reshape(40, 2, 8).swapaxes(0, 1).astype(np.float32)


def built(method, raw):
    """Index and placement of a prompt with these keys."""
    spec, pos = spec_of(method), jnp.arange(40, dtype=jnp.int32)
    context = Context(
        jnp.asarray(rotated(raw, pos)), pos, (pos >= START) & (pos < START + STORED), pos, jnp.zeros((2, 2, 0, 8)),
        jnp.zeros(0, jnp.int32),
    )
    return spec, *jax.jit(lambda: method.build(spec, method.init(spec, ()), context))()


def lowered(raw, rank):
    """The prompt's keys in their leading directions, by NumPy; and those directions."""
    flat = raw[:, START : START + STORED].swapaxes(0, 1).reshape(STORED, -1)
    leading = np.linalg.svd(flat, full_matrices=False)[2][:rank]
    return (flat @ leading.T @ leading).reshape(STORED, 2, 8).swapaxes(0, 1), leading


def worst(key):
    """The chunk of each head with the key that is least like the chunk's mean."""
    chunks = [key[:, at : at + 4] for at in range(0, STORED, 4)]
    means = [chunk.mean(1, keepdims=True) for chunk in chunks]
    cosines = [(c * m).sum(-1) / np.linalg.norm(c, axis=-1) / np.linalg.norm(m, axis=-1)
               for c, m in zip(chunks, means, strict=True)]
    return np.argmin([cosine.min(1) for cosine in cosines], axis=0)


def test_keys_are_the_low_rank_ones_turned_to_their_positions_and_outliers_are_exact(raw):
    method = dataclasses.replace(METHOD, sigma=8.0)  # rank 2 of 16
    spec, index, placement = built(method, raw)
    at = slice(START, START + STORED)
    found = method.rebuild(spec, index, placement.block[:, at], placement.row[:, at], jnp.arange(40)[at])
    exact, low = rotated(raw, np.arange(40))[:, at], rotated(lowered(raw, 2)[0], np.arange(40)[at])
    outlier = np.arange(STORED) // 4 == worst(exact)[:, None]
    np.testing.assert_allclose(np.asarray(found)[outlier], exact[outlier], atol=1e-5)
    np.testing.assert_allclose(np.asarray(found)[~outlier], low[~outlier], atol=1e-4)
    assert np.abs(exact - low)[~outlier].max() > 0.05


@pytest.mark.parametrize("outliers", [1, 9])
def test_a_decoded_token_is_projected_and_kept_exactly_in_an_outlier(raw, outliers):
    """The token comes into the ninth chunk, which is an outlier if all are."""
    method = dataclasses.replace(METHOD, sigma=8, outliers=outliers)
    spec, index, _ = built(method, raw)
    new = np.random.default_rng(1).normal(size=(2, 1, 8)).astype(np.float32)
    pos = START + STORED
    key = jnp.asarray(rotated(new, np.array([pos]))[:, 0])
    evicted = WindowEviction(key, jnp.int32(pos), jnp.int32(0), jnp.bool_(True), jnp.full(3, -1, jnp.int32))
    view = caching.view(spec, caching.empty_layer(spec, index, jnp.float32))
    index, placement = method.append(spec, index, view, evicted)
    found = method.rebuild(spec, index, placement.block[:, None], placement.row[:, None], jnp.full((2, 1), pos))
    leading = lowered(raw, 2)[1]
    projected = (new.reshape(16) @ leading.T @ leading).reshape(2, 1, 8)
    expected = new if outliers == 9 else projected
    np.testing.assert_allclose(found, rotated(expected, np.array([pos])), atol=1e-4)
    assert np.abs(new - projected).max() > 0.1


def test_at_full_rank_nothing_is_lost(params, tokens, tmp_path):
    fetched = teacher_forced(params, tokens, dataclasses.replace(METHOD, sigma=None), steps=8)
    whole = dataclasses.replace(METHOD, sigma=1.0)
    np.testing.assert_allclose(teacher_forced(params, tokens, whole, steps=8), fetched, atol=2e-3)
    lossy = teacher_forced(params, tokens, dataclasses.replace(METHOD, sigma=8.0), "fused",
                           FlashStore(directory=tmp_path), 8)
    assert np.abs(lossy - fetched).max() > 0.02


def test_a_prompt_that_says_too_little_of_keys_is_refused(params, tokens):
    llm = kvjax.LLM(CONFIG, params)
    with pytest.raises(PromptError, match="needs 13 tokens of it where there are 12"):
        llm.prefill(tokens[0, :12].tolist(), method=dataclasses.replace(METHOD, sigma=2.0), capacity=60)
    llm.prefill(tokens[0, :13].tolist(), method=dataclasses.replace(METHOD, sigma=2.0), capacity=60)
    llm.prefill(tokens[0, :2].tolist(), method=dataclasses.replace(METHOD, sigma=None), capacity=60)


def test_blocks_hold_values_alone():
    widths = [
        store_geometry(make_plan(CONFIG, dataclasses.replace(METHOD, sigma=sigma), 1, CAPACITY)).width
        for sigma in (None, 8.0)
    ]
    assert widths == [16, 8]


def test_a_codec_of_keys_is_refused(params, tokens, tmp_path):
    with pytest.raises(ConfigError, match="'rle' compresses keys"):
        start(params, tokens, METHOD, FlashStore(directory=tmp_path, codec="rle"))


@pytest.mark.parametrize("change", [{"sigma": 0.5}, {"outliers": 0}, {"reuse": 2}], ids=str)
def test_impossible_settings_are_refused(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        dataclasses.replace(METHOD, **change)
