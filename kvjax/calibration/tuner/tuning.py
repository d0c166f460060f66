"""Solutions for batch sizes and context lengths, saved as a JSON file, and the choice of one for a run."""

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

VERSION = 13  # of the file format, and of the rules by which solutions are chosen
_TUNED = {"budget", "group", "sigma", "bits", "per_head", "aggregation", "adapters"}  # fields of KVSwap set by a tuning


@dataclasses.dataclass(frozen=True)
class Family:
    """Settings that all solutions of a tuning share.

    Attributes:
      selected: MG, tokens that groups may contribute to one step.
      bits: bits of each number of a compressed key (`kvjax.KVSwap`); the paper has floats.
      adapters: file of the adapters of each sigma; a sigma without one decomposes each prompt's own keys.
      per_head: whether each head is decomposed separately, which suits few bits.
      aggregation: how scores of heads are aggregated (`kvjax.ops.topk.aggregate`); "mean" is the paper's, and fast.
      dtype: type in which keys and values are stored (`LLM.prefill`).

    Raises:
      ConfigError: `selected`, `bits` or a sigma is no positive integer, or the type is unknown.
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
        # Python's integers can be saved, and absolute paths hold wherever a saved tuning is loaded.
        adapters = {int(sigma): os.path.abspath(file) for sigma, file in self.adapters.items()}
        for name, kept in (("selected", int(self.selected)), ("bits", int(self.bits)), ("adapters", adapters)):
            object.__setattr__(self, name, kept)

    def method(self, setting: Setting, **settings: Any) -> KVSwap:
        """Returns KVSwap for a setting, with a budget of MG = `selected` tokens plus sinks and window.

        The group that is still being filled counts in MG.

        Args:
          setting: the tuned setting.
          **settings: further fields of KVSwap.

        Raises:
          ConfigError: one of these fields is set by the tuning.
        """
        taken = sorted(_TUNED & settings.keys())
        if taken:
            raise ConfigError(f"the tuning sets {', '.join(taken)}; leave that out, or construct a KVSwap yourself")
        adapters = self.adapters.get(setting.sigma)
        made = KVSwap(group=setting.group, sigma=setting.sigma, bits=self.bits, adapters=adapters,
                      per_head=self.per_head and adapters is None, aggregation=self.aggregation, **settings)
        return dataclasses.replace(made, budget=made.sinks + made.window + self.selected)

    def slots(self, setting: Setting) -> Slots:
        """Returns FIFO slots for C tokens in groups, or at least for one step's groups, prefetched while a layer
        computes. With C = 0, all layers share the slots of one, and nothing is kept between steps."""
        if not setting.reuse:
            return Slots(keep=False, prefetch="layer")
        least = -(-self.selected // setting.group) + 2
        return Slots(count=max(least, -(-setting.reuse // setting.group)), policy="fifo", prefetch="layer")


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Result of the tuner.

    Attributes:
      solutions: solution of each (batch size, context length).
      family: settings that all solutions share.
      limits: limits that the solutions satisfy.
      fingerprint: identity of the model (`LLM.identity`).
      source: name of the store and the text that were measured with.
      tables: the measurements.
    """

    solutions: dict[tuple[int, int], Solution]
    family: Family
    limits: Limits
    fingerprint: str
    source: str = ""
    tables: Tables = dataclasses.field(default_factory=Tables)

    @property
    def dtype(self) -> str:
        """Type in which keys and values are stored."""
        return self.family.dtype

    def nearest(self, batch: int, context: int) -> Solution:
        """Returns the solution of a batch size and context length, or of the nearest pair, by ratios.

        The memory of a solution is that of a cache whose capacity is the solution's context length; a larger capacity
        takes more.

        Args:
          batch: number of sequences.
          context: tokens that a sequence may grow to.
        """
        def distance(pair):
            return abs(math.log2(pair[0] / batch)) + abs(math.log2(pair[1] / context))

        return self.solutions[min(self.solutions, key=distance)]

    def method(self, batch: int, context: int, **settings: Any) -> KVSwap:
        """Returns KVSwap for a run of `batch` sequences of up to `context` tokens; `settings` as in `Family.method`."""
        return self.family.method(self.nearest(batch, context).setting, **settings)

    def slots(self, batch: int, context: int) -> Slots:
        """Returns the reuse buffer for a run of `batch` sequences of up to `context` tokens."""
        return self.family.slots(self.nearest(batch, context).setting)

    def save(self, path: str | os.PathLike) -> None:
        """Writes a JSON file, replacing an existing file once all of it is written.

        Raises:
          WriteFailed: writing fails.
        """
        rows = [
            {"batch": batch, "context": context, **dataclasses.asdict(solution)}
            for (batch, context), solution in sorted(self.solutions.items())
        ]
        saved = {"version": VERSION, "fingerprint": self.fingerprint, "family": dataclasses.asdict(self.family),
                 "source": self.source, "limits": dataclasses.asdict(self.limits), "tables": self.tables.rows(),
                 "solutions": rows}
        try:
            with _files.replacing(pathlib.Path(path).expanduser()) as fresh:
                fresh.write_text(json.dumps(saved, indent=2) + "\n")
        except OSError as cause:
            raise WriteFailed(f"writing {path} failed: {cause}; choose another path") from cause


def load(path: str | os.PathLike) -> Tuning:
    """Returns the tuning that `Tuning.save` wrote.

    Raises:
      ReadFailed: the file cannot be read, or is no tuning.
      FormatMismatch: it is of another version.
    """
    try:
        saved = _files.read_json(pathlib.Path(path).expanduser())
        if saved["version"] != VERSION:
            raise FormatMismatch(f"{path} is a tuning of version {saved['version']}, but this library reads version "
                                 f"{VERSION}; tune again")
        return _tuning(saved)
    except FormatMismatch:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as cause:
        raise ReadFailed(f"{path} is no tuning that can be read: {cause!r}; make one with configs/tune.py") from cause


def _tuning(saved: dict[str, Any]) -> Tuning:
    solutions = {(row["batch"], row["context"]): _solution(row) for row in saved["solutions"]}
    adapters = {int(sigma): file for sigma, file in saved["family"]["adapters"].items()}
    family = Family(**{**saved["family"], "adapters": adapters})
    space = Space(**{name: tuple(values) for name, values in saved["limits"]["space"].items()})
    limits = Limits(**{**saved["limits"], "space": space})
    measured = Tables.from_rows(saved["tables"])
    return Tuning(solutions, family, limits, saved["fingerprint"], saved["source"], measured)


def _solution(row: dict[str, Any]) -> Solution:
    known = {field.name: row[field.name] for field in dataclasses.fields(Solution)}
    return Solution(**{**known, "setting": Setting(**row["setting"])})
