"""k-means, the split in two, and the layout in blocks, against scikit-learn and NumPy."""

import argparse
import functools
import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score

import kvjax
from kvjax.inference import dense_prefill
from kvjax.ops import kmeans as clustering

ROOT = pathlib.Path(__file__).parents[2]
SEEDS = (0, 1, 2)
SIZES = (2000, 5000)  # of the larger, a start is drawn from a sample
_kmeans = jax.jit(clustering.kmeans, static_argnums=(2, 5))
_two_means = jax.jit(clustering.two_means, static_argnums=(2, 3))
_pack = jax.jit(clustering.pack, static_argnums=(2, 3, 4))


def kmeans(points, active=64, valid=None, seed=0, iterations=10, padded=None):
    """Owners of the points, among 64 clusters; two padded shapes, so that few programs are compiled."""
    valid = np.ones(len(points), bool) if valid is None else valid
    padded = padded or (2000 if len(points) <= 2000 else 6000)
    extra = padded - len(points)
    filled = np.pad(np.asarray(points, np.float32), ((0, extra), (0, 0)), constant_values=7.0)
    owner = _kmeans(filled, np.pad(valid, (0, extra)), 64, jnp.int32(active), jax.random.key(seed), iterations)
    owner = np.asarray(owner)
    assert (owner[len(points) :] == 64).all()
    return owner[: len(points)]


def two_means(points, largest, valid=None):
    """The parts of at most 40 points of at most 8 dimensions."""
    extra = 40 - len(points)
    valid = np.pad(np.ones(len(points), bool) if valid is None else valid, (0, extra))
    filled = np.pad(np.asarray(points, np.float32), ((0, extra), (0, 8 - points.shape[1])))
    return tuple(np.asarray(part)[: len(points)] for part in _two_means(filled, valid, largest))


