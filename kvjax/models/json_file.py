"""JSON files of a model directory, whose readers raise errors that name file, field and value."""

import dataclasses
import os
import pathlib
import re
import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvjax import _files
from kvjax.errors import CheckpointError

CONFIG = "config.json"
GENERATION = "generation_config.json"

Path = str | os.PathLike[str]
Fields = Mapping[str, Any]
_REQUIRED = object()
_MOST_BYTES = 8 << 20  # limit for a JSON file; an index of 50,000 tensors takes half of it
_MOST = 2**30  # the sum of two such numbers fits a 32-bit integer on the device
_LEAST_NUMBER, _MOST_NUMBER = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def model_directory(directory: Path) -> pathlib.Path:
    """Returns `directory` as a path. Raises CheckpointError if it is not a directory."""
    path = pathlib.Path(directory).expanduser()
    try:
        is_directory = path.is_dir()
    except OSError as error:  # such as a name that is too long, or a parent without permission
        raise CheckpointError(f"{path}: cannot be looked at ({error}); give the folder that holds {CONFIG}") from error
    if not is_directory and re.fullmatch(r"[\w.-]+/[\w.-]+", os.fspath(directory)):
        raise CheckpointError(f"{path}: not a directory, and kvjax downloads nothing; if it is a model on the Hugging "
                              f"Face hub, run `hf download {path} --local-dir DIR` and load DIR")
    if not is_directory:
        raise CheckpointError(f"{path}: not a directory; download the model and give the directory that holds {CONFIG}")
    return path


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Reads the JSON object in `path`. Raises CheckpointError if it is missing, corrupt, too large or no object."""
    try:
        content = _files.parse_json(_files.read_regular(path, _MOST_BYTES))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: this file is missing from the model directory; download it") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error}); download the file again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(content).__name__}; expected an object")
    return content


def read_optional_json(path: pathlib.Path) -> dict[str, Any]:
    """Reads like `read_json`; returns an empty object if the file does not exist."""
    return read_json(path) if os.path.lexists(path) else {}


def token_ids(field: str, *documents: tuple[pathlib.Path, Fields]) -> tuple[int, ...]:
    """Returns the token ids that the first document with the given field has for it; () if none has it.

    Args:
      field: field that holds a token id or a list of them.
      *documents: each a path, for error messages, and the JSON object read from it.

    Raises:
      CheckpointError: the field holds something else.
    """
    for path, fields in documents:
        value = fields.get(field)
        if value is not None:
            ids = tuple(value) if isinstance(value, list) else (value,)
            if not all(type(i) is int and 0 <= i <= _MOST for i in ids):
                raise CheckpointError(f"{path}: {field} is {shown(value)}; expected a token id or a list of them")
            return ids
    return ()


def shown(value: object) -> str:
    """Returns a file's value for an error message, cut to a few dozen characters."""
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


@dataclasses.dataclass(frozen=True)
class Section:
    """JSON object of a file, whose readers raise CheckpointError naming file, field and value."""

    path: pathlib.Path
    fields: Fields
    prefix: str = ""

    def integer(self, name: str, default: Any = _REQUIRED, least: int = 1, most: int = _MOST) -> Any:
        """Returns an integer field; null or no value means `default` if one is given."""
        value = self.fields.get(name)
        if value is None and default is not _REQUIRED:
            return default
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(name, f"expected an integer of at least {least} and at most {most}")
        return value

    def number(self, name: str, default: Any = _REQUIRED, zero_is_none: bool = False) -> Any:
        """Returns a positive number that is finite and above zero as f32, too.

        Null or no value, and a zero if `zero_is_none`, mean `default` if one is given.
        """
        value: Any = self.fields.get(name)
        absent = value is None or (zero_is_none and type(value) in (int, float) and value == 0)
        if absent and default is not _REQUIRED:
            return default
        if not _is_positive(value):
            raise self.wrong(name, f"expected a number above zero, at most {_MOST_NUMBER:.2g}")
        return float(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """Returns a list of numbers, each as `number` allows."""
        value: Any = self.fields.get(name)
        if not isinstance(value, list) or not value or not all(map(_is_positive, value)):
            raise self.wrong(name, f"expected a list of numbers above zero, at most {_MOST_NUMBER:.2g}")
        return tuple(map(float, value))

    def switch(self, name: str, default: Any = _REQUIRED) -> bool:
        """Returns true or false; no value means `default` if one is given."""
        value = self.fields.get(name, default)
        if type(value) is not bool:
            raise self.wrong(name, "expected true or false")
        return value

    def require(self, name: str, supported: tuple[Any, ...]) -> Any:
        """Returns a field's value, which has to be one of `supported`."""
        value = self.fields.get(name)
        if type(value) is bool or value not in supported:  # True equals 1
            raise self.wrong(name, f"supported: {', '.join(map(str, supported))}")
        return value

    def wrong(self, name: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {self.prefix}{name} is {shown(self.fields.get(name))}; {expected}")


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and _LEAST_NUMBER <= value <= _MOST_NUMBER
