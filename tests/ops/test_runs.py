"""Run-length encoding: runs against brute force, one by one against all at once, scores against all keys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvjax.errors import ConfigError
from kvjax.models.config import RopeConfig
from kvjax.ops import attention, rotary
from kvjax.ops import runs as rle
from kvjax.ops.runs import Tolerance

TOKENS, SIZE, GROUP = 24, 4, 2
FIELDS = ("key", "count", "slot", "runs", "tokens", "refused")


def brute_force(key, length, tolerance):
    """Slot of each token and first key of each run."""
    slots, firsts = [], []
    for one in key[:length].astype(np.float64):  # which holds every number of the types below
        allowed = tolerance.absolute + tolerance.relative * np.abs(firsts[-1]) if firsts else None
        if not firsts or not (np.abs(one - firsts[-1]) <= allowed).all():
            firsts.append(one)
        slots.append(len(firsts) - 1)
    return slots, firsts


def keys(dtype, values):
    """Keys with many repeats, next to each other and further apart."""
    rows = st.lists(st.integers(0, 3), min_size=TOKENS, max_size=TOKENS)
    table = hnp.arrays(np.float64, (4, SIZE), elements=st.sampled_from(values))
    return st.builds(lambda table, rows: table.astype(dtype)[rows], table, rows)


FEW = [-2.0, -0.5, 0.0, 0.5, 0.53, 1.0]
CASES = st.one_of(
    keys(np.float32, [*FEW, 1.0 + 2.0**-23]), keys(np.float16, [*FEW, 1.0 + 2.0**-10]),
    keys(jnp.bfloat16, [*FEW, 1.0 + 2.0**-7]), keys(np.int8, [-127.0, -1.0, 0.0, 1.0, 127.0]),
    keys(np.int32, [-(2.0**31), -1.0, 0.0, 1.0, 2.0**24, 2.0**24 + 1, 2.0**31 - 1]),
)
TOLERANCES = st.sampled_from([Tolerance(), Tolerance(absolute=0.05), Tolerance(relative=0.05), Tolerance(1.1, 0.25)])


@functools.partial(jax.jit, static_argnums=3)
def encode(key, length, tolerance, slots):
    return rle.encode(key, length, tolerance, slots)


@functools.partial(jax.jit, static_argnums=3)
def one_by_one(key, length, tolerance, slots):
    def step(i, runs):
        return rle.append(runs, key[i], tolerance)

    return jax.lax.fori_loop(0, length, step, rle.empty(slots, TOKENS, SIZE, key.dtype))


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [(np.int32, 2**24, 2**24 + 1), (np.int8, 126, 127), (np.float16, 1, 1 + 2.0**-10),
     (jnp.bfloat16, 1, 1 + 2.0**-7), (np.float32, 1, 1 + 2.0**-23), (np.float32, 1e30, np.inf)],
)
def test_neighbouring_numbers_of_any_type_are_two_keys_and_come_back(dtype, low, high):
    """All at once and one by one; also where a float of 32 bits does not tell them apart."""
    key = np.asarray([[low] * SIZE, [low] * SIZE, [low] * (SIZE - 1) + [high], [high] * SIZE, [high] * SIZE], dtype)
    key = jnp.asarray(np.pad(key, ((0, TOKENS - 5), (0, 0))))
    bulk, grown = (way(key, jnp.int32(5), Tolerance(), TOKENS) for way in (encode, one_by_one))
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(bulk, name), getattr(grown, name), err_msg=name)
    np.testing.assert_array_equal(bulk.slot[:5], [0, 0, 1, 2, 2])
    assert bulk.key.dtype == dtype and rle.decode(bulk)[:5].tobytes() == key[:5].tobytes()


@pytest.mark.parametrize("far", [2**31 - 1, 2**26 + 3])
def test_large_integers_are_apart_by_their_difference(far):
    """Which no number of their type holds, or no float of 32 bits."""
    first = -(2**31) if far == 2**31 - 1 else 2**26
    key, first = jnp.asarray([[far]], jnp.int32), jnp.asarray([[first]], jnp.int32)
    assert not Tolerance(absolute=2.0).equal(key, first) and Tolerance(absolute=2.0**32).equal(key, first)
    assert bool(Tolerance(absolute=3.0).equal(key, first)) == (far == 2**26 + 3)


@settings(max_examples=120)
@given(key=CASES, length=st.integers(0, TOKENS), tolerance=TOLERANCES)
def test_runs_are_those_of_brute_force(key, length, tolerance):
    runs = jax.device_get(encode(key, jnp.int32(length), tolerance, TOKENS))
    slots, firsts = brute_force(key, length, tolerance)
    assert (int(runs.tokens), int(runs.runs), int(runs.refused)) == (length, len(firsts), 0)
    np.testing.assert_array_equal(runs.slot[:length], slots)
    np.testing.assert_array_equal(runs.key[: len(firsts)], np.reshape(firsts, (-1, SIZE)))
    np.testing.assert_array_equal(runs.count, np.bincount(slots, minlength=TOKENS))
    if not tolerance.absolute and not tolerance.relative:
        np.testing.assert_array_equal(rle.decode(runs)[:length], key[:length])


@settings(max_examples=80)
@given(key=CASES, length=st.integers(0, TOKENS), tolerance=TOLERANCES, slots=st.sampled_from([3, TOKENS]))
def test_one_by_one_gives_the_same_as_all_at_once(key, length, tolerance, slots):
    """Also when slots run out: then both leave out the same tokens, and say how many."""
    bulk = encode(key, jnp.int32(length), tolerance, slots)
    grown = one_by_one(key, jnp.int32(length), tolerance, slots)
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(bulk, name), getattr(grown, name), err_msg=name)
    assert int(bulk.tokens + bulk.refused) == length


@pytest.mark.parametrize("way", [encode, one_by_one])
def test_errors_do_not_add_up_along_a_run(way):
    """Given keys that drift by less than the tolerance, a run ends where its first key is too far away."""
    key = jnp.broadcast_to(0.04 * jnp.arange(TOKENS, dtype=jnp.float32)[:, None], (TOKENS, SIZE))
    runs = way(key, jnp.int32(6), Tolerance(absolute=0.05), TOKENS)
    np.testing.assert_array_equal(runs.slot[:6], [0, 0, 1, 1, 2, 2])


def test_more_tokens_follow_an_encoded_prompt():
    key = np.repeat(np.random.default_rng(0).normal(size=(8, SIZE)), 3, axis=0).astype(np.float32)
    runs = encode(key, jnp.int32(10), Tolerance(), 8)
    append = jax.jit(rle.append)
    for one in key[10:]:
        runs = append(runs, one, Tolerance())
    whole = encode(key, jnp.int32(24), Tolerance(), 8)
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(runs, name), getattr(whole, name), err_msg=name)


def problem(seed):
    """Queries, and keys of which three in a row are equal."""
    rng = np.random.default_rng(seed)
    q, key = rng.normal(size=(GROUP, SIZE)), np.repeat(rng.normal(size=(TOKENS // 3, SIZE)), 3, axis=0)
    return jnp.asarray(q, jnp.float32), jnp.asarray(key, jnp.float32)


def attended(q, runs, value):
    """As a cache does with the scores."""
    valid = jnp.arange(len(value)) < runs.tokens
    return attention.attend_scores(attention.only_valid(rle.scores(q, runs), valid), value, valid)


@pytest.mark.parametrize(("tokens", "slots"), [(256, 64), (256, 256), (512, 128)])
def test_attention_over_runs_has_the_bits_of_attention_over_keys(tokens, slots):
    """Of heads as models have them; with a few rows of a few numbers XLA:CPU adds in another order."""
    rng = np.random.default_rng(1)
    key = jnp.asarray(np.repeat(rng.normal(size=(tokens // 4, 64)), 4, axis=0), jnp.float32)
    q, value = (jnp.asarray(rng.normal(size=(n, 64)), jnp.float32) for n in (GROUP, tokens))
    runs = encode(key, jnp.int32(tokens - 6), Tolerance(), slots)
    expected = jax.jit(attention.attend_part)(q, key, value, jnp.arange(tokens) < tokens - 6)
    found = jax.jit(attended)(q, runs, value)
    for name in ("out", "top", "total"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)


def test_no_key_is_expanded():
    """No intermediate result of scoring is as large as all keys."""
    made = jax.make_jaxpr(rle.scores)(jnp.zeros((4, 64)), rle.empty(16, 4096, 64))
    sizes = [np.prod(v.aval.shape) for line in made.jaxpr.eqns for v in line.outvars]
    assert 4 * 4096 in sizes and max(sizes) < 4096 * 64


@pytest.mark.parametrize(("length", "block"), [(20, 8), (24, 7), (1, 8)])
def test_keys_before_rotation_are_turned_to_their_positions(length, block):
    """Also where the last block reaches beyond the capacity."""
    q, key = problem(2)
    freqs, at = np.array([1.0, 0.1], np.float32), jnp.arange(TOKENS, dtype=jnp.int32)
    runs = encode(key, jnp.int32(length), Tolerance(), 8)

    rotated = rotary.rotate(key[:, None], at, freqs)[:, 0]
    expected = attention.scores_of(q, rotated, at < length)
    found = jax.jit(lambda runs: rle.scores_unrotated(q, runs, jnp.ones(SIZE), freqs, block))(runs)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_keys_before_rotation_meet_a_query_of_16_bits_unrounded():
    rng, freqs = np.random.default_rng(0), rotary.inverse_frequencies(64, RopeConfig())
    key, q = jnp.asarray(rng.normal(size=(256, 64)), jnp.float32), jnp.asarray(rng.normal(size=(GROUP, 64)), "bfloat16")
    runs = rle.encode(key, jnp.int32(256), Tolerance(), 256)
    found = rle.scores_unrotated(q, runs, jnp.ones(64), freqs, 32)
    expected = rle.scores_unrotated(q.astype(jnp.float32), runs, jnp.ones(64), freqs, 32)
    np.testing.assert_array_equal(found, expected)


def test_of_keys_before_rotation_one_block_is_expanded():
    """At a time."""
    def made_by(program):
        for line in program.eqns:
            yield from (int(np.prod(v.aval.shape)) for v in line.outvars)
            for part in line.params.values():
                yield from made_by(part.jaxpr) if hasattr(part, "jaxpr") else ()

    scores = functools.partial(rle.scores_unrotated, freqs=np.ones(32, np.float32), block=128)
    program = jax.make_jaxpr(scores)(jnp.zeros((4, 64)), rle.empty(16, 4096, 64), jnp.ones(64))
    sizes = list(made_by(program.jaxpr))
    assert 128 * 64 in sizes and max(sizes) < 4096 * 64


def test_the_index_is_as_narrow_as_its_length_allows():
    assert rle.empty(1, 65_535, 2).slot.dtype == jnp.uint16 and rle.empty(1, 65_536, 2).slot.dtype == jnp.uint32


def test_a_size_counts_every_array():
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(rle.empty(8, TOKENS, SIZE)))
    assert rle.size(TOKENS, 8, SIZE, 4).coded == held and rle.size(TOKENS, 8, SIZE, 4).raw == TOKENS * SIZE * 4


def test_the_shortest_length_that_pays():
    least = rle.fewest_tokens(0.5, 64, 2)
    assert rle.size(least, round(0.5 * least), 64, 2).pays
    assert not rle.size(least - 1, max(1, round(0.5 * (least - 1))), 64, 2).pays
    assert rle.fewest_tokens(1.0, 64, 2) is None


def test_impossible_sizes_are_refused():
    with pytest.raises(ConfigError, match="at least 1"):
        rle.empty(0, 4, 4)
