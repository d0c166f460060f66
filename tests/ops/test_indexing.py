"""Places in an array, and rows and columns of matrices, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.ops import indexing
from kvjax.ops.kernels import lines, tiles

places_of = jax.jit(indexing.places_of, static_argnums=1)
first = jax.jit(indexing.first)
masks = st.lists(st.booleans(), min_size=12, max_size=12).map(np.array)


@pytest.mark.parametrize("size", [3, 12, 20])
@given(among=masks)
def test_marked_places_come_in_order_and_the_rest_is_padding(size, among):
    marked = np.flatnonzero(among)[:size]
    expected = np.pad(marked, (0, size - len(marked)), constant_values=-1)
    np.testing.assert_array_equal(places_of(among, size), expected)


@given(among=masks)
def test_the_first_that_is_marked_is_found(among):
    assert first(among) == (np.flatnonzero(among)[0] if among.any() else 11)


# ------------------------------------------------------------------------------------ rows and columns


@pytest.fixture(params=[False, True], ids=["scatter", "kernel"])
def in_tiles(request, monkeypatch):
    """Changes columns with a scatter, and with the kernel, interpreted."""
    monkeypatch.setattr(tiles, "wanted", lambda: request.param)


def changed(x, at, new, how):
    """Changes the columns with NumPy."""
    x, new = (np.array(leaf, np.float32) for leaf in (x, new))
    for one, column, row in zip(x, at, new, strict=True):
        if column < x.shape[-1]:
            old = one[:, column]
            one[:, column] = {"set": row, "max": np.maximum(old, row), "add": old + row}[how]
    return x


@pytest.mark.usefixtures("in_tiles")
@pytest.mark.parametrize(("how", "dtype"), [
    *((how, "float32") for how in lines.CHANGES), ("set", "bfloat16"), ("max", "uint8"), ("add", "int32"),
])
@pytest.mark.parametrize("size", [5, 128, 300])
def test_a_column_of_each_matrix_is_changed(size, how, dtype):
    """One of them is none, one is the last."""
    rng = np.random.default_rng(size)
    x, new = (jnp.asarray(rng.integers(0, 100, (4, 6, n)), dtype) for n in (size, 1))
    at = np.array([0, size - 1, size, size // 2], np.int32)
    found = indexing.with_column(x, jnp.asarray(at), new[..., 0], how)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.astype(jnp.float32), changed(x, at, new[..., 0], how))
    last = np.minimum(at, size - 1)
    for taken in (indexing.column, jax.vmap(indexing.column)):
        np.testing.assert_array_equal(taken(found, jnp.asarray(at)), np.asarray(found)[np.arange(4), :, last])
    both = x.reshape(2, 2, 6, size), at.reshape(2, 2), new[..., 0].reshape(2, 2, 6)
    for axes in (lambda f: f, jax.vmap, lambda f: jax.vmap(jax.vmap(f))):  # over sequences, and over heads
        again = axes(lambda *args: indexing.with_column(*args, how))(*both)
        np.testing.assert_array_equal(again.reshape(found.shape), found)


@pytest.mark.usefixtures("in_tiles")
def test_several_columns_are_replaced():
    x, new = (jax.random.normal(jax.random.key(n), (2, 7, n)) for n in (300, 3))
    at = np.array([[299, 0, 128], [300, 4, 300]], np.int32)
    found = jax.vmap(indexing.with_columns)(x, jnp.asarray(at), new.swapaxes(1, 2))
    for i in range(3):
        x = changed(x, at[:, i], new[..., i], "set")
    np.testing.assert_array_equal(found, x)


@pytest.mark.usefixtures("in_tiles")
@pytest.mark.parametrize(("dtype", "width"), [("float32", 128), ("bfloat16", 128), ("uint8", 128), ("float32", 6)])
def test_a_row_of_each_matrix_is_replaced(dtype, width):
    rng = np.random.default_rng(0)
    x, new = (jnp.asarray(rng.integers(0, 100, (4, n, width)), dtype) for n in (70, 1))
    at = np.array([0, 69, 70, 33], np.int32)
    expected = changed(x.swapaxes(1, 2), at, new[:, 0], "set").swapaxes(1, 2)
    for axes in (lambda f: f, jax.vmap):
        found = axes(indexing.with_row)(x, jnp.asarray(at), new[:, 0])
        np.testing.assert_array_equal(found, expected)
        taken = axes(indexing.row)(found, jnp.asarray(at))
        np.testing.assert_array_equal(taken, np.asarray(found)[np.arange(4), np.minimum(at, 69)])


@pytest.mark.usefixtures("in_tiles")
@pytest.mark.parametrize("width", [128, 6])
def test_several_rows_of_each_matrix_are_replaced_and_numbers_in_them(width):
    """Rows and places that are none among them; one number for all matrices, or one for each."""
    x, new = (jax.random.normal(jax.random.key(n), (2, 3, n, width)) for n in (70, 2))  # of 2 sequences, 3 heads
    at = np.array([[0, 69], [70, 5], [70, 70]], np.int32)
    expected = np.array(x)
    for head, row in np.ndindex(at.shape):
        if at[head, row] < 70:
            expected[:, head, at[head, row]] = new[:, head, row]
    found = jax.vmap(lambda x, new: indexing.with_rows(x, jnp.asarray(at), new))(x, new)
    np.testing.assert_array_equal(found, expected)
    first, place = at[:, 0], np.array([width - 1, 0, 1], np.int32)
    for number in (jnp.float32(7), jnp.arange(3, dtype=jnp.float32)):
        for where in (place, np.full(3, width, np.int32)):
            expected = np.array(found)
            for head in range(3):
                if first[head] < 70 and where[head] < width:
                    expected[:, head, first[head], where[head]] = np.broadcast_to(number, 3)[head]
            changed_too = jax.vmap(lambda x, number=number, where=where: indexing.with_number(
                x, jnp.asarray(first), jnp.asarray(where), number))(found)
            np.testing.assert_array_equal(changed_too, expected)


@pytest.mark.usefixtures("in_tiles")
@pytest.mark.parametrize("at", [[3], [70], [0, 69, 70]])
def test_the_same_lines_of_all_matrices_are_replaced(at):
    """One of them, none, or several."""
    x, new = (jax.random.normal(jax.random.key(n), (2, n, 128)) for n in (70, len(at)))
    expected = np.array(x)
    for i, row in enumerate(at):
        expected[:, row : row + 1] = new[:, i : i + 1] if row < 70 else expected[:, row : row + 1]
    np.testing.assert_array_equal(indexing.with_rows_at(x, jnp.asarray(at, jnp.int32), new), expected)
    found = indexing.with_columns_at(x.swapaxes(1, 2), jnp.asarray(at, jnp.int32), new.swapaxes(1, 2))
    np.testing.assert_array_equal(found.swapaxes(1, 2), expected)
