"""Attention over parts, causal attention in chunks, and the rules of aggregation, against NumPy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax

from kvjax.errors import ConfigError
from kvjax.ops import attention, causal
from kvjax.ops.topk import AGGREGATIONS, aggregate

HEADS, GROUP, SIZE, TOKENS, PARTS = 2, 3, 8, 24, 5


def exact(q, key, value, valid):
    """Attention of q[K, G, D] over the valid ones of key[K, N, D] in float64; zero where there is none."""
    out = np.zeros((HEADS, GROUP, SIZE))
    for head in range(HEADS):
        k, v = (x[head, valid[head]].astype(np.float64) for x in (key, value))
        if len(k):
            out[head] = softmax(q[head].astype(np.float64) @ k.T / np.sqrt(SIZE), axis=-1) @ v
    return out


@jax.jit
def merged(q, key, value, owner):
    """Attention over the tokens of parts 0 .. 4, one part after the other; owner -1 = invalid token."""
    parts = [attention.attend_part(q, key, value, owner == i) for i in range(PARTS)]
    return attention.normalise(functools.reduce(attention.merge, parts), q.dtype)


def tokens(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    q, key, value = (rng.normal(size=(HEADS, n, SIZE)).astype(np.float32) for n in (GROUP, TOKENS, TOKENS))
    return scale * q, key, value


owners = st.lists(st.integers(-1, PARTS - 1), min_size=HEADS * TOKENS, max_size=HEADS * TOKENS).map(
    lambda owner: np.array(owner, np.int32).reshape(HEADS, TOKENS)
)
partitions = given(seed=st.integers(0, 1000), owner=owners, scale=st.sampled_from([0.0, 1.0, 30.0]))


# Parts --------------------------------------------------------------------------------------------


@settings(max_examples=100)
@partitions
def test_merged_parts_equal_softmax_over_the_union(seed, owner, scale):
    q, key, value = tokens(seed, scale)
    np.testing.assert_allclose(
        merged(q, key, value, owner), exact(q, key, value, owner >= 0), atol=2e-6 * max(1, scale)
    )


@settings(max_examples=50)
@given(seed=st.integers(0, 1000), owner=owners, part=st.integers(0, PARTS - 1))
def test_empty_parts_change_nothing(seed, owner, part):
    """Given everything in one part, the other four are empty before and after it."""
    q, key, value = tokens(seed)
    np.testing.assert_allclose(
        merged(q, key, value, np.where(owner >= 0, np.int32(part), np.int32(-1))),
        exact(q, key, value, owner >= 0), atol=2e-6,
    )


def test_a_part_without_rows_changes_nothing():
    q, key, value = tokens(0)
    whole = attention.attend_part(q, key, value, np.ones((HEADS, TOKENS), bool))
    none = attention.attend_part(q, key[:, :0], value[:, :0], np.ones((HEADS, 0), bool))
    for both in (attention.merge(whole, none), attention.merge(none, whole)):
        np.testing.assert_array_equal(attention.normalise(both, jnp.float32), attention.normalise(whole, jnp.float32))


def test_no_valid_token_at_all_gives_zero():
    q, key, value = tokens(0)
    np.testing.assert_array_equal(merged(q, key, value, np.full((HEADS, TOKENS), -1, np.int32)), 0)


@pytest.mark.parametrize("sign", [-1, 1])
def test_scores_beyond_the_range_of_exp_neither_overflow_nor_vanish(sign):
    """Given scores that are all near 500 or all near -500."""
    q, key, value = tokens(0)
    q, key = sign * 300 * np.abs(q), np.abs(key)
    owner = np.arange(TOKENS, dtype=np.int32)[None].repeat(HEADS, 0) % PARTS
    np.testing.assert_allclose(merged(q, key, value, owner), exact(q, key, value, owner >= 0), atol=5e-4)


def test_keys_and_values_of_invalid_tokens_do_not_matter():
    q, key, value = tokens(1)
    owner = np.where(np.arange(TOKENS) < 10, 0, -1).astype(np.int32)[None].repeat(HEADS, 0)
    wild_key, wild_value = (np.where(owner[..., None] == 0, x, np.float32(1e6)) for x in (key, value))
    np.testing.assert_array_equal(merged(q, key, value, owner), merged(q, wild_key, wild_value, owner))


def test_keys_and_values_in_bf16_are_summed_in_f32():
    """Given the same rounded numbers, storage in bf16 gives what f32 storage gives, to f32 accuracy."""
    q, key, value = tokens(2)
    key16, value16 = jnp.asarray(key, jnp.bfloat16), jnp.asarray(value, jnp.bfloat16)
    owner = np.zeros((HEADS, TOKENS), np.int32)
    rounded = (np.asarray(x.astype(jnp.float32)) for x in (key16, value16))
    np.testing.assert_allclose(merged(q, key16, value16, owner), exact(q, *rounded, owner >= 0), atol=2e-6)


@settings(max_examples=100)
@given(st.lists(st.floats(2.0**-80, 2.0**80, width=32), min_size=1, max_size=8), st.sampled_from([-1.0, 0.0, 1.0]))
def test_three_numbers_of_bfloat16_are_one_of_f32(numbers, sign):
    x = np.float32(numbers) * np.float32(sign)
    parts = jax.jit(attention.in_bfloat16)(x)
    assert all(part.dtype == jnp.bfloat16 for part in parts)
    np.testing.assert_array_equal(sum(np.asarray(part, np.float64) for part in parts), x)


@pytest.mark.parametrize("narrow", ["q", "key"])
def test_products_of_two_types_round_neither(narrow):
    """Queries of a model in bf16 meet what a method keeps in f32, and f32 queries a cache in bf16."""
    q, key, _ = tokens(3)
    pair = {"q": jnp.asarray(q), "key": jnp.asarray(key)}
    pair[narrow] = pair[narrow].astype(jnp.bfloat16)
    exact_products = np.einsum("kgd,knd->kgn", *(np.asarray(pair[name], np.float64) for name in ("q", "key")))
    np.testing.assert_allclose(jax.jit(attention.products)((pair["key"], pair["q"])), exact_products, atol=2e-6)


def test_rows_in_bf16_are_not_widened_before_they_are_attended():
    q, rows = jnp.ones((HEADS, GROUP, SIZE)), jnp.ones((HEADS, 4096, SIZE), jnp.bfloat16)
    attend = jax.jit(attention.attend_part).lower(q, rows, rows, jnp.ones((HEADS, 4096), bool)).compile()
    scores = 4 * HEADS * GROUP * 4096
    assert f"f32[{HEADS},4096,{SIZE}]" not in attend.as_text()
    assert attend.memory_analysis().temp_size_in_bytes < 8 * scores  # scores, weights, and the weights in three parts


# Causal attention in chunks -----------------------------------------------------------------------

LENGTH, QUERIES = 48, 16
_causal = jax.jit(causal.in_chunks, static_argnums=(4, 5))


@pytest.mark.parametrize("window", [None, 1, 7, 100])
@pytest.mark.parametrize("chunk", [4, 16, 48])
def test_causal_equals_dense_attention_from_every_start(chunk, window):
    rng = np.random.default_rng(3)
    q = rng.normal(size=(QUERIES, HEADS, GROUP, SIZE)).astype(np.float32)
    key, value = (rng.normal(size=(LENGTH, HEADS, SIZE)).astype(np.float32) for _ in range(2))
    for start in (0, 5, 16, LENGTH - QUERIES):
        found = _causal(q, key, value, jnp.int32(start), chunk, window)
        for i in range(QUERIES):
            at = start + i
            seen = np.arange(LENGTH) <= at
            if window is not None:
                seen &= np.arange(LENGTH) > at - window
            dense = exact(q[i], key.swapaxes(0, 1), value.swapaxes(0, 1), seen[None].repeat(HEADS, 0))
            np.testing.assert_allclose(found[i], dense, atol=2e-6)


def test_keys_that_are_not_whole_chunks_are_refused():
    q, key = np.zeros((4, HEADS, GROUP, SIZE), np.float32), np.zeros((10, HEADS, SIZE), np.float32)
    with pytest.raises(ConfigError, match="10 keys"):
        causal.in_chunks(q, key, key, jnp.int32(0), 4, None)


# Aggregation over the query heads of a KV head ----------------------------------------------------

RULES = {
    "mean": lambda s: s.mean(1), "max": lambda s: s.max(1),
    "softmax_mean": lambda s: softmax(s, axis=-1).mean(1), "softmax_max": lambda s: softmax(s, axis=-1).max(1),
}


@pytest.mark.parametrize("rule", AGGREGATIONS)
def test_aggregation_follows_its_rule(rule):
    scores = 5 * np.random.default_rng(4).normal(size=(HEADS, GROUP, TOKENS))
    np.testing.assert_allclose(
        aggregate(jnp.asarray(scores, jnp.float32), rule), RULES[rule](scores), rtol=1e-5, atol=1e-6
    )
