"""Kernels against NumPy in float64, of every size that their loops treat apart; and what replaces them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax

from kvjax import attention, kernels, packing
from kvjax.codecs import lowbit
from kvjax.store import residency

compiled = pytest.mark.skipif(not kernels.COMPILED, reason="built without a C compiler")
TYPES = ("float32", "bfloat16")


def scattered(dtype: str, size: int, heads: int = 3, tokens: int = 11):
    """Rows of a pool of 40, some of them out of range, and as numbers of float64."""
    rng = np.random.default_rng(size)
    pool = packing.pack(jnp.asarray(rng.normal(size=(40, size)), jnp.float32), dtype)
    index = rng.integers(-5, 50, (heads, tokens)).astype(np.int32)
    rows = np.asarray(packing.unpack(pool, dtype), np.float64)[index.clip(0, 39)]
    return packing.Scattered(pool, jnp.asarray(index), dtype), rows


def vectors(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def test_the_kernels_are_here():
    """Where there is a C compiler. Without this test a broken build would only be slow."""
    pytest.importorskip("kvjax.store.native", reason="built without a C compiler")
    assert kernels.COMPILED


def refuse(name, shape, message, operands):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        result = jax.ShapeDtypeStruct(shape, jnp.float32)
        kernels.on_cpu(name, result, lambda *_: jnp.zeros(shape), *map(jnp.asarray, operands))


def both(rows: packing.Scattered, q, weight):
    """Products with q, and the sums of exp(weight - top) times the rows: what attention takes of keys and of values."""
    valid = jnp.ones(rows.index.shape, bool)
    part = attention.attend_scores(weight, rows, valid)
    return attention.scores_of(q, rows, valid), part.out / part.total[..., None]


def exactly(rows: np.ndarray, q, weight):
    """The same of float64 rows[K, N, D]."""
    return np.einsum("kgd,knd->kgn", q, rows) * q.shape[-1] ** -0.5, softmax(weight, axis=-1) @ rows


@pytest.mark.parametrize("tokens", [1, 3, 4, 11, 64])
@pytest.mark.parametrize("group", [1, 3, 4, 5, 9])
@pytest.mark.parametrize("size", [1, 7, 8, 27, 64])
@pytest.mark.parametrize("dtype", TYPES)
def test_rows_are_read_where_they_lie(dtype, size, group, tokens):
    rows, exact = scattered(dtype, size, tokens=tokens)
    given = vectors(3, group, size), vectors(3, group, tokens)
    for found, expected in zip(both(rows, *given), exactly(exact, *map(np.float64, given)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float16", "int8", "int4"])
def test_rows_of_other_types_are_gathered(dtype):
    rows, exact = scattered(dtype, 64)
    given = vectors(3, 4, 64), vectors(3, 4, 11)
    for found, expected in zip(both(rows, *given), exactly(exact, *map(np.float64, given)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-5)


@compiled
@pytest.mark.parametrize("dtype", TYPES)
def test_what_replaces_a_kernel_agrees_with_it(dtype, monkeypatch):
    rows, _ = scattered(dtype, 64)
    given = rows, vectors(3, 4, 64), vectors(3, 4, 11)
    found = both(*given)
    monkeypatch.setattr(kernels, "COMPILED", False)
    for one, other in zip(found, both(*given), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@compiled
def test_kernels_newer_than_xla_are_left_out(monkeypatch, caplog):
    monkeypatch.setattr(kernels._kernels, "JAXLIB", "999.1.2")
    assert not kernels._registered()
    assert "compiled for jaxlib 999.1.2" in caplog.text


@pytest.mark.parametrize("dtype", TYPES)
def test_threads_share_what_is_large(dtype):
    """Several times, as threads come at other times in each."""
    rows, exact = scattered(dtype, 72, heads=8, tokens=2051)
    given = vectors(8, 5, 72), vectors(8, 5, 2051)
    expected = exactly(exact, *map(np.float64, given))
    attend = jax.jit(both)
    for _ in range(20):
        for found, right in zip(attend(rows, *given), expected, strict=True):
            np.testing.assert_allclose(found, right, rtol=1e-5, atol=2e-5)


@compiled
@pytest.mark.parametrize("dtype", TYPES)
def test_many_at_once_are_each_alone(dtype):
    rows, _ = scattered(dtype, 24)
    q, weight = vectors(5, 3, 2, 24), vectors(5, 3, 2, 11)
    found = jax.vmap(both, in_axes=(None, 0, 0))(rows, q, weight)
    for i in range(5):
        for one, other in zip(found, both(rows, q[i], weight[i]), strict=True):
            np.testing.assert_array_equal(one[i], other)


def test_queries_in_bf16_are_those_numbers():
    rows, exact = scattered("bfloat16", 64)
    q = jnp.asarray(vectors(3, 4, 64), jnp.bfloat16)
    found = attention.scores_of(q, rows, jnp.ones((3, 11), bool))
    np.testing.assert_allclose(found, exactly(exact, np.asarray(q, np.float64), np.zeros((3, 4, 11)))[0], atol=2e-5)


@compiled
def test_rows_after_the_last_that_is_attended_may_be_anything():
    rows, _ = scattered("float32", 16, tokens=12)
    valid = jnp.broadcast_to(jnp.arange(12) < 8, (3, 12))
    spoilt = packing.Scattered(rows.pool.at[0].set(jnp.nan), jnp.where(valid, rows.index % 39 + 1, 0), rows.dtype)
    scores = attention.scores_of(vectors(3, 4, 16), spoilt, valid)
    assert np.isfinite(attention.attend_scores(scores, spoilt, valid).out).all()


@compiled
@pytest.mark.parametrize("operands", [
    (np.zeros((4, 8)), np.zeros((3, 5), np.int32), np.zeros((3, 2, 7))),
    (np.zeros((4, 8)), np.zeros((2, 5), np.int32), np.zeros((3, 2, 8))),
    (np.zeros((0, 8)), np.zeros((3, 5), np.int32), np.zeros((3, 2, 8))),
    (np.zeros((4, 8), np.int8), np.zeros((3, 5), np.int32), np.zeros((3, 2, 8))),
])
def test_sizes_that_do_not_agree_are_refused(operands):
    refuse("row_products", (3, 2, 5), "rows: ", operands)


@pytest.mark.parametrize("tokens", [0, 1, 31, 32, 100, 2048, 2148])
@pytest.mark.parametrize("group", [1, 3, 4, 6])
@pytest.mark.parametrize("size", [8, 72])
@pytest.mark.parametrize("bits", lowbit.BITS)
def test_products_with_codes(bits, size, group, tokens):
    rng = np.random.default_rng(size)
    code = np.asarray(lowbit.quantise(vectors(2, tokens, size), np.full(size, 0.3, np.float32), bits))
    packed = lowbit.pack(jnp.asarray(code), bits).swapaxes(1, 2)
    q = rng.normal(size=(2, group, size)).astype(np.float32)
    found = lowbit.products_by_dimension(packed, q, bits)
    np.testing.assert_allclose(found, np.einsum("fqd,fnd->fqn", np.float64(q), code), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("group", [1, 5])
def test_threads_share_many_codes(group):
    packed = np.random.default_rng(0).integers(0, 256, (2, 144, 6177), np.uint8)
    levels = np.stack([packed & 15, packed >> 4], axis=2).reshape(2, 288, 6177)
    q = vectors(2, group, 288)
    expected = np.einsum("fqd,fdn->fqn", np.float64(q), levels - 7.0)
    product = jax.jit(functools.partial(lowbit.products_by_dimension, bits=4))
    for _ in range(20):
        np.testing.assert_allclose(product(packed, q), expected, rtol=1e-5, atol=2e-3)


@compiled
def test_codes_of_other_sizes_are_refused():
    refuse("code_products", (2, 3, 9), "codes: ", (np.zeros((2, 5, 9), np.uint8), np.zeros((2, 3, 15))))


@compiled
@pytest.mark.parametrize("group", [1, 4])
def test_codes_of_a_batch_are_those_of_each_alone(group):
    packed = jnp.asarray(np.random.default_rng(0).integers(0, 256, (3, 2, 100, 70), np.uint8))
    q = vectors(3, 2, group, 200)
    product = functools.partial(lowbit.products_by_dimension, bits=4)
    batch, batches = jax.vmap(product), jax.vmap(jax.vmap(product))
    for many in (batch(packed, q), batches(packed[None], q[None])[0]):
        for i in range(3):
            np.testing.assert_array_equal(many[i], product(packed[i], q[i]))


@compiled
@pytest.mark.parametrize("policy", [1, 2, 3])
@pytest.mark.parametrize(("slots", "asked"), [(1, 1), (7, 3), (40, 17), (40, 40)])
def test_slots_are_given_as_by_xla(slots, asked, policy):
    """Few keys, so that many are equal; empty slots with keys of what they had; blocks that are not needed anywhere."""
    blocks, rng = slots + 9, np.random.default_rng(slots)

    def some(count):
        rows = np.stack([rng.permutation(blocks)[:count] for _ in range(6)])
        rows = np.where(rng.random(rows.shape) < rng.choice([0, 0.3, 1]), blocks + rng.integers(0, 2), rows)
        return rows.reshape(2, 3, count).astype(np.int32)

    def kernel(*operands):
        results = tuple(jax.ShapeDtypeStruct(operands[i].shape, jnp.int32) for i in (2, 2, 0, 0))
        return kernels.on_cpu("assign", results, residency._assign, *operands)

    found, expected = (jax.jit(jax.vmap(one, in_axes=(0, 0, 0, None))) for one in (kernel, residency._assign))
    for _ in range(50):
        keys = rng.integers(-1, 3, (2, 3, slots, policy), np.int32)
        operands = np.minimum(some(slots), blocks), keys, some(asked), np.int32(blocks)
        for one, other in zip(found(*operands), expected(*operands), strict=True):
            np.testing.assert_array_equal(one, other)
