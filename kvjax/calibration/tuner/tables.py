"""Tables of measurements, and interpolation between them (KVSwap, appendix A).

Reading and computing are measured at some batch sizes and context lengths, the knots, and interpolated linearly in
between (appendix A.3). Reuse rates are measured for every context length. They depend on the model and its text, not on
the machine, so those of one machine serve another (appendix A.1).
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from kvjax.calibration.tuner.solver import Setting


class Measurement(NamedTuple):
    """Seconds of one layer's reads."""

    whole: float  # from the request to the data
    busy: float  # seconds of the caller's time, if the reads were begun early enough


Pair = tuple[int, int]  # batch size and context length


@dataclasses.dataclass
class Tables:
    """Measurements made so far.

    Attributes:
      rates: share of the needed groups that are in a buffer of C tokens, by (context, C).
      reads: one layer's reads, by (batch, context, G, C).
      computes: seconds of one layer without reads, by (batch, context, sigma, C); G hardly changes it (appendix A.3).
    """

    rates: dict[tuple[int, int], float] = dataclasses.field(default_factory=dict)
    reads: dict[tuple[int, int, int, int], Measurement] = dataclasses.field(default_factory=dict)
    computes: dict[tuple[int, int, int, int], float] = dataclasses.field(default_factory=dict)

    def read(self, pair: Pair, setting: Setting, measure: Callable[[], Measurement]) -> Measurement:
        """Returns the reads of a setting at a knot, calling `measure` if they are not known."""
        return _kept(self.reads, (*pair, setting.group, setting.reuse), measure)

    def compute(self, pair: Pair, setting: Setting, measure: Callable[[], float]) -> float:
        """Returns the computing time of a setting at a knot, in seconds, calling `measure` if it is not known."""
        return _kept(self.computes, (*pair, setting.sigma, setting.reuse), measure)

    def rate(self, context: int, reuse: int, measure: Callable[[], float]) -> float:
        """Returns the reuse rate of a buffer of `reuse` tokens, calling `measure` if it is not known."""
        return _kept(self.rates, (context, reuse), measure)

    def rows(self) -> dict[str, list[list[Any]]]:
        """Returns the tables for a JSON file: the key and value of each entry in one list."""
        return {
            "rates": [[*key, value] for key, value in sorted(self.rates.items())],
            "reads": [[*key, *value] for key, value in sorted(self.reads.items())],
            "computes": [[*key, value] for key, value in sorted(self.computes.items())],
        }

    @classmethod
    def from_rows(cls, rows: dict[str, list[list[Any]]]) -> "Tables":
        """Returns the tables that `rows` was called on."""
        return cls(
            rates={(context, reuse): rate for context, reuse, rate in rows["rates"]},
            reads={(*key,): Measurement(whole, busy) for *key, whole, busy in rows["reads"]},
            computes={(*key,): seconds for *key, seconds in rows["computes"]},
        )


def _kept(table: dict, key: tuple, measure: Callable[[], Any]) -> Any:
    if key not in table:
        table[key] = measure()
    return table[key]


def knots_of(values: Iterable[int], most: int) -> list[int]:
    """Returns at most `most` of the values, ascending: both ends, and values spread evenly between them; only the
    largest if there is just one."""
    ordered = sorted(set(values))
    count = min(most, len(ordered))
    if count == 1:
        return ordered[-1:]
    return [ordered[round(i * (len(ordered) - 1) / (count - 1))] for i in range(count)]


def weights(knots: Sequence[int], at: int) -> list[tuple[int, float]]:
    """Returns the knots next to a value with their interpolation weights; beyond an end, that end alone."""
    if at in knots or at <= knots[0] or at >= knots[-1]:
        return [(min(max(at, knots[0]), knots[-1]), 1.0)]
    above = next(i for i, knot in enumerate(knots) if knot > at)
    low, high = knots[above - 1], knots[above]
    share = (at - low) / (high - low)
    return [(low, 1.0 - share), (high, share)]


def around(batches: Sequence[int], contexts: Sequence[int], pair: Pair) -> list[tuple[Pair, float]]:
    """Returns the knots next to a pair with their interpolation weights (bilinear).

    Args:
      batches: ascending knots of batch sizes.
      contexts: ascending knots of context lengths.
      pair: batch size and context length.
    """
    return [
        ((batch, context), of_batch * of_context)
        for batch, of_batch in weights(batches, pair[0]) for context, of_context in weights(contexts, pair[1])
    ]
