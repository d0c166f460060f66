"""Static update against a greedy assignment in NumPy."""

import jax
import numpy as np
import pytest
from harness import HEADS, METHODS, Sim, Stream

STATIC = METHODS["dynakv_static"]
PROMPT, STEPS = 40, 50


def partition(sim, b, head):
    """Positions of every cluster of a head, by the number of its first block."""
    state, found = jax.device_get(sim.cache.state), {}
    for block in np.flatnonzero(state.count[b, head]):
        rows = state.pos[b, head, block, : state.count[b, head, block]]
        found.setdefault(int(state.index.cluster[b, head, block]), []).extend(rows.tolist())
    return found


@pytest.fixture(scope="module", params=[0, 1])
def run(request):
    """Sequences with few clusters for their length, so that they grow over several blocks, before and after."""
    sim = Sim(STATIC, Stream.rows(request.param, 1 - request.param), [PROMPT, PROMPT])
    before = [partition(sim, 0, head) for head in range(HEADS)]
    for _ in range(STEPS):
        sim.step()
    return sim, before


@pytest.mark.parametrize("head", range(HEADS))
def test_every_key_goes_to_the_cluster_with_the_nearest_mean(run, head):
    sim, before = run
    keys, expected = sim.stream.k[0, :, head].astype(np.float64), {c: list(p) for c, p in before[head].items()}
    spec = sim.plan.spec
    for evicted in range(PROMPT - spec.ring, PROMPT + STEPS - spec.ring):
        means = {c: keys[p].mean(0) for c, p in expected.items()}
        expected[min(means, key=lambda c: np.square(keys[evicted] - means[c]).sum())].append(evicted)
    assert {c: sorted(p) for c, p in partition(sim, 0, head).items()} == {c: sorted(p) for c, p in expected.items()}


@pytest.mark.parametrize("head", range(HEADS))
def test_blocks_of_one_cluster_share_its_mean_and_variance(run, head):
    sim, _ = run
    index, count = jax.device_get(sim.cache.state.index), np.asarray(sim.cache.state.count[0, head])
    for cluster, pos in partition(sim, 0, head).items():
        keys = sim.stream.k[0, pos, head].astype(np.float64)
        for block in np.flatnonzero((index.cluster[0, head] == cluster) & (count > 0)):
            np.testing.assert_allclose(index.centroid[0, head, :, block], keys.mean(0), atol=1e-5)
            np.testing.assert_allclose(index.norm[0, head, block], np.square(keys.mean(0)).sum(), rtol=1e-4)
            np.testing.assert_allclose(index.variance[0, head, block], keys.var(0).sum(), rtol=1e-4)


def test_clusters_outgrow_their_block_and_none_is_added(run):
    sim, before = run
    after = [partition(sim, 0, head) for head in range(HEADS)]
    assert [set(p) for p in after] == [set(p) for p in before]
    assert max(len(pos) for found in after for pos in found.values()) > STATIC.largest
    assert not np.asarray(sim.cache.state.index.splits).any()


def test_without_a_prompt_all_keys_are_one_cluster():
    sim = Sim(STATIC, Stream.rows(2, 3), [1, 1])
    for _ in range(60):
        sim.step()
    assert all(set(partition(sim, 0, head)) == {0} for head in range(HEADS))
