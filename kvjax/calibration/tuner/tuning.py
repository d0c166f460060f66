"""Solutions for batch sizes and context lengths as a JSON file, and the one that a run takes."""

import dataclasses
import json
import math
import os
import pathlib
from typing import Any

from kvjax import _files, _validate
from kvjax.calibration.tuner.solver import Limits, Setting, Solution, Space
from kvjax.calibration.tuner.tables import Tables
from kvjax.errors import ConfigError, FormatMismatch, ReadFailed, WriteFailed
from kvjax.inference.plan import Slots
from kvjax.methods.kvswap import KVSwap
from kvjax.ops import quantize

VERSION = 13  # of the file, and of how solutions are chosen
_TUNED = {"budget", "group", "sigma", "bits", "per_head", "aggregation", "adapters"}  # that a tuning decides of KVSwap


@dataclasses.dataclass(frozen=True)
class Family:
    """What all settings of a tuning have in common.

    Attributes:
      selected: MG, tokens that groups may contribute to one step.
      bits: of each number of a compressed key (`kvjax.KVSwap`); the paper has floats.
      adapters: directory of the adapters of each sigma; a sigma without one decomposes each prompt's own keys.
      per_head: whether that decomposition is each head's for itself, which goes well with few bits.
      aggregation: how scores of heads become one (`kvjax.ops.topk.aggregate`); "mean" is the paper's, and quick.
      dtype: how keys and values are kept (`LLM.prefill`).

    Raises ConfigError where `selected`, `bits` or a sigma is no positive integer, or for a type that there is not.
    """

    selected: int = 400
    bits: int = 32
    adapters: dict[int, str] = dataclasses.field(default_factory=dict)
    per_head: bool = False
    aggregation: str = KVSwap.aggregation
    dtype: str = "float32"

    def __post_init__(self):
        _validate.check(self)
        quantize.check(self.dtype)
        sigmas = (("sigma", sigma) for sigma in self.adapters)
        for name, value in (("selected", self.selected), ("bits", self.bits), *sigmas):
            if not _validate.whole(value, 1):
                raise ConfigError(f"{name}={value!r} of a tuning must be a positive integer")
        # So that they can be saved, and adapters are found from wherever a saved tuning is loaded.
        found = {int(sigma): os.path.abspath(directory) for sigma, directory in self.adapters.items()}
        for name, kept in (("selected", int(self.selected)), ("bits", int(self.bits)), ("adapters", found)):
            object.__setattr__(self, name, kept)

    def method(self, setting: Setting, **settings: Any) -> KVSwap:
        """KVSwap with MG = `selected`; its budget also has sinks and window. The unfinished group is part of MG.

        Raises ConfigError for settings that are the tuning's.
        """
        taken = sorted(_TUNED & settings.keys())
        if taken:
            raise ConfigError(f"the tuning sets {', '.join(taken)}; leave that out, or make a KVSwap of your own")
        adapters = self.adapters.get(setting.sigma)
        made = KVSwap(group=setting.group, sigma=setting.sigma, bits=self.bits, adapters=adapters,
                      per_head=self.per_head and adapters is None, aggregation=self.aggregation, **settings)
        return dataclasses.replace(made, budget=made.sinks + made.window + self.selected)

    def slots(self, setting: Setting) -> Slots:
        """Room for C tokens in groups, and for what one step needs at least: FIFO, filled while a layer computes. With
        C = 0 layers share what one of them needs, and keep nothing."""
        if not setting.reuse:
            return Slots(keep=False, prefetch="layer")
        least = -(-self.selected // setting.group) + 2
        return Slots(count=max(least, -(-setting.reuse // setting.group)), policy="fifo", prefetch="layer")


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What the tuner found.

    Attributes:
      solutions: by (batch size, context length).
      family: what all of them have in common.
      limits: within which they were found.
      fingerprint: of the model (`LLM.identity`).
      source: the kind of store and the text that all was measured with.
      tables: what was measured.
    """

    solutions: dict[tuple[int, int], Solution]
    family: Family
    limits: Limits
    fingerprint: str
    source: str = ""
    tables: Tables = dataclasses.field(default_factory=Tables)

    @property
    def dtype(self) -> str:
        """Of keys and values."""
        return self.family.dtype

    def nearest(self, batch: int, context: int) -> Solution:
        """The solution of that batch size and context length, or of the nearest pair there is, by ratios. Memory is
        that of a cache of such a capacity: one with room for more tokens takes more."""
        def distance(pair):
            return abs(math.log2(pair[0] / batch)) + abs(math.log2(pair[1] / context))

        return self.solutions[min(self.solutions, key=distance)]

    def method(self, batch: int, context: int, **settings: Any) -> KVSwap:
        """KVSwap for a run of so many sequences and tokens; `settings` are further fields, as in `Family.method`."""
        return self.family.method(self.nearest(batch, context).setting, **settings)

    def slots(self, batch: int, context: int) -> Slots:
        """The reuse buffer for such a run."""
        return self.family.slots(self.nearest(batch, context).setting)

    def save(self, path: str | os.PathLike) -> None:
        """Writes a JSON file, in place of one that is there once all of it is written. Raises WriteFailed."""
        rows = [
            {"batch": batch, "context": context, **dataclasses.asdict(found)}
            for (batch, context), found in sorted(self.solutions.items())
        ]
        saved = {"version": VERSION, "fingerprint": self.fingerprint, "family": dataclasses.asdict(self.family),
                 "source": self.source, "limits": dataclasses.asdict(self.limits), "tables": self.tables.rows(),
                 "solutions": rows}
        try:
            with _files.replacing(pathlib.Path(path)) as fresh:
                fresh.write_text(json.dumps(saved, indent=2) + "\n")
        except OSError as cause:
            raise WriteFailed(f"writing {path} failed: {cause}; choose another path") from cause


def load(path: str | os.PathLike) -> Tuning:
    """What `Tuning.save` wrote. Raises ReadFailed where that cannot be read, FormatMismatch for another version."""
    try:
        saved = _files.read_json(path)
        if saved["version"] != VERSION:
            raise FormatMismatch(f"{path} is a tuning of version {saved['version']}, this library reads {VERSION}; "
                                 "tune again")
        return _tuning(saved)
    except FormatMismatch:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as cause:
        raise ReadFailed(f"{path} is no tuning that can be read: {cause!r}; run configs/tune.py") from cause


def _tuning(saved: dict[str, Any]) -> Tuning:
    solutions = {(row["batch"], row["context"]): _solution(row) for row in saved["solutions"]}
    adapters = {int(sigma): directory for sigma, directory in saved["family"]["adapters"].items()}
    family = Family(**{**saved["family"], "adapters": adapters})
    space = Space(**{name: tuple(values) for name, values in saved["limits"]["space"].items()})
    limits = Limits(**{**saved["limits"], "space": space})
    measured = Tables.from_rows(saved["tables"])
    return Tuning(solutions, family, limits, saved["fingerprint"], saved["source"], measured)


def _solution(row: dict[str, Any]) -> Solution:
    known = {field.name: row[field.name] for field in dataclasses.fields(Solution)}
    return Solution(**{**known, "setting": Setting(**row["setting"])})
