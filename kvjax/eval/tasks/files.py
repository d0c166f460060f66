"""Reading of benchmark files: JSON lines, other JSON, and texts to hide facts in."""

import pathlib
from collections.abc import Mapping
from typing import Any

from kvjax import _files
from kvjax.errors import TaskFileError

Row = Mapping[str, Any]


def read_text(path: pathlib.Path) -> str:
    """Returns a file as text. Raises TaskFileError if it cannot be read as UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskFileError(f"{path}: cannot be read as UTF-8 text ({error}); give another file") from error


def read_json(path: pathlib.Path) -> Any:
    """Returns the content of a JSON file. Raises TaskFileError if it cannot be read."""
    return _parse(str(path), read_text(path))


def read_essays(path: pathlib.Path) -> str:
    """Returns the text of a file, of all *.txt of a folder by name, or of the field "text" of a JSON file.

    Raises TaskFileError if there is none.
    """
    text: Any
    if path.is_dir():
        text = "\n".join(read_text(file) for file in sorted(path.glob("*.txt")))
    elif path.suffix == ".json":
        content = read_json(path)
        text = content.get("text") if isinstance(content, dict) else None
    else:
        text = read_text(path)
    if not isinstance(text, str) or not text.strip():
        raise TaskFileError(f"{path}: no text; give a text file, a folder of *.txt, or JSON with the field text")
    return text


def read_rows(
    path: pathlib.Path, fields: Mapping[str, type], other_version: Mapping[str, str]
) -> list[tuple[str, Row]]:
    """Reads and checks the rows of a file.

    Args:
      path: file to read.
      fields: names and types of the fields that every row must have.
      other_version: hints by fields that identify the file of another benchmark or version.

    Returns:
      Each row with its place in the file, for error messages.

    Raises:
      TaskFileError: the file cannot be read or is empty, or a row is not a JSON object with these fields. The message
        names file and line.
    """
    text = read_text(path)
    rows = _list(path, text) if text.lstrip().startswith("[") else _lines(path, text)
    if not rows:
        raise TaskFileError(f"{path}: no rows; the file is empty")
    for where, row in rows:
        _check(where, row, fields, other_version)
    return rows


def _lines(path: pathlib.Path, text: str) -> list[tuple[str, Any]]:
    numbered = [(f"{path}:{i}", line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    return [(where, _parse(where, line)) for where, line in numbered]


def _list(path: pathlib.Path, text: str) -> list[tuple[str, Any]]:
    return [(f"{path}: row {i}", row) for i, row in enumerate(_parse(str(path), text), 1)]


def _parse(where: str, text: str) -> Any:
    try:
        return _files.parse_json(text.encode())
    except ValueError as error:
        raise TaskFileError(f"{where}: not JSON ({error}); get the file again") from error


def _check(where: str, row: Any, fields: Mapping[str, type], other_version: Mapping[str, str]) -> None:
    if not isinstance(row, dict):
        raise TaskFileError(f"{where}: expected a JSON object with {', '.join(fields)}")
    missing = [name for name in fields if name not in row]
    if missing:
        hints = [hint for name, hint in other_version.items() if name in row]
        raise TaskFileError(f"{where}: no field {', '.join(missing)}; {hints[0] if hints else f'it has {list(row)}'}")
    for name, kind in fields.items():
        if not isinstance(row[name], kind):
            raise TaskFileError(f"{where}: {name} is {type(row[name]).__name__}, expected {kind.__name__}")


def text_of(where: str, row: Row, field: str) -> str:
    """Returns an optional text field, "" if it is missing. Raises TaskFileError for another type."""
    value = row.get(field) or ""
    if not isinstance(value, str):
        raise TaskFileError(f"{where}: {field} is {type(value).__name__}, expected str or nothing")
    return value


def classes_of(where: str, row: Row) -> tuple[str, ...]:
    """Returns the allowed answers of a classification row; none for other rows. Raises TaskFileError if not a list."""
    value = row.get("all_classes") or []
    if not isinstance(value, list) or not all(isinstance(label, str) for label in value):
        raise TaskFileError(f"{where}: all_classes is {value!r:.80}, expected a list of texts")
    return tuple(value)


def answers_of(where: str, row: Row, field: str) -> tuple[str, ...]:
    """Returns a field's right answers as texts. Raises TaskFileError if there is none."""
    if not row[field]:
        raise TaskFileError(f"{where}: {field} is empty; a row needs a right answer")
    return tuple(map(str, row[field]))
