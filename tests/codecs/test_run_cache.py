"""A cache of runs against full attention, token by token, and against itself without its codec, bit by bit."""

import dataclasses

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import HEADS, Stream

from kvjax.codecs import rle, run_cache
from kvjax.codecs.rle import Plain, Runs, Tolerance
from kvjax.errors import ConfigError
from kvjax.models import rope

attend, append = jax.jit(run_cache.attend), jax.jit(run_cache.append)
FREE = ((0, 0), (0, 0), (0, 22), (0, 0))  # rows of keys after the prompt


def repeated(seed):
    """A stream in which each key comes three times in a row."""
    stream = Stream.draw(seed)
    k = np.repeat(stream.k[:, ::3], 3, axis=1)[:, : stream.k.shape[1]]
    return Stream(stream.q, k, stream.v)


def start(stream, lengths, slots, capacity=60):
    most = max(lengths)
    return run_cache.prefill(
        jnp.asarray(stream.k[:, :most]), jnp.asarray(stream.v[:, :most]), jnp.asarray(lengths), capacity=capacity,
        slots=slots,
    )


@pytest.mark.parametrize(("lengths", "slots"), [((30, 17), 20), ((1, 2), 60)])
def test_every_token_is_attended_as_without_a_codec(lengths, slots):
    stream, at = repeated(0), np.asarray(lengths)
    cache = start(stream, lengths, slots)
    for _ in range(30):
        rows = (jnp.asarray(array[np.arange(2), at]) for array in (stream.q, stream.k, stream.v))
        out, cache = attend(cache, *rows)
        for b in range(2):
            np.testing.assert_allclose(out[b], harness.dense_attention(stream, b, at[b]), atol=2e-5, rtol=0)
        at += 1
    np.testing.assert_array_equal(cache.keys.runs, np.repeat(-(-at[:, None] // 3), HEADS, axis=1))
    assert not np.asarray(cache.keys.refused).any()


def test_a_full_cache_says_so_and_grows():
    stream = repeated(1)
    cache = start(stream, (18, 18), slots=6)
    assert bool(run_cache.full(cache))
    rows = [jnp.asarray(array[:, 18]) for array in (stream.q, stream.k, stream.v)]
    assert np.asarray(attend(cache, *rows)[1].keys.refused).all()
    out, grown = attend(run_cache.grow(cache, 12), *rows)
    assert not np.asarray(grown.keys.refused).any() and not bool(run_cache.full(grown))
    np.testing.assert_allclose(out[0], harness.dense_attention(stream, 0, 18), atol=2e-5, rtol=0)


def in_runs(tokens: int, run: int, more: int = 8):
    """Keys and values `[1, T, K, D]` of heads as models have them, keys in runs, and queries for `more` tokens."""
    rng = np.random.default_rng(0)
    key = np.repeat(rng.normal(size=(1, -(-(tokens + more) // run), HEADS, 64)), run, axis=1)[:, : tokens + more]
    value, q = rng.normal(size=key.shape), rng.normal(size=(more, 1, 2 * HEADS, 64))
    return tuple(jnp.asarray(array, jnp.float32) for array in (q, key, value))


def outputs(cache, q, key, value):
    """What the tokens after a prompt attend to, and the cache."""
    out, first = [], key.shape[1] - len(q)
    for i, query in enumerate(q):
        one, cache = attend(cache, query, key[:, first + i], value[:, first + i])
        out.append(one)
    return np.stack(out), cache


@pytest.mark.parametrize("freqs", [None, np.geomspace(1, 1e-4, 32, dtype=np.float32)])
def test_with_and_without_the_codec_no_bit_differs(freqs):
    """Without a tolerance."""
    q, key, value = in_runs(250, 4)
    filled = run_cache.prefill(key[:, :250], value[:, :250], jnp.asarray([250]), capacity=272, freqs=freqs)
    assert isinstance(filled.keys, Runs)
    tokens = jnp.full((1, HEADS), 250)
    plain = dataclasses.replace(filled, keys=Plain(jnp.pad(key[:, :250].swapaxes(1, 2), FREE), tokens))
    (found, with_codec), (expected, without) = (outputs(cache, q, key, value) for cache in (filled, plain))
    np.testing.assert_array_equal(found, expected)
    assert isinstance(with_codec.keys, Runs) and isinstance(without.keys, Plain)
    assert not np.asarray(with_codec.keys.refused).any()
    np.testing.assert_array_equal(jax.vmap(jax.vmap(rle.decode))(with_codec.keys)[:, :, :258], key.swapaxes(1, 2))


def test_keys_before_rotation_are_attended_as_rotated_ones():
    """And equal contents are runs only before rotation."""
    q, key, value = in_runs(120, 3)
    freqs, at = np.geomspace(1, 1e-4, 32, dtype=np.float32), jnp.arange(key.shape[1], dtype=jnp.int32)
    rotated, length = rope.rotate(key, at[None], freqs), jnp.asarray([120])
    before = run_cache.prefill(key[:, :120], value[:, :120], length, capacity=130, slots=44, freqs=freqs)
    after = run_cache.prefill(rotated[:, :120], value[:, :120], length, capacity=130, slots=130)
    found, before = outputs(before, q, key, value)
    expected, after = outputs(after, q, rotated, value)
    np.testing.assert_allclose(found, expected, atol=2e-5, rtol=0)
    assert (np.asarray(before.keys.runs) == 43).all() and (np.asarray(after.keys.runs) == 128).all()


def test_a_codec_that_does_not_pay_is_off_and_the_log_says_so(caplog):
    """And attention goes on."""
    stream = Stream.draw(3)
    with caplog.at_level("INFO", logger="absl"):
        cache = start(stream, (30, 17), slots=None)
    assert isinstance(cache.keys, Plain) and "codec off" in caplog.text
    assert not bool(run_cache.full(cache)) and run_cache.grow(cache, 3) is cache
    for at in np.add.outer(np.arange(6), [30, 17]):
        out, cache = attend(cache, *(jnp.asarray(array[np.arange(2), at]) for array in (stream.q, stream.k, stream.v)))
        for b in range(2):
            np.testing.assert_allclose(out[b], harness.dense_attention(stream, b, at[b]), atol=2e-5, rtol=0)


def test_the_codec_is_on_from_the_length_at_which_it_pays():
    """Given keys that stand in pairs, of which the index of one eats what one run saves."""
    key = jnp.asarray(np.repeat(np.random.default_rng(0).normal(size=(1, 40, 1, 2)), 2, axis=1), jnp.float32)
    least = next(tokens for tokens in range(2, 80, 2) if rle.size(tokens, tokens // 2, 2, 4).pays)
    for tokens, kind in ((least - 2, Plain), (least, Runs)):
        cache = run_cache.prefill(key[:, :tokens], key[:, :tokens], jnp.asarray([tokens]), capacity=tokens)
        assert isinstance(cache.keys, kind), tokens


def test_deciding_again_turns_the_codec_on_and_off():
    """As runs turn out longer, or shorter, than the prompt foretold; kept keys and slots follow."""
    _, key, value = in_runs(60, 1, more=4)
    shorter = jnp.repeat(key[:, :1], 2, axis=1), key[:, 2:62], Runs, Plain
    longer = key[:, :24], jnp.repeat(key[:, 24:25], 38, axis=1), Plain, Runs
    for prompt, rest, first, last in (shorter, longer):
        tokens = prompt.shape[1]
        cache = run_cache.prefill(prompt, value[:, :tokens], jnp.asarray([tokens]), capacity=64)
        assert isinstance(cache.keys, first)
        for one in rest.swapaxes(0, 1):
            cache = run_cache.decide(cache) if bool(run_cache.full(cache)) else cache
            cache = dataclasses.replace(cache, keys=append(cache, one))
        cache = run_cache.decide(cache)
        assert isinstance(cache.keys, last)
        expected = jnp.concatenate([prompt, rest], axis=1).swapaxes(1, 2)
        np.testing.assert_array_equal(jax.vmap(jax.vmap(rle.decode))(cache.keys)[:, :, :62], expected)


def test_with_a_tolerance_keys_are_off_by_no_more():
    _, key, value = in_runs(56, 8)
    drift = key + 0.004 * (jnp.arange(64) % 8)[:, None, None]
    cache = run_cache.prefill(
        drift, value, jnp.asarray([64]), capacity=64, tolerance=Tolerance(jnp.float32(0.01), jnp.float32(0))
    )
    back = jax.vmap(jax.vmap(rle.decode))(cache.keys).swapaxes(1, 2)
    assert isinstance(cache.keys, Runs) and 0.007 < float(jnp.abs(back - drift).max()) <= 0.01


def test_prompts_beyond_the_capacity_are_refused():
    with pytest.raises(ConfigError, match="raise it"):
        start(repeated(2), (30, 17), slots=8, capacity=20)
