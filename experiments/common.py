"""Shared parts of the experiments: methods, stores and checks from a configuration, and the reference model."""

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

# Settings that are not fields: see `make_method`.
NOT_FIELDS = ("label", "slots", "dtype", "replay", "only", "whole", "budgets")
REFERENCE = pathlib.Path(kvjax.__file__).parent / "reference"
REFERENCE_8K = REFERENCE.parent / "reference_8k"


def check_counts(config: Mapping[str, Any], **least: int) -> None:
    """Checks that numbers of the configuration, or all numbers of a list, are whole and large enough.

    Args:
      config: the experiment's configuration.
      **least: the smallest allowed value of each field.

    Raises:
      ConfigError: a number is not whole or too small, or a list is empty.
    """
    for name, lowest in least.items():
        given = config[name]
        several = isinstance(given, tuple | list)
        if several:
            check_some(config, name)
        for number in given if several else (given,):
            if not _validate.whole(number, lowest):
                raise ConfigError(f"{name}={given!r} must be {'whole numbers' if several else 'a whole number'} of at "
                                  f"least {lowest}")


def check_some(config: Mapping[str, Any], *names: str) -> None:
    """Raises ConfigError for the first of the named lists of the configuration that is empty."""
    for name in names:
        if not config[name]:
            raise ConfigError(f"config.{name} is empty; name at least one")


def check_names(config: Mapping[str, Any], name: str, known: Collection[str]) -> None:
    """Raises ConfigError if a list of the configuration has a name that is not among the known ones."""
    unknown = sorted(set(config[name]) - set(known))
    if unknown:
        raise ConfigError(f"config.{name} has unknown {', '.join(map(repr, unknown))}; use some of {', '.join(known)}")


def make_method(settings: Mapping[str, Any], extras: Collection[str] = ()) -> Method:
    """Makes a method from {"name": ..., field: value, ...}.

    Some settings are not fields of the method: "label", its name in tables (`label_of`); "slots", how a store's blocks
    are kept (`make_slots`); "dtype", the type of stored keys and values (`dtype_of`); "replay", what timed runs select
    (`experiments.speed.replay`); "only", what it is timed with (`experiments.speed.throughput`); "whole", that it has
    no budget, and "budgets", its own ones (`experiments.board.grid`).

    Args:
      settings: the method's.
      extras: those of `NOT_FIELDS` that the experiment understands.

    Returns:
      The method.

    Raises:
      ConfigError: the name, a field or a value is unknown, or an extra is not understood.
    """
    check_extras(settings, extras)
    given = {field: value for field, value in settings.items() if field not in NOT_FIELDS}
    return methods.make(given.pop("name", None), given)


def check_extras(settings: Mapping[str, Any], extras: Collection[str]) -> None:
    """Raises ConfigError if the settings are not a mapping, or have one of `NOT_FIELDS` that the experiment does not
    understand: its results would not be what the settings say."""
    if not isinstance(settings, Mapping | ml_collections.ConfigDict):
        raise ConfigError(f"{settings!r} is not a method; give settings such as {{'name': 'quest', 'budget': 256}}")
    ignored = [extra for extra in NOT_FIELDS if extra in settings and extra not in extras]
    if ignored:
        raise ConfigError(f"{settings.get('name')}: this experiment has no use for a method's {', '.join(ignored)}; "
                          "leave it out")


def make_slots(settings: Mapping[str, Any], count: int = 0) -> Slots:
    """Makes the slots of a method's settings.

    Args:
      settings: the method's; "slots" has fields of `kvjax.Slots`.
      count: number of slots if "slots" does not give it; 0 = as many as one step needs.

    Returns:
      The slots.

    Raises:
      ConfigError: "slots" is not a mapping, or has an unknown or invalid field.
    """
    given = settings.get("slots", {})
    if not isinstance(given, Mapping | ml_collections.ConfigDict):
        raise ConfigError(f"slots={given!r} must be settings such as {{'count': 32, 'policy': 'lru'}}")
    unknown = set(given) - {field.name for field in dataclasses.fields(Slots)}
    if unknown:
        raise ConfigError(f"slots have no setting {', '.join(sorted(unknown))}")
    return Slots(**{"count": count or None, **dict(given)})


