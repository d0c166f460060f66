"""Settings have the types that their dataclasses declare: a wrong one is an error by its name, where it is made."""

import dataclasses
import math
import numbers
import os
import types
import typing
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvjax.errors import ConfigError

_KINDS: dict[Any, type] = {int: numbers.Integral, float: numbers.Real}  # NumPy's numbers count too


def check(settings: Any) -> None:
    """Raises ConfigError for a field of a dataclass that is not of its type, and for one that is no number."""
    for name, kind in _hints(type(settings)).items():
        value = getattr(settings, name)
        either = typing.get_origin(kind) in (types.UnionType, typing.Union)
        allowed = typing.get_args(kind) if either else (kind,)
        if not any(_is(value, one) for one in allowed):
            raise ConfigError(f"{name}={value!r} of {type(settings).__name__} must be "
                              f"{' or '.join(_name(one) for one in allowed)}")
        if isinstance(value, numbers.Real) and math.isnan(value):
            raise ConfigError(f"{name} of {type(settings).__name__} is not a number; give one")


def whole(value: Any, least: int | None = None) -> bool:
    """Whether it is an integer, and not below the least one; NumPy's count too, True and False do not."""
    return _is(value, int) and (least is None or value >= least)


def wholes(name: str, values: Any, least: int) -> tuple[int, ...]:
    """Integers as Python's, so that they can be saved. Raises ConfigError unless they are a sequence of such, not below
    the least one, and at least one."""
    found = tuple(values) if isinstance(values, Sequence | np.ndarray) and not isinstance(values, str) else ()
    if not found or not all(whole(one, least) for one in found):
        raise ConfigError(f"{name}={values!r} must be one or more integers of at least {least}, such as ({least},)")
    return tuple(map(int, found))


def number(value: Any) -> bool:
    """Whether it is a real number; NumPy's count too, True and False do not."""
    return _is(value, float)


def path(name: str, given: Any) -> str:
    """Returns a path as text. Raises ConfigError for what the system cannot take as one."""
    text = os.fspath(given) if isinstance(given, str | os.PathLike) else ""
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{name}={given!r} must be a path")
    try:
        encoded = os.fsencode(text)
    except UnicodeEncodeError as cause:
        raise ConfigError(f"{name}={text!r} cannot be a file's name: {cause}; choose another path") from cause
    if b"\0" in encoded:
        raise ConfigError(f"{name}={text!r} contains a NUL character, which ends a file's name; leave it out")
    return text


def _hints(kind: Any) -> dict[str, Any]:
    """The types of a dataclass's fields by name; none where they are not known at run time."""
    try:
        hints = typing.get_type_hints(kind)
    except NameError:  # a method of somebody's own may name types that are there for type checkers alone
        return {}
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _is(value: Any, kind: Any) -> bool:
    kind = typing.get_origin(kind) or kind
    if kind is Any or not isinstance(kind, type):  # or a Literal: not for us to judge
        return True
    if isinstance(value, bool | np.bool_):
        return kind is bool
    if isinstance(value, type):  # has a protocol's methods, and is none of what it makes
        return kind is type
    return isinstance(value, _KINDS.get(kind, kind))


def _name(kind: Any) -> str:
    known = {int: "an integer", float: "a number", bool: "True or False", types.NoneType: "None", str: "a text",
             os.PathLike: "a path"}
    return known.get(kind, getattr(kind, "__name__", str(kind)))
