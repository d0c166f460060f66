"""Methods and slots as JSON, in a manifest."""

import dataclasses
import json
import os
import pathlib
from typing import Any

import numpy as np

from kvjax.cache.method import Method
from kvjax.cache.slots import SlotPool
from kvjax.cache.tiers import TieredPool
from kvjax.errors import ConfigError, FormatMismatch
from kvjax.inference.plan import Plan, State
from kvjax.inference.saves.manifest import Manifest
from kvjax.methods import METHODS, name_of

_NOT_SAVED = "not saved"  # marks a setting that JSON cannot represent


def describe(method: Method) -> tuple[str, dict[str, Any]]:
    """Returns the name of a method and its settings as JSON holds them."""
    kind, method = type(method), method.as_saved()
    settings = json.loads(json.dumps(dataclasses.asdict(method), default=_plain))
    for name in kind.files:  # made absolute, so that they are found from any working directory
        if isinstance(settings[name], str) and settings[name]:
            settings[name] = os.path.abspath(settings[name])
    return name_of(kind) or f"{kind.__module__}.{kind.__qualname__}", settings


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else {_NOT_SAVED: repr(value)}


def same_method(path: pathlib.Path, saved: Manifest, method: Method | None) -> Method:
    """Returns the given method, or the saved one if none is given.

    Raises:
      FormatMismatch: another method was saved, or one with impossible settings.
      ConfigError: the method has to be given, because a manifest cannot describe it.
    """
    if method is None:
        return _made(path, saved)
    name, settings = describe(method)
    if (name, settings) != (saved.method, saved.settings):
        raise FormatMismatch(f"{path} was saved with the method {saved.method} {saved.settings}, not with {name} "
                             f"{settings}; use that method")
    return method


def _made(path: pathlib.Path, saved: Manifest) -> Method:
    """Creates the method that a manifest describes."""
    if saved.method not in METHODS:
        raise ConfigError(f"{path} was saved with the method {saved.method}, which is not in kvjax.METHODS; give "
                          "restore that method")
    for name, value in saved.settings.items():
        if isinstance(value, dict) and _NOT_SAVED in value:
            raise ConfigError(f"{path} was saved with {saved.method}({name}={value[_NOT_SAVED]}), a setting that is "
                              "not saved; give restore that method")
    try:
        return METHODS[saved.method](**saved.settings)
    except (ConfigError, TypeError) as cause:
        raise FormatMismatch(f"{path} was saved with settings that {saved.method} does not accept: {cause}; prefill "
                             "again") from cause


def most_slots(plan: Plan) -> int:
    """Returns the largest number of slots that is saved: more than there are blocks would be useless."""
    return max(layer.spec.num_blocks + layer.spec.max_blocks + 1 for layer in plan.layers)


def slots_of(plan: Plan, state: State) -> dict[str, Any]:
    """Returns the arguments of `Slots` to save; {} for a cache in memory."""
    pools = [layer.pool for layer in state.layers if isinstance(layer.pool, SlotPool)]
    if not pools:
        return {}
    pool, most = pools[-1], most_slots(plan)
    host = min(pool.host_rows.shape[2], most) if isinstance(pool, TieredPool) else None
    return {"count": min(pool.slots, most), "host": host, "policy": pool.policy, "prefetch": pool.prefetch,
            "keep": pool.keep, "even": pool.even}
