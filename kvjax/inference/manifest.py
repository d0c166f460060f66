"""The manifest of a saved cache: how the cache was made, and which state file counts; sealed by a checksum."""

import dataclasses
import json
import pathlib
import re
from typing import Any

import xxhash

from kvjax import _files, _validate
from kvjax.errors import ChecksumMismatch, ConfigError, FormatMismatch, ReadFailed

# 6: a sealed manifest beside one state file, tokens that are still to be fed, keys less a vector before they are packed
VERSION = 6
_MOST_TOKENS = 1 << 40  # beyond that sizes of arrays have no number
_STATE = re.compile(r"state-[0-9a-f]{12}")


@dataclasses.dataclass(frozen=True)
class Manifest:
    """How a saved cache was made, and which state file counts.

    Attributes:
      state: name of the state file, without what its kind adds.
      checksum: of the arrays in the state file, in hexadecimal digits.
      fingerprint: of model and tokenizer.
      method: its name in `kvjax.METHODS`, or the class of one that is not there.
      settings: of the method.
      batch, capacity, dtype: of the plan (`kvjax.inference.plan.Plan`).
      slots: arguments of `kvjax.Slots`; empty for a cache in memory.
      pending: ids[B][n] of tokens that are to be fed before anything else; [] = none.
    """

    state: str
    checksum: str
    fingerprint: str
    method: str
    settings: dict[str, Any]
    batch: int
    capacity: int
    dtype: str
    slots: dict[str, Any]
    pending: list[list[int]]

    def __post_init__(self):
        """Raises ConfigError for a field that is not of its type or range."""
        _validate.check(self)
        if not _STATE.fullmatch(self.state):
            raise ConfigError(f"state={self.state!r:.80} is no name of a state file")
        if not 1 <= self.batch * self.capacity <= _MOST_TOKENS:
            raise ConfigError(f"batch={self.batch} sequences of {self.capacity} tokens")
        if len(self.pending) not in (0, self.batch):
            raise ConfigError(f"pending tokens of {len(self.pending)} sequences, and batch={self.batch}")
        if not all(isinstance(row, list) and all(_validate.whole(one, 0) for one in row) for row in self.pending):
            raise ConfigError("pending must be lists of token ids")

    def pack(self) -> bytes:
        """The manifest as JSON, sealed."""
        content = dataclasses.asdict(self)
        return _canonical({"version": VERSION, "manifest": content, "seal": _seal(content)})

    @classmethod
    def unpack(cls, data: bytes, path: pathlib.Path) -> "Manifest":
        """Parses what `pack` made and a file at `path` holds.

        Raises ReadFailed for what is no JSON, ChecksumMismatch where it is not what was written, and FormatMismatch for
        another version, impossible values, or something else than a manifest.
        """
        try:
            found = _files.parse_json(data or b"null")
        except ValueError as cause:
            raise ReadFailed(f"{path} cannot be read: {cause}; prefill again") from cause
        if not isinstance(found, dict) or not ({"version", "manifest"} <= found.keys() or
                                               {"version", "state"} <= found.keys()):
            raise FormatMismatch(f"{path} holds something else than a saved cache; choose another directory")
        if found["version"] != VERSION:
            raise FormatMismatch(f"{path} was saved in version {found['version']!r:.20}, this library reads {VERSION}; "
                                 "prefill again, or restore it with the kvjax that saved it")
        content = found.get("manifest")
        if not isinstance(content, dict) or found.get("seal") != _seal(content):
            raise ChecksumMismatch(f"{path} is not what was written; the device or another program damaged it, prefill "
                                   "again")
        try:
            return cls(**content)
        except (TypeError, ConfigError) as cause:
            raise FormatMismatch(f"{path} holds an impossible manifest: {cause}; prefill again") from cause


def names_none(data: bytes) -> bool:
    """Whether this is no manifest of any version, as of a branch of a store that was saved by itself."""
    try:
        found = _files.parse_json(data or b"null")
    except ValueError:
        return False
    return not isinstance(found, dict) or "version" not in found


def _canonical(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def _seal(content: Any) -> str:
    return xxhash.xxh3_64_hexdigest(_canonical([VERSION, content]))
