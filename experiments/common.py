"""What the experiments share: methods and stores from configuration, the reference model."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import kvjax
from kvjax.errors import ConfigError
from kvjax.method import Method

REFERENCE = pathlib.Path(kvjax.__file__).parent / "reference"


def make_method(settings: Mapping[str, Any]) -> Method:
    """A method from {"name": ..., field: value, ...}. Raises ConfigError on an unknown name or field."""
    fields = dict(settings)
    name = fields.pop("name", None)
    if name not in kvjax.METHODS:
        raise ConfigError(f"unknown method {name!r}; use one of {', '.join(kvjax.METHODS)}")
    known = {field.name for field in dataclasses.fields(kvjax.METHODS[name])}
    unknown = set(fields) - known
    if unknown:
        raise ConfigError(f"{name} has no setting {', '.join(sorted(unknown))}; it has {', '.join(sorted(known))}")
    return kvjax.METHODS[name](**fields)


def make_store(kind: str, directory: pathlib.Path):
    """A store by name; None keeps blocks in JAX arrays."""
    if kind == "memory":
        return None
    if kind == "host":
        return kvjax.HostStore()
    if kind != "flash":
        raise ConfigError(f"unknown store {kind!r}; use memory, host or flash")
    directory.mkdir(parents=True, exist_ok=True)
    return kvjax.FlashStore(directory)


def load_model(path: str) -> kvjax.LLM:
    """The model at `path`, or the reference model for an empty path."""
    return kvjax.load(path or REFERENCE)


def label(method: Method) -> str:
    """Name and budget, as tables show them."""
    return method.name if method.budget is None else f"{method.name}@{method.budget}"
