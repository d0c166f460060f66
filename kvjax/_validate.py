"""Checks of settings against the types that their dataclasses declare."""

import dataclasses
import difflib
import math
import numbers
import os
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvjax.errors import ConfigError

_KINDS: dict[Any, type] = {int: numbers.Integral, float: numbers.Real}  # NumPy's numbers count too


def check(settings: Any) -> None:
    """Raises ConfigError for a field of a dataclass that is NaN or not of its declared type."""
    for name, kind in _hints(type(settings)).items():
        value = getattr(settings, name)
        either = typing.get_origin(kind) in (types.UnionType, typing.Union)
        allowed = typing.get_args(kind) if either else (kind,)
        if not any(_is(value, option) for option in allowed):
            raise ConfigError(f"{name}={value!r} of {type(settings).__name__} must be "
                              f"{' or '.join(_name(option) for option in allowed)}")
        if isinstance(value, numbers.Real) and math.isnan(value):
            raise ConfigError(f"{name} of {type(settings).__name__} is not a number (NaN); give one")


def nearest(name: Any, known: Iterable[str]) -> str:
    """Returns " (did you mean ...?)" if a name is like one of the known ones, else ""."""
    alike = difflib.get_close_matches(str(name).lower(), known, n=1)
    return f" (did you mean {alike[0]}?)" if alike else ""


def whole(value: Any, least: int | None = None) -> bool:
    """Returns whether `value` is an integer (NumPy's included, bool excluded) of at least `least`."""
    return _is(value, int) and (least is None or value >= least)


def wholes(name: str, values: Any, least: int) -> tuple[int, ...]:
    """Returns integers as Python's own type, so that they can be saved.

    Args:
      name: name of the setting, for the error message.
      values: sequence or array of integers.
      least: smallest allowed integer.

    Raises:
      ConfigError: `values` is empty, or is not a sequence of integers of at least `least`.
    """
    integers = tuple(values) if isinstance(values, Sequence | np.ndarray) and not isinstance(values, str) else ()
    if not integers or not all(whole(integer, least) for integer in integers):
        raise ConfigError(f"{name}={values!r} must be one or more integers of at least {least}, such as ({least},)")
    return tuple(map(int, integers))


def number(value: Any) -> bool:
    """Returns whether `value` is a real number (NumPy's included, bool excluded)."""
    return _is(value, float)


def path(name: str, given: Any) -> str:
    """Returns the path `given` for the setting `name` as text, in which `~` is the user's directory, as in a shell.

    Raises ConfigError if the system cannot use it.
    """
    text = os.fspath(given) if isinstance(given, str | os.PathLike) else ""
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{name}={given!r} must be a path")
    try:
        encoded = os.fsencode(text)
    except UnicodeEncodeError as cause:
        raise ConfigError(f"{name}={text!r} cannot be a file's name: {cause}; choose another path") from cause
    if b"\0" in encoded:
        raise ConfigError(f"{name}={text!r} contains a NUL character, which no file name may; leave it out")
    return os.path.expanduser(text)


def _hints(kind: Any) -> dict[str, Any]:
    """Returns the types of a dataclass's fields by name; none if they cannot be resolved at run time."""
    try:
        hints = typing.get_type_hints(kind)
    except NameError:  # a user's method may name types that are imported for type checkers only
        return {}
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _is(value: Any, kind: Any) -> bool:
    kind = typing.get_origin(kind) or kind
    if kind is Any or not isinstance(kind, type):  # or a Literal, which is not checked
        return True
    if isinstance(value, bool | np.bool_):
        return kind is bool
    if isinstance(value, type):  # a class has a protocol's methods, but is no instance of it
        return kind is type
    return isinstance(value, _KINDS.get(kind, kind))


def _name(kind: Any) -> str:
    known = {int: "an integer", float: "a number", bool: "True or False", types.NoneType: "None", str: "a string",
             os.PathLike: "a path"}
    return known.get(kind, getattr(kind, "__name__", str(kind)))
