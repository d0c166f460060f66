"""Kernels against NumPy in float64, of every size that their loops treat apart; and what replaces them."""

import functools
import importlib.machinery

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import compiled
from scipy.special import logsumexp, softmax

from kvjax import _native
from kvjax.cache import residency
from kvjax.ops import attention, kernels, lowbit, quantize

TYPES = ("float32", "bfloat16")


def scattered(dtype: str, size: int, heads: int = 3, tokens: int = 11, seed: int = 0):
    """Rows of a pool of 40, some of them out of range, and as numbers of float64."""
    rng = np.random.default_rng((size, seed))
    pool = quantize.pack(jnp.asarray(rng.normal(size=(40, size)), jnp.float32), dtype)
    index = rng.integers(-5, 50, (heads, tokens)).astype(np.int32)
    rows = np.asarray(quantize.unpack(pool, dtype), np.float64)[index.clip(0, 39)]
    return quantize.Scattered(pool, jnp.asarray(index), dtype), rows


def vectors(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def test_the_kernels_are_here():
    """Where there is a C compiler. Without this test a broken build would only be slow."""
    pytest.importorskip("kvjax.store.native._compiled", reason="built without a C compiler")
    assert kernels.COMPILED


def attended(q, key, value, valid, bias=None):
    """The output of attention, and the logarithm of its sum of exponentials."""
    part = attention.attend_part(q, key, value, valid, bias)
    return attention.normalise(part, jnp.float32), part.top + jnp.log(part.total)


def exactly(q, key, value, valid, bias=0.0):
    """The same of float64 rows[K, N, D]."""
    scores = np.einsum("kgd,knd->kgn", np.float64(q), key) * q.shape[-1] ** -0.5 + bias
    scores = np.where(valid[:, None], scores, -np.inf)
    return softmax(scores, axis=-1) @ value, logsumexp(scores, axis=-1)


def close(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-5)


def rows_and_queries(dtype, size, group, tokens, heads=3):
    """Operands, and the same with rows as numbers; one row in five is not valid."""
    (key, keys), (value, values) = (scattered(dtype, size, heads, tokens, seed) for seed in (0, 1))
    valid = np.random.default_rng(tokens).random((heads, tokens)) < 0.8
    valid[:, tokens // 2] = True
    q = vectors(heads, group, size)
    return (q, key, value, valid), (q, keys, values, valid)


@pytest.mark.parametrize("tokens", [1, 3, 4, 11, 40, 200])
@pytest.mark.parametrize("group", [1, 3, 4, 5, 9])
@pytest.mark.parametrize("size", [1, 7, 8, 27, 64])
@pytest.mark.parametrize("dtype", TYPES)
def test_rows_are_attended_where_they_lie(dtype, size, group, tokens):
    rows, exact = rows_and_queries(dtype, size, group, tokens)
    close(attended(*rows), exactly(*exact))


@pytest.mark.parametrize("dtype", ["float16", "int8", "int4"])
def test_rows_of_other_types_are_gathered(dtype):
    rows, exact = rows_and_queries(dtype, 64, 4, 11)
    close(attended(*rows), exactly(*exact))


@pytest.mark.parametrize("dtype", TYPES)
def test_a_bias_is_added_to_the_scores(dtype):
    rows, exact = rows_and_queries(dtype, 16, 5, 70)
    bias = 3 * vectors(3, 5, 70)
    close(attended(*rows, bias), exactly(*exact, bias))


@pytest.mark.parametrize("made", TYPES)
@pytest.mark.parametrize("dtype", TYPES)
def test_keys_may_be_an_array(dtype, made):
    """Those that a method makes of what it keeps. Values are where they lie."""
    (q, _, value, valid), (_, keys, values, _) = rows_and_queries(dtype, 24, 4, 70)
    keys = jnp.asarray(keys, made)
    close(attended(q, keys, value, valid), exactly(q, np.asarray(keys, np.float64), values, valid))


@pytest.mark.parametrize("scale", [0.0, 30.0, 3000.0])
def test_scores_of_any_size(scale):
    """The exponentials that the kernel computes: all 1, of a common spread, and all but one 0."""
    (q, *rows), (_, *exact) = rows_and_queries("float32", 16, 4, 100)
    found, expected = attended(scale * q, *rows), exactly(scale * q, *exact)
    np.testing.assert_allclose(found[0], expected[0], atol=2e-5 * max(1, scale / 10))
    np.testing.assert_allclose(found[1], expected[1], rtol=2e-6, atol=1e-6)


@compiled
@pytest.mark.parametrize("dtype", TYPES)
def test_what_replaces_a_kernel_agrees_with_it(dtype, monkeypatch):
    rows, _ = rows_and_queries(dtype, 64, 4, 11)
    found = attended(*rows)
    monkeypatch.setattr(kernels, "COMPILED", False)
    close(found, attended(*rows))


@compiled
@pytest.mark.parametrize(("part", "version", "said"), [("MAJOR", 9, "interface 9."), ("MINOR", 999, "interface 0.999")])
def test_kernels_for_another_interface_than_xlas_are_left_out(part, version, said, monkeypatch, caplog):
    monkeypatch.setattr(kernels._compiled, f"XLA_FFI_API_{part}", version)
    assert not kernels.register(kernels._compiled, ())
    assert said in caplog.text and "install kvjax again" in caplog.text


@compiled
def test_kernels_for_an_older_minor_version_of_the_interface_are_used(monkeypatch):
    monkeypatch.setattr(kernels._compiled, "XLA_FFI_API_MINOR", 0)
    assert kernels.register(kernels._compiled, kernels.NAMES)


@compiled
def test_kernels_that_do_not_tell_their_interface_are_left_out(monkeypatch, caplog):
    monkeypatch.delattr(kernels._compiled, "XLA_FFI_API_MINOR")
    assert not kernels.register(kernels._compiled, kernels.NAMES)
    assert "compiled without XLA_FFI_API_MINOR; install kvjax again" in caplog.text


@compiled
def test_kernels_older_than_the_code_are_left_out(caplog):
    assert not kernels.register(kernels._compiled, ("copy", "of a later version"))
    assert "compiled without of a later version; install kvjax again" in caplog.text


@compiled
def test_all_kernels_are_registered():
    assert set(kernels._compiled.handlers()) == set(kernels.NAMES)


def test_a_compiled_part_that_cannot_be_loaded_is_done_without_and_said(tmp_path, monkeypatch, caplog):
    (tmp_path / f"broken_part{importlib.machinery.EXTENSION_SUFFIXES[0]}").write_bytes(b"no library")
    monkeypatch.syspath_prepend(tmp_path)
    assert _native.load("broken_part") is None
    assert "broken_part cannot be loaded" in caplog.text and "install kvjax again" in caplog.text
    caplog.clear()
    assert _native.load("no_such_part") is None and not caplog.text


@pytest.mark.parametrize("dtype", TYPES)
def test_threads_share_what_is_large(dtype):
    """Several times, as threads come at other times in each."""
    rows, exact = rows_and_queries(dtype, 72, 5, 2051, heads=8)
    expected, attend = exactly(*exact), jax.jit(attended)
    for _ in range(20):
        close(attend(*rows), expected)


@pytest.mark.parametrize("tokens", [4096, 4097, 20_000])
def test_many_tokens_are_attended_in_segments(tokens):
    rows, exact = rows_and_queries("float32", 8, 4, tokens, heads=1)
    close(attended(*rows), exactly(*exact))


@compiled
@pytest.mark.parametrize("dtype", TYPES)
def test_many_at_once_are_each_alone(dtype):
    (_, *rows), _ = rows_and_queries(dtype, 24, 2, 11)
    q = vectors(5, 3, 2, 24)
    found = jax.vmap(attended, in_axes=(0, None, None, None))(q, *rows)
    for i in range(5):
        for one, other in zip(found, attended(q[i], *rows), strict=True):
            np.testing.assert_array_equal(one[i], other)


def test_queries_in_bf16_are_those_numbers():
    (q, *rows), (_, *exact) = rows_and_queries("bfloat16", 24, 4, 11)
    q = jnp.asarray(q, jnp.bfloat16)
    close(attended(q, *rows), exactly(np.asarray(q, np.float64), *exact))


@compiled
def test_rows_that_are_not_valid_may_be_anything():
    (q, key, value, valid), _ = rows_and_queries("float32", 16, 4, 100)
    spoilt = [quantize.Scattered(rows.pool.at[0].set(jnp.nan), jnp.where(valid, rows.index.clip(1), 0), rows.dtype)
              for rows in (key, value)]
    right = [np.asarray(rows.pool, np.float64)[np.asarray(rows.index).clip(1, 39)] for rows in (key, value)]
    close(attended(q, *spoilt, valid), exactly(q, *right, valid))


@compiled
def test_what_follows_the_last_row_changes_no_bit():
    """So that a cache of more room, or with blocks in other places, answers alike."""
    (q, key, value, valid), _ = rows_and_queries("float32", 16, 4, 4100)
    more = [quantize.Scattered(rows.pool, jnp.pad(rows.index, ((0, 0), (0, 5000))), rows.dtype) for rows in (key,
    value)]
    for one, other in zip(attended(q, key, value, valid), attended(q, *more, np.pad(valid, ((0, 0), (0, 5000)))),
                          strict=True):
        np.testing.assert_array_equal(one, other)


@compiled
def test_no_token_at_all():
    (q, key, value, valid), _ = rows_and_queries("float32", 16, 4, 5)
    key, value = (quantize.Scattered(rows.pool[:0], rows.index[:, :0], rows.dtype) for rows in (key, value))
    np.testing.assert_array_equal(attention.attend_part(q, key, value, valid[:, :0]).total, 0)


@compiled
def test_no_valid_row_is_a_part_of_nothing():
    (q, key, value, valid), _ = rows_and_queries("float32", 16, 4, 100)
    part = attention.attend_part(q, key, value, np.zeros_like(valid))
    np.testing.assert_array_equal(part.out, 0)
    np.testing.assert_array_equal(part.total, 0)


OPERANDS = {"keys": np.zeros((4, 8)), "key index": np.zeros((3, 5), np.int32), "values": np.zeros((6, 8)),
            "value index": np.zeros((3, 5), np.int32), "valid": np.ones((3, 5), bool), "q": np.zeros((3, 4, 8)),
            "bias": np.zeros((3, 4, 0))}


@compiled
@pytest.mark.parametrize(("name", "spoilt"), [
    ("keys", np.zeros((4, 7))), ("keys", np.zeros((0, 8))), ("keys", np.zeros((4, 8), np.uint16)),
    ("key index", np.zeros((2, 5), np.int32)), ("values", np.zeros((6, 7))), ("values", np.zeros((0, 8))),
    ("value index", np.zeros((3, 4), np.int32)), ("valid", np.ones((3, 5), np.int32)), ("valid", np.ones((3, 6), bool)),
    ("q", np.zeros((3, 4, 7))), ("q", np.zeros((2, 4, 8))), ("q", np.zeros((3, 3, 8))), ("bias", np.zeros((3, 4, 4))),
    ("bias", np.zeros((3, 1, 5))),
])
def test_sizes_that_do_not_agree_are_refused(name, spoilt):
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((3, 1, 4, 8), (3, 1, 4), (3, 1, 4))]
    with pytest.raises(jax.errors.JaxRuntimeError, match="rows: "):
        kernels.call("row_attention", results, *map(jnp.asarray, (OPERANDS | {name: spoilt}).values()))


@compiled
@pytest.mark.parametrize(("size", "group", "tokens"), [
    (8, 1, 0), (72, 3, 1), (8, 4, 31), (72, 6, 32), (8, 6, 100), (72, 1, 4096), (8, 3, 4196), (72, 4, 4196),
])
@pytest.mark.parametrize("bits", lowbit.BITS)
def test_products_with_codes_are_exactly_those_of_xla(bits, size, group, tokens):
    rng = np.random.default_rng(size)
    packed = jnp.asarray(rng.integers(0, 256, (2, size * bits // 8, tokens), np.uint8))
    q, stored = jnp.asarray(rng.normal(size=(2, group, size)), jnp.float32), jnp.int32(tokens - tokens // 5)
    found = lowbit.products(packed, q, stored, bits)
    np.testing.assert_array_equal(found, lowbit._products(packed, *lowbit._whole(q, bits), stored, bits))


@pytest.mark.parametrize("group", [1, 5])
def test_threads_share_many_codes(group):
    packed = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 144, 6177), np.uint8))
    q, stored = jnp.asarray(vectors(2, group, 288)), jnp.int32(6177)
    expected = lowbit._products(packed, *lowbit._whole(q, 4), stored, 4)
    weight = np.exp(np.float64(expected) - np.max(expected, axis=-1, keepdims=True))
    share = np.mean(weight / weight.sum(-1, keepdims=True), axis=(0, 1))[None]
    product = jax.jit(functools.partial(lowbit.products, bits=4))
    mean = jax.jit(functools.partial(lowbit.softmax_mean, bits=4, groups=1))
    for _ in range(20):
        np.testing.assert_array_equal(product(packed, q, stored), expected)
        np.testing.assert_allclose(mean(packed, q, stored), share, rtol=1e-4, atol=1e-9)


CODES = {"codes": np.zeros((2, 4, 9), np.uint8), "q": np.zeros((2, 3, 8), np.int8), "step": np.zeros((2, 3)),
         "stored": np.int32(9)}


@compiled
@pytest.mark.parametrize("kernel", ["code_products", "code_softmax"])
@pytest.mark.parametrize(("name", "spoilt"), [
    ("codes", np.zeros((2, 5, 9), np.uint8)), ("codes", np.zeros((2, 4, 9), np.int8)),
    ("q", np.zeros((3, 3, 8), np.int8)),
    ("q", np.zeros((2, 3, 24), np.int8)), ("q", np.zeros((2, 3, 8))), ("step", np.zeros((2, 4))), ("step", np.zeros(2)),
    ("stored", np.zeros(1, np.int32)), ("stored", np.float32(9)), ("codes", np.zeros((2, 4, 8), np.uint8)),
])
def test_codes_of_other_sizes_are_refused(kernel, name, spoilt):
    shapes = [(2, 3, 9)] if kernel == "code_products" else [(1, 2, 9), (1, 9)]
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    of_result = kernel == "code_softmax" and name == "codes" and spoilt.shape == (2, 4, 8)
    with pytest.raises(jax.errors.JaxRuntimeError, match="softmax: results" if of_result else "codes: "):
        kernels.call(kernel, results, *map(jnp.asarray, (CODES | {name: spoilt}).values()))


@compiled
@pytest.mark.parametrize(("sums", "mean"), [((1, 2, 8), (1, 9)), ((3, 2, 9), (3, 9)), ((1, 2, 9), (1, 8)),
                                            ((1, 2, 9), (0, 9)), ((1, 0, 9), (1, 9)), ((1, 1, 9), (2, 9))])
def test_softmaxes_of_other_sizes_are_refused(sums, mean):
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (sums, mean)]
    with pytest.raises(jax.errors.JaxRuntimeError, match="softmax: "):
        kernels.call("code_softmax", results, *map(jnp.asarray, CODES.values()))


@compiled
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("function", [lowbit.products, functools.partial(lowbit.softmax_mean, groups=1),
                                      functools.partial(lowbit.softmax_mean, groups=2)])
def test_codes_of_a_batch_are_those_of_each_alone(group, function):
    packed = jnp.asarray(np.random.default_rng(0).integers(0, 256, (3, 2, 100, 70), np.uint8))
    q, stored = jnp.asarray(vectors(3, 2, group, 200)), jnp.asarray([70, 33, 0], jnp.int32)
    one = functools.partial(function, bits=4)
    batch, batches = jax.vmap(one), jax.vmap(jax.vmap(one))
    for many in (batch(packed, q, stored), batches(packed[None], q[None], stored[None])[0]):
        for i in range(3):
            np.testing.assert_array_equal(many[i], one(packed[i], q[i], stored[i]))


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
