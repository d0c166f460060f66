"""Products of weights, against NumPy."""

import jax
import numpy as np
import pytest

from kvjax.models.transformer import apply_rows


@pytest.mark.parametrize("shape", [(), (1,), (2,), (3, 5), (64,), (65,)])
def test_every_token_meets_every_row_however_many_there_are(shape):
    rng = np.random.default_rng(0)
    weight, x = rng.normal(size=(7, 12)).astype(np.float32), rng.normal(size=(*shape, 12)).astype(np.float32)
    np.testing.assert_allclose(jax.jit(apply_rows)(weight, x), x @ weight.T, atol=1e-5)


def test_products_of_a_batch_are_differentiated_and_mapped():
    rng = np.random.default_rng(0)
    weight, x = rng.normal(size=(7, 12)).astype(np.float32), rng.normal(size=(4, 2, 12)).astype(np.float32)
    slope = jax.jit(jax.grad(lambda weight: jax.vmap(apply_rows, (None, 0))(weight, x).sum()))(weight)
    np.testing.assert_allclose(slope, np.broadcast_to(x.sum((0, 1)), weight.shape), atol=1e-5)
