"""How the threshold follows the average cluster size. Splits themselves: tests/methods/test_dynakv.py."""

import dataclasses
import functools

import harness
import jax
import numpy as np
import pytest
from harness import METHODS, Sim, Stream

from kvjax.cache.types import View
from kvjax.methods.clusters import Adaptive
from kvjax.methods.clusters.index import empty_index

METHOD = METHODS["dynakv"]
RULE = Adaptive(cluster=4, threshold=1.5, gain=2.0, buffer=3)


def limit(count, rule=RULE, tau=10.0, spread=0.0):
    index = jax.tree.map(lambda leaf: leaf[0], empty_index(harness.plan_of(METHOD).spec))
    index = dataclasses.replace(index, tau=np.asarray(tau, np.float32), spread=np.asarray(spread, np.float32))
    count = np.array(count, np.int32)
    return float(jax.jit(rule.limit)(index, count.sum(), (count > 0).sum()))


@pytest.mark.parametrize(("count", "factor"), [([4, 4, 0], 1), ([2, 2, 0], 4), ([8, 8, 0], 0.25), ([1, 7], 1)])
def test_the_limit_is_tau_times_a_power_of_target_over_average_size(count, factor):
    assert limit(count) == pytest.approx(10 * factor)


def test_without_gain_the_limit_is_tau():
    assert limit([1, 1], dataclasses.replace(RULE, gain=0.0)) == pytest.approx(10)


def test_half_the_spread_of_all_keys_stands_in_for_the_mean_variance():
    assert limit([4, 4], tau=-1.0, spread=6.0) == pytest.approx(1.5 * 0.5 * 6)


def test_nothing_stored_yet_gives_a_finite_limit():
    assert np.isfinite(limit([0, 0]))


def simulated(seed, threshold, **settings):
    """Two prompts under a threshold of its own: tau is a multiple of it, so that one program serves all of them."""
    sim = Sim(dataclasses.replace(METHOD, **settings), Stream.draw(seed), [40, 40])
    state = sim.cache.state
    index = dataclasses.replace(state.index, tau=state.index.tau * (threshold / METHOD.threshold))
    sim.cache = dataclasses.replace(sim.cache, state=dataclasses.replace(state, index=index))
    return sim


def test_steering_keeps_clusters_larger_where_splits_would_be_many():
    sizes = []
    for gain in (0.0, 2.0):
        sim = simulated(0, 0.4, gain=gain, num_blocks=harness.CAPACITY // 2)
        for _ in range(50):
            sim.step()
        count = np.asarray(sim.cache.state.count)
        sizes.append(count.sum() / (count > 0).sum())
    assert sizes[0] < 0.95 * sizes[1] and sizes[1] < METHOD.cluster * 1.2


# too few blocks -----------------------------------------------------------------------------------


def crowded(counts, flagged, held):
    """One head of the rule with full clusters: (spec, index, view)."""
    spec = dataclasses.replace(harness.plan_of(METHOD).spec, num_blocks=len(counts), block_rows=8, held=RULE.held)
    index = jax.tree.map(lambda leaf: leaf[0], empty_index(spec))
    index = dataclasses.replace(
        index, tau=np.asarray(1e9, np.float32), split=np.isin(np.arange(len(counts)), flagged),
        centroid=np.arange(len(counts), dtype=np.float32) * np.ones((spec.head_dim, 1), np.float32),
    )
    index = dataclasses.replace(index, norm=np.square(index.centroid).sum(0))
    block = np.array(held + [len(counts)] * (RULE.held - len(held)), np.int32)
    view = View(
        pos=np.zeros((len(counts), 8), np.int32), count=np.array(counts, np.int32),
        held_pos=np.where(block < len(counts), 0, -1).astype(np.int32), held_block=block,
        loaded=np.arange(len(counts), dtype=np.int32), oldest_key=np.zeros(spec.head_dim, np.float32),
    )
    return spec, index, view


def appended(spec, index, view, near):
    """Block, new flags and refusals of a key beside that cluster."""
    append, key = jax.jit(functools.partial(RULE.append, spec)), index.centroid[:, near]
    squared = np.square(index.centroid - key[:, None]).sum(0)
    index, placement = append(index, view, key, squared, np.asarray(True))
    return int(placement.block), np.flatnonzero(index.split).tolist(), int(index.refused)


def test_a_key_that_fits_nowhere_takes_a_reserved_block_and_that_is_counted():
    """The flag stays until a block is free; meanwhile nothing is due, and nothing is loaded for it."""
    spec, index, view = crowded([8, 8, 0], flagged=[1], held=[1] * RULE.held)
    assert int(RULE.force(spec, view)) == 1 and int(RULE.due(spec, index, view)[0]) == 1
    assert appended(spec, index, view, near=0) == (2, [1], 1)
    view = dataclasses.replace(view, count=np.array([8, 8, 1], np.int32))
    assert int(RULE.force(spec, view)) == 3 and int(RULE.due(spec, index, view)[0]) == 3
    assert appended(spec, index, view, near=1) == (2, [1], 0), "what is there is not counted again"


def test_no_flag_is_granted_for_the_block_that_its_key_takes():
    spec, index, view = crowded([8, 8, 0, 0], flagged=[1], held=[1] * RULE.held)
    assert appended(spec, index, view, near=0) == (2, [1], 1)
    spec, index, view = crowded([8, 8, 0, 0, 0], flagged=[1], held=[1] * RULE.held)
    assert appended(spec, index, view, near=0) == (2, [0, 1], 0)


# merging ------------------------------------------------------------------------------------------


def decoded(merge, seed=0, steps=50):
    """The state after decoding with a threshold that leaves many clusters of one key."""
    sim = simulated(seed, 2.0, merge=merge, gain=0.0)
    for _ in range(steps):
        sim.step()
        harness.check_every_token_has_one_place(sim)
    return sim


def test_tiny_clusters_are_merged_and_their_statistics_stay_exact():
    """Against brute force over the positions in each block; without merging there are more tiny clusters."""
    apart, merged = decoded(0), decoded(1)
    tiny = [int((sim.cache.state.count == 1).sum()) for sim in (apart, merged)]
    assert tiny[1] < tiny[0]
    state, stream = jax.device_get(merged.cache.state), merged.stream
    for b, head, block in zip(*np.nonzero(state.count), strict=True):
        at = state.pos[b, head, block, : state.count[b, head, block]]
        keys = stream.k[b, at, head].astype(np.float64)
        np.testing.assert_allclose(state.index.centroid[b, head, :, block], keys.mean(0), atol=1e-5)
        np.testing.assert_allclose(state.index.variance[b, head, block], keys.var(0).sum(), atol=1e-4)


def test_what_is_merged_is_far_from_being_split():
    """A pair wider than half the limit stays apart: with a limit of nearly nothing, nothing is merged."""
    sim = simulated(1, 1e-6, merge=1, gain=0.0)
    count = np.asarray(sim.cache.state.count)
    assert (count == 1).any(), "there is what could be merged"
    sim.run(5)
    assert (np.asarray(sim.cache.state.count) > 0).sum() >= (count > 0).sum()