def check_store(kind: str) -> tuple[str, dict[str, str]]:
    """Returns the name of a kind of store, and the "profile" and "layout" that it gives; raises ConfigError for an
    unknown kind."""
    name, *rest = kind.split(":")
    if name not in ("memory", "host", "flash") or (rest and name != "flash") or len(rest) > 2:
        raise ConfigError(f"unknown store {kind!r}; use memory, host, flash, flash:DEVICE or flash:DEVICE:LAYOUT")
    named = dict(zip(("profile", "layout"), rest, strict=False))
    emulation.system_of(named.get("profile", profiles.NATIVE))
    check_layout(named.get("layout", SEQUENTIAL))
    return name, named


def make_store(kind: str, directory: pathlib.Path, **settings: Any):
    """Makes a store by name.

    Args:
      kind: "memory", "host", "flash", "flash:DEVICE" (an emulated device of `kvjax.store.io.profiles`) or
        "flash:DEVICE:LAYOUT".
      directory: where a flash store has its files; made if missing.
      **settings: of a flash store (`kvjax.FlashStore`); other kinds ignore them.

    Returns:
      The store; None for "memory", where blocks stay in JAX arrays.

    Raises:
      ConfigError: the kind, device or layout is unknown.
    """
    name, named = check_store(kind)
    if name == "memory":
        return None
    if name == "host":
        return kvjax.HostStore()
    return kvjax.FlashStore(directory=directory, **named, **settings)


def disk_of(store, since: tuple[int, int, float] = (0, 0, 0.0)) -> dict[str, Any]:
    """Describes the device under a store for a row of results.

    Args:
      store: a store or None.
      since: an earlier `commands_of`; commands before it do not count.

    Returns:
      {} without a device; else "disk". For an emulated device also the share of commands that the host answered later
      than the device would have, and the host's microseconds per command (`EmulatedIO.host_seconds`).
    """
    system = getattr(store, "system", None)
    if not isinstance(system, emulation.EmulatedIO):
        return {} if system is None else {"disk": profiles.NATIVE}
    late, commands, seconds = np.subtract(commands_of(store), since)
    return {"disk": f"{system.profile.name} (emulated)", "late_share": float(late / max(1, commands)),
            "host_us_per_command": float(1e6 * seconds / max(1, commands))}


def commands_of(store) -> tuple[int, int, float]:
    """Returns the late commands of an emulated device so far, all its commands, and the host's seconds; zeros for other
    stores."""
    system = getattr(store, "system", None)
    if not isinstance(system, emulation.EmulatedIO):
        return 0, 0, 0.0
    return system.late, system.commands, system.host_seconds


def cost_of(usages: Sequence[Usage]) -> dict[str, float]:
    """Returns the cost of a token of one sequence over several generations: attended tokens (mean over tokens that did
    not go through in chunks), hit rate, and with a store bytes and reads."""
    tokens, single = max(1, sum(usage.tokens for usage in usages)), sum(usage.single_tokens for usage in usages)
    attended = sum(usage.attended_tokens * usage.single_tokens for usage in usages)
    needed, read = sum(usage.blocks_needed for usage in usages), sum(usage.blocks_read for usage in usages)
    cost = {"attended_tokens": attended / max(1, single), "hit_rate": 1.0 - read / max(1, needed)}
    stores = [usage.store for usage in usages if usage.store is not None]
    if stores:
        cost |= {"bytes_read_per_token": sum(stats.bytes_read for stats in stores) / tokens,
                 "reads_per_token": sum(stats.reads for stats in stores) / tokens}
    return cost


def held_out_tokens(llm: kvjax.LLM) -> np.ndarray:
    """Returns the token ids of the held-out library files, int64[n], one file after the other."""
    return np.asarray(llm.encode("\n".join(corpus.stdlib_documents(held_out=True)), start=False))


