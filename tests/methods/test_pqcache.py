"""PQCache: codes and centroids against scikit-learn and brute force, tokens ranked by what their codes stand for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import GROUP, HEADS, METHODS, SIZE, Sim, Stream, selection
from sklearn.cluster import KMeans

from kvjax.errors import ConfigError
from kvjax.methods import PQCache, pqcache
from kvjax.ops.kernels import tiles

METHOD = METHODS["pqcache"]
learn = jax.jit(functools.partial(pqcache.centroids_of, count=16, iterations=10))


@pytest.fixture(scope="module")
def run():
    """Two prompts and 20 tokens more: simulation, state after them, and the index before them."""
    sim = Sim(METHOD, Stream.draw(0), [70, 30])
    before = jax.device_get(sim.cache.state.index)
    for _ in range(20):
        sim.step()
    return sim, jax.device_get(sim.cache.state), before


def points(seed, clumps):
    rng = np.random.default_rng(seed)
    centre = 2 * rng.normal(size=(clumps, 4))[rng.integers(0, clumps, 600)]
    return (centre + 0.7 * rng.normal(size=(600, 4))).astype(np.float32)


@pytest.mark.parametrize("clumps", [1, 40])
def test_the_error_of_a_part_is_that_of_scikit_learns_k_means(clumps):
    ours, theirs = 0.0, 0.0
    for seed in range(3):
        part = points(seed, clumps)
        codebook = np.asarray(learn(part, np.ones(600, bool), jax.random.key(seed)))
        ours += np.square(part - codebook[np.asarray(pqcache.nearest(codebook, part))]).sum()
        theirs += KMeans(16, n_init=1, max_iter=10, random_state=seed).fit(part).inertia_
    assert ours <= 1.05 * theirs, f"ratio {ours / theirs:.3f}"


def test_few_points_are_coded_without_error():
    part = np.repeat(points(5, 1)[:9], 3, axis=0)
    part = np.concatenate([part, np.full((573, 4), 50.0, np.float32)])
    codebook = np.asarray(learn(part, np.arange(600) < 27, jax.random.key(0)))
    assert np.abs(codebook).max() < 40, "what is not valid is no point"
    np.testing.assert_allclose(codebook[np.asarray(pqcache.nearest(codebook, part[:27]))], part[:27], atol=1e-5)


@pytest.mark.parametrize("kernel", [False, True], ids=["gather", "kernel"])
@pytest.mark.parametrize(("keys", "group", "parts", "centroids"), [(50, 2, 4, 8), (1030, 7, 1, 256), (2048, 1, 2, 64)])
def test_a_score_is_the_product_with_the_key_its_code_stands_for(keys, group, parts, centroids, kernel, monkeypatch):
    """Looks up by XLA's gather, and by the kernel for TPUs, interpreted."""
    monkeypatch.setattr(tiles, "wanted", lambda: kernel)
    rng = np.random.default_rng(1)
    codebook = rng.normal(size=(HEADS, parts, centroids, 8 // parts)).astype(np.float32)
    code = rng.integers(0, centroids, (HEADS, parts, keys)).astype(np.uint8)
    q = rng.normal(size=(HEADS, group, 8)).astype(np.float32)
    decoded = np.stack([[codebook[k, j, code[k, j]] for j in range(parts)] for k in range(HEADS)])  # [K, P, N, S]
    decoded = decoded.transpose(0, 2, 1, 3).reshape(HEADS, keys, 8)
    expected = np.einsum("kgd,knd->kgn", q.astype(np.float64), decoded)
    np.testing.assert_allclose(pqcache.lookup(codebook, code, q), expected, atol=1e-5)


def test_every_stored_key_has_the_code_of_its_nearest_centroids(run):
    sim, state, _ = run
    for b, stored in enumerate(sim.at - METHOD.window - METHOD.sinks + 1):
        pos = state.pos[b, 0, :stored, 0]
        np.testing.assert_array_equal(pos, METHOD.sinks + np.arange(stored))
        for head in range(HEADS):
            for j in range(METHOD.parts):
                part = sim.stream.k[b, pos, head].reshape(stored, METHOD.parts, -1)[:, j].astype(np.float64)
                distance = np.square(part[:, None] - state.index.codebook[b, head, j]).sum(-1)
                mine = distance[np.arange(stored), state.index.code[b, head, j, :stored]]
                np.testing.assert_allclose(mine, distance.min(-1), atol=1e-4)


def test_decoding_changes_no_centroid_and_no_code(run):
    _, state, before = run
    np.testing.assert_array_equal(state.index.codebook, before.codebook)
    for b, stored in enumerate(state.count.sum(-1)[:, 0]):
        old = stored - 20
        np.testing.assert_array_equal(state.index.code[b, ..., :old], before.code[b, ..., :old])


def test_tokens_are_selected_by_the_summed_softmax_of_their_scores(run):
    sim, state, _ = run
    spec, q = sim.plan.spec, np.random.default_rng(2).normal(size=(HEADS, GROUP, SIZE)).astype(np.float32)
    one = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), sim.cache.state)
    block = selection(sim, 0, q).block
    stored = state.count[0, 0].sum()
    score = np.asarray(pqcache.lookup(one.index.codebook, one.index.code, q), np.float64)[..., :stored] / np.sqrt(SIZE)
    weight = np.exp(score - score.max(-1, keepdims=True))
    weight = (weight / weight.sum(-1, keepdims=True)).sum(1)
    for head in range(HEADS):  # codes are equal for many tokens: compare what was reached, not which of them
        best = np.sort(weight[head])[::-1][: spec.max_blocks]
        np.testing.assert_allclose(np.sort(weight[head, block[head]])[::-1], best, rtol=1e-4)
        assert len(set(block[head].tolist())) == spec.max_blocks


def test_impossible_settings_are_refused():
    for wrong in ({"bits": 9}, {"bits": 0}, {"parts": 0}, {"iterations": -3}):
        with pytest.raises(ConfigError, match="bits="):
            PQCache(**wrong)
    with pytest.raises(ConfigError, match="head size"):
        PQCache(parts=3).init(PQCache().spec(kv_heads=2, group=1, head_dim=8, capacity=300), ())
