"""Intervals against known values and other implementations."""

import numpy as np
import pytest
from scipy import stats

from kvjax.errors import ConfigError
from kvjax.eval.intervals import independent, of_mean, paired, paired_bootstrap, wilson


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


def clustered(rng, texts: int, each: int, alike: float, share: float = 0.6) -> list[float]:
    """Draws scores of 0 and 1 of some questions about each text, a part of which is copied within a text."""
    own, of_text = rng.random((texts, each)) < share, rng.random((texts, 1)) < share
    return np.where(rng.random((texts, each)) < alike, of_text, own).astype(float).ravel().tolist()


@pytest.mark.parametrize("alike", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("texts", [4, 12])
def test_differences_on_shared_texts_are_covered(texts, alike):
    """Given questions about few texts, the interval has the true difference, 0, about as often as it says."""
    rng, groups = np.random.default_rng(0), np.repeat(np.arange(texts), 8).tolist()
    covered = 0
    for _ in range(100):
        one, other = clustered(rng, texts, 8, alike), clustered(rng, texts, 8, alike)
        low, high = paired(one, other, groups)
        covered += low <= 0 <= high
    assert covered >= 90


def test_shares_on_shared_texts_count_as_fewer_samples():
    rng, groups = np.random.default_rng(0), np.repeat(np.arange(20), 8).tolist()
    apart, alike = (independent(clustered(rng, 20, 8, copied), groups) for copied in (0.0, 1.0))
    assert alike == 20 and 80 < apart <= 160
    assert independent([1.0] * 16, [0] * 8 + [1] * 8) == 16  # nothing tells texts apart
    assert independent([1.0, 0.0, 1.0]) == independent([1.0, 0.0, 1.0], [2, 0, 1]) == 3


def test_without_shared_texts_pairs_have_the_bootstrap():
    full, other = [1.0] * 40, [1.0, 0.0] * 20
    assert paired(other, full) == paired_bootstrap(other, full) == paired(other, full, list(range(40)))
    assert paired(other, full, [0] * 40) == paired_bootstrap(other, full)  # one text
    with pytest.raises(ConfigError, match="a group for each"):
        paired(other, full, [0])


def test_a_mean_of_intervals_covers_the_mean():
    """Given cells of unlike sizes and shares."""
    rng, counts, shares = np.random.default_rng(0), (8, 64, 24), (0.9, 0.2, 0.5)
    covered = 0
    for _ in range(400):
        found = [rng.binomial(count, share) / count for count, share in zip(counts, shares, strict=True)]
        low, high = of_mean(found, [wilson(share, count) for share, count in zip(found, counts, strict=True)])
        covered += low <= np.mean(shares) <= high
    assert covered >= 372  # 93 per cent
    assert of_mean([0.5], [(0.25, 0.625)]) == pytest.approx((0.25, 0.625))
