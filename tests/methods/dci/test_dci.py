"""The DCI-tree against NumPy: transforms, levels, parents, search, inserts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import ConfigError
from kvjax.methods import dci
from kvjax.methods.dci.projections import adapted_directions, lower_bounds, prioritised, random_directions
from kvjax.methods.dci.promotion import promote
from kvjax.methods.dci.tree import ahead, most_levels

SIZE, POINTS = 16, 1000
SHAPE = dci.Shape(pages=250, rows=8, size=SIZE, ratio=1 / 16, levels=most_levels(POINTS, 1 / 16), projections=10)
WIDE = dci.Search(beam=250, pages=250)  # room for everything
NARROW = dci.Search(beam=60, pages=240, visit=110)  # every node is opened, a tenth of the points visited


def clumps(seed, points=POINTS, size=SIZE):
    rng = np.random.default_rng(seed)
    centres = 3 * rng.normal(size=(20, size))
    return (centres[rng.integers(0, 20, points)] + 0.5 * rng.normal(size=(points, size))).astype(np.float32)


def uniform(seed, points=POINTS, size=SIZE):
    return np.random.default_rng(seed).uniform(-1, 1, size=(points, size)).astype(np.float32)


@functools.partial(jax.jit, static_argnums=0)
def _build(shape, key, valid):
    level = dci.draw_levels(jax.random.key(1), jnp.arange(key.shape[0]), shape.ratio, shape.levels)
    return (*dci.build(shape, jax.random.key(0), key, valid, level), level)


def build(key, valid=None, shape=SHAPE):
    return jax.device_get(_build(shape, key, np.ones(len(key), bool) if valid is None else valid))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _insert_all(shape, search, tree, key, valid):
    level = dci.draw_levels(jax.random.key(1), jnp.arange(key.shape[0]), shape.ratio, shape.levels)

    def one(tree, given):
        tree, page, row = dci.insert(shape, search, tree, *given)
        return tree, (page, row)

    tree, places = jax.lax.scan(one, tree, (key, level, valid))
    return tree, *places


def insert_all(tree, key, valid, shape=SHAPE, search=WIDE):
    """Inserts the valid keys one by one; the page and row of each."""
    return jax.device_get(_insert_all(shape, search, tree, key, valid))


def grow(key, start, shape=SHAPE, search=WIDE):
    """A tree of the first `start` keys built at once and the others inserted, and the page and row of every key."""
    first = np.arange(len(key)) < start
    tree, page, row, _ = build(key, first, shape)
    tree, more, rows = insert_all(tree, key, ~first, shape, search)
    return tree, np.where(first, page, more), np.where(first, row, rows)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _query(shape, search, tree, q):
    return jax.vmap(lambda one: dci.query(shape, search, tree, dci.transform_query(one[None])))(q)


def visited(search, tree, page, row, q, shape=SHAPE):
    """bool[N, T]: which points each query visited."""
    point = np.asarray(_query(shape, search, tree, q).point).reshape(len(q), -1)
    number = np.full(shape.points + 1, len(page))
    number[page * shape.rows + row] = np.arange(len(page))
    hit = np.zeros((len(q), len(page) + 1), bool)
    np.put_along_axis(hit, number[np.minimum(point, shape.points)], True, axis=1)
    return hit[:, :-1]


def recall(hit, key, q, k):
    top = np.argsort(-(q.astype(np.float64) @ key.T.astype(np.float64)), axis=1)[:, :k]
    return np.take_along_axis(hit, top, axis=1).mean()


def nodes(tree, shape=SHAPE):
    """(level, parent, points) of every node: parent None for the root, points named by page * C + row."""
    found, waiting = [], [(int(tree.height), None, int(tree.root))]
    while waiting:
        level, parent, page = waiting.pop()
        chain = []
        while page < shape.pages:
            chain.append(page)
            page = int(tree.jump[0, page])
        for nth, page in enumerate(chain):
            assert tree.length[page] == len(chain) - nth
            further = [nth + 2**j for j in range(len(tree.jump))]
            np.testing.assert_array_equal(
                tree.jump[:, page], [chain[n] if n < len(chain) else shape.pages for n in further]
            )
        points = [page * shape.rows + r for page in chain for r in range(tree.count[page])]
        found.append((level, parent, points))
        child = tree.child.reshape(-1)
        waiting += [(level - 1, p, int(child[p])) for p in points if child[p] < shape.pages]
    return found


# Transforms ------------------------------------------------------------------------------------------


def test_distances_of_transforms_are_two_minus_twice_the_scaled_inner_product():
    key, q = clumps(0), clumps(1)[:5]
    radius = np.asarray(1.7 * np.square(key).sum(-1).max(), np.float32)
    near = dci.transform_key(key, radius), dci.transform_query(q)
    distance = np.square(np.asarray(near[0])[:, None] - np.asarray(near[1])).sum(-1)
    expected = 2 - 2 * (key @ q.T) / (np.sqrt(radius) * np.linalg.norm(q, axis=-1))
    np.testing.assert_allclose(distance, expected, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(near[0], axis=-1), 1, atol=1e-5)


def test_a_zero_query_is_transformed_to_zero():
    np.testing.assert_array_equal(dci.transform_query(np.zeros((1, 4), np.float32)), np.zeros((1, 5)))


def test_a_longer_key_rescales_all_earlier_ones():
    """Given a key far longer than all before, scores still follow the inner products."""
    key, q = clumps(0), clumps(1)[:8]
    key[-1] *= 20
    tree, page, row = grow(key, POINTS - 1)
    assert tree.radius == pytest.approx(np.square(key[-1]).sum(), rel=1e-6)
    found = jax.device_get(_query(SHAPE, WIDE, tree, q))
    keys = np.zeros((SHAPE.points, SIZE), np.float32)
    keys[page * 8 + row] = key
    unit = q / np.linalg.norm(q, axis=-1, keepdims=True)
    for n in range(8):
        point, score = found.point[n].reshape(-1), found.score[n].reshape(-1)
        np.testing.assert_allclose(score[point < SHAPE.points], keys[point[point < SHAPE.points]] @ unit[n], atol=1e-3)
        assert (point < SHAPE.points).sum() == POINTS


def test_bounds_rescale_with_a_longer_key():
    """Given a key far longer than all before, inserted, visits by bounds find as much as in a tree built with it."""
    key, q = clumps(0), clumps(1)[:60]
    key[-1] *= 20
    (whole, *places, _), (part, *grown_places) = build(key), grow(key, POINTS - 1)
    np.testing.assert_allclose(part.projected[tuple(grown_places)], key @ part.directions[:-1], atol=1e-2)
    at_once, grown = visited(NARROW, whole, *places, q), visited(NARROW, part, *grown_places, q)
    assert recall(grown, key, q, 16) >= recall(at_once, key, q, 16) - 0.02


# Projections -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapted", [False, True])
def test_bounds_never_exceed_distances(adapted):
    points, q = clumps(0), clumps(1)[:7]
    directions = random_directions(jax.random.key(0), SIZE, 6)
    if adapted:
        directions = adapted_directions(directions, points, np.arange(POINTS) < 400)
    bound = np.asarray(lower_bounds(points @ directions, q @ directions))
    distance = np.square(points[:, None] - q).sum(-1)
    assert (bound <= distance * 1.0001 + 1e-3).all() and (bound > 0.02 * distance).mean() > 0.5
    np.testing.assert_allclose(np.asarray(directions.T @ directions), np.eye(6), atol=1e-5)


def test_adapted_directions_hold_nearly_as_much_as_the_best_subspace():
    points = (np.random.default_rng(0).normal(size=(500, 16)) * 0.8 ** np.arange(16)).astype(np.float32)
    directions = adapted_directions(random_directions(jax.random.key(0), 16, 6), points, np.ones(500, bool))
    best = np.square(np.linalg.svd(points, compute_uv=False)[:6]).sum()
    assert np.square(points @ np.asarray(directions)).sum() > 0.97 * best


def test_the_smallest_bounds_are_visited_first():
    bound, valid = np.array([3.0, 1.0, 2.0, 0.5], np.float32), np.array([True, True, True, False])
    np.testing.assert_array_equal(prioritised(bound, valid, 2), [1, 2])
    np.testing.assert_array_equal(prioritised(bound, valid, 4), [1, 2, 0, 4])


# The tree --------------------------------------------------------------------------------------------


def test_levels_are_geometric():
    level = np.asarray(dci.draw_levels(jax.random.key(0), jnp.arange(40_000), 1 / 8, 6))
    for least in range(1, 4):
        assert (level >= least).mean() == pytest.approx(8.0 ** (1 - least), rel=0.15)
    assert level.max() <= 6 and level.min() == 1


def check_tree(tree, key, page, row, shape=SHAPE):
    """Every point is in one node, one level below its parent; returns the nodes."""
    found = nodes(tree, shape)
    members = [point for *_, points in found for point in points]
    np.testing.assert_array_equal(np.sort(members), np.sort(page * shape.rows + row))
    np.testing.assert_array_equal(tree.key[page, row], key)
    assert tree.used == (tree.count > 0).sum() and (tree.count[: tree.used] > 0).all()
    assert len({p for _, p, _ in found}) == len(found)
    return found


@pytest.mark.parametrize("points", [POINTS, 85, 3, 0])
def test_each_parent_is_the_nearest_point_one_level_up(points):
    key = clumps(2)
    tree, page, row, level = build(key, np.arange(POINTS) < points)
    page, row = page[:points], row[:points]
    found = check_tree(tree, key[:points], page, row)
    number = {int(p * 8 + r): i for i, (p, r) in enumerate(zip(page, row, strict=True))}
    assert tree.height == max(1, len(set(level[:points])))
    place = {number[p]: at for at, _, members in found for p in members}
    for depth, parent, members in found:
        rivals = [i for i, at in place.items() if at == depth + 1]
        assert (parent is None) == (not rivals)
        for i in [number[p] for p in members] if rivals else []:
            distance = _transformed(key[rivals], key[:points]) - _transformed(key[i], key[:points])
            assert number[parent] == rivals[int(np.square(distance).sum(-1).argmin())]


def _transformed(key, every):
    radius = np.square(every.astype(np.float64)).sum(-1).max()
    last = np.sqrt(np.maximum(0, radius - np.square(key.astype(np.float64)).sum(-1, keepdims=True)))
    return np.concatenate([key, last], axis=-1)


def test_invalid_points_are_nowhere():
    valid = np.random.default_rng(0).random(POINTS) < 0.5
    key = np.where(valid[:, None], clumps(0), 1e4)
    tree, page, row, _ = build(key, valid)
    assert (page[~valid] == SHAPE.pages).all() and tree.count.sum() == valid.sum()
    check_tree(tree, key[valid], page[valid], row[valid])
    assert tree.radius < 1e4


def test_points_without_a_page_of_their_own_fill_other_pages():
    shape = dci.Shape(pages=125, rows=8, size=SIZE, ratio=1 / 8, levels=6, projections=0)
    key = clumps(0)
    tree, page, row, _ = build(key, shape=shape)
    assert tree.strays > 0 and (tree.count == 8).all()
    assert len(set(zip(page.tolist(), row.tolist(), strict=True))) == POINTS
    np.testing.assert_array_equal(tree.key[page, row], key)
    hit = visited(dci.Search(beam=125, pages=125), tree, page, row, key[:4], shape)
    assert hit.mean() > 0.7  # the others hang under points that strayed too far down


# Search ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [clumps, uniform])
def test_a_search_with_room_for_all_visits_every_point(keys):
    tree, page, row, _ = build(keys(0))
    assert visited(WIDE, tree, page, row, keys(1)[:5]).all()


def test_a_wide_search_finds_the_best_quarter():
    key, q = clumps(0), clumps(1)[:60]
    tree, page, row, _ = build(key)
    hit = visited(dci.Search(beam=40, pages=120), tree, page, row, q)
    assert recall(hit, key, q, 256) > 0.9 and hit.mean() < 0.9


@pytest.mark.parametrize(("keys", "floor"), [(clumps, 0.83), (uniform, 0.6)], ids=["clumps", "uniform"])
def test_recall_against_brute_force(keys, floor):
    key, q = keys(0), keys(1)[:60]
    tree, page, row, _ = build(key)
    hit = visited(NARROW, tree, page, row, q)
    assert hit.mean() <= 0.2
    found = {k: recall(hit, key, q, k) for k in (16, 64)}
    assert min(found.values()) >= floor, found


def test_visits_follow_the_bounds_and_not_the_order_of_pages():
    key, q = clumps(0), clumps(1)[:60]
    tree, page, row, _ = build(key)
    blind = dataclasses.replace(tree, projected=np.zeros_like(tree.projected))
    seeing, unseeing = (recall(visited(NARROW, one, page, row, q), key, q, 16) for one in (tree, blind))
    assert seeing > unseeing + 0.3


def test_a_group_of_queries_visits_what_each_of_them_likes_best():
    key = clumps(0)
    tree, *_ = build(key)
    q = np.stack([key[3], key[400]])
    found = jax.jit(dci.query, static_argnums=(0, 1))(SHAPE, dci.Search(8, 16), tree, dci.transform_query(q))
    score = np.asarray(found.score).max((1, 2))
    alone = [float((key @ (one / np.linalg.norm(one))).max()) for one in q]
    np.testing.assert_allclose(score, alone, rtol=1e-4)


def test_a_tree_is_that_of_its_seeds():
    key = clumps(0)
    for one, other in zip(jax.tree.leaves(build(key)), jax.tree.leaves(build(key)), strict=True):
        np.testing.assert_array_equal(one, other)
    drawn = [np.asarray(dci.draw_levels(jax.random.key(seed), jnp.arange(POINTS), 1 / 8, 4)) for seed in (0, 0, 1)]
    assert np.array_equal(drawn[0], drawn[1]) and not np.array_equal(drawn[0], drawn[2])


# Inserts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [100, 0])
def test_inserts_keep_every_point_in_one_node(start):
    key = clumps(3)
    tree, page, row = grow(key, start)
    check_tree(tree, key, page, row)
    assert 2 <= tree.height <= SHAPE.levels and tree.strays == 0


@pytest.mark.parametrize("start", [100, 0])
def test_levels_get_the_points_that_were_drawn_and_those_ahead(start):
    """Every promotion that was drawn for an inserted point, or is there in advance, was given to one or waits."""
    key = clumps(3)
    tree, page, row = grow(key, start)
    level = np.asarray(dci.draw_levels(jax.random.key(1), jnp.arange(POINTS), SHAPE.ratio, SHAPE.levels))
    at = {point: depth for depth, _, points in nodes(tree) for point in points}
    got = np.array([at[int(p * SHAPE.rows + r)] for p, r in zip(page, row, strict=True)])
    for number, waiting in enumerate(tree.waiting, start=2):
        drawn = (level[start:] >= number).sum() + ahead(SHAPE.points, SHAPE.ratio, number)
        assert (got[start:] >= number).sum() + waiting == drawn
        assert waiting < 0.5 * drawn


def test_a_promotion_waits_for_a_point_that_is_far_from_all_parents():
    tree, *_ = build(clumps(0))
    tree = dataclasses.replace(tree, waiting=np.zeros_like(tree.waiting), far=np.ones_like(tree.far))
    told = []
    for drawn, distance in [(2, 0.5), (1, 0.5), (1, 2.0), (1, 2.0)]:
        away = np.full(SHAPE.levels - 1, distance, np.float32)
        tree, level = promote(SHAPE, tree, jnp.int32(drawn), away, jnp.bool_(True))
        told.append(int(level))
    assert told == [1, 1, 2, 1] and not np.asarray(tree.waiting).any()


def test_an_insert_goes_under_the_nearest_point_one_level_up():
    key = clumps(4)
    tree, *_ = build(key, np.arange(POINTS) < 400)
    tree = dataclasses.replace(tree, waiting=np.zeros_like(tree.waiting))  # so that none is promoted
    rivals = np.array([p for depth, _, points in nodes(tree) for p in points if depth == 2])
    keys = tree.key.reshape(-1, SIZE)
    for new in key[400:420]:
        grown, at, _ = _insert(tree, new, 1, True)
        every = np.concatenate([key[:400], new[None]])
        distance = np.square(_transformed(keys[rivals], every) - _transformed(new, every)).sum(-1)
        first = int(np.asarray(grown.child).reshape(-1)[rivals[distance.argmin()]])
        assert int(at) == first


def _insert(tree, key, level, valid):
    return jax.jit(dci.insert, static_argnums=(0, 1))(SHAPE, WIDE, tree, key, jnp.int32(level), jnp.asarray(valid))


def test_an_insert_that_is_not_valid_changes_nothing():
    tree, *_ = build(clumps(0))
    after, page, _ = _insert(tree, np.full(SIZE, 99, np.float32), 3, False)
    assert page == SHAPE.pages
    for before, now in zip(jax.tree.leaves(tree), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(before, now)


def test_directions_follow_the_keys_that_are_inserted():
    """Given a tree grown from nothing, its directions hold nearly as much of the keys as those of one built at once."""
    key = clumps(0)
    (whole, *_), (part, page, row) = build(key), grow(key, 0)
    np.testing.assert_allclose(part.projected[page, row], key @ part.directions[:-1], atol=1e-3)
    held = [np.square(_transformed(key, key) @ tree.directions).sum() for tree in (whole, part)]
    assert held[1] > 0.97 * held[0]


def test_a_full_tree_takes_points_wherever_there_is_room():
    shape = dci.Shape(pages=12, rows=4, size=SIZE, ratio=1 / 4, levels=4, projections=0)
    key, search = clumps(5)[:48], dci.Search(12, 12)
    empty = dci.empty_tree(shape, jax.random.key(0))
    tree, page, row = insert_all(empty, key, np.ones(48, bool), shape, search)
    assert tree.strays > 0 and (np.asarray(tree.count) == 4).all()
    np.testing.assert_array_equal(np.asarray(tree.key)[page, row], key)


def test_keys_put_aside_are_in_no_node_and_hide_none():
    """Given as many keys aside as in the tree: pages in the order they came, and a search visits just the others."""
    key, aside, half = clumps(0), jax.jit(dci.put_aside, static_argnums=0), POINTS // 2
    tree, page, row, _ = build(key, np.arange(POINTS) < half)
    places = []
    for new in key[half:]:
        tree, at, to = aside(SHAPE, tree, new, jnp.asarray(True))
        places.append((int(at), int(to)))
    page, row = (np.concatenate([one[:half], more]) for one, more in zip((page, row), np.array(places).T, strict=True))
    assert tree.strays == 0 and len(set(places)) == half and places == sorted(places)
    np.testing.assert_array_equal(np.asarray(tree.key)[page, row], key)
    hit = visited(WIDE, tree, page, row, clumps(1)[:5])
    assert hit[:, :half].all() and not hit[:, half:].any()


@pytest.mark.parametrize("start", [0, POINTS // 2])
def test_a_tree_built_by_inserts_has_the_recall_of_one_built_at_once(start):
    """Within two points, with about half of the pages opened."""
    key, q = clumps(0), clumps(1)[:60]
    whole, *places, _ = build(key)
    part, *grown_places = grow(key, start)
    for search in (dci.Search(beam=40, pages=80), NARROW):
        at_once, grown = visited(search, whole, *places, q), visited(search, part, *grown_places, q)
        for k in (16, 64):
            assert recall(grown, key, q, k) >= recall(at_once, key, q, k) - 0.02
        assert grown.mean() <= at_once.mean() * 1.15


# Bad settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [{"ratio": 1.0}, {"ratio": 0.0}, {"projections": 99}])
def test_impossible_shapes_are_refused(wrong):
    with pytest.raises(ConfigError):
        dci.Shape(**{"pages": 4, "rows": 4, "size": 8, "ratio": 0.25, "levels": 3, "projections": 4} | wrong)
