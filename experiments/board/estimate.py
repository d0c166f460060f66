"""Time that the rest of a leaderboard's grid takes, from what was measured of it so far.

A batch costs its reading, once for all methods, and for each of them filling a cache and decoding. Kinds of cells that
were not measured yet are taken to be like the nearest one that was, in proportion to their tokens.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from experiments.board.exams import Batch
from experiments.board.grid import Cell
from kvjax.models.config import ModelConfig


class Kind(NamedTuple):
    """Cells that cost alike: method, budget and length, and whether every step is compared with exact attention."""

    method: str
    budget: int | None
    context: int
    probed: bool


class Cost(NamedTuple):
    """Seconds of one kind on a batch."""

    fill: float  # per sequence
    step: float  # per decoded token of the whole batch


class Unit(NamedTuple):
    """One method on one batch."""

    cell: Cell
    batch: Batch
    probed: bool

    @property
    def kind(self) -> Kind:
        return Kind(self.cell.label, self.cell.budget, self.cell.context, self.probed)


@dataclasses.dataclass
class Estimate:
    """Costs by kind, newest last, and what they say about units that are left."""

    config: ModelConfig
    costs: dict[Kind, Cost] = dataclasses.field(default_factory=dict)
    reading: dict[int, float] = dataclasses.field(default_factory=dict)  # seconds of one context by length
    decoded: dict[str, float] = dataclasses.field(default_factory=dict)  # share of the most steps that a task takes

    def add(self, line: Mapping) -> None:
        """Takes the seconds of a logged line."""
        if "seconds" not in line:
            return
        spent, context = line["seconds"], line["context"]
        kind = Kind(line["method"], line["budget"], context, spent["probed"])
        self.costs.pop(kind, None)
        self.costs[kind] = Cost(spent["fill"] / spent["sequences"], spent["step"])
        if spent["read"]:
            self.reading[context] = spent["read"] / spent["contexts"]
        self.decoded[line["task"]] = spent["steps"] / spent["most_steps"]

    def knows(self, cell: Cell) -> bool:
        """Returns whether this method was measured."""
        return any(kind.method == cell.label for kind in self.costs)

    def nearest(self, kind: Kind) -> tuple[Kind, Cost]:
        """Returns the measured kind most like this one, by method, then length, budget and probe, and its cost."""
        def likeness(other: Kind) -> tuple[bool, float, bool, bool]:
            apart = abs(math.log(kind.context / other.context))
            return kind.method == other.method, -apart, kind.budget == other.budget, kind.probed == other.probed

        known = max(reversed(self.costs), key=likeness)  # of equally near ones, the newest
        return known, self.costs[known]

    def seconds(self, units: Iterable[Unit]) -> Counter[tuple[str, str]]:
        """Returns the seconds that units take, by method ("reading" for their contexts) and by task with its length."""
        spent: Counter[tuple[str, str]] = Counter()
        near = dict[Kind, tuple[Kind, Cost]]()
        read = set[tuple]()
        for unit in units:
            task, context, _ = unit.batch.exam
            known, cost = near.setdefault(unit.kind, self.nearest(unit.kind))
            fill = cost.fill * context / known.context * len(unit.batch.items)
            steps = unit.batch.steps * self.decoded.get(task, 1.0)
            step = cost.step * max(1.0, context / known.context)  # of a shorter context it may not be less
            name = f"{task} at {context:,}"
            spent[unit.cell.label, name] += fill + steps * step
            if (place := (unit.batch.exam, unit.batch.span)) not in read:
                read.add(place)
                spent["reading", name] += self._reading(context) * unit.batch.different
        return spent

    def _reading(self, context: int) -> float:
        """Returns the seconds in which one context of this length is read."""
        if not self.reading:
            return 0.0
        known = min(self.reading, key=lambda length: abs(length - context))
        return self.reading[known] * work(self.config, context) / work(self.config, known)


def work(config: ModelConfig, tokens: int) -> float:
    """Returns the multiplications of reading a context: those of the weights, and every token's with all others."""
    hidden, inner = config.hidden_size, config.intermediate_size
    heads = config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    weights = hidden * (heads + 3 * inner * config.use_mlp)
    return config.num_layers * tokens * (weights + 2.0 * tokens * config.num_heads * config.head_dim)


def table(spent: Counter[tuple[str, str]]) -> str:
    """Returns lines with the seconds by method and by task, and the hours in all."""
    lines = []
    for title, which in (("method", 0), ("task", 1)):
        sums: Counter[str] = Counter()
        for names, seconds in spent.items():
            sums[names[which]] += seconds
        lines += [f"{title:>32}{'seconds':>10}", *(f"{name:>32}{seconds:10,.0f}" for name, seconds in sums.items())]
    return "\n".join([*lines, f"in all {spent.total() / 3600:,.1f} hours at most, without compiling"])
