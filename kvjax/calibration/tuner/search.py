"""The tuner (KVSwap, section 3.5): measures a model and a store, and solves for every batch size and context length.

Reading and computing are measured at the knots of a grid of batch sizes and context lengths, for the settings that the
solver asks for at or next to a knot. Between knots, costs are interpolated (`kvjax.calibration.tuner.tables`, appendix
A.3).
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import logging
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from tqdm import tqdm

from kvjax import _validate
from kvjax.calibration.tuner import fifo, profile, tables, tuning
from kvjax.calibration.tuner.solver import Costs, Limits, Setting, Solution, Space, expected, solve
from kvjax.calibration.tuner.tables import Measurement, Pair, Tables
from kvjax.calibration.tuner.tuning import Family, Tuning
from kvjax.errors import ConfigError, FormatMismatch, WriteFailed
from kvjax.inference.plan import Slots
from kvjax.llm import LLM
from kvjax.methods.kvswap import KVSwap
from kvjax.store.flash.store import FlashStore
from kvjax.store.interface import Store, is_store

_LOG = logging.getLogger(__name__)


def tune(
    llm: LLM, store: Store, text: str | Sequence[int], *, max_bytes: int, batches: Sequence[int] = (1,),
    contexts: Sequence[int] = (4096, 8192, 16384, 32768), selected: int = 400, bits: int = 32,
    per_head: bool = False, aggregation: str = KVSwap.aggregation, dtype: str = "float32", relax: float = 0.1,
    space: Space | None = None, adapters: dict[int, str] | None = None, knots: Sequence[int] = (3, 2),
    rates: Mapping[tuple[int, int], float] | None = None, path: str | os.PathLike | None = None,
) -> Tuning:
    """Tunes the settings of KVSwap for a model on a store (appendix A).

    Every sequence gets max_bytes / max(batches) bytes.

    Args:
      llm: the model.
      store: the store to read from.
      text: text or token ids on which the reuse rate of every buffer size is measured. The last 512 tokens are decoded,
        or half of the text if it is shorter than 1,024 tokens; the rest is the prompt.
      max_bytes: bytes of memory for the caches of the largest batch (`Cache.resident_bytes`) and the store's own arrays
        (`Cache.store_bytes`), without rows that are not written yet (`FlashStore.staging_bytes`).
      batches: batch sizes to solve for.
      contexts: context lengths to solve for: tokens that a sequence may grow to, question and answer included
        (`capacity` of `LLM.prefill`), for which memory is counted.
      selected, bits, per_head, aggregation, dtype, adapters: settings that all solutions share (`Family`).
      relax: alpha, the share of its computing time by which reading may prolong a layer.
      space: values that the solver chooses from; None = `Space()`.
      knots: most batch sizes and most context lengths at which to measure, both ends included.
      rates: known reuse rates by (context, C), e.g. `Tuning.tables.rates` of the same model on another machine.
      path: file in which solutions are saved as they are found; solutions it already has are not computed again.

    Returns:
      A solution for every batch size and context length.

    Raises:
      ConfigError: an argument is out of range, a batch size and context length do not fit the memory, or `store` is no
        store, a `FlashStore` of one file, or one with a codec.
      FormatMismatch: the file at `path` is of another model, store, text, family, memory, alpha, space or rates, or the
        adapters are of another model.
      WriteFailed: the file at `path` cannot be written.
      NoSpace: the store has no room for a layer.
    """
    batches, contexts = _validate.wholes("batches", batches, 1), _validate.wholes("contexts", contexts, 1)
    knots = _validate.wholes("knots", knots, 2)
    if len(knots) != 2:
        raise ConfigError(f"knots={knots} must be two numbers, one of batch sizes and one of context lengths")
    if not _validate.whole(max_bytes, 1):
        raise ConfigError(f"max_bytes={max_bytes!r} must be a positive integer")
    if not all(0.0 <= rate <= 1.0 for rate in (rates or {}).values()):
        raise ConfigError(f"rates={rates} must be shares of the needed groups, from 0 to 1")
    family = Family(selected, bits, adapters or {}, per_head, aggregation, dtype)
    limits = Limits(max_bytes // max(batches), relax, space or Space())
    _check(llm, store, family, limits.space)
    found = _resumed(path, Tuning({}, family, limits, llm.identity, _source(llm, store, text)))
    _add_rates(found.tables, rates or {}, path)
    bench = Bench(llm, store, family, limits.space, _reuse_rates(llm, text, limits.space, family), found.tables)
    grid = tables.knots_of(batches, knots[0]), tables.knots_of(contexts, knots[1])
    pairs = sorted(itertools.product(batches, contexts), key=lambda pair: pair not in itertools.product(*grid))
    for pair in tqdm(pairs, desc="tune", disable=None):  # knots first, as other pairs use their measurements
        if pair not in found.solutions:
            with bench.costs(pair, tables.around(*grid, pair)) as costs:
                found.solutions[pair] = solve(limits.space, limits.sequence_bytes * pair[0], costs, limits.relax)
            _LOG.info("batch %d, context %d: %s", *pair, found.solutions[pair])
            if path is not None:
                found.save(path)
    return found


def _add_rates(known: Tables, rates: Mapping[tuple[int, int], float], path) -> None:
    """Adds known rates to the tables; raises FormatMismatch if other rates were found before, on which the measured
    reads depend."""
    changed = sorted(key for key, rate in rates.items() if known.rates.get(key, rate) != rate)
    if changed:
        raise FormatMismatch(f"{path} was tuned with other rates for (context, C) = {changed}; choose another path")
    known.rates.update(rates)


def expect(
    llm: LLM, store: Store, text: str | Sequence[int], family: Family, setting: Setting, *, batch: int, context: int,
    space: Space | None = None,
) -> Solution:
    """Measures the costs of a given setting, as `tune` does at a knot.

    Args:
      llm, store, text: as in `tune`.
      family: settings that all solutions share.
      setting: the setting to measure.
      batch: number of sequences.
      context: tokens that a sequence may grow to.
      space: values whose middle group size and smallest sigma are used to measure reuse; None = `Space()`.

    Returns:
      The setting with its costs.

    Raises:
      ConfigError, FormatMismatch, NoSpace: as in `tune`.
    """
    pair, space = (batch, context), space or Space()
    _check(llm, store, family, space)
    bench = Bench(llm, store, family, space, _reuse_rates(llm, text, space, family), Tables())
    with bench.costs(pair, [(pair, 1.0)]) as costs:
        return expected(costs, setting)


def _check(llm: LLM, store: Store, family: Family, space: Space) -> None:
    """Raises ConfigError unless model and store can be tuned for, FormatMismatch for another model's adapters.

    A store of one file is refused, because each group size needs a temporary file. A store with a codec is refused,
    because the measured rows are artificial, and their compressed size would say nothing.
    """
    if llm.layout is not None:
        raise ConfigError("tuning measures caches over a store, which are on one device; load the model without mesh=")
    if not is_store(store):
        raise ConfigError(f"store={store!r} is no store; give one such as kvjax.FlashStore(directory=...)")
    if isinstance(store, FlashStore) and not store.temporary:
        raise ConfigError(f"{store.path} is a file, and tuning creates files of its own; use FlashStore(directory=...) "
                          "on the device")
    if isinstance(store, FlashStore) and store.codec not in (None, "raw"):
        raise ConfigError(f"codec={store.codec!r} makes the size of blocks depend on their keys, which a tuning does "
                          "not know; tune with codec='raw'")
    for sigma in space.sigmas:
        family.method(Setting(space.middle_group, sigma, space.reuses[0])).check_model(llm.identity)


def _resumed(path, fresh: Tuning) -> Tuning:
    """Returns the tuning in a file, or `fresh` if there is none. Raises WriteFailed now if the file's directory does
    not exist, instead of after minutes of measuring."""
    path = None if path is None else pathlib.Path(path).expanduser()
    if path is not None and not path.parent.is_dir():
        raise WriteFailed(f"{path} is in no directory that exists; create it first, or choose another path")
    if path is None or not path.exists():
        return fresh
    saved = tuning.load(path)
    if dataclasses.replace(saved, solutions={}, tables=Tables()) != fresh:
        raise FormatMismatch(f"{path} was tuned for {_asked(saved)}, not for {_asked(fresh)}; choose another path")
    return saved


def _asked(tuned: Tuning) -> str:
    return f"the model {tuned.fingerprint!r} on {tuned.source}, {tuned.family} and {tuned.limits}"


def _source(llm: LLM, store: Store, text: str | Sequence[int]) -> str:
    """Returns a name for a store (its device and how it is read) and a text."""
    ids = np.asarray(llm.encode(text, start=False), np.int64)
    kind = "no device"
    if isinstance(store, FlashStore):
        kind = f"{store.profile}, {store.layout}, direct={store.direct}, engine={store.engine}, {_device(store.path)}"
    return f"{type(store).__name__} ({kind}), text {hashlib.sha256(ids.tobytes()).hexdigest()[:16]}"


def _device(directory: str) -> str:
    """Returns the name of the block device that a directory is on, if the system knows it."""
    number = os.stat(directory).st_dev
    link = pathlib.Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    return f"device {link.resolve().name}" if link.exists() else "device unknown"


_DECODED = 512  # most tokens of a text that are decoded to measure reuse


def _reuse_rates(llm, text, space: Space, family: Family):
    """Returns a function (C, context) -> reuse rate, for the middle group size (the paper has one rate).

    The text, cut to the context if it is longer, stands in for a context: the same share of its prompt is selected, and
    the buffer holds the same multiple of the selection.
    """
    ids = llm.encode(text, start=False)
    if len(ids) < 2 * family.selected:
        raise ConfigError(f"{len(ids)} tokens of text are too few to measure reuse; give at least "
                          f"{2 * family.selected}")
    group, sigma = space.middle_group, space.sigmas[0]

    def prompt(length: int) -> int:
        return max(length // 2, length - _DECODED)

    def groups(context: int) -> int:
        return max(2, round(prompt(min(len(ids), context)) / context * family.selected / group))

    @functools.cache
    def needed(count: int, length: int):
        method = dataclasses.replace(family, selected=count * group).method(Setting(group, sigma, 0))
        return profile.needed_groups(llm, method, ids[:length], prompt(length), family.dtype)

    def rate(reuse: int, context: int) -> float:
        if not reuse:
            return 0.0
        count = family.slots(Setting(group, sigma, reuse)).count or 0
        times = (count - 1) * group / family.selected  # one slot is for the unfinished group
        need = needed(groups(context), min(len(ids), context))
        return fifo.rate(need, max(groups(context) + 1, round(times * groups(context))))

    return rate


class Bench:
    """Measurements of settings at knots, each made once and kept in the tables."""

    def __init__(self, llm: LLM, store: Store, family: Family, space: Space, recurring: Callable[[int, int], float],
                 known: Tables):
        """Prepares measurements.

        Args:
          llm: the model.
          store: the store to read from.
          family: settings that all solutions share.
          space: values to choose from; its middle group size is used to measure computing.
          recurring: (C, context) -> share of the needed groups that are in a buffer of C tokens.
          known: tables that are read and extended.
        """
        self._llm, self._store, self._family, self._recurring, self._known = llm, store, family, recurring, known
        self._group = space.middle_group
        self._stored: dict[tuple[Pair, int], profile.StoredLayer] = {}

    @contextlib.contextmanager
    def costs(self, pair: Pair, around: Sequence[tuple[Pair, float]]) -> Iterator[Costs]:
        """Gives the costs of settings for a batch size and context length, as a context manager.

        Inside the context, the store holds one layer for each knot and group size that was asked for.

        Args:
          pair: batch size and context length.
          around: the knots next to it with their interpolation weights (`tables.around`).
        """

        @functools.cache
        def memory(setting: Setting) -> int:
            return profile.memory_bytes(self._llm.config, *self._parts(setting), *pair, self._family.dtype, self._store)

        def read(setting: Setting) -> Measurement:
            parts = np.array([self._read(knot, setting) for knot, _ in around])
            return Measurement(*np.average(parts, axis=0, weights=[share for _, share in around]).tolist())

        def compute(setting: Setting) -> float:
            return sum(share * self._compute(knot, setting) for knot, share in around)

        try:
            yield Costs(
                memory=memory,
                read=lambda setting: read(setting).whole,
                busy=lambda setting: read(setting).busy,
                compute=compute,
                reuse_rate=lambda reuse: self._rate(reuse, pair[1]),
            )
        finally:
            for layer in self._stored.values():
                layer.close()
            self._stored.clear()

    def _parts(self, setting: Setting) -> tuple[KVSwap, Slots]:
        return self._family.method(setting), self._family.slots(setting)

    def _rate(self, reuse: int, context: int) -> float:
        return self._known.rate(context, reuse, lambda: self._recurring(reuse, context))

    def _read(self, knot: Pair, setting: Setting) -> Measurement:
        def measure() -> Measurement:
            missing = (1.0 - self._rate(setting.reuse, knot[1])) * self._family.selected
            return self._layer(knot, setting.group).read_seconds(round(missing / setting.group))

        return self._known.read(knot, setting, measure)

    def _layer(self, knot: Pair, group: int) -> profile.StoredLayer:
        if (knot, group) not in self._stored:
            self._stored[knot, group] = profile.StoredLayer(
                self._store, self._llm.config, group, *knot, self._family.dtype
            )
        return self._stored[knot, group]

    def _compute(self, knot: Pair, setting: Setting) -> float:
        typical = dataclasses.replace(setting, group=self._group)
        return self._known.compute(
            knot, setting,
            lambda: profile.compute_seconds(self._llm, *self._parts(typical), *knot, self._family.dtype),
        )
