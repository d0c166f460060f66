"""Intervals against known values and other implementations."""

import numpy as np
import pytest
from scipy import stats

from kvjax.errors import ConfigError
from kvjax.eval.intervals import paired_bootstrap, wilson


@pytest.mark.parametrize(("right", "count"), [(0, 10), (1, 32), (16, 32), (97, 100), (64, 64)])
def test_wilson_is_that_of_scipy(right, count):
    low, high = stats.binomtest(right, count).proportion_ci(0.95, method="wilson")
    assert wilson(right / count, count) == pytest.approx((low, high), abs=1e-5)


def test_wilson_of_none_and_all_of_ten_has_its_known_bounds():
    assert wilson(0.0, 10) == pytest.approx((0.0, 0.27754), abs=1e-5)
    assert wilson(1.0, 10) == pytest.approx((0.72246, 1.0), abs=1e-5)


def test_a_bootstrap_of_equal_losses_has_the_quantiles_of_the_binomial_distribution():
    """Given 10 of 100 pairs that differ by one, the sum over a resample is binomial."""
    full, other = [1.0] * 100, [1.0] * 90 + [0.0] * 10
    low, high = paired_bootstrap(other, full)
    expected = stats.binom.ppf((0.025, 0.975), 100, 0.1)
    assert (low, high) == pytest.approx((-expected[1] / 100, -expected[0] / 100))
    assert paired_bootstrap(full, other) == pytest.approx((-high, -low), abs=0.011)


def test_a_bootstrap_is_that_of_scipy():
    rng = np.random.default_rng(1)
    full = rng.random(60)
    other = np.clip(full - rng.normal(0.05, 0.1, 60), 0, 1)
    theirs = stats.bootstrap((other - full,), np.mean, method="percentile", rng=2).confidence_interval
    assert paired_bootstrap(other.tolist(), full.tolist()) == pytest.approx((theirs.low, theirs.high), abs=2e-3)


def test_pairs_matter_and_not_only_means():
    """Given the same scores in another order, the means differ as before, and the interval is wider."""
    full, near = [1.0] * 50 + [0.0] * 50, [1.0] * 48 + [0.0] * 52
    narrow, wide = paired_bootstrap(near, full), paired_bootstrap(near[::-1], full)
    assert narrow[1] - narrow[0] < 0.1 < 0.3 < wide[1] - wide[0]


def test_an_interval_without_a_difference_is_no_point():
    bound = wilson(0.0, 20)[1]
    assert paired_bootstrap([0.5] * 20, [0.5] * 20) == pytest.approx((-bound, bound))
    low, high = paired_bootstrap([1.0], [0.0])
    assert -1 < low < 0.5 and high == 1.0


def test_a_seed_gives_the_same_interval_again():
    full, other = [1.0] * 40, [1.0, 0.0] * 20
    assert paired_bootstrap(other, full, seed=3) == paired_bootstrap(other, full, seed=3)


def test_what_has_no_interval_is_refused():
    for share, count in ((0.5, 0), (1.5, 3), (float("nan"), 3)):
        with pytest.raises(ConfigError, match="a share is in"):
            wilson(share, count)
    for scores, others in (([], []), ([1.0], [1.0, 0.0])):
        with pytest.raises(ConfigError, match="same samples"):
            paired_bootstrap(scores, others)
