"""95 % intervals of scores: of a share, and of the difference between two methods on the same samples."""

import math
from collections.abc import Sequence

import numpy as np

from kvjax.errors import ConfigError

_Z = 1.96  # standard deviations of the normal distribution on either side
_RESAMPLES = 10_000


def wilson(share: float, count: int) -> tuple[float, float]:
    """Returns the 95 % interval of a share (Wilson, 1927): right for scores of 0 and 1, too wide for scores between.

    Args:
      share: mean score, in 0..1.
      count: number of samples, independent of each other.

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
