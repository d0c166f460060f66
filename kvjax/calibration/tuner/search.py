"""The tuner: measures what a model and a store take, and solves for every batch size and context length.

Reading and computing are measured at the knots of a grid of batch sizes and context lengths, for the settings that the
solver asks for there or beside it; between knots costs are interpolated (`kvjax.calibration.tuner.tables`, appendix
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
    """Settings of KVSwap for a model on a store (appendix A).

    Every sequence gets max_bytes / max(batches).

    Args:
      text: text or token ids on which the reuse rate of every buffer size is measured: the last 512 tokens are decoded,
        or half of fewer, the rest is the prompt.
      contexts: tokens that a sequence may grow to, question and answer included (`capacity` of `LLM.prefill`), for
        which memory is counted.
      max_bytes: memory for the caches of the largest batch (`Cache.resident_bytes`) and for what the store has beside
        them (`Cache.store_bytes`), but for rows that wait to be written (`FlashStore.staging_bytes`).
      selected, bits, per_head, aggregation, dtype, adapters: what all settings have in common (`Family`).
      relax: alpha, by what share reading may prolong a layer.
      knots: at how many batch sizes and context lengths is measured at most, both ends among them.
      rates: reuse rates that are known, by (context, C): `Tuning.tables.rates` of the same model on another machine.
      path: where to keep solutions as they are found; pairs that are there already are not solved again.

    Raises ConfigError where `batches`, `contexts` or `max_bytes` are not positive integers, `knots` are below 2,
    `rates` are no shares, `relax` is negative, or a batch size and context length do not fit their memory, or for what
    is no store, a `FlashStore` of one file or one with a codec; FormatMismatch where `path` is of another model, store,
    text, family, memory, alpha, space or rates, or adapters of another model, or WriteFailed; and what the store
    raises, NoSpace where it has no room for a layer.
    """
    batches, contexts = _validate.wholes("batches", batches, 1), _validate.wholes("contexts", contexts, 1)
    knots = _validate.wholes("knots", knots, 2)
    if len(knots) != 2:
        raise ConfigError(f"knots={knots} must be two, of batch sizes and of context lengths")
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
    for pair in tqdm(pairs, desc="tune", disable=None):  # knots first: others find most of what they need measured
        if pair not in found.solutions:
            with bench.costs(pair, tables.around(*grid, pair)) as costs:
                found.solutions[pair] = solve(limits.space, limits.sequence_bytes * pair[0], costs, limits.relax)
            _LOG.info("batch %d, context %d: %s", *pair, found.solutions[pair])
            if path is not None:
                found.save(path)
    return found


def _add_rates(known: Tables, rates: Mapping[tuple[int, int], float], path) -> None:
    """Takes rates over. Raises FormatMismatch where others were found before: reads were measured by those."""
    changed = sorted(key for key, rate in rates.items() if known.rates.get(key, rate) != rate)
    if changed:
        raise FormatMismatch(f"{path} was tuned with other rates for (context, C) = {changed}; choose another path")
    known.rates.update(rates)


def expect(
    llm: LLM, store: Store, text: str | Sequence[int], family: Family, setting: Setting, *, batch: int, context: int,
    space: Space | None = None,
) -> Solution:
    """What a setting of one's own takes, measured as `tune` does at a knot; arguments as there."""
    pair, space = (batch, context), space or Space()
    _check(llm, store, family, space)
    bench = Bench(llm, store, family, space, _reuse_rates(llm, text, space, family), Tables())
    with bench.costs(pair, [(pair, 1.0)]) as costs:
        return expected(costs, setting)


def _check(llm: LLM, store: Store, family: Family, space: Space) -> None:
    """Raises ConfigError for no store, one of one file, as each group size that is tried needs one, of which none is
    kept, or with a codec, which has little to do with rows that are made up; FormatMismatch for another model's
    adapters."""
    if not is_store(store):
        raise ConfigError(f"store={store!r} is no store; give one such as kvjax.FlashStore(directory)")
    if isinstance(store, FlashStore) and not os.path.isdir(store.path):
        raise ConfigError(f"{store.path} is a file; give FlashStore a directory on the device, where files come and go")
    if isinstance(store, FlashStore) and store.codec not in (None, "raw"):
        raise ConfigError(f"codec={store.codec!r} makes blocks as small as their keys allow, which a tuning does not "
                          "know; tune with codec='raw'")
    for sigma in space.sigmas:
        family.method(Setting(space.middle_group, sigma, space.reuses[0])).check_model(llm.identity)


def _resumed(path, fresh: Tuning) -> Tuning:
    """The tuning in that file, or a fresh one where there is none. Raises WriteFailed where there is no directory for
    it: better than after minutes of measuring."""
    if path is not None and not pathlib.Path(path).parent.is_dir():
        raise WriteFailed(f"{path} is in no directory that exists; make it first, or choose another path")
    if path is None or not pathlib.Path(path).exists():
        return fresh
    found = tuning.load(path)
    if dataclasses.replace(found, solutions={}, tables=Tables()) != fresh:
        raise FormatMismatch(f"{path} was tuned for {_asked(found)}, not for {_asked(fresh)}; choose another path")
    return found


def _asked(one: Tuning) -> str:
    return f"the model {one.fingerprint!r} on {one.source}, {one.family} and {one.limits}"


def _source(llm: LLM, store: Store, text: str | Sequence[int]) -> str:
    """Names a store, by its device and how it is read, and a text."""
    ids = np.asarray(llm.encode(text, start=False), np.int64)
    kind = "no device"
    if isinstance(store, FlashStore):
        kind = f"{store.profile}, {store.layout}, direct={store.direct}, engine={store.engine}, {_device(store.path)}"
    return f"{type(store).__name__} ({kind}), text {hashlib.sha256(ids.tobytes()).hexdigest()[:16]}"


def _device(directory: str) -> str:
    """The name of the block device that a directory is on, where it is on one that the system can tell."""
    number = os.stat(directory).st_dev
    link = pathlib.Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    return f"device {link.resolve().name}" if link.exists() else "device unknown"


_DECODED = 512  # tokens of a text, at most, during which reuse is measured


def _reuse_rates(llm, text, space: Space, family: Family):
    """(C, context) -> reuse rate, with the group in the middle (the paper has one rate).

    The text, cut to the context where it is longer, stands for it: as large a share of its prompt is selected, and the
    buffer holds as many times what is selected.
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
        times = (count - 1) * group / family.selected  # one slot is the unfinished group's
        found = needed(groups(context), min(len(ids), context))
        return fifo.rate(found, max(groups(context) + 1, round(times * groups(context))))

    return rate


class Bench:
    """Measures what settings take at knots, nothing that is in the tables already."""

    def __init__(self, llm: LLM, store: Store, family: Family, space: Space, recurring: Callable[[int, int], float],
                 known: Tables):
        """recurring: (C, context) -> share of the needed groups that are in such a buffer."""
        self._llm, self._store, self._family, self._recurring, self._known = llm, store, family, recurring, known
        self._group = space.middle_group
        self._stored: dict[tuple[Pair, int], profile.StoredLayer] = {}

    @contextlib.contextmanager
    def costs(self, pair: Pair, around: Sequence[tuple[Pair, float]]) -> Iterator[Costs]:
        """What settings take for a batch size and context length, given the knots around and the share of each.
        Meanwhile the store has one layer for each knot and group size that was asked for."""

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
