"""Local update: new keys are clustered among themselves, a period at a time."""

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import HEADS, METHODS, Sim, Stream, check_every_token_has_one_place

from kvjax.methods import DynaKV
from kvjax.ops import kmeans as clustering

LOCAL = METHODS["dynakv_local"]
PERIOD, PROMPT = 8, 40
kmeans = jax.jit(clustering.kmeans, static_argnums=2)
FIRST = PROMPT - (LOCAL.window - 1)  # first position that leaves the window while decoding


def blocks(sim, head):
    """Positions of the rows of every non-empty block of the first sequence."""
    state = jax.device_get(sim.cache.state)
    return {int(j): state.pos[0, head, j, : state.count[0, head, j]] for j in np.flatnonzero(state.count[0, head])}


@pytest.fixture(scope="module")
def run():
    """Two periods and a half, with what there was after the prompt."""
    sim = Sim(LOCAL, Stream.rows(0, 1), [PROMPT, PROMPT])
    before = [blocks(sim, head) for head in range(HEADS)]
    for _ in range(20):
        sim.step()
    return sim, before


@pytest.mark.parametrize("head", range(HEADS))
def test_clusters_of_the_prompt_stay_as_they_are(run, head):
    sim, before = run
    after = blocks(sim, head)
    for block, pos in before[head].items():
        np.testing.assert_array_equal(after[block], pos)


@pytest.mark.parametrize("head", range(HEADS))
def test_new_clusters_are_k_means_of_one_period(run, head):
    sim, before = run
    new = [set(pos.tolist()) for block, pos in blocks(sim, head).items() if block not in before[head]]
    for period in range(2):
        pos = FIRST + period * PERIOD + np.arange(PERIOD)
        seed = jax.random.split(jax.random.key(LOCAL.seed), HEADS)[head]
        keys = jnp.asarray(sim.stream.k[0, pos, head])
        owner = np.asarray(kmeans(keys, jnp.ones(PERIOD, bool), 2, jnp.int32(2), seed))
        mine = [part for part in new if part & set(pos.tolist())]
        assert sorted(map(sorted, mine)) == sorted(sorted(pos[owner == c].tolist()) for c in range(2))


@pytest.mark.parametrize("head", range(HEADS))
def test_statistics_of_new_clusters_are_those_of_their_keys(run, head):
    sim, _ = run
    index = jax.device_get(sim.cache.state.index)
    for block, pos in blocks(sim, head).items():
        keys = sim.stream.k[0, pos, head].astype(np.float64)
        np.testing.assert_allclose(index.centroid[0, head, :, block], keys.mean(0), atol=1e-5)
        np.testing.assert_allclose(index.variance[0, head, block], keys.var(0).sum(), atol=1e-4)


def test_an_unfinished_period_waits_and_is_attended(run):
    sim, _ = run
    waiting = set(range(FIRST + 2 * PERIOD, FIRST + 20))
    assert all(set(sim.places(0, head)["held"]) == waiting for head in range(HEADS))
    _, report = Sim.step(sim)
    assert all(waiting <= set(np.asarray(report.selected[0, head]).tolist()) for head in range(HEADS))


def test_without_free_blocks_keys_go_to_clusters_with_room_and_are_counted():
    """Given so few blocks that periods soon find none, no key is lost."""
    method = DynaKV(budget=40, sinks=2, window=4, cluster=4, num_blocks=14, update="local")
    sim = Sim(method, Stream.draw(1, batch=1), [30])
    for _ in range(60):
        sim.step()
        check_every_token_has_one_place(sim)
    state = jax.device_get(sim.cache.state)
    assert (state.index.refused > 0).all()
    for head in range(HEADS):
        for block, pos in blocks(sim, head).items():
            keys = sim.stream.k[0, pos, head].astype(np.float64)
            np.testing.assert_allclose(state.index.centroid[0, head, :, block], keys.mean(0), atol=1e-4)


def test_the_tail_has_room_for_one_period():
    assert harness.plan_of(LOCAL).spec.held == PERIOD
