"""Keys in few bits: how far off they are, what they are as bytes, and runs of them."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.codecs import lowbit, rle
from kvjax.errors import ConfigError

TOKENS, SIZE = 24, 8
TABLE = np.random.default_rng(0).normal(size=(9, SIZE)).astype(np.float32)


@pytest.mark.parametrize(("bits", "largest"), [(8, 127), (4, 7), (2, 1)])
def test_keys_are_half_a_step_off_at_most(bits, largest):
    key = jnp.asarray(TABLE * np.asarray([1, 100, 0.01, 0, 1, 1, 1, 1], np.float32))
    scale = lowbit.scale_of(key, bits)
    code = lowbit.quantise(key, scale, bits)
    assert (jnp.abs(lowbit.dequantise(code, scale) - key) <= 0.501 * scale).all() and code.dtype == jnp.int8
    assert int(jnp.abs(code).max()) == largest and not np.asarray(code[:, 3]).any()
    np.testing.assert_array_equal(lowbit.quantise(jnp.full((1, SIZE), 1e6), scale, bits), largest)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_every_code_comes_back_from_its_bytes(bits):
    largest = 2 ** (bits - 1) - 1
    code = np.random.default_rng(1).integers(-largest, largest + 1, (40, SIZE)).astype(np.int8)
    packed = lowbit.pack(jnp.asarray(code), bits)
    assert packed.dtype == jnp.uint8 and packed.shape == (40, SIZE * bits // 8)
    np.testing.assert_array_equal(lowbit.unpack(packed, bits), code)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("piece", [1, 2 * 2 * SIZE, 2 * 5 * SIZE, 1 << 20])
def test_products_piece_by_piece_are_those_of_the_codes(bits, piece, monkeypatch):
    """Two heads of 42 tokens: a token at a time, pieces that fit and that leave a rest, all at once."""
    monkeypatch.setattr(lowbit, "_PIECE", piece)
    rng, largest = np.random.default_rng(2), 2 ** (bits - 1) - 1
    code = rng.integers(-largest, largest + 1, (2, 42, SIZE)).astype(np.int8)
    q = rng.normal(size=(2, 3, SIZE)).astype(np.float32)
    found = lowbit.products(lowbit.pack(jnp.asarray(code), bits), jnp.asarray(q), bits)
    np.testing.assert_allclose(found, np.einsum("fnd,fqd->fnq", code, q), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("size", [4, 16, 40])
def test_products_dimension_by_dimension_are_those_of_the_codes(bits, size):
    """Two heads of 42 tokens: fewer dimensions than are added at a time, as many, and more."""
    rng, largest = np.random.default_rng(3), 2 ** (bits - 1) - 1
    code = rng.integers(-largest, largest + 1, (2, 42, size)).astype(np.int8)
    q = rng.normal(size=(2, 3, size)).astype(np.float32)
    packed = lowbit.pack(jnp.asarray(code), bits).swapaxes(1, 2)
    found = lowbit.products_by_dimension(packed, jnp.asarray(q), bits)
    np.testing.assert_allclose(found, np.einsum("fnd,fqd->fqn", code, q), rtol=1e-5, atol=1e-4)


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
