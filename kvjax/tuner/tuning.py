"""Solutions for batch sizes and context lengths as a JSON file, and the one that a run takes."""

import dataclasses
import json
import math
import os
import pathlib
from typing import Any

from kvjax.errors import FormatMismatch, ReadFailed, WriteFailed
from kvjax.methods.kvswap import KVSwap
from kvjax.planning import Slots
from kvjax.tuner.solver import Setting, Solution

VERSION = 3


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What the tuner found.

    Attributes:
      solutions: by (batch size, context length).
      selected: MG, tokens that groups may contribute to one step.
      relax: alpha (`kvjax.tuner.solver`).
      adapters: directory of the adapters of each sigma; a sigma without one decomposes each prompt's own keys.
      fingerprint: of the model.
    """

    solutions: dict[tuple[int, int], Solution]
    selected: int
    relax: float
    adapters: dict[int, str]
    fingerprint: str

    def nearest(self, batch: int, context: int) -> Solution:
        """The solution of that batch size and context length, or of the nearest pair there is, by ratios."""
        def distance(pair):
            return abs(math.log2(pair[0] / batch)) + abs(math.log2(pair[1] / context))

        return self.solutions[min(self.solutions, key=distance)]

    def method(self, batch: int, context: int, **settings: Any) -> KVSwap:
        """KVSwap for a run of so many sequences and tokens; `settings` are further fields of it."""
        return make_method(self.nearest(batch, context).setting, self.selected, self.adapters, **settings)

    def slots(self, batch: int, context: int) -> Slots:
        """The reuse buffer for such a run: FIFO slots, filled while the layer before computes."""
        return make_slots(self.nearest(batch, context).setting, self.selected)

    def save(self, path: str | os.PathLike) -> None:
        """Writes a JSON file. Raises WriteFailed."""
        rows = [
            {"batch": batch, "context": context, **dataclasses.asdict(found)}
            for (batch, context), found in sorted(self.solutions.items())
        ]
        saved = {"version": VERSION, "fingerprint": self.fingerprint, "selected": self.selected,
                 "relax": self.relax, "adapters": self.adapters, "solutions": rows}
        try:
            pathlib.Path(path).write_text(json.dumps(saved, indent=2) + "\n")
        except OSError as cause:
            raise WriteFailed(f"writing {path} failed: {cause}; choose another path") from cause


def load(path: str | os.PathLike) -> Tuning:
    """What `Tuning.save` wrote. Raises ReadFailed where that cannot be read, FormatMismatch for another version."""
    try:
        saved = json.loads(pathlib.Path(path).read_text())
        version = saved["version"]
    except (OSError, ValueError, KeyError, TypeError) as cause:
        raise ReadFailed(f"{path} is no tuning that can be read: {cause}; run configs/tune.py") from cause
    if version != VERSION:
        raise FormatMismatch(f"{path} is a tuning of version {version}, this library reads {VERSION}; tune again")
    adapters = {int(sigma): directory for sigma, directory in saved["adapters"].items()}
    solutions = {(row["batch"], row["context"]): _solution(row) for row in saved["solutions"]}
    return Tuning(solutions, saved["selected"], saved["relax"], adapters, saved["fingerprint"])


def _solution(row: dict[str, Any]) -> Solution:
    fields = {field.name: row[field.name] for field in dataclasses.fields(Solution)}
    return Solution(**{**fields, "setting": Setting(**row["setting"])})


def make_method(setting: Setting, selected: int, adapters: dict[int, str], **settings: Any) -> KVSwap:
    """KVSwap with MG = `selected`; its budget also has sinks, window, and what a group adds by being whole."""
    method = KVSwap(group=setting.group, sigma=setting.sigma, adapters=adapters.get(setting.sigma), **settings)
    return dataclasses.replace(method, budget=method.sinks + method.window + selected)


def make_slots(setting: Setting, selected: int) -> Slots:
    """Room for C tokens in groups, and for what one step needs at least."""
    least = -(-selected // setting.group) + 2
    return Slots(count=max(least, -(-setting.reuse // setting.group)), policy="fifo", prefetch="layer")
