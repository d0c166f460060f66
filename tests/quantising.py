"""Our product quantisation beside faiss's, given its centroids."""

import jax
import numpy as np

from kvjax.methods import pqcache


def compare(theirs):
    """Asserts that codes and inner products are theirs, and that our own centroids leave as small an error."""
    keys, centroids = theirs["keys"], theirs["centroids"]
    code = _codes(centroids, keys)
    same = theirs["code"] == code
    assert same.mean() > 0.999, "beyond ties in the last bit of a distance"
    products = np.asarray(pqcache.lookup(centroids[None], code[None], theirs["q"][None]))[0]
    ours = np.take_along_axis(products, theirs["best"], 1)
    alike = same.all(0)[theirs["best"]]
    np.testing.assert_allclose(ours[alike], theirs["score"][alike], rtol=1e-4, atol=1e-4)
    assert alike.mean() > 0.99

    learned = _learned(keys, *centroids.shape[:2])
    decoded = np.concatenate([book[row] for book, row in zip(learned, _codes(learned, keys), strict=True)], axis=1)
    ratio = np.square(keys - decoded).sum() / theirs["error"]
    assert ratio < 1.03, f"{ratio:.3f}"


def _codes(centroids, keys):
    parts = pqcache.split(keys[None], len(centroids))[0]
    return np.stack([np.asarray(pqcache.nearest(*pair)) for pair in zip(centroids, parts, strict=True)])


def _learned(keys, parts, count):
    valid, seeds = np.ones(len(keys), bool), jax.random.split(jax.random.key(0), parts)
    learn = jax.jit(lambda part, seed: pqcache.centroids_of(part, valid, seed, count, 20))
    pairs = zip(pqcache.split(keys[None], parts)[0], seeds, strict=True)
    return np.stack([np.asarray(learn(*pair)) for pair in pairs])
