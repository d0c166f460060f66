"""GgufHeader of a GGUF file: its fields, and where its tensors are. Whatever the file says, reading it is bounded."""

import math
import os
import pathlib
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from kvjax import _files
from kvjax.errors import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_FLOAT, _TEXT, _ARRAY = 6, 8, 9
_MOST_BYTES = 1 << 28  # limit for a header; the largest vocabularies take 20 MB
_MOST_TENSORS = 1 << 20
_MOST_AXES = 4


class Entry(NamedTuple):
    """A tensor: sizes of its axes, the last one being contiguous; number of its type; first byte in the file."""

    shape: tuple[int, ...]
    kind: int
    offset: int


class GgufHeader(NamedTuple):
    """Fields and tensors of a GGUF file by name, and the file's size in bytes."""

    fields: Mapping[str, Any]
    tensors: Mapping[str, Entry]
    size: int


def read(path: pathlib.Path) -> GgufHeader:
    """Reads the header of a GGUF file of version 2 or 3.

    Raises:
      CheckpointError: the file cannot be read, is not a GGUF file, or ends within its header.
    """
    try:
        with _files.open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            return _parse(_Cursor(file, size), size)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not a complete GGUF file ({error}); download it again, or give the directory "
                              "of a Hugging Face model") from error


class _Cursor:
    """Reads numbers and texts one after the other; raises ValueError beyond the end."""

    def __init__(self, file: BinaryIO, size: int):
        self._file, self.left, self.at = file, min(size, _MOST_BYTES), 0
        self._buffer, self._start = b"", 0

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise ValueError(f"its header goes on beyond byte {self.at + self.left}")
        if count > len(self._buffer) - self._start:
            rest = self._buffer[self._start :]
            self._buffer, self._start = rest + self._read(max(count - len(rest), 1 << 20)), 0
            if count > len(self._buffer):
                raise ValueError(f"it ends within the header, at byte {self.at + len(self._buffer)}")
        taken = self._buffer[self._start : self._start + count]
        self._start, self.left, self.at = self._start + count, self.left - count, self.at + count
        return taken

    def _read(self, count: int) -> bytes:
        pieces: list[bytes] = []
        while count > 0 and (piece := self._file.read(count)):
            pieces.append(piece)
            count -= len(piece)
        return b"".join(pieces)

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _FLOAT:
            return float(str(np.float32(self.number("f"))))  # 1e-6 as it was written, not as f32 has it
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _TEXT:
            return self.text()
        if kind == _ARRAY:
            return self._array(self.number("I"), self.number("Q"))
        raise ValueError(f"a field has the unknown type {kind}")

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind in _SCALARS:
            size = struct.calcsize(f"<{_SCALARS[kind]}")
            return np.frombuffer(self.take(count * size), np.dtype(_SCALARS[kind]).newbyteorder("<")).tolist()
        if kind != _TEXT or count * 8 > self.left:
            raise ValueError(f"a field is an array of {count} values of type {kind}")
        return [self.text() for _ in range(count)]


def _parse(cursor: _Cursor, size: int) -> GgufHeader:
    if cursor.take(4) != _MAGIC:
        raise ValueError("it does not begin with GGUF")
    version, tensors, fields = cursor.number("I"), cursor.number("Q"), cursor.number("Q")
    if version not in _VERSIONS:
        raise ValueError(f"it has version {version}; supported: {', '.join(map(str, _VERSIONS))}")
    if tensors > _MOST_TENSORS:
        raise ValueError(f"it has {tensors} tensors; at most {_MOST_TENSORS} are read")
    by_name: dict[str, Any] = {}
    for _ in range(fields):
        name = cursor.text()
        by_name[name] = cursor.value(cursor.number("I"))
    entries: dict[str, Entry] = {}
    for _ in range(tensors):
        name = cursor.text()
        if name in entries:
            raise ValueError(f"it has two tensors {name:.100}")
        entries[name] = _entry(cursor)
    alignment = by_name.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20:
        raise ValueError(f"general.alignment is {alignment!r:.60}")
    data = -(-cursor.at // alignment) * alignment
    placed = {name: entry._replace(offset=data + entry.offset) for name, entry in entries.items()}
    return GgufHeader(by_name, placed, size)


def _entry(cursor: _Cursor) -> Entry:
    axes = cursor.number("I")
    if not 1 <= axes <= _MOST_AXES:
        raise ValueError(f"a tensor has {axes} axes")
    shape = tuple(cursor.number("Q") for _ in range(axes))[::-1]
    if math.prod(shape) >= 1 << 62 or 0 in shape:
        raise ValueError(f"a tensor has the shape {shape}")
    return Entry(shape, cursor.number("I"), cursor.number("Q"))
