"""What the experiments share: methods and stores from configuration, the reference model."""

import dataclasses
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import ml_collections
import numpy as np

import kvjax
from kvjax import _validate, methods
from kvjax.cache.method import Method
from kvjax.errors import ConfigError, FormatMismatch
from kvjax.eval import tasks
from kvjax.eval.tasks import corpus
from kvjax.inference import chunked_prefill, prefill
from kvjax.inference.generate import Usage
from kvjax.inference.plan import Slots, check_plan, make_plan
from kvjax.models.config import ModelConfig
from kvjax.store.flash.layout import SEQUENTIAL, check_layout
from kvjax.store.io import emulation, profiles

NOT_FIELDS = ("label", "slots", "dtype", "replay", "only", "whole")  # that are no fields of a method: see `make_method`
REFERENCE = pathlib.Path(kvjax.__file__).parent / "reference"
REFERENCE_8K = REFERENCE.parent / "reference_8k"


def check_counts(config: Mapping[str, Any], **least: int) -> None:
    """Raises ConfigError where a number of the configuration, or one of several, is not whole or below its least."""
    for name, lowest in least.items():
        given = config[name]
        several = isinstance(given, tuple | list)
        if several:
            check_some(config, name)
        for one in given if several else (given,):
            if not _validate.whole(one, lowest):
                raise ConfigError(f"{name}={given!r} must be {'whole numbers' if several else 'a whole number'} of at "
                                  f"least {lowest}")


def check_some(config: Mapping[str, Any], *names: str) -> None:
    """Raises ConfigError where a list of the configuration is empty."""
    for name in names:
        if not config[name]:
            raise ConfigError(f"config.{name} is empty; name at least one")


def check_names(config: Mapping[str, Any], name: str, known: Collection[str]) -> None:
    """Raises ConfigError where a list of the configuration has a name that there is not."""
    unknown = sorted(set(config[name]) - set(known))
    if unknown:
        raise ConfigError(f"config.{name} has unknown {', '.join(map(repr, unknown))}; use some of {', '.join(known)}")


def make_method(settings: Mapping[str, Any], extras: Collection[str] = ()) -> Method:
    """A method from {"name": ..., field: value, ...}. Raises ConfigError on an unknown name or field; `extras`: see
    `check_extras`.

    A "label" among the settings is what tables call it (`label_of`), "slots" how a store's blocks are kept
    (`make_slots`), "dtype" what keys and values are kept as (`dtype_of`), "replay" what timed runs select
    (`experiments.speed.replay`), "only" where they time it (`experiments.speed.throughput`), "whole" that it has no
    budget (`experiments.board.leaderboard`).
    """
    check_extras(settings, extras)
    given = {field: value for field, value in settings.items() if field not in NOT_FIELDS}
    return methods.make(given.pop("name", None), given)


def check_extras(settings: Mapping[str, Any], extras: Collection[str]) -> None:
    """Raises ConfigError for what is no method's settings, and for one of `NOT_FIELDS` that is not among those which an
    experiment understands: its table would show what was not measured."""
    if not isinstance(settings, Mapping | ml_collections.ConfigDict):
        raise ConfigError(f"{settings!r} is no method; give settings such as {{'name': 'quest', 'budget': 256}}")
    ignored = [extra for extra in NOT_FIELDS if extra in settings and extra not in extras]
    if ignored:
        raise ConfigError(f"{settings.get('name')}: this experiment has no use for a method's {', '.join(ignored)}; "
                          "leave it out")


def make_slots(settings: Mapping[str, Any], count: int = 0) -> Slots:
    """The "slots" of a method's settings; `count` is their number if they do not say it, 0 = what one step needs."""
    given = settings.get("slots", {})
    if not isinstance(given, Mapping | ml_collections.ConfigDict):
        raise ConfigError(f"slots={given!r} must be settings such as {{'count': 32, 'policy': 'lru'}}")
    unknown = set(given) - {field.name for field in dataclasses.fields(Slots)}
    if unknown:
        raise ConfigError(f"slots have no setting {', '.join(sorted(unknown))}")
    return Slots(**{"count": count or None, **dict(given)})


