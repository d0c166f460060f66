"""Rotary embedding: which dimensions rotate, by which angles, and what the length of a text changes."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.errors import ConfigError
from kvjax.ops import rotary
from kvjax.ops.rotary import RopeConfig

DYNAMIC = RopeConfig(1e4, "dynamic", 2.0, original_max_position=64)
LONGROPE = RopeConfig(1e4, "longrope", original_max_position=64, short_factor=(1.0, 2.0), long_factor=(3.0, 4.0))
sizes = pytest.mark.parametrize("size", [80, 96])
parts = pytest.mark.parametrize("part", [0.5, 0.75, 1.0])


def rotated(x, pos, rope):
    """Complex multiplication in float64: what the definition says."""
    size, n = rope.rotated(x.shape[-1]), rope.rotated(x.shape[-1]) // 2
    freqs = rope.theta ** (-2 * np.arange(n) / size)
    turned = (x[..., :n] + 1j * x[..., n:size]) * np.exp(1j * pos[:, None, None] * freqs) * rope.attention_factor
    return np.concatenate([turned.real, turned.imag, x[..., size:]], axis=-1)


@sizes
@parts
def test_the_first_part_of_each_head_rotates_and_is_scaled(size, part):
    rope, pos = RopeConfig(attention_factor=1.3, partial=part), np.array([0, 1, 77, 900], np.int32)
    x = np.random.default_rng(0).normal(size=(4, 2, size)).astype(np.float32)
    found = rotary.rotate(jnp.asarray(x), jnp.asarray(pos), rotary.inverse_frequencies(size, rope), 1.3)
    np.testing.assert_allclose(found, rotated(x, pos, rope), atol=2e-4, rtol=0)
    np.testing.assert_array_equal(found[..., rope.rotated(size) :], x[..., rope.rotated(size) :])


def test_frequencies_that_depend_on_the_length_are_asked_for_with_one():
    for rope in (DYNAMIC, LONGROPE):
        with pytest.raises(ConfigError, match=f"{rope.kind} rotary embedding depends on the length"):
            rotary.inverse_frequencies(4, rope)
        with pytest.raises(ConfigError, match="for_length"):
            kvjax.init_cache(kvjax.Full(), batch=1, kv_heads=1, group=1, head_dim=4, capacity=8, rope=rope)
        fixed = rope.for_length(80, 4)
        assert not fixed.by_length and fixed.for_length(9999, 4) == fixed
        kvjax.init_cache(kvjax.Full(), batch=1, kv_heads=1, group=1, head_dim=4, capacity=8, rope=fixed)


@pytest.mark.parametrize("tokens", [1, 64])
def test_up_to_the_original_length_nothing_is_stretched_but_by_short_factors(tokens):
    plain = rotary.inverse_frequencies(4, RopeConfig())
    np.testing.assert_array_equal(rotary.inverse_frequencies(4, DYNAMIC.for_length(tokens, 4)), plain)
    short = rotary.inverse_frequencies(4, LONGROPE.for_length(tokens, 4))
    np.testing.assert_allclose(short, plain / [1, 2], rtol=1e-6)


@pytest.mark.parametrize("tokens", [65, 128])
def test_beyond_it_the_base_grows_with_the_length_and_long_factors_hold(tokens):
    base = 1e4 * (2 * tokens / 64 - 1) ** 2  # the exponent is D / (D - 2)
    np.testing.assert_allclose(rotary.inverse_frequencies(4, DYNAMIC.for_length(tokens, 4)), [1, base**-0.5], rtol=1e-6)
    long = rotary.inverse_frequencies(4, LONGROPE.for_length(tokens, 4))
    np.testing.assert_allclose(long, rotary.inverse_frequencies(4, RopeConfig()) / [3, 4], rtol=1e-6)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_keeps_fast_pairs_divides_slow_ones_and_blends_between(truncate):
    rope = RopeConfig(1e4, "yarn", 8.0, original_max_position=4096, truncate=truncate)
    plain, found = (rotary.inverse_frequencies(128, r) for r in (RopeConfig(), rope))
    ratio, turns = plain / found, 4096 * plain / (2 * math.pi)
    np.testing.assert_allclose(ratio[turns > 32 * 1.2], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[turns < 1 / 1.2], 8, rtol=1e-6)
    between = ratio[(turns < 32 / 1.2) & (turns > 1.2)]
    assert len(between) > 5 and (np.diff(between) > 0).all() and 1 < between[0] < between[-1] < 8
    exact = dataclasses.replace(rope, truncate=not truncate)
    assert not np.array_equal(found, rotary.inverse_frequencies(128, exact))


def test_text_of_older_settings_stays_so_that_models_keep_their_identity():
    assert repr(RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 512)) == (
        "RopeConfig(theta=500000.0, kind='llama3', factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, "
        "original_max_position=512)"
    )
    assert len({repr(RopeConfig()), repr(RopeConfig(partial=0.5)), repr(RopeConfig(attention_factor=2.0))}) == 3


@sizes
@pytest.mark.parametrize("part", [0.5, 0.75])
@pytest.mark.parametrize("method", [
    kvjax.RLE(before_rotation=True, tolerance=1e-5), kvjax.ShadowKV(budget=256, window=4, sinks=2, sigma=1, outliers=1),
], ids=lambda method: method.name)
def test_methods_that_turn_keys_back_and_forth_attend_as_full_does(method, size, part):
    rope, rng = RopeConfig(attention_factor=1.3, partial=part), np.random.default_rng(1)
    q, raw, value = (rng.normal(size=(1, 208, heads, size)).astype(np.float32) for heads in (4, 2, 2))
    key = rotary.rotate(raw, np.arange(208, dtype=np.int32)[None], rotary.inverse_frequencies(size, rope), 1.3)
    outputs = []
    for tried in (method, kvjax.Full()):
        cache = kvjax.init_cache(tried, batch=1, kv_heads=2, group=2, head_dim=size, capacity=208, rope=rope)
        cache = kvjax.prefill_cache(cache, key[:, :200], value[:, :200], jnp.asarray([200]))
        for i in range(200, 208):
            out, cache = kvjax.attend(cache, q[:, i], key[:, i], value[:, i])
            outputs.append(out)
    np.testing.assert_allclose(outputs[:8], outputs[8:], atol=1e-3, rtol=0)
