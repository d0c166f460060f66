"""Matrices of a batch are decomposed one by one on CPU, where jaxlib's threads may wait for one another for ever."""

import re

import jax
import numpy as np
import pytest
from harness import METHODS, Stream, fill_text, plan_of
from test_architecture import ROOT

from kvjax.ops.decompositions import eigenvectors, orthonormal

BATCH = 2, 3
on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="other platforms decompose a batch at once")


@pytest.fixture
def matrices():
    return np.random.default_rng(0).normal(size=(*BATCH, 12, 12)).astype(np.float32)


def twice(function):
    return jax.jit(jax.vmap(jax.vmap(function)))


def operands_of_lapack(text: str) -> list[int]:
    """Returns the number of axes of the first operand of each call of LAPACK."""
    calls = re.findall(r"stablehlo\.custom_call @lapack_\w+\(.*? : \(tensor<([^>]*)>", text)
    return [operand.count("x") for operand in calls]


def test_eigenvectors_of_a_batch(matrices):
    symmetric = matrices + matrices.swapaxes(-1, -2)
    found = np.asarray(twice(eigenvectors)(symmetric))
    values = np.linalg.eigvalsh(symmetric)
    np.testing.assert_allclose(symmetric @ found, found * values[..., None, :], atol=1e-4)
    np.testing.assert_allclose(found.swapaxes(-1, -2) @ found, np.broadcast_to(np.eye(12), (*BATCH, 12, 12)), atol=1e-5)


def test_orthonormal_columns_of_a_batch(matrices):
    columns = matrices[..., :5]
    found = np.asarray(twice(orthonormal)(columns))
    np.testing.assert_allclose(found.swapaxes(-1, -2) @ found, np.broadcast_to(np.eye(5), (*BATCH, 5, 5)), atol=1e-5)
    for count in range(1, 6):
        first = found[..., :count]
        np.testing.assert_allclose(first @ (first.swapaxes(-1, -2) @ columns[..., :count]), columns[..., :count],
                                   atol=1e-4)


@on_cpu
@pytest.mark.parametrize("function", [eigenvectors, orthonormal])
def test_lapack_is_given_one_matrix_at_a_time(function, matrices):
    assert set(operands_of_lapack(twice(function).lower(matrices).as_text())) == {2}


@on_cpu
@pytest.mark.parametrize("name", ["kvswap", "loki", "shadowkv", "icecache"])
def test_prompts_of_a_batch_are_fitted_to_one_at_a_time(name):
    text = fill_text(plan_of(METHODS[name]), Stream.draw(0), [50, 20])
    assert set(operands_of_lapack(text)) == {2}


def test_nothing_else_decomposes():
    """A product or a norm is no decomposition."""
    others = re.compile(r"jnp\.linalg\.(?!norm)|jax\.(lax|scipy)\.linalg|jsp\.linalg")
    files = [file for folder in ("kvjax", "experiments", "scripts") for file in (ROOT / folder).rglob("*.py")]
    found = {file.relative_to(ROOT).as_posix() for file in files if others.search(file.read_text())}
    assert found == {"kvjax/ops/decompositions.py"}