def check_store(kind: str) -> tuple[str, dict[str, str]]:
    """Name of a kind of store, and the device and layout that it names. Raises ConfigError on an unknown one."""
    name, *rest = kind.split(":")
    if name not in ("memory", "host", "flash") or (rest and name != "flash") or len(rest) > 2:
        raise ConfigError(f"unknown store {kind!r}; use memory, host, flash, flash:DEVICE or flash:DEVICE:LAYOUT")
    named = dict(zip(("profile", "layout"), rest, strict=False))
    emulation.system_of(named.get("profile", profiles.NATIVE))
    check_layout(named.get("layout", SEQUENTIAL))
    return name, named


def make_store(kind: str, directory: pathlib.Path, **settings: Any):
    """A store by name; None keeps blocks in JAX arrays. "flash:emmc" emulates a device of `kvjax.store.io.profiles`,
    and "flash:emmc:sequential" has its blocks there in that layout.

    `settings` are those of a flash store (`kvjax.FlashStore`); the others have none.
    """
    name, named = check_store(kind)
    if name == "memory":
        return None
    if name == "host":
        return kvjax.HostStore()
    store = kvjax.FlashStore(directory, **named, **settings)
    directory.mkdir(parents=True, exist_ok=True)
    return store


def disk_of(store, since: tuple[int, int, float] = (0, 0, 0.0)) -> dict[str, Any]:
    """What a row of results says about the device under a store; of an emulated one also which share of the commands
    after `since`, an earlier `commands_of`, the host answered later than the device would have, and what one takes the
    host (`EmulatedIO.host_seconds`)."""
    system = getattr(store, "system", None)
    if not isinstance(system, emulation.EmulatedIO):
        return {} if system is None else {"disk": profiles.NATIVE}
    late, commands, seconds = np.subtract(commands_of(store), since)
    return {"disk": f"{system.profile.name} (emulated)", "late_share": float(late / max(1, commands)),
            "host_us_per_command": float(1e6 * seconds / max(1, commands))}


def commands_of(store) -> tuple[int, int, float]:
    """Commands of an emulated device so far, the late ones and all, and the host's seconds; none of other stores."""
    system = getattr(store, "system", None)
    if not isinstance(system, emulation.EmulatedIO):
        return 0, 0, 0.0
    return system.late, system.commands, system.host_seconds


def cost_of(usages: Sequence[Usage]) -> dict[str, float]:
    """What a token of one sequence cost, of several generations together; bytes and reads where there was a store."""
    tokens = max(1, sum(usage.tokens for usage in usages))
    cost = {"attended_tokens": float(np.mean([usage.attended_tokens for usage in usages])),
            "hit_rate": float(np.mean([usage.hit_rate for usage in usages]))}
    stores = [usage.store for usage in usages if usage.store is not None]
    if stores:
        cost |= {"bytes_read_per_token": sum(one.bytes_read for one in stores) / tokens,
                 "reads_per_token": sum(one.reads for one in stores) / tokens}
    return cost


def held_out_tokens(llm: kvjax.LLM) -> np.ndarray:
    """int64[n] token ids of the held-out library files, one after the other."""
    return np.asarray(llm.encode("\n".join(corpus.stdlib_documents(held_out=True)), start=False))


def held_out_rows(llm: kvjax.LLM, count: int, tokens: int) -> np.ndarray:
    """int32[count, tokens] of the held-out library files, every row from a part of its own. Raises ConfigError if they
    are too few."""
    ids = held_out_tokens(llm).astype(np.int32)
    start = np.asarray(llm.encode("", start=True), np.int32)
    own = tokens - start.size
    if ids.size < count * own:
        raise ConfigError(f"batch={count} rows of {tokens} tokens need more than the {ids.size} tokens of held-out "
                          "text; lower batch, context or steps")
    rows = ids[:count * own].reshape(count, -1)
    return np.concatenate([np.tile(start, (count, 1)), rows], axis=1)


