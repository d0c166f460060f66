"""95 % intervals of scores: of a share, of the difference of two methods on the same samples, and of means of these.

Several questions about one text are not independent of each other. Where `groups` says which samples share a text, the
variance is that between texts (a mean of clusters; Cochran, Sampling Techniques, 1977, chapter 9A).
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from kvjax.errors import ConfigError

_Z = 1.96  # standard deviations of the normal distribution on either side
_RESAMPLES = 10_000


def wilson(share: float, count: int | float) -> tuple[float, float]:
    """Returns the 95 % interval of a share (Wilson, 1927): right for scores of 0 and 1, too wide for scores between.

    Args:
      share: mean score, in 0..1.
      count: number of samples, independent of each other; or `independent` of samples that are not.

    Raises:
      ConfigError: there is no sample, or the share is not in 0..1.
    """
    if count < 1 or not 0 <= share <= 1:
        raise ConfigError(f"share={share} of count={count} samples; a share is in 0..1 of at least one sample")
    centre = (share + _Z * _Z / (2 * count)) / (1 + _Z * _Z / count)
    half = _Z * math.sqrt(share * (1 - share) / count + _Z * _Z / (4 * count * count)) / (1 + _Z * _Z / count)
    return max(0.0, centre - half), min(1.0, centre + half)


def paired_bootstrap(scores: Sequence[float], others: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Returns the 95 % interval of the mean of `scores - others`, by percentiles of 10,000 resamples of the pairs.

    If all pairs differ alike, as when no score differs, resamples show no spread. The interval is then what the mean
    can be if the share of other pairs is within Wilson's interval of none, so that it is never a point.

    Args:
      scores: scores in 0..1 of one method by sample.
      others: scores in 0..1 of the other method on the same samples.
      seed: of the resamples; equal seeds give equal intervals.

    Raises:
      ConfigError: there is no sample, or the two are not equally many.
    """
    count = len(scores)
    if count < 1 or len(others) != count:
        raise ConfigError(f"{count} and {len(others)} scores; pairs need both methods' scores on the same samples")
    differences, times = np.unique(np.subtract(scores, others, dtype=float), return_counts=True)
    if len(differences) == 1:
        same, unseen = float(differences[0]), wilson(0.0, count)[1]
        return same - unseen * (1 + same), same + unseen * (1 - same)
    drawn = np.random.default_rng(seed).multinomial(count, times / count, size=_RESAMPLES)
    low, high = np.quantile(drawn @ differences / count, (0.025, 0.975), method="inverted_cdf")
    return float(low), float(high)


def independent(scores: Sequence[float], groups: Sequence[int] | None = None) -> float:
    """Returns the number of independent samples whose mean would vary as much as that of these.

    It is at least the number of groups and at most that of samples; the latter where no score differs.

    Args:
      scores: scores in 0..1.
      groups: text of each sample; None = each has its own.

    Raises:
      ConfigError: there is no sample, or not a group for each.
    """
    count, between = len(scores), _between_groups(scores, groups)
    alone = float(np.var(scores)) / count
    if between is None or alone == 0:
        return float(count)
    texts, variance = between
    return float(np.clip(count * alone / max(variance, 1e-12), texts, count))


def paired(
    scores: Sequence[float], others: Sequence[float], groups: Sequence[int] | None = None
) -> tuple[float, float]:
    """Returns the 95 % interval of the mean of `scores - others`: Student's over groups, else `paired_bootstrap`'s.

    The bootstrap takes samples as independent. It also serves where there is one group, or the groups do not differ,
    as nothing is then known of how much texts differ.

    Args:
      scores: scores in 0..1 of one method by sample.
      others: scores in 0..1 of the other method on the same samples.
      groups: text of each sample; None = each has its own.

    Raises:
      ConfigError: there is no sample, the two are not equally many, or there is not a group for each.
    """
    found = paired_bootstrap(scores, others)
    differences = np.subtract(scores, others, dtype=float)
    between = _between_groups(differences, groups)
    if between is None or between[1] == 0:
        return found
    centre, half = float(np.mean(differences)), float(stats.t.ppf(0.975, between[0] - 1)) * math.sqrt(between[1])
    return max(-1.0, centre - half), min(1.0, centre + half)


def _between_groups(values: Sequence[float] | np.ndarray, groups: Sequence[int] | None) -> tuple[int, float] | None:
    """Returns the number of groups and the variance of the mean by what differs between them; None if each sample is a
    group, or all are one."""
    if len(values) < 1 or (groups is not None and len(groups) != len(values)):
        raise ConfigError(f"{len(values)} scores and {len(groups or ())} groups; give a group for each score")
    if groups is None:
        return None
    _, which = np.unique(np.asarray(groups), return_inverse=True)
    count, texts = len(values), int(which.max()) + 1
    if texts in (1, count):
        return None
    apart = np.bincount(which, weights=np.asarray(values, dtype=float) - np.mean(values))
    return texts, float(texts / (texts - 1) * np.sum(np.square(apart)) / count**2)


def of_mean(values: Sequence[float], bounds: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns the 95 % interval of the mean of independent figures from their own intervals.

    Distances to the bounds add up as standard deviations do (Zou and Donner, 2008).
    """
    low, high = (float(np.linalg.norm(np.subtract(values, edge))) / len(values) for edge in zip(*bounds, strict=True))
    centre = float(np.mean(values))
    return centre - low, centre + high