def clumps(seed, count, points=2000, size=16, spread=0.5):
    """Points around `count` centres, and the number of each point's centre."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, count, points)
    centres = 3 * rng.normal(size=(count, size))
    return (centres[label] + spread * rng.normal(size=(points, size))).astype(np.float32), label


def isotropic(seed, points=2000, size=16):
    return np.random.default_rng(seed).normal(size=(points, size)).astype(np.float32)


def inertia(points, owner):
    """Sum of squared distances to the means of the clusters, in float64."""
    points = points.astype(np.float64)
    return sum(np.square(points[owner == c] - points[owner == c].mean(0)).sum() for c in np.unique(owner))


# k-means ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("points", SIZES)
@pytest.mark.parametrize("data", [
    isotropic, functools.partial(clumps, count=8), functools.partial(clumps, count=64),
    functools.partial(clumps, count=200),
], ids=["isotropic", "8_clumps", "64_clumps", "200_clumps"])
def test_inertia_is_within_five_percent_of_scikit_learn(data, points):
    """Stops after 10 iterations, where the other by default goes on until its centroids rest."""
    ours, theirs = [], []
    for seed in SEEDS:
        drawn = data(seed, points=points)
        drawn = drawn[0] if isinstance(drawn, tuple) else drawn
        ours.append(inertia(drawn, kmeans(drawn, seed=seed)))
        theirs.append(KMeans(64, random_state=seed).fit(drawn).inertia_)
    assert np.mean(ours) <= 1.05 * np.mean(theirs), f"ratio {np.mean(ours) / np.mean(theirs):.3f}"


@pytest.fixture(scope="module")
def keys():
    """Those of each KV head of two layers of a trained model, which reads a module of the standard library."""
    llm = kvjax.load(ROOT / "kvjax/reference_8k")
    text = llm.encode(pathlib.Path(argparse.__file__).read_text(), start=True)[: max(SIZES)]
    layers = dense_prefill.read(llm.config, llm.params, dense_prefill.pad(jnp.asarray([text])))
    return np.concatenate([one.key[0, : len(text)].swapaxes(0, 1) for one in itertools.islice(layers, 2)])


@pytest.mark.parametrize("points", SIZES)
def test_inertia_of_a_models_keys_is_within_five_percent_of_scikit_learn(keys, points):
    for drawn in keys[:, :points]:
        assert len(drawn) == points
        ours, theirs = inertia(drawn, kmeans(drawn)), KMeans(64, random_state=0).fit(drawn).inertia_
        assert ours <= 1.05 * theirs, f"ratio {ours / theirs:.3f}"


def test_iterations_lower_the_inertia():
    points = isotropic(3)
    assert inertia(points, kmeans(points)) < 0.95 * inertia(points, kmeans(points, iterations=0))


def test_every_point_belongs_to_the_nearest_mean_once_converged():
    points, _ = clumps(4, count=8, points=400)
    owner = kmeans(points, active=8)
    means = np.stack([points[owner == c].mean(0) for c in range(8)])
    nearest = np.square(points[:, None] - means[None]).sum(-1).argmin(-1)
    np.testing.assert_array_equal(owner, nearest)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_cluster_is_empty_when_most_points_are_duplicates(seed):
    """Given 80 different points, one of them 1,500 times, 64 clusters all find a point."""
    rng = np.random.default_rng(seed)
    different = rng.normal(size=(80, 16))
    points = np.concatenate([different, np.repeat(different[:1], 1500, 0), different[rng.integers(0, 80, 100)]])
    owner = kmeans(points[rng.permutation(len(points))], seed=seed)
    assert len(np.unique(owner)) == 64


def test_as_many_clusters_as_different_points_give_each_point_its_own():
    owner = kmeans(np.tile(isotropic(5, points=40), (5, 1)), active=40)
    np.testing.assert_array_equal(owner, np.tile(owner[:40], 5))
    assert len(np.unique(owner)) == 40


def test_an_emptied_cluster_is_refilled():
    """Given a start from 4,096 of 5,900 points that misses rare ones, clusters move to these and not to padding."""
    points, valid = np.zeros((6000, 16)), np.arange(6000) < 5900
    points[5840:] += 10 + 5 * np.arange(160)[:, None]
    start = kmeans(points, 58, valid, iterations=0)[valid]
    assert len(np.unique(start)) < 58
    assert len(np.unique(kmeans(points, 58, valid)[valid])) == 58


@pytest.mark.parametrize("different", [1, 3])
def test_fewer_different_points_than_clusters_leave_every_point_an_owner(different):
    owner = kmeans(np.repeat(isotropic(6, points=different), 50, axis=0), active=8)
    assert ((owner >= 0) & (owner < 8)).all()
    assert len(np.unique(owner)) == different


def test_fewer_points_than_clusters_leave_every_point_an_owner():
    owner = kmeans(isotropic(7, points=5), active=9)
    assert (owner < 9).all() and len(np.unique(owner)) == 5


def test_no_valid_point_gives_no_owner():
    np.testing.assert_array_equal(kmeans(isotropic(8, points=20), valid=np.zeros(20, bool)), 64)


@pytest.mark.parametrize("active", [1, 7, 64])
def test_only_active_clusters_are_used(active):
    owner = kmeans(isotropic(9, points=300), active)
    np.testing.assert_array_equal(np.unique(owner), np.arange(active))


def test_invalid_points_get_the_sentinel():
    valid = np.random.default_rng(10).random(300) < 0.6
    owner = kmeans(isotropic(10, points=300), valid=valid)
    assert (owner[~valid] == 64).all() and (owner[valid] < 64).all()


def test_invalid_points_have_no_influence():
    """Given far-away values in the invalid rows, the valid ones are clustered alike."""
    points, valid = isotropic(11, points=300), np.arange(300) % 3 > 0
    other = np.where(valid[:, None], points, 1e3)
    np.testing.assert_array_equal(kmeans(points, 16, valid), kmeans(other, 16, valid))


def test_the_start_draws_valid_points_only():
    """Given fewer valid points than candidates of one draw, and padding that is nearer to all: four centroids."""
    points = np.zeros((64, 16))
    points[[5, 20, 40, 60], 0] = [-11, -9, 9, 11]
    valid = points[:, 0] != 0
    assert sorted(kmeans(points, 4, valid, iterations=0)[valid]) == [0, 1, 2, 3]


@pytest.mark.parametrize(("points", "padded"), [(300, 2000), (2000, 6000), (5000, 6000)])
def test_padding_does_not_change_the_result(points, padded):
    data, _ = clumps(13, count=20, points=points)
    np.testing.assert_array_equal(kmeans(data, 32, padded=points), kmeans(data, 32, padded=padded))


def test_clusters_that_padding_adds_do_not_change_the_draws(monkeypatch):
    """Where there are more points than a start is drawn from, with a cluster for every eight, padding included."""
    monkeypatch.setattr(clustering, "_SAMPLE", 64)
    data, valid = isotropic(13, points=400), np.arange(400) >= 3
    owners = []
    for padded in (400, 1200):
        program = jax.jit(lambda points, valid, most=padded // 8: clustering.kmeans(
            points, valid, most, jnp.int32(50), jax.random.key(0), 3))
        found = np.asarray(program(*(np.pad(x, ((0, padded - 400), *((0, 0),) * (x.ndim - 1))) for x in (data, valid))))
        owners.append(found[:400][valid])
    np.testing.assert_array_equal(*owners)


def test_same_seed_same_result():
    points = isotropic(14, points=500)
    np.testing.assert_array_equal(kmeans(points, seed=3), kmeans(points, seed=3))


def test_another_seed_starts_elsewhere():
    points = isotropic(14, points=500)
    assert (kmeans(points, seed=3) != kmeans(points, seed=4)).any()


# The split in two ---------------------------------------------------------------------------------


@settings(max_examples=150)
@given(seed=st.integers(0, 10_000), size=st.integers(2, 32), identical=st.booleans(), skew=st.sampled_from([0, 1, 50]))
def test_a_split_gives_two_parts_that_fit(seed, size, identical, skew):
    """Given 2 to 32 valid points among 40 and room for 16, both parts are non-empty, fit, and cover all once."""
    rng = np.random.default_rng(seed)
    points = np.ones((40, 8)) if identical else rng.normal(size=(40, 8))
    points[rng.integers(0, 40)] += skew
    valid = rng.permutation(np.arange(40) < size)
    first, second = two_means(points, 16, valid)
    np.testing.assert_array_equal(first ^ second, valid)
    assert not (first & second).any()
    assert 1 <= first.sum() <= 16 and 1 <= second.sum() <= 16


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("share", [0.5, 0.2])
def test_a_split_separates_two_clumps_as_scikit_learn_does(seed, share):
    rng = np.random.default_rng(seed)
    centre = np.where(rng.random(40)[:, None] < share, 4 * rng.normal(size=8), 4 * rng.normal(size=8))
    points = (centre + rng.normal(size=(40, 8))).astype(np.float32)
    first, _ = two_means(points, 40)
    theirs = KMeans(2, n_init=5, random_state=seed).fit(points).labels_
    assert adjusted_rand_score(theirs, first) == 1


def test_a_split_ignores_invalid_points():
    points = np.concatenate([np.full((10, 2), 100.0), np.zeros((5, 2)), np.ones((5, 2))])
    first, second = two_means(points, 16, np.arange(20) >= 10)
    assert {tuple(np.flatnonzero(first)), tuple(np.flatnonzero(second))} == {(10, 11, 12, 13, 14), (15, 16, 17, 18, 19)}


def test_iterations_lower_the_inertia_of_a_split():
    points = isotropic(15, points=40, size=8)
    start, _ = _two_means(points, np.ones(40, bool), 40, 0)
    first, _ = two_means(points, 40)
    assert inertia(points, first) < 0.99 * inertia(points, np.asarray(start))


@pytest.mark.parametrize("outlier", [0, -26])
def test_a_part_that_is_too_large_is_cut_along_the_axis_between_the_means(outlier):
    """Given 19 points on a line on the left and 3 on the right, the right part takes the nearest of the left.

    The outlier decides which of the parts the split starts from.
    """
    line = np.concatenate([[outlier], np.linspace(0, 1, 18), [30, 30.1, 30.2]])[:, None]
    first, second = two_means(line, 16)
    small = first if first.sum() < second.sum() else second
    np.testing.assert_array_equal(np.flatnonzero(small), np.arange(16, 22))


def test_heads_with_nothing_to_split_have_no_first_half():
    points, valid = np.ones((3, 40, 8), np.float32), np.arange(40) < np.array([[0], [1], [2]])
    first, _ = jax.vmap(lambda *head: clustering.two_means(*head, 16))(points, valid)
    assert first.sum(1).tolist() == [0, 0, 1]


# The layout in blocks -----------------------------------------------------------------------------


@st.composite
def owners(draw):
    size = draw(st.integers(1, 48))
    owner = np.array(draw(st.lists(st.integers(0, 5), min_size=size, max_size=size)), np.int32)
    valid = np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    pad = 48 - size
    return np.pad(np.where(valid, owner, 6), (0, pad), constant_values=6), np.pad(valid, (0, pad))


@settings(max_examples=150)
@given(owners())
def test_packing_gives_every_token_its_own_row(case):
    owner, valid = case
    block, row, _ = (np.asarray(x) for x in _pack(owner, valid, 6, 4, 18))
    places = list(zip(block[valid], row[valid], strict=True))
    assert len(set(places)) == len(places)
    assert (block[valid] < 18).all() and (row[valid] >= 0).all() and (row[valid] < 4).all()
    assert (block[~valid] == 18).all()


@settings(max_examples=150)
@given(owners())
def test_packing_fills_blocks_of_one_cluster_from_the_front(case):
    """Each block holds one cluster, its rows are a prefix, and only a cluster's last block has room left."""
    owner, valid = case
    block, row, _ = (np.asarray(x) for x in _pack(owner, valid, 6, 4, 18))
    used = 0
    for cluster in range(6):
        mine = np.flatnonzero(valid & (owner == cluster))
        expected = [(used + i // 4, i % 4) for i in range(len(mine))]  # tokens keep their order
        assert list(zip(block[mine], row[mine], strict=True)) == expected
        used += -(-len(mine) // 4)


@settings(max_examples=150)
@given(owners())
def test_without_enough_blocks_packing_fills_those_that_are_there(case):
    """Keeps in its block what has one, the rest goes where rows are free, and rows in use stay a prefix."""
    owner, valid = case
    wide_block, wide_row, none = (np.asarray(x) for x in _pack(owner, valid, 6, 4, 18))
    block, row, strays = (np.asarray(x) for x in _pack(owner, valid, 6, 4, 12))
    kept = valid & (wide_block < 12)
    assert none == 0 and strays == (valid & ~kept).sum()
    np.testing.assert_array_equal(block[kept], wide_block[kept])
    np.testing.assert_array_equal(row[kept], wide_row[kept])
    assert (block[~valid] == 12).all()
    for number in range(12):
        rows = np.sort(row[valid & (block == number)])
        np.testing.assert_array_equal(rows, np.arange(len(rows)))
        assert len(rows) <= 4
    assert (block[valid] < 12).all()
