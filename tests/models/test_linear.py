"""Products of weights, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.models.transformer import apply_rows


@pytest.mark.parametrize("shape", [(), (1,), (2,), (3, 5), (64,), (65,)])
def test_every_token_meets_every_row_however_many_there_are(shape):
    rng = np.random.default_rng(0)
    weight, x = rng.normal(size=(7, 12)).astype(np.float32), rng.normal(size=(*shape, 12)).astype(np.float32)
    np.testing.assert_allclose(jax.jit(apply_rows)(weight, x), x @ weight.T, atol=1e-5)


@pytest.mark.parametrize("shape", [(), (1,), (2,), (3, 5), (64,), (65,)])
def test_weights_in_bf16_are_summed_in_f32_and_rounded_once(shape):
    rng = np.random.default_rng(1)
    weight, x = (jnp.asarray(rng.normal(size=size), jnp.bfloat16) for size in ((7, 512), (*shape, 512)))
    y = jax.jit(apply_rows)(weight, x)
    assert y.dtype == jnp.bfloat16
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=2**-8, atol=1e-3)


def test_products_of_a_batch_are_differentiated_and_mapped():
    rng = np.random.default_rng(0)
    weight, x = rng.normal(size=(7, 12)).astype(np.float32), rng.normal(size=(4, 2, 12)).astype(np.float32)
    slope = jax.jit(jax.grad(lambda weight: jax.vmap(apply_rows, (None, 0))(weight, x).sum()))(weight)
    np.testing.assert_allclose(slope, np.broadcast_to(x.sum((0, 1)), weight.shape), atol=1e-5)
