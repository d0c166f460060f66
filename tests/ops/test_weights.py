"""Weight matrices in few bits, and products of all weights with a few vectors, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import compiled

from kvjax.errors import ConfigError
from kvjax.ops import kernels, weights
from kvjax.ops.weights import FEW, QuantisedMatrix, apply_rows

KINDS = ("float32", "bfloat16", "int8", "int4")


def matrix(rows, columns, kind, dtype="float32", seed=0):
    """Weights of a type, and their numbers in float64."""
    numbers = np.random.default_rng((rows, columns, seed)).normal(size=(rows, columns)).astype(np.float32)
    if kind not in weights.KINDS:
        made = jnp.asarray(numbers, kind)
        return made, np.asarray(made, np.float64)
    codes, scale = weights.codes_and_scale(numbers, kind)
    made = QuantisedMatrix(jnp.asarray(codes), jnp.asarray(scale), numbers.shape, jnp.dtype(dtype))
    return made, unpacked(codes, scale)


def unpacked(codes, scale):
    """The numbers of codes, one by one."""
    scale = np.asarray(scale, np.float64)
    if codes.dtype == np.int8:
        return codes * scale
    nibbles = [[nibble for byte in row for nibble in (int(byte) % 16, int(byte) // 16)] for row in codes]
    return np.asarray([[(nibble - 16 * (nibble > 7)) * scale[y, x // 32] for x, nibble in enumerate(row)]
                       for y, row in enumerate(nibbles)])


def vectors(*shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(shape).normal(size=shape), dtype)


def exactly(numbers, x):
    return np.asarray(x, np.float64) @ numbers[:, : x.shape[-1]].T


@pytest.mark.parametrize("columns", [1, 7, 8, 31, 33, 63, 64, 65, 200])
@pytest.mark.parametrize("kind", KINDS)
def test_every_vector_meets_every_row(kind, columns):
    """Given as many vectors as the kernel takes at once, each number with another number of rows."""
    for count in range(1, 9):
        rows = (1, 2, 3, 4, 5, 11)[(count + columns) % 6]
        weight, numbers = matrix(rows, columns, kind)
        x = vectors(count, columns, dtype="bfloat16" if kind == "bfloat16" else "float32")
        y, exact = jax.jit(apply_rows)(weight, x), exactly(numbers, x)
        assert y.dtype == x.dtype
        rounding = 2**-8 * np.abs(exact) if kind == "bfloat16" else 0
        assert np.all(np.abs(np.asarray(y, np.float64) - exact) <= rounding + 1e-5 * columns**0.5)


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (FEW,), (FEW + 1,), (2, 40)])
@pytest.mark.parametrize("kind", KINDS)
def test_vectors_may_have_any_axes_and_be_many(kind, shape):
    weight, numbers = matrix(7, 96, kind)
    x = vectors(*shape, 96, dtype="bfloat16" if kind == "bfloat16" else "float32")
    exact = exactly(numbers, x)
    np.testing.assert_allclose(np.asarray(jax.jit(apply_rows)(weight, x), np.float64), exact, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("kind", weights.KINDS)
def test_vectors_in_bfloat16_meet_few_bits_and_are_rounded_once(kind):
    weight, numbers = matrix(40, 200, kind, "bfloat16")
    x = vectors(3, 200, dtype="bfloat16")
    y = jax.jit(apply_rows)(weight, x)
    assert y.dtype == jnp.bfloat16
    expected = jnp.asarray(exactly(numbers, x), jnp.bfloat16)
    same = np.asarray(y == expected)
    assert same.mean() > 0.95  # others lie between two numbers of bfloat16, as close as f32 can tell
    np.testing.assert_allclose(np.asarray(y, np.float32), np.asarray(expected, np.float32), rtol=2**-7, atol=1e-5)


@compiled
@pytest.mark.parametrize(("kind", "dtype"), [
    ("bfloat16", "bfloat16"), ("int8", "float32"), ("int8", "bfloat16"), ("int4", "float32"), ("int4", "bfloat16")])
def test_a_vector_has_the_same_products_alone_and_among_others(kind, dtype):
    weight, _ = matrix(700, 500, kind, dtype)  # enough for several threads
    x = vectors(FEW, 500, dtype=dtype)
    alone = np.concatenate([jax.jit(apply_rows)(weight, x[i : i + 1]) for i in range(9)])
    for count in (2, 3, 4, 5, 7, 8, 9, FEW):
        np.testing.assert_array_equal(jax.jit(apply_rows)(weight, x[:count])[:9], alone[:count])


@compiled
@pytest.mark.parametrize("kind", KINDS)
def test_what_replaces_the_kernel_agrees_with_it(kind, monkeypatch):
    weight, _ = matrix(50, 130, kind, "bfloat16")
    x = vectors(5, 130, dtype="bfloat16" if kind != "float32" else kind)
    found = np.asarray(apply_rows(weight, x), np.float32)
    monkeypatch.setattr(kernels, "COMPILED", False)
    np.testing.assert_allclose(found, np.asarray(apply_rows(weight, x), np.float32), rtol=2**-6, atol=0.2)


def test_products_of_floats_are_differentiated_and_mapped():
    weight, _ = matrix(7, 12, "float32")
    x = vectors(4, 2, 12)
    slope = jax.jit(jax.grad(lambda weight: jax.vmap(apply_rows, (None, 0))(weight, x).sum()))(weight)
    np.testing.assert_allclose(slope, np.broadcast_to(x.sum((0, 1)), weight.shape), atol=1e-5)


@pytest.mark.parametrize("kind", weights.KINDS)
def test_products_with_few_bits_are_differentiated_by_the_vectors(kind):
    weight, numbers = matrix(7, 12, kind)
    slope = jax.jit(jax.grad(lambda x: apply_rows(weight, x).sum()))(vectors(2, 12))
    np.testing.assert_allclose(slope, np.broadcast_to(numbers[:, :12].sum(0), (2, 12)), atol=1e-5)


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 70])
@pytest.mark.parametrize("kind", weights.KINDS)
def test_widened_numbers_are_codes_times_scales(kind, columns):
    weight, numbers = matrix(5, columns, kind)
    np.testing.assert_allclose(weights.widened(weight), numbers[:, :columns], rtol=1e-6)


@pytest.mark.parametrize(("kind", "steps"), [("int8", 0.5 / 127), ("int4", 1 / 8)])
def test_a_weight_is_off_by_half_a_step_or_by_what_symmetry_costs(kind, steps):
    """In 4 bits there is no code for 8: a weight as large as the largest, of the other sign, is off by a whole step."""
    numbers = np.random.default_rng(3).normal(size=(64, 96)).astype(np.float32)
    codes, scale = weights.codes_and_scale(numbers, kind)
    size = 96 if kind == "int8" else 32
    largest = np.abs(numbers).reshape(64, -1, size).max(axis=2, keepdims=True)
    off = np.abs(unpacked(codes, scale) - numbers).reshape(64, -1, size)
    assert np.all(off <= (steps + 2**-8 * (kind == "int4")) * largest + 1e-7)
    assert np.median(off / largest) < steps / 2


@pytest.mark.parametrize("kind", weights.KINDS)
def test_rows_of_zeros_stay_zeros_and_others_are_quantised_by_themselves(kind):
    numbers = np.random.default_rng(4).normal(size=(6, 64)).astype(np.float32)
    numbers[2] = 0
    codes, scale = weights.codes_and_scale(numbers, kind)
    assert not np.any(unpacked(codes, scale)[2])
    apart = [weights.codes_and_scale(numbers[i : i + 1], kind) for i in range(6)]
    np.testing.assert_array_equal(codes, np.concatenate([part[0] for part in apart]))
    np.testing.assert_array_equal(scale, np.concatenate([part[1] for part in apart]))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_taken_by_number_and_are_nan_outside(kind):
    weight, numbers = matrix(9, 40, kind)
    index = jnp.asarray([[3, 0], [8, 9]])
    rows = np.asarray(jax.jit(weights.take_rows)(weight, index), np.float64)
    np.testing.assert_allclose(rows[:, 0], numbers[[3, 8], :40], rtol=1e-6)
    assert np.isnan(rows[1, 1]).all()


def test_types_are_told_in_words():
    floats, few = jnp.zeros(3, jnp.bfloat16), [matrix(2, 32, kind)[0] for kind in weights.KINDS]
    assert weights.types_of({"a": floats}) == "bfloat16"
    assert weights.types_of({"a": floats, "b": few}) == "bfloat16, int4 and int8"
    assert [leaf.size for leaf in weights.parameters({"b": few})] == [64, 64]
    assert [leaf.nbytes for leaf in few] == [64 + 8, 32 + 4]
    assert repr(few[1]) == "QuantisedMatrix(int4, [2, 32], 0.0 MiB)"


@pytest.mark.parametrize("kind", ["int9", "int", 8, ("int8",)])
def test_another_type_than_these_is_an_error(kind):
    with pytest.raises(ConfigError, match="use int8 or int4, or None"):
        weights.check_kind(kind)


def test_the_error_names_the_type_that_was_meant():
    with pytest.raises(ConfigError, match=r"weights='in4' is no type .*did you mean int4"):
        weights.check_kind("in4")
