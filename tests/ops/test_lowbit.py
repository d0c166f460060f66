"""Keys in few bits: how far off they are, what they are as bytes, and runs of them."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import ConfigError
from kvjax.ops import kernels, lowbit
from kvjax.ops import runs as rle

TOKENS, SIZE = 24, 8
CODES = {8: np.arange(-127, 128), 4: np.arange(-7, 8), 2: np.asarray([-3, -1, 1, 3])}
TABLE = np.random.default_rng(0).normal(size=(9, SIZE)).astype(np.float32)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_keys_are_half_a_step_off_at_most(bits):
    """Given channels of unlike size, and one that is all zero."""
    key = jnp.asarray(TABLE * np.asarray([1, 100, 0.01, 0, 1, 1, 1, 1], np.float32))
    scale = lowbit.scale_of(key, bits)
    code, apart = lowbit.quantise(key, scale, bits), CODES[bits][1] - CODES[bits][0]
    assert (jnp.abs(lowbit.dequantise(code, scale) - key) <= 0.501 * apart * scale).all() and code.dtype == jnp.int8
    assert set(np.unique(code)) <= set(CODES[bits]) and int(jnp.abs(code).max()) == CODES[bits][-1]
    np.testing.assert_allclose(lowbit.dequantise(code, scale)[:, 3], 0, atol=1e-20)
    np.testing.assert_array_equal(lowbit.quantise(jnp.full((1, SIZE), 1e6), scale, bits), CODES[bits][-1])


@pytest.mark.parametrize(("bits", "best"), [(4, 0.352), (2, 0.498)])
def test_the_closest_scale_is_known_for_normal_numbers(bits, best):
    """Given what is best for 15 and for 4 levels; the scales tried lie 19 % apart. Zeros stay what they are."""
    key = np.random.default_rng(5).normal(size=(4000, 3)).astype(np.float32) * np.asarray([1, 50, 0], np.float32)
    scale = np.asarray(lowbit.closest_scale(jnp.asarray(key), bits, jnp.ones(len(key), bool)))
    assert np.abs(np.log2(scale[:2] / np.asarray([best, 50 * best]))).max() <= 0.15 and scale[2] > 0
    error = [np.square(lowbit.dequantise(lowbit.quantise(key, one, bits), one) - key).sum(0)
             for one in (scale, np.asarray(lowbit.scale_of(jnp.asarray(key), bits)))]
    assert (error[0][:2] < 0.8 * error[1][:2]).all() and error[0][2] < 1e-20


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_rows_that_are_not_valid_change_no_scale(bits):
    """Given padding that is nine times as long as the prompt; of 2 bits, zeros are not near any code."""
    key = jnp.asarray(np.random.default_rng(6).normal(size=(40, SIZE)).astype(np.float32))
    padded = jnp.concatenate([key, jnp.zeros((320, SIZE)), jnp.full((40, SIZE), 1e6)])
    alone = lowbit.closest_scale(key, bits, jnp.ones(40, bool))
    np.testing.assert_array_equal(lowbit.closest_scale(padded, bits, jnp.arange(400) < 40), alone)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_every_code_comes_back_from_its_bytes(bits):
    code = np.random.default_rng(1).choice(CODES[bits], (40, SIZE)).astype(np.int8)
    packed = lowbit.pack(jnp.asarray(code), bits)
    assert packed.dtype == jnp.uint8 and packed.shape == (40, SIZE * bits // 8)
    np.testing.assert_array_equal(lowbit.unpack(packed, bits), code)


def whole_queries(q: np.ndarray) -> np.ndarray:
    """Queries as `products` sees them: the largest number of each is 127 steps."""
    step = np.abs(q).max(-1, keepdims=True) / 127
    return np.round(q / step).astype(np.float64) * step


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("piece", [1, 2 * 2 * SIZE, 2 * 5 * SIZE, 1 << 20, None])
def test_products_are_those_of_the_codes(bits, piece, monkeypatch):
    """Two heads of 42 tokens, 40 of them stored: by XLA a token at a time, in pieces that fit and that leave a rest,
    and all at once, and by the kernel."""
    if piece is not None:
        monkeypatch.setattr(lowbit, "_PIECE", piece)
        monkeypatch.setattr(kernels, "COMPILED", False)
    rng = np.random.default_rng(2)
    code = rng.choice(CODES[bits], (2, 42, SIZE)).astype(np.int8)
    q = rng.normal(size=(2, 3, SIZE)).astype(np.float32)
    packed = lowbit.pack(jnp.asarray(code), bits).swapaxes(1, 2)
    for queries in (q, q[:, :1]):
        found = np.asarray(lowbit.products(packed, jnp.asarray(queries), jnp.int32(40), bits))
        exact = np.einsum("fnd,fqd->fqn", code[:, :40], whole_queries(queries))
        np.testing.assert_allclose(found[..., :40], exact, rtol=1e-5, atol=1e-4)
        assert (found[..., 40:] == -1e30).all()
        off = np.abs(queries).max(-1) / 254  # at most, of each number of a query
        wanted = np.einsum("fnd,fqd->fqn", code[:, :40], queries)
        assert (np.abs(found[..., :40] - wanted) <= off[..., None] * np.abs(code[:, None, :40]).sum(-1) + 1e-4).all()


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("heads", "groups"), [(4, 1), (4, 2), (4, 4), (6, 1), (5, 1)])
def test_the_mean_of_softmaxes_is_that_of_the_products(bits, compiled, heads, groups, monkeypatch):
    """Given three queries of each head; nothing is stored of the last tile, and a part of the one before."""
    monkeypatch.setattr(kernels, "COMPILED", compiled and kernels.COMPILED)
    rng, tokens, stored = np.random.default_rng(3), 2 * 2048 + 5, 2048 + 77  # the kernel works on 2,048 at a time
    code = rng.choice(CODES[bits], (heads, tokens, SIZE)).astype(np.int8)
    q = rng.normal(size=(heads, 3, SIZE)).astype(np.float32) * 2 / np.abs(code).max()
    packed = lowbit.pack(jnp.asarray(code), bits).swapaxes(1, 2)
    found = lowbit.softmax_mean(packed, jnp.asarray(q), jnp.int32(stored), bits, groups)
    scores = np.einsum("fnd,fqd->fqn", code[:, :stored], whole_queries(q))
    weight = np.exp(scores - scores.max(-1, keepdims=True))
    share = (weight / weight.sum(-1, keepdims=True)).reshape(groups, -1, stored).mean(1)
    np.testing.assert_allclose(found[:, :stored], share, rtol=2e-5, atol=1e-9)
    assert (np.asarray(found[:, stored:]) == 0).all()


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_runs_of_packed_keys_are_scored_without_turning_back(bits):
    """Given keys that stand in threes."""
    key = jnp.asarray(np.repeat(TABLE[:8], 3, axis=0))
    scale, q = lowbit.scale_of(key, bits), jnp.asarray(TABLE[:2])
    coded = lowbit.quantise(key, scale, bits)
    runs = rle.encode(lowbit.pack(coded, bits), jnp.int32(TOKENS), rle.Tolerance(), TOKENS)
    assert int(runs.runs) == 8
    np.testing.assert_array_equal(lowbit.unpack(rle.decode(runs), bits), coded)
    unpacked = rle.encode(coded, jnp.int32(TOKENS), rle.Tolerance(), TOKENS)
    exact = rle.encode(lowbit.dequantise(coded, scale), jnp.int32(TOKENS), rle.Tolerance(), TOKENS)
    np.testing.assert_allclose(rle.scores(q * scale, unpacked), rle.scores(q, exact), rtol=2e-5, atol=1e-6)


def test_impossible_codes_are_refused():
    with pytest.raises(ConfigError, match="one of 8, 4, 2"):
        lowbit.scale_of(jnp.asarray(TABLE), 3)
    with pytest.raises(ConfigError, match="whole bytes"):
        lowbit.pack(jnp.zeros((1, 3), jnp.int8), 4)
