"""What was measured, and what is taken to lie between.

Measurement and computing are measured at some batch sizes and context lengths, the knots; in between they are taken to
change evenly (appendix A.3). How often groups come back is measured for every context length. It depends on the model
and its text, and not on the machine, so that what one machine found serves another (appendix A.1).
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from kvjax.calibration.tuner.solver import Setting


class Measurement(NamedTuple):
    """Seconds of one layer's reads: all of them, and what they take of the caller if they were begun early enough."""

    whole: float
    busy: float


Pair = tuple[int, int]  # batch size and context length


@dataclasses.dataclass
class Tables:
    """What is known so far.

    Attributes:
      rates: share of the needed groups that are in a buffer of C tokens, by (context, C).
      reads: one layer's reads, by (batch, context, G, C).
      computes: seconds of one layer without reads, by (batch, context, sigma, C). G hardly changes it (appendix A.3).
    """

    rates: dict[tuple[int, int], float] = dataclasses.field(default_factory=dict)
    reads: dict[tuple[int, int, int, int], Measurement] = dataclasses.field(default_factory=dict)
    computes: dict[tuple[int, int, int, int], float] = dataclasses.field(default_factory=dict)

    def read(self, pair: Pair, setting: Setting, measure: Callable[[], Measurement]) -> Measurement:
        """Of a knot; measured where it is not known."""
        return _kept(self.reads, (*pair, setting.group, setting.reuse), measure)

    def compute(self, pair: Pair, setting: Setting, measure: Callable[[], float]) -> float:
        """Of a knot; measured where it is not known."""
        return _kept(self.computes, (*pair, setting.sigma, setting.reuse), measure)

    def rate(self, context: int, reuse: int, measure: Callable[[], float]) -> float:
        """Of a context length; measured where it is not known."""
        return _kept(self.rates, (context, reuse), measure)

    def rows(self) -> dict[str, list[list[Any]]]:
        """For a JSON file: each entry's key and value in one list."""
        return {
            "rates": [[*key, value] for key, value in sorted(self.rates.items())],
            "reads": [[*key, *value] for key, value in sorted(self.reads.items())],
            "computes": [[*key, value] for key, value in sorted(self.computes.items())],
        }

    @classmethod
    def from_rows(cls, rows: dict[str, list[list[Any]]]) -> "Tables":
        """What `rows` gave."""
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
    """At most so many of the values, ascending: both ends, and what is evenly between them."""
    ordered = sorted(set(values))
    count = min(most, len(ordered))
    if count == 1:
        return ordered[-1:]
    return [ordered[round(i * (len(ordered) - 1) / (count - 1))] for i in range(count)]


def weights(knots: Sequence[int], at: int) -> list[tuple[int, float]]:
    """The knots beside a value and the share of each in what lies there; beyond an end that end alone."""
    if at in knots or at <= knots[0] or at >= knots[-1]:
        return [(min(max(at, knots[0]), knots[-1]), 1.0)]
    above = next(i for i, knot in enumerate(knots) if knot > at)
    low, high = knots[above - 1], knots[above]
    share = (at - low) / (high - low)
    return [(low, 1.0 - share), (high, share)]


def around(batches: Sequence[int], contexts: Sequence[int], pair: Pair) -> list[tuple[Pair, float]]:
    """The knots beside a pair, and the share of each in what is there."""
    return [
        ((batch, context), of_batch * of_context)
        for batch, of_batch in weights(batches, pair[0]) for context, of_context in weights(contexts, pair[1])
    ]
