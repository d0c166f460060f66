"""KVSwap's greedy parameter solver (appendix A.4): the settings that hide reading behind computing at the least loss.

Quality falls with sigma and G, so both start as small as memory allows, and grow only while reading takes longer than
computing. If the largest group does not hide reading, memory is moved from the low-rank keys to the reuse buffer, and
the search starts again with the smallest group. Memory and time of a setting are given as functions. Of the memory that
is left at the end, the reuse buffer gets as much as makes a layer faster, at no loss; the paper leaves it unused.

In the paper reads cost nothing but waiting. If the processor that computes also requests, verifies and copies blocks,
no pipeline hides that part (`busy`): a layer takes the longer of T_io and T_model + busy. Hence alpha is not the share
of T_io that may remain visible, but the share of T_model by which reading may prolong a layer.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

from kvjax import _validate
from kvjax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Setting:
    """Parameters that the solver chooses."""

    group: int  # G, tokens
    sigma: int  # compression ratio of the low-rank keys
    reuse: int  # C, tokens of one KV head that the reuse buffer holds; 0 = none, one layer's groups at a time


@dataclasses.dataclass(frozen=True)
class Space:
    """Values that the solver chooses from, ascending; the last value of each is the limit (G_max, sigma_max).

    Attributes:
      groups: values of G, tokens.
      sigmas: values of the compression ratio.
      reuses: values of C, tokens; may contain 0.

    Raises:
      ConfigError: a sequence is empty, not ascending, or has a value that is no positive integer (0 in `reuses` aside).
    """

    groups: Sequence[int] = (1, 2, 4, 8, 16)
    sigmas: Sequence[int] = (4, 8, 16, 32)
    reuses: Sequence[int] = (0, 400, 600, 800, 1200, 1600)

    def __post_init__(self):
        for name, given in dataclasses.asdict(self).items():
            # Stored as a tuple, because a list would not equal the tuple of a loaded tuning.
            values = _validate.wholes(name, given, 0 if name == "reuses" else 1)
            if list(values) != sorted(set(values)):
                raise ConfigError(f"{name}={given} must be ascending, without duplicates")
            object.__setattr__(self, name, values)

    @property
    def middle_group(self) -> int:
        """G used to measure what hardly depends on it, in tokens."""
        return self.groups[len(self.groups) // 2]


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits on a solution.

    Attributes:
      sequence_bytes: bytes of memory for the cache of each sequence of a batch.
      relax: alpha, the share of its computing time by which reading may prolong a layer.
      space: values that the solver chooses from.

    Raises:
      ConfigError: a value is no number, or alpha is negative.
    """

    sequence_bytes: int
    relax: float = 0.1
    space: Space = dataclasses.field(default_factory=Space)

    def __post_init__(self):
        _validate.check(self)
        if self.relax < 0:
            raise ConfigError(f"relax={self.relax} must not be negative; 0 hides all reads if possible")
        object.__setattr__(self, "sequence_bytes", int(self.sequence_bytes))  # Python's numbers, as NumPy's cannot be
        object.__setattr__(self, "relax", float(self.relax))  # saved as JSON


@dataclasses.dataclass(frozen=True)
class Costs:
    """Costs of a setting, for one batch size and context length."""

    memory: Callable[[Setting], int]  # bytes in memory
    read: Callable[[Setting], float]  # T_io, seconds of one layer's reads
    busy: Callable[[Setting], float]  # seconds of T_io that computing waits for even if the reads were begun early
    compute: Callable[[Setting], float]  # T_model, seconds of one layer without reads
    reuse_rate: Callable[[int], float]  # C -> share of the needed groups that are in a buffer of C tokens


@dataclasses.dataclass(frozen=True)
class Solution:
    """A setting and its expected costs."""

    setting: Setting
    memory: int  # bytes
    read: float  # T_io, seconds
    busy: float  # seconds of T_io that computing waits for in any case
    compute: float  # T_model, seconds
    reuse_rate: float  # share of the needed groups that are in the reuse buffer

    @property
    def seconds(self) -> float:
        """Seconds of one layer: the longer of reading, which runs in parallel, and computing."""
        return max(self.read, self.compute + self.busy)

    @property
    def exposed(self) -> float:
        """Seconds by which reading prolongs a layer."""
        return self.seconds - self.compute


_GAIN = 0.02  # share of a layer's time; smaller differences may be chance


def solve(space: Space, budget: int, costs: Costs, relax: float = 0.0) -> Solution:
    """Returns the first setting in the paper's order whose reads prolong a layer by a share of alpha or less, with a
    larger reuse buffer if that is faster.

    If no setting hides its reads that far, the fastest is returned, and the first among about equal ones; the paper
    leaves this case open.

    Args:
      space: values to choose from.
      budget: bytes of memory.
      costs: costs of each setting.
      relax: alpha, a share of the computing time.

    Raises:
      ConfigError: no setting fits the budget.
    """
    tried = []
    for reuse in space.reuses:
        for group in space.groups:
            solution = _least_compressed(space, budget, costs, group, reuse)
            if solution is None:
                continue
            if solution.exposed <= relax * solution.compute:
                return _with_larger_buffer(space, budget, costs, solution)
            tried.append(solution)
    if not tried:
        least = min(costs.memory(Setting(group, space.sigmas[-1], space.reuses[0])) for group in space.groups)
        raise ConfigError(f"the budget of {budget:,} bytes is too small, as the smallest setting takes {least:,}; "
                          "raise it, or allow a larger sigma or a smaller reuse buffer")
    return functools.reduce(_faster, tried)


def _faster(first: Solution, other: Solution) -> Solution:
    """Returns the first solution, unless the other is faster by more than chance."""
    return other if other.seconds < (1 - _GAIN) * first.seconds else first


def _with_larger_buffer(space: Space, budget: int, costs: Costs, found: Solution) -> Solution:
    """Returns the solution with the larger reuse buffer that should be fastest, if measuring confirms it."""
    known = dataclasses.replace(costs, compute=lambda _: found.compute)  # hardly depends on the buffer
    larger = (dataclasses.replace(found.setting, reuse=size) for size in space.reuses if size > found.setting.reuse)
    best = functools.reduce(_faster, (expected(known, new) for new in larger if costs.memory(new) <= budget), found)
    return min(found, expected(costs, best.setting), key=lambda solution: solution.seconds)


def expected(costs: Costs, setting: Setting) -> Solution:
    """Returns a setting with its costs."""
    return Solution(
        setting, memory=costs.memory(setting), read=costs.read(setting), busy=costs.busy(setting),
        compute=costs.compute(setting), reuse_rate=costs.reuse_rate(setting.reuse),
    )


def _least_compressed(space: Space, budget: int, costs: Costs, group: int, reuse: int) -> Solution | None:
    """Returns the solution with the smallest sigma that fits the budget; None if none does."""
    for sigma in space.sigmas:
        setting = Setting(group, sigma, reuse)
        if costs.memory(setting) <= budget:
            return expected(costs, setting)
    return None
