"""Places in an array, against NumPy."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.ops import indexing

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
