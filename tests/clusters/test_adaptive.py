"""How the threshold follows the average cluster size. Splits themselves: tests/methods/test_dynakv.py."""

import dataclasses

import harness
import jax
import numpy as np
import pytest
from harness import METHODS, Sim, Stream

from kvjax.clusters import Adaptive
from kvjax.clusters.index import empty_index

METHOD = METHODS["dynakv"]
RULE = Adaptive(cluster=4, threshold=1.5, gain=2.0, buffer=3)


def limit(count, rule=RULE, tau=10.0, spread=0.0):
    index = jax.tree.map(lambda leaf: leaf[0], empty_index(harness.plan_of(METHOD).spec))
    index = dataclasses.replace(index, tau=np.asarray(tau, np.float32), spread=np.asarray(spread, np.float32))
    return float(rule.limit(index, np.array(count, np.int32)))


@pytest.mark.parametrize(("count", "factor"), [([4, 4, 0], 1), ([2, 2, 0], 4), ([8, 8, 0], 0.25), ([1, 7], 1)])
def test_the_limit_is_tau_times_a_power_of_target_over_average_size(count, factor):
    assert limit(count) == pytest.approx(10 * factor)


def test_without_gain_the_limit_is_tau():
    assert limit([1, 1], dataclasses.replace(RULE, gain=0.0)) == pytest.approx(10)


def test_half_the_spread_of_all_keys_stands_in_for_the_mean_variance():
    assert limit([4, 4], tau=-1.0, spread=6.0) == pytest.approx(1.5 * 0.5 * 6)


def test_nothing_stored_yet_gives_a_finite_limit():
    assert np.isfinite(limit([0, 0]))


def test_steering_keeps_clusters_larger_where_splits_would_be_many():
    sizes = []
    for gain in (0.0, 2.0):
        sim = Sim(dataclasses.replace(METHOD, threshold=0.4, gain=gain), Stream.draw(0), [40, 40])
        for _ in range(50):
            sim.step()
        count = np.asarray(sim.cache.state.count)
        sizes.append(count.sum() / (count > 0).sum())
    assert sizes[0] < 0.95 * sizes[1] and sizes[1] < METHOD.cluster * 1.2
