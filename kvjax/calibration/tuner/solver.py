"""KVSwap's greedy parameter solver (appendix A.4): the settings that hide reading behind computing at the least loss.

Quality falls with sigma and G, so both start as small as memory allows and grow only while reading takes longer than
computing; when the largest group does not hide it, memory goes from the low-rank keys to the reuse buffer, and the
search starts again with the smallest group. What memory and time a setting takes is given as functions. Of the memory
that is left then, the reuse buffer gets what makes a layer faster, which loses nothing (the paper leaves it unused).

The paper's reads cost nothing but waiting. Where the processor that computes also asks for blocks, verifies and copies
them, no pipeline hides that part (`busy`): a layer takes the longer of T_io and T_model + busy. Hence alpha is not the
share of T_io that may be seen, but the share of T_model by which reading may prolong a layer.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

from kvjax import _validate
from kvjax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Setting:
    """What the solver chooses."""

    group: int  # G, tokens
    sigma: int  # compression ratio of the low-rank keys
    reuse: int  # C, tokens of one KV head that the reuse buffer holds; 0 = none, one layer's groups at a time


@dataclasses.dataclass(frozen=True)
class Space:
    """What it may choose from, each ascending, kept as a tuple; the last of each is the limit (G_max, sigma_max).

    Raises ConfigError where one of them is empty, not ascending, or has something other than positive integers, or 0
    among `reuses`.
    """

    groups: Sequence[int] = (1, 2, 4, 8, 16)
    sigmas: Sequence[int] = (4, 8, 16, 32)
    reuses: Sequence[int] = (0, 400, 600, 800, 1200, 1600)

    def __post_init__(self):
        for name, given in dataclasses.asdict(self).items():
            # A list would not equal the tuple that a saved tuning is loaded with.
            values = _validate.wholes(name, given, 0 if name == "reuses" else 1)
            if list(values) != sorted(set(values)):
                raise ConfigError(f"{name}={given} must be ascending")
            object.__setattr__(self, name, values)

    @property
    def middle_group(self) -> int:
        """G with which is measured what hardly depends on it."""
        return self.groups[len(self.groups) // 2]


@dataclasses.dataclass(frozen=True)
class Limits:
    """Within which a solution is looked for.

    Attributes:
      sequence_bytes: memory for the cache of each sequence of a batch.
      relax: alpha, by what share reading may prolong a layer.

    Raises ConfigError where these are no numbers, or alpha is negative.
    """

    sequence_bytes: int
    relax: float = 0.1
    space: Space = dataclasses.field(default_factory=Space)

    def __post_init__(self):
        _validate.check(self)
        if self.relax < 0:
            raise ConfigError(f"relax={self.relax} must not be negative; 0 hides all reads, where there is a way")
        object.__setattr__(self, "sequence_bytes", int(self.sequence_bytes))  # of NumPy's numbers, so that they can be
        object.__setattr__(self, "relax", float(self.relax))  # saved


@dataclasses.dataclass(frozen=True)
class Costs:
    """What a setting takes, for one batch size and context length."""

    memory: Callable[[Setting], int]  # bytes in memory
    read: Callable[[Setting], float]  # T_io, seconds of one layer's reads
    busy: Callable[[Setting], float]  # of them, what computing waits for even if they were begun early enough
    compute: Callable[[Setting], float]  # T_model, seconds of one layer without them
    reuse_rate: Callable[[int], float]  # C -> share of the needed groups that are in a buffer of C tokens


@dataclasses.dataclass(frozen=True)
class Solution:
    """A setting and what it is expected to take."""

    setting: Setting
    memory: int
    read: float
    busy: float
    compute: float
    reuse_rate: float

    @property
    def seconds(self) -> float:
        """Of one layer: the longer of reading, which goes on meanwhile, and computing."""
        return max(self.read, self.compute + self.busy)

    @property
    def exposed(self) -> float:
        """Seconds by which reading prolongs a layer."""
        return self.seconds - self.compute


_GAIN = 0.02  # of a layer's time, below which one setting may be faster than another by chance


def solve(space: Space, budget: int, costs: Costs, relax: float = 0.0) -> Solution:
    """The first setting in the paper's order whose reading prolongs a layer by a share of alpha or less, with a larger
    reuse buffer where that is faster.

    Args:
      budget: bytes of memory.
      relax: alpha.

    Where none hides enough, the fastest, of about equal ones the first (the paper leaves open which it takes).
    Raises ConfigError where no setting fits the budget.
    """
    tried = []
    for reuse in space.reuses:
        for group in space.groups:
            found = _least_compressed(space, budget, costs, group, reuse)
            if found is None:
                continue
            if found.exposed <= relax * found.compute:
                return _with_larger_buffer(space, budget, costs, found)
            tried.append(found)
    if not tried:
        least = min(costs.memory(Setting(group, space.sigmas[-1], space.reuses[0])) for group in space.groups)
        raise ConfigError(f"a budget of {budget:,} bytes is too small: the smallest setting takes {least:,}; raise the "
                          "budget, or allow a larger sigma or a smaller reuse buffer")
    return functools.reduce(_faster, tried)


def _faster(first: Solution, other: Solution) -> Solution:
    """The first, unless the other is faster by more than chance."""
    return other if other.seconds < (1 - _GAIN) * first.seconds else first


def _with_larger_buffer(space: Space, budget: int, costs: Costs, found: Solution) -> Solution:
    """The one that should be fastest of those that differ in the reuse buffer alone, if it is."""
    known = dataclasses.replace(costs, compute=lambda _: found.compute)  # which hardly depends on the buffer
    larger = (dataclasses.replace(found.setting, reuse=one) for one in space.reuses if one > found.setting.reuse)
    best = functools.reduce(_faster, (expected(known, one) for one in larger if costs.memory(one) <= budget), found)
    return min(found, expected(costs, best.setting), key=lambda one: one.seconds)


def expected(costs: Costs, setting: Setting) -> Solution:
    """A setting with what it takes."""
    return Solution(
        setting, memory=costs.memory(setting), read=costs.read(setting), busy=costs.busy(setting),
        compute=costs.compute(setting), reuse_rate=costs.reuse_rate(setting.reuse),
    )


def _least_compressed(space: Space, budget: int, costs: Costs, group: int, reuse: int) -> Solution | None:
    """The smallest sigma that fits the budget, None if none does."""
    for sigma in space.sigmas:
        setting = Setting(group, sigma, reuse)
        if costs.memory(setting) <= budget:
            return expected(costs, setting)
    return None
