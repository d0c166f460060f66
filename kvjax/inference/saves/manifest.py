"""The manifest of a saved cache: how the cache was made and which state file is valid, sealed by a checksum."""

import dataclasses
import json
import pathlib
import re
from typing import Any

import xxhash

from kvjax import _files, _validate
from kvjax.errors import ChecksumMismatch, ConfigError, FormatMismatch, ReadFailed

# 6: a sealed manifest beside one state file, pending tokens, keys that are smoothed before they are packed
VERSION = 6
_MOST_TOKENS = 1 << 40  # beyond, sizes of arrays overflow
_STATE = re.compile(r"state-[0-9a-f]{12}")
Pending = tuple[tuple[int, ...], ...]  # tokens of each sequence that must be fed before anything else


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A description of how a saved cache was made and which state file is valid.

    Attributes:
      state: name of the state file, without suffix.
      checksum: checksum of the arrays in the state file, in hexadecimal digits.
      fingerprint: fingerprint of model and tokenizer.
      method: name of the method in `kvjax.METHODS`, or the class of one that is not there.
      settings: settings of the method.
      batch, capacity, dtype: sizes of the plan (`kvjax.inference.plan.Plan`).
      slots: arguments of `kvjax.Slots`; empty for a cache in memory.
      pending: token ids [B][n] that must be fed before anything else; [] = none.
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
            raise ConfigError(f"state={self.state!r:.80} is not the name of a state file")
        if not 1 <= self.batch * self.capacity <= _MOST_TOKENS:
            raise ConfigError(f"batch={self.batch} sequences of capacity={self.capacity} tokens are out of range")
        if len(self.pending) not in (0, self.batch):
            raise ConfigError(f"pending tokens are of {len(self.pending)} sequences, but batch={self.batch}")
        if not all(isinstance(row, list) and all(_validate.whole(token, 0) for token in row) for row in self.pending):
            raise ConfigError("pending must be lists of token ids")

    def pack(self) -> bytes:
        """Returns the manifest as sealed JSON."""
        content = dataclasses.asdict(self)
        return _canonical({"version": VERSION, "manifest": content, "seal": _seal(content)})

    @classmethod
    def unpack(cls, data: bytes, path: pathlib.Path) -> "Manifest":
        """Parses the result of `pack`.

        Args:
          data: contents of the file, or the metadata of a store file's commit.
          path: path of the file, for messages.

        Returns:
          The manifest.

        Raises:
          ReadFailed: the data is not JSON.
          ChecksumMismatch: the data was damaged.
          FormatMismatch: the data is of another version, has impossible values, or is not a manifest.
        """
        try:
            parsed = _files.parse_json(data or b"null")
        except ValueError as cause:
            raise ReadFailed(f"{path} cannot be read: {cause}; prefill again") from cause
        if not isinstance(parsed, dict) or not ({"version", "manifest"} <= parsed.keys() or
                                                {"version", "state"} <= parsed.keys()):
            raise FormatMismatch(f"{path} holds something else than a saved cache; choose another directory")
        if parsed["version"] != VERSION:
            raise FormatMismatch(f"{path} was saved in version {parsed['version']!r:.20}, but this library reads "
                                 f"{VERSION}; prefill again, or restore it with the kvjax that saved it")
        content = parsed.get("manifest")
        if not isinstance(content, dict) or parsed.get("seal") != _seal(content):
            raise ChecksumMismatch(f"{path} is not what was written: the device or another program damaged it; prefill "
                                   "again")
        try:
            return cls(**content)
        except (TypeError, ConfigError) as cause:
            raise FormatMismatch(f"{path} holds an impossible manifest: {cause}; prefill again") from cause


def names_none(data: bytes) -> bool:
    """Returns True if this is not a manifest of any version, as after a branch of a store was saved by itself."""
    try:
        parsed = _files.parse_json(data or b"null")
    except ValueError:
        return False
    return not isinstance(parsed, dict) or "version" not in parsed


def _canonical(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def _seal(content: Any) -> str:
    return xxhash.xxh3_64_hexdigest(_canonical([VERSION, content]))
