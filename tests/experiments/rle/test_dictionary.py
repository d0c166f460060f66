"""Dictionaries of keys, segments of slots and the learned codec."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.rle import autoencoder, dictionary
from kvjax.errors import ConfigError
from kvjax.ops.runs import decode

TOKENS, SIZE, VOCAB = 24, 4, 9
TABLE = np.random.default_rng(0).normal(size=(VOCAB, SIZE)).astype(np.float32)
texts = st.lists(st.integers(0, VOCAB - 1), min_size=TOKENS, max_size=TOKENS).map(lambda row: np.asarray(row, np.int32))
by_token = jax.jit(dictionary.by_token, static_argnums=3)
by_content = jax.jit(dictionary.by_content, static_argnums=2)


@functools.partial(jax.jit, static_argnums=3)
def one_by_one(key, token, length, slots):
    def step(i, found):
        return dictionary.append(found, key[i], token[i])

    return jax.lax.fori_loop(0, length, step, dictionary.empty(slots, TOKENS, SIZE, VOCAB))


@settings(max_examples=60)
@given(token=texts, length=st.integers(0, TOKENS), slots=st.sampled_from([4, VOCAB]))
def test_dictionaries_are_exact_and_alike(token, length, slots):
    key, token, length = jnp.asarray(TABLE[token]), jnp.asarray(token), jnp.int32(length)
    known, found = by_token(key, token, length, slots), by_content(key, length, slots)
    grown = one_by_one(key, token, length, slots).runs
    for name in ("key", "count", "slot", "runs", "tokens", "refused"):
        np.testing.assert_array_equal(getattr(known, name), getattr(found, name), err_msg=name)
        np.testing.assert_array_equal(getattr(known, name), getattr(grown, name), err_msg=name)
    kept = int(known.tokens)
    np.testing.assert_array_equal(np.asarray(decode(known))[:kept], np.asarray(key)[:kept])
    assert int(known.runs) == len(set(np.asarray(token)[:kept].tolist())) and (slots == 4 or kept == length)


def test_keys_that_differ_in_one_bit_are_two():
    key = np.ones((3, SIZE), np.float32)
    key[1, 2] = np.nextafter(np.float32(1), np.float32(2))
    np.testing.assert_array_equal(by_content(key, jnp.int32(3), 3).slot, [0, 1, 0])


def test_colliding_rows_stay_apart(monkeypatch):
    """Given a hash that is the same for all rows, nothing false is merged."""
    monkeypatch.setattr(jnp, "sum", lambda x, axis, dtype: jnp.zeros(len(x), dtype))
    rows = np.asarray([[1], [2], [1], [1], [3]], np.int32)
    leader = np.asarray(dictionary.first_equal(rows))
    np.testing.assert_array_equal(rows[leader], rows)


def test_rows_of_keys_and_values_share_one_index():
    """Where the token decides both, as in the first layer."""
    token = jnp.asarray([3, 1, 3, 3, 0, 1], jnp.int32)
    rows = jnp.concatenate([TABLE[token], np.sin(TABLE)[token]], axis=1)
    runs = by_token(rows, token, jnp.int32(6), VOCAB)
    np.testing.assert_array_equal(decode(runs), rows)
    np.testing.assert_array_equal(runs.slot, [0, 1, 0, 0, 2, 1])


@settings(max_examples=40)
@given(st.lists(st.sampled_from([(0, 1, 2), (3, 4, 5), (0, 1, 3)]), min_size=8, max_size=8))
def test_segments_give_the_index_back(parts):
    slot = np.asarray(parts, np.uint16).reshape(-1)
    found = dictionary.segments(slot, 3)
    assert int(found.count) == len(set(parts))
    np.testing.assert_array_equal(dictionary.expand(found), slot)


@pytest.mark.parametrize(("shift", "different"), [(0, 3), (2, 6)])
def test_a_repeated_paragraph_is_found_only_where_it_is_aligned(shift, different):
    """A paragraph of two segments comes again after one more: shifted by two tokens, none of them is the same."""
    paragraph, between, rest = np.arange(16), np.arange(16, 24 + shift), np.arange(100, 100 + -shift % 8)
    slot = np.concatenate([paragraph, between, paragraph, rest]).astype(np.uint16)
    found = dictionary.segments(slot, 8)
    assert int(found.count) == different
    np.testing.assert_array_equal(dictionary.expand(found), slot)


def test_segments_pay_where_paragraphs_repeat():
    repeated, different = (dictionary.index_size(1024, n, 32) for n in (4, 32))
    assert repeated.coded < repeated.raw < different.coded
    with pytest.raises(ConfigError, match="whole segments"):
        dictionary.segments(np.zeros(10, np.uint16), 3)


def test_an_autoencoder_learns_a_subspace():
    rng = np.random.default_rng(1)
    key = jnp.asarray(rng.normal(size=(512, 3)) @ rng.normal(size=(3, 8)), jnp.float32)
    how = autoencoder.Training(width=3, hidden=8, steps=300, batch=64, rate=1e-2)
    model = autoencoder.train(key, how, jax.random.key(0))
    error = np.linalg.norm(model.decode(model.encode(key)) - key) / np.linalg.norm(key)
    assert model.encode(key).shape == (512, 3) and error < 0.1
    with pytest.raises(ConfigError, match="smaller than the head size"):
        autoencoder.train(key, autoencoder.Training(width=8), jax.random.key(0))