def draw_task(
    llm: kvjax.LLM, text: str | np.ndarray, name: str, length: int, count: int, seed: int, new_tokens: int = 32
) -> Sequence[tasks.Sample] | Sequence[tasks.Continuation]:
    """The samples of a task by name (`kvjax.eval.tasks`), facts hidden in `text`; the same for the same seed."""
    rng = np.random.default_rng((seed, length, tasks.number(name)))
    return tasks.draw(name, tasks.Request(llm.tokenizer, text, length, count, rng, new_tokens=new_tokens))


def load_model(path: str, dtype: str = "float32") -> kvjax.LLM:
    """The model at `path`, or the reference model for an empty path; `dtype` is that of its weights."""
    return kvjax.load(path or REFERENCE, dtype)


def dtype_of(settings: Mapping[str, Any]) -> str:
    """The "dtype" of a method's settings (`kvjax.ops.quantize`)."""
    return settings.get("dtype", "float32")


def label_of(settings: Mapping[str, Any]) -> str:
    """What tables call the method of these settings."""
    own = label(make_method(settings, NOT_FIELDS))  # made in any case: what is no method has no label either
    return settings.get("label") or own


def by_label(entries: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The settings of each method by what tables call it. Raises ConfigError where two are called the same."""
    found: dict[str, Mapping[str, Any]] = {}
    for settings in entries:
        if found.setdefault(label_of(settings), settings) != settings:
            raise ConfigError(f'two methods are called {label_of(settings)}; give one of them another "label"')
    return found


def make_methods(entries: Sequence[Mapping[str, Any]], extras: Collection[str]) -> dict[str, Method]:
    """Methods by what tables call them. Raises ConfigError as `by_label` and `make_method`."""
    return {label: make_method(settings, extras) for label, settings in by_label(entries).items()}


def slots_of(settings: Mapping[str, Any], store: str) -> Slots | None:
    """The "slots" of a method's settings, None where they have none. Raises ConfigError where blocks are in memory."""
    if "slots" not in settings:
        return None
    slots = make_slots(settings)
    if store == "memory" and not slots.for_memory:
        raise ConfigError(f"{label_of(settings)}: slots are for blocks on a store; leave them out with "
                          "--config.store=memory")
    return slots


def check_model(llm: kvjax.LLM, entries: Sequence[Mapping[str, Any]]) -> None:
    """Raises ConfigError where what a method was given is of another model: now, not in an hour."""
    for settings in entries:
        try:
            make_method(settings, NOT_FIELDS).check_model(llm.identity)
        except FormatMismatch as cause:
            raise ConfigError(f"{label_of(settings)}: {cause}; or leave it out of config.methods") from cause


def check_fit(
    model: ModelConfig, settings: Mapping[str, Any], prompts: Sequence[int], capacity: int, *, chunk: int = 0,
    slots: Slots | None = None,
) -> None:
    """Raises ConfigError or PromptError where a method's cache cannot be made of such prompts: now, not in an hour.

    Nothing is computed. A method that fits itself to prompts is taken as it is given.

    Args:
      prompts: tokens of each prompt.
      capacity: most tokens of a sequence.
      chunk: tokens of a prompt that are read at once; 0: all.
      slots: how a store's blocks are kept; None for blocks in memory, or slots by default.
    """
    plan = make_plan(model, make_method(settings, NOT_FIELDS), len(prompts), capacity, dtype_of(settings))
    prefill.check_prompts(plan, np.minimum(prompts, chunk) if chunk else np.asarray(prompts))
    if chunk:
        check = chunked_prefill.check_prompt if max(prompts) > chunk else chunked_prefill.check
        check(plan, chunk, () if slots is None else (slots.backend,))
    check_plan(plan, slots is not None, slots or Slots())


def label(method: Method) -> str:
    """Name and budget, as tables show them; the name is the one that configurations use."""
    name = methods.name_of(type(method)) or method.name
    return name if method.budget is None else f"{name}@{method.budget}"
