"""Settings are of the types that their dataclasses declare. That methods are checked so: `tests/test_cli.py`, in
processes of their own, as here a hook checks their types before."""

import dataclasses
import os
import pathlib
from typing import Any, Literal

import numpy as np
import pytest

import kvjax
from kvjax import _validate
from kvjax.errors import ConfigError
from kvjax.methods import METHODS


@dataclasses.dataclass(frozen=True)
class Settings:
    budget: int | None = 256
    threshold: float = 1.0
    lookahead: bool = False
    rule: str = "max"
    path: str | os.PathLike | None = None
    sizes: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Own:
    """Of types that are not for the check to judge."""

    mode: Literal["a", "b"] = "a"
    other: Any = None


@dataclasses.dataclass(frozen=True)
class Unknown:
    """Of a type that is there for type checkers alone."""

    other: "NotThere" = None


def test_what_cannot_be_judged_is_taken():
    _validate.check(Own("c", 3))
    _validate.check(Unknown(3))


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_settings_of_its_types(name):
    _validate.check(METHODS[name]())


@pytest.mark.parametrize("settings", [
    {"budget": None}, {"budget": np.int64(64)}, {"threshold": 2}, {"threshold": np.float32(2)}, {"lookahead": True},
    {"lookahead": np.bool_(True)},
    {"path": pathlib.Path("x")}, {"path": "x"}, {"sizes": (1, 2)},
])
def test_what_is_of_a_type_is_taken(settings):
    _validate.check(Settings(**settings))


@pytest.mark.parametrize(("settings", "words"), [
    ({"budget": "64"}, "budget='64' of Settings must be an integer or None"), ({"budget": 64.0}, "budget=64.0"),
    ({"budget": True}, "budget=True"), ({"threshold": "1"}, "threshold='1' of Settings must be a number"),
    ({"threshold": np.float32("nan")}, "not a number"), ({"threshold": None}, "threshold=None"),
    ({"threshold": float("nan")}, "threshold of Settings is not a number"),
    ({"lookahead": 1}, "lookahead=1 of Settings must be True or False"), ({"rule": 3}, "rule=3"),
    ({"path": 3}, "must be a string or a path or None"), ({"sizes": 3}, "sizes=3"),
])
def test_what_is_not_is_refused_by_name(settings, words):
    with pytest.raises(ConfigError, match=words):
        _validate.check(Settings(**settings))


@pytest.mark.parametrize(("make", "words"), [
    (lambda: kvjax.Quest(max_blocks=0), "max_blocks=0"), (lambda: kvjax.Quest(budget=-1), "budget=-1"),
    (lambda: kvjax.DynaKV(threshold=float("nan")), "threshold of DynaKV is not a number"),
    (lambda: kvjax.Slots(count=-3), "count=-3"), (lambda: kvjax.Slots(host=0), "host=0"),
])
def test_impossible_numbers_are_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()