def held_out_rows(llm: kvjax.LLM, count: int, tokens: int) -> np.ndarray:
    """Returns rows of the held-out library files, each from a different part.

    Args:
      llm: the model.
      count: number of rows.
      tokens: tokens of a row.

    Returns:
      int32[count, tokens] token ids.

    Raises:
      ConfigError: there is too little text.
    """
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
    """Draws the samples of a task.

    Args:
      llm: the model, for its tokenizer.
      text: text or token ids in which facts are hidden.
      name: of a task of `kvjax.eval.tasks`.
      length: tokens of a context.
      count: number of samples.
      seed: equal seeds give equal samples.
      new_tokens: tokens after a context, where the task continues text.

    Returns:
      The samples.

    Raises:
      ConfigError: the task is unknown, or does not fit the length.
    """
    rng = np.random.default_rng((seed, length, tasks.number(name)))
    return tasks.draw(name, tasks.Request(llm.tokenizer, text, length, count, rng, new_tokens=new_tokens))


def load_model(path: str, dtype: str = "float32") -> kvjax.LLM:
    """Loads the model at `path` (the reference model if empty) with weights of type `dtype`."""
    return kvjax.load(path or REFERENCE, dtype)


def dtype_of(settings: Mapping[str, Any]) -> str:
    """Returns the type of stored keys and values in a method's settings (`kvjax.ops.quantize`)."""
    return settings.get("dtype", "float32")


def label_of(settings: Mapping[str, Any]) -> str:
    """Returns the name that tables give the method of these settings."""
    own = label(make_method(settings, NOT_FIELDS))  # made in any case, so that invalid settings raise
    return settings.get("label") or own


def by_label(entries: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Returns the settings of each method by its label; raises ConfigError if two methods have the same label."""
    labelled: dict[str, Mapping[str, Any]] = {}
    for settings in entries:
        if labelled.setdefault(label_of(settings), settings) != settings:
            raise ConfigError(f'two methods are called {label_of(settings)}; give one of them another "label"')
    return labelled


def make_methods(entries: Sequence[Mapping[str, Any]], extras: Collection[str]) -> dict[str, Method]:
    """Makes methods from settings, by label; raises ConfigError as `by_label` and `make_method` do."""
    return {label: make_method(settings, extras) for label, settings in by_label(entries).items()}


def slots_of(settings: Mapping[str, Any], store: str) -> Slots | None:
    """Returns the slots of a method's settings, None without any; raises ConfigError if blocks are in memory."""
    if "slots" not in settings:
        return None
    slots = make_slots(settings)
    if store == "memory" and not slots.for_memory:
        raise ConfigError(f"{label_of(settings)}: slots are for blocks on a store; leave them out with "
                          "--config.store=memory")
    return slots


def check_model(llm: kvjax.LLM, entries: Sequence[Mapping[str, Any]]) -> None:
    """Raises ConfigError if a method was given something that belongs to another model (adapters, a table), before a
    long run starts."""
    for settings in entries:
        try:
            llm.with_fitted(make_method(settings, NOT_FIELDS))
        except FormatMismatch as cause:
            raise ConfigError(f"{label_of(settings)}: {cause}; or leave it out of config.methods") from cause


def check_fit(
    model: ModelConfig, settings: Mapping[str, Any], prompts: Sequence[int], capacity: int, *, chunk: int = 0,
    slots: Slots | None = None,
) -> None:
    """Checks that a method's cache can be made of some prompts, before a long run starts.

    Nothing is computed, and a method that fits itself to prompts is taken as it is given.

    Args:
      model: the model's shape.
      settings: the method's.
      prompts: tokens of each prompt.
      capacity: most tokens of a sequence.
      chunk: tokens of a prompt that are read at once; 0 = all.
      slots: how a store's blocks are kept; None for blocks in memory, or default slots.

    Raises:
      ConfigError: the method does not fit the model or the capacity.
      PromptError: the prompts do not fit the method.
    """
    plan = make_plan(model, make_method(settings, NOT_FIELDS), len(prompts), capacity, dtype_of(settings))
    prefill.check_prompts(plan, np.minimum(prompts, chunk) if chunk else np.asarray(prompts))
    if chunk:
        check = chunked_prefill.check_prompt if max(prompts) > chunk else chunked_prefill.check
        check(plan, chunk)
    check_plan(plan, slots is not None, slots or Slots())


def label(method: Method) -> str:
    """Returns the method's name in configurations with its budget, as tables show them."""
    name = methods.name_of(type(method)) or method.name
    return name if method.budget is None else f"{name}@{method.budget}"
