"""A cache of runs against full attention, token by token."""

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import HEADS, Stream

from kvjax.codecs import run_cache
from kvjax.errors import ConfigError

attend = jax.jit(run_cache.attend)


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
    np.testing.assert_array_equal(cache.runs.runs, np.repeat(-(-at[:, None] // 3), HEADS, axis=1))
    assert not np.asarray(cache.runs.refused).any()


def test_a_full_cache_says_so_and_grows():
    stream = repeated(1)
    cache = start(stream, (18, 18), slots=6)
    assert bool(run_cache.full(cache))
    rows = [jnp.asarray(array[:, 18]) for array in (stream.q, stream.k, stream.v)]
    assert np.asarray(attend(cache, *rows)[1].runs.refused).all()
    out, grown = attend(run_cache.grow(cache, 12), *rows)
    assert not np.asarray(grown.runs.refused).any() and not bool(run_cache.full(grown))
    np.testing.assert_allclose(out[0], harness.dense_attention(stream, 0, 18), atol=2e-5, rtol=0)


def test_prompts_beyond_the_capacity_are_refused():
    with pytest.raises(ConfigError, match="raise it"):
        start(repeated(2), (30, 17), slots=8, capacity=20)
