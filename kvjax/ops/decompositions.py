"""Decompositions of matrices, which CPUs take one by one where there is a batch of them.

jaxlib 0.10.0 to 0.11.0 shares a batch out among XLA's threads and waits for them on one of these. So many programs at
once that every thread waits, two on a machine with two cores, wait for ever. A single matrix is decomposed at once.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from kvjax.typing import Array, Float


def eigenvectors(matrix: Float[Array, "N N"]) -> Float[Array, "N N"]:
    """Returns the eigenvectors of a symmetric matrix in its columns, that of the smallest eigenvalue first."""
    return _one_by_one(lambda matrix: jnp.linalg.eigh(matrix)[1])(matrix)


def orthonormal(columns: Float[Array, "N P"]) -> Float[Array, "N P"]:
    """Returns orthonormal columns, the first p of which span what the first p given ones span."""
    return _one_by_one(lambda columns: jnp.linalg.qr(columns)[0])(columns)


def _one_by_one(decompose: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Returns a function of one matrix that under `jax.vmap` is a loop on CPU, and there alone."""
    return jax.custom_batching.sequential_vmap(decompose) if jax.default_backend() == "cpu" else decompose
