"""ClusterKV: spherical k-means against scikit-learn, clusters of prompt and periods, and their ranking."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import GROUP, HEADS, METHODS, SIZE, Sim, Stream, selection
from sklearn.cluster import KMeans

from kvjax.errors import ConfigError
from kvjax.methods import ClusterKV
from kvjax.ops import kmeans as clustering

METHOD = METHODS["clusterkv"]
PROMPT, PERIOD = 50, 8
FIRST = PROMPT - METHOD.window + 1  # first position that leaves the window while decoding
cluster = jax.jit(functools.partial(clustering.kmeans, clusters=16, iterations=10, cosine=True))
kmeans = jax.jit(clustering.kmeans, static_argnames=("clusters", "cosine"))


def keys_of(seed):
    """800 keys around 12 directions, of very different lengths."""
    rng = np.random.default_rng(seed)
    keys = 2 * rng.normal(size=(12, 8))[rng.integers(0, 12, 800)] + rng.normal(size=(800, 8))
    return (keys * np.exp(rng.normal(size=(800, 1)))).astype(np.float32)


def owners(keys, seed):
    every = np.ones(len(keys), bool)
    return np.asarray(cluster(jnp.asarray(keys), every, active=jnp.int32(16), seed=jax.random.key(seed)))


def unlike(keys, owner):
    """Sum of cosine distances to the direction of each key's cluster, in float64."""
    keys = keys.astype(np.float64) / np.linalg.norm(keys, axis=-1, keepdims=True)
    total = np.stack([keys[owner == c].sum(0) for c in range(16)])
    return len(keys) - np.linalg.norm(total, axis=-1).sum()


def test_cosine_distances_are_those_of_scikit_learn_on_the_sphere():
    ours, theirs = 0.0, 0.0
    for seed in range(3):
        keys = keys_of(seed)
        ours += unlike(keys, owners(keys, seed))
        sphere = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
        theirs += unlike(keys, KMeans(16, n_init=1, max_iter=10, random_state=seed).fit(sphere).labels_)
    assert ours <= 1.05 * theirs, f"ratio {ours / theirs:.3f}"


def test_the_length_of_a_key_does_not_matter():
    keys = keys_of(4)
    length = 2.0 ** np.random.default_rng(5).integers(-2, 3, (800, 1))
    np.testing.assert_array_equal(owners(keys, 0), owners((keys * length).astype(np.float32), 0))


def blocks(state, head):
    """Positions of the rows of every non-empty block of the first sequence."""
    return {int(j): state.pos[0, head, j, : state.count[0, head, j]] for j in np.flatnonzero(state.count[0, head])}


@pytest.fixture(scope="module")
def run():
    """Two periods and a half after the prompt: simulation, state before and after."""
    sim = Sim(METHOD, Stream.rows(0, 1), [PROMPT, PROMPT])
    start = jax.device_get(sim.cache.state)
    sim.run(20)
    return sim, start, jax.device_get(sim.cache.state)


def parts_of(keys, clusters, head):
    """Index sets of the clusters of some keys of a head."""
    seed = jax.random.split(jax.random.key(METHOD.seed), HEADS)[head]
    every, active = jnp.ones(len(keys), bool), jnp.int32(clusters)
    owner = np.asarray(kmeans(jnp.asarray(keys), every, clusters, active, seed, cosine=True))
    return [set(np.flatnonzero(owner == c).tolist()) for c in range(clusters)]


@pytest.mark.parametrize("head", range(HEADS))
def test_every_period_is_clustered_by_itself_and_nothing_else_moves(run, head):
    sim, start, state = run
    before, after = blocks(start, head), blocks(state, head)
    for block, pos in before.items():
        np.testing.assert_array_equal(after[block], pos)
    new = [set(pos.tolist()) for block, pos in after.items() if block not in before]
    for period in range(2):
        pos = FIRST + period * PERIOD + np.arange(PERIOD)
        expected = [{int(pos[i]) for i in part} for part in parts_of(sim.stream.k[0, pos, head], 2, head)]
        assert sorted(map(sorted, expected)) == sorted(sorted(part) for part in new if part & set(pos.tolist()))


@pytest.mark.parametrize("head", range(HEADS))
def test_a_block_of_the_prompt_holds_keys_of_one_direction(run, head):
    """Each key is at least as like its own block's direction as that of any other, if k-means has settled."""
    sim, start, _ = run
    own, other = [], []
    members = list(blocks(start, head).values())
    unit = [k / np.linalg.norm(k, axis=-1, keepdims=True) for k in (sim.stream.k[0, pos, head] for pos in members)]
    directions = np.stack([k.sum(0) / np.linalg.norm(k.sum(0)) for k in unit])
    for j, keys in enumerate(unit):
        likeness = keys @ directions.T
        own.extend(likeness[:, j])
        other.extend(np.delete(likeness, j, axis=1).max(1))
    assert np.mean(np.array(own) >= np.array(other) - 1e-6) > 0.9


def test_clusters_are_ranked_by_the_softmax_of_centroid_products(run):
    sim, _, state = run
    spec = sim.plan.spec
    q = np.random.default_rng(1).normal(size=(HEADS, GROUP, SIZE)).astype(np.float32)
    found = selection(sim, 0, q).block
    for head in range(HEADS):
        held = blocks(state, head)
        centroid = np.stack([sim.stream.k[0, pos, head].astype(np.float64).mean(0) for pos in held.values()])
        score = q[head] @ centroid.T / np.sqrt(SIZE)
        weight = np.exp(score - score.max(-1, keepdims=True))
        order = np.argsort(-(weight / weight.sum(-1, keepdims=True)).mean(0))
        np.testing.assert_array_equal(found[head], np.array(list(held))[order][: spec.max_blocks])


@pytest.mark.parametrize("period", [0, -3])
def test_an_empty_period_is_refused(period):
    with pytest.raises(ConfigError, match=f"period={period}"):
        ClusterKV(period=period)
