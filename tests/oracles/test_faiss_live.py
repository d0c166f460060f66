"""Product quantisation against faiss; needs the extra `oracles`."""

import jax
import numpy as np
import pytest

from kvjax.methods import pqcache

pytestmark = pytest.mark.oracles
SIZE, PARTS, BITS, TOKENS = 32, 4, 5, 3000


@pytest.fixture(scope="module")
def faiss():
    import faiss

    return faiss


@pytest.fixture(scope="module")
def keys():
    """Keys in clumps, with dimensions of different sizes."""
    rng = np.random.default_rng(0)
    clump = 2 * rng.normal(size=(100, SIZE))[rng.integers(0, 100, TOKENS)]
    return ((clump + rng.normal(size=(TOKENS, SIZE))) * np.linspace(0.3, 2, SIZE)).astype(np.float32)


@pytest.fixture(scope="module")
def codebook(keys):
    parts, seeds = pqcache.split(keys[None], PARTS)[0], jax.random.split(jax.random.key(0), PARTS)
    valid = np.ones(TOKENS, bool)
    learn = jax.jit(lambda part, seed: pqcache.centroids_of(part, valid, seed, 2**BITS, 20))
    return np.stack([np.asarray(learn(part, seed)) for part, seed in zip(parts, seeds, strict=True)])


def code_of(codebook, keys):
    parts = pqcache.split(keys[None], PARTS)[0]
    return np.stack([np.asarray(pqcache.nearest(*pair)) for pair in zip(codebook, parts, strict=True)])


@pytest.fixture
def theirs(faiss, codebook):
    """faiss with our centroids."""
    quantiser = faiss.ProductQuantizer(SIZE, PARTS, BITS)
    faiss.copy_array_to_vector(codebook.ravel(), quantiser.centroids)
    return quantiser


def unpacked(packed):
    """Codes of `BITS` bits each, which faiss packs one after the other, lowest bit first."""
    bits = np.unpackbits(packed, axis=1, bitorder="little")[:, : PARTS * BITS].reshape(len(packed), PARTS, BITS)
    return (bits * 2 ** np.arange(BITS)).sum(-1).T


def test_codes_are_those_of_faiss(theirs, codebook, keys):
    same = unpacked(theirs.compute_codes(keys)) == code_of(codebook, keys)
    assert same.mean() > 0.999, "beyond ties in the last bit of a distance"


def test_scores_are_the_inner_products_of_faiss(faiss, theirs, codebook, keys):
    q = np.random.default_rng(1).normal(size=(6, SIZE)).astype(np.float32)
    code = code_of(codebook, keys)
    ours = np.asarray(pqcache.lookup(codebook[None], code[None], q[None]))[0]
    index = faiss.IndexPQ(SIZE, PARTS, BITS, faiss.METRIC_INNER_PRODUCT)
    faiss.copy_array_to_vector(codebook.ravel(), index.pq.centroids)
    index.is_trained = True
    index.add(keys)
    score, token = index.search(q, 50)
    same = (unpacked(theirs.compute_codes(keys)) == code).all(0)
    ours = np.take_along_axis(ours, token, 1)
    np.testing.assert_allclose(ours[same[token]], score[same[token]], rtol=1e-4, atol=1e-4)


def test_the_reconstruction_error_is_that_of_faiss(faiss, codebook, keys):
    trained = faiss.ProductQuantizer(SIZE, PARTS, BITS)
    trained.cp.seed = 3
    trained.train(keys)
    error = np.square(keys - trained.decode(trained.compute_codes(keys))).sum()
    decoded = np.concatenate([book[code] for book, code in zip(codebook, code_of(codebook, keys), strict=True)], axis=1)
    ratio = np.square(keys - decoded).sum() / error
    assert ratio < 1.03, f"{ratio:.3f}"
