"""The tuner: measures what a model and a store take, and solves for every batch size and context length."""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import logging
import os
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np
from tqdm import tqdm

from kvjax import fields
from kvjax.errors import ConfigError, FormatMismatch
from kvjax.llm import LLM
from kvjax.methods.kvswap import KVSwap
from kvjax.planning import Slots
from kvjax.store import fifo
from kvjax.store.base import Store
from kvjax.store.flash import FlashStore
from kvjax.tuner import profile, tuning
from kvjax.tuner.solver import Costs, Limits, Setting, Solution, Space, expected, solve
from kvjax.tuner.tuning import Family, Tuning

_LOG = logging.getLogger(__name__)


def tune(
    llm: LLM, store: Store, text: str | Sequence[int], *, max_bytes: int, batches: Sequence[int] = (1,),
    contexts: Sequence[int] = (4096, 8192, 16384, 32768), selected: int = 400, bits: int = 32,
    per_head: bool = False, relax: float = 0.1, space: Space | None = None, adapters: dict[int, str] | None = None,
    path: str | os.PathLike | None = None,
) -> Tuning:
    """Settings of KVSwap for a model on a store (appendix A).

    Every sequence gets max_bytes / max(batches). Only what the solver asks for is measured, at exactly that setting, so
    nothing is interpolated.

    Args:
      text: text or token ids on which the reuse rate of every buffer size is measured; half is the prompt, the rest
        decoded.
      max_bytes: memory for the caches of the largest batch.
      selected, bits, per_head, adapters: what all settings have in common (`Family`).
      relax: alpha, by what share reading may prolong a layer.
      path: where to keep solutions as they are found; pairs that are there already are not solved again.

    Raises ConfigError where `batches` or `contexts` are not positive integers or there are none, or a batch size and
    context length do not fit their memory, or for a `FlashStore` of one file; FormatMismatch where `path` is of another
    model, store, text, family, memory, alpha or space, or WriteFailed; and what the store raises, NoSpace where it has
    no room for a layer.
    """
    for name, sizes in (("batches", batches), ("contexts", contexts)):
        if not sizes or not all(fields.whole(one, 1) for one in sizes):
            raise ConfigError(f"{name}={sizes} must be positive integers, at least one")
    _check_store(store)
    family = Family(selected, bits, adapters or {}, per_head)
    limits = Limits(max_bytes // max(batches), relax, space or Space())
    found = _resumed(path, Tuning({}, family, limits, llm.identity, _source(llm, store, text)))
    recurring = _reuse_rates(llm, text, limits.space, family)
    for batch, context in tqdm(list(itertools.product(batches, contexts)), desc="tune", disable=None):
        if (batch, context) not in found.solutions:
            with _costs(llm, store, batch, context, family, recurring) as costs:
                found.solutions[batch, context] = solve(
                    limits.space, limits.sequence_bytes * batch, costs, limits.relax
                )
            _LOG.info("batch %d, context %d: %s", batch, context, found.solutions[batch, context])
            if path is not None:
                found.save(path)
    return found


def expect(
    llm: LLM, store: Store, text: str | Sequence[int], family: Family, setting: Setting, *, batch: int, context: int,
    space: Space | None = None,
) -> Solution:
    """What a setting of one's own takes, measured as `tune` does; arguments as there."""
    _check_store(store)
    recurring = _reuse_rates(llm, text, space or Space(), family)
    with _costs(llm, store, batch, context, family, recurring) as costs:
        return expected(costs, setting)


def _check_store(store: Store) -> None:
    """Raises ConfigError for a store of one file: each group size that is tried needs one, of which none is kept."""
    if isinstance(store, FlashStore) and not os.path.isdir(store.path):
        raise ConfigError(f"{store.path} is a file; give FlashStore a directory on the device, where files come and go")


def _resumed(path, fresh: Tuning) -> Tuning:
    """The tuning in that file, or a fresh one where there is none."""
    if path is None or not pathlib.Path(path).exists():
        return fresh
    found = tuning.load(path)
    if dataclasses.replace(found, solutions={}) != fresh:
        raise FormatMismatch(f"{path} was tuned for {_asked(found)}, not for {_asked(fresh)}; choose another path")
    return found


def _asked(one: Tuning) -> str:
    return f"the model {one.fingerprint!r} on {one.source}, {one.family} and {one.limits}"


def _source(llm: LLM, store: Store, text: str | Sequence[int]) -> str:
    """Names a kind of store and a text."""
    ids = np.asarray(llm.encode(text, start=False), np.int64)
    kind = f"{store.profile}, {store.layout}, direct={store.direct}" if isinstance(store, FlashStore) else "no device"
    return f"{type(store).__name__} ({kind}), text {hashlib.sha256(ids.tobytes()).hexdigest()[:16]}"


def _reuse_rates(llm, text, space: Space, family: Family):
    """(C, context) -> reuse rate, with the group in the middle (the paper has one rate).

    Half of the text stands for a longer context: as large a share of it is selected as of the real one, and the buffer
    holds as many times what is selected.
    """
    ids = llm.encode(text, start=False)
    if len(ids) < 2 * family.selected:
        raise ConfigError(f"{len(ids)} tokens of text are too few to measure reuse; give at least "
                          f"{2 * family.selected}")
    group, sigma, prompt = space.groups[len(space.groups) // 2], space.sigmas[0], len(ids) // 2

    def groups(context: int) -> int:
        return max(2, round(min(1.0, prompt / context) * family.selected / group))

    @functools.cache
    def needed(context: int):
        method = dataclasses.replace(family, selected=groups(context) * group).method(Setting(group, sigma, 0))
        return profile.needed_groups(llm, method, ids, prompt)

    @functools.cache
    def rate(reuse: int, context: int) -> float:
        count = family.slots(Setting(group, sigma, reuse)).count or 0
        times = (count - 1) * group / family.selected  # one slot is the unfinished group's
        return fifo.rate(needed(context), max(groups(context) + 1, round(times * groups(context))))

    return rate


@contextlib.contextmanager
def _costs(llm, store, batch, context, family: Family, recurring) -> Iterator[Costs]:
    """What settings take at one batch size and context length; nothing is measured twice. Meanwhile the store has one
    layer for each group size that was asked for."""
    stored: dict[int, profile.StoredLayer] = {}

    def parts(setting: Setting) -> tuple[KVSwap, Slots]:
        return family.method(setting), family.slots(setting)

    @functools.cache
    def read(group: int, reuse: int) -> profile.Reading:
        if group not in stored:
            stored[group] = profile.StoredLayer(store, llm.config, group, batch, context)
        return stored[group].read_seconds(round((1 - recurring(reuse, context)) * family.selected / group))

    costs = Costs(
        memory=functools.cache(lambda setting: profile.memory_bytes(llm.config, *parts(setting), batch, context)),
        read=lambda setting: read(setting.group, setting.reuse).whole,
        busy=lambda setting: read(setting.group, setting.reuse).busy,
        compute=functools.cache(lambda setting: profile.compute_seconds(llm, *parts(setting), batch, context)),
        reuse_rate=lambda reuse: recurring(reuse, context),
    )
    try:
        yield costs
    finally:
        for layer in stored.values():
            layer.close()
