"""The adapters of a model as a value that can be hashed, saved and loaded."""

import functools
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from kvjax import _files
from kvjax.errors import ChecksumMismatch, FormatMismatch, ReadFailed, WriteFailed

VERSION = 2


class Adapters:
    """One low-rank adapter per layer, immutable.

    Not a dataclass: methods are compared, hashed and described by their fields, and arrays can be none of that. Two
    values are equal when their bytes are.

    Attributes:
      layers: f32[K, D, r] of each layer: A_k, which takes a key or query of KV head k to r dimensions.
      joint: whether a token's projections are summed over its heads, which gives one r-vector per token (the paper's
        joint-head compression); if not, each head keeps its own.
      fingerprint: of the model whose keys they were fitted to (`kvjax.LLM.identity`).
    """

    def __init__(self, layers: Sequence[np.ndarray], joint: bool, fingerprint: str):
        self.layers = tuple(np.array(layer, np.float32) for layer in layers)
        self.joint, self.fingerprint = joint, fingerprint
        for layer in self.layers:
            layer.flags.writeable = False

    @property
    def rank(self) -> int:
        """r: numbers kept per token, by each head if not `joint`."""
        return self.layers[0].shape[-1]

    @property
    def ratio(self) -> float:
        """sigma: numbers of a token's keys over numbers kept of them."""
        heads, size, rank = self.layers[0].shape
        return heads * size / (rank if self.joint else heads * rank)

    def has_ratio(self, sigma: int) -> bool:
        """Whether adapters of that sigma have this rank, which is a whole number."""
        heads, size, rank = self.layers[0].shape
        return (heads * size if self.joint else size) // sigma == rank

    @functools.cached_property
    def digest(self) -> str:
        """Of everything that makes the value what it is."""
        total = xxhash.xxh3_128(f"{self.joint} {self.fingerprint}".encode())
        for layer in self.layers:
            total.update(f"{layer.shape}".encode())
            total.update(layer.tobytes())
        return total.hexdigest()

    def __eq__(self, other) -> bool:
        return isinstance(other, Adapters) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Adapters(layers={len(self.layers)}, rank={self.rank}, joint={self.joint}, digest={self.digest})"

    def check_model(self, fingerprint: str) -> None:
        """Raises FormatMismatch unless they were fitted to the model of that fingerprint."""
        if fingerprint != self.fingerprint:
            raise FormatMismatch(f"the adapters were fitted to the model {self.fingerprint!r}, not to {fingerprint!r}; "
                                 "use that model, or fit adapters to this one (configs/train_svd.py)")

    def save(self, directory: str | os.PathLike) -> None:
        """Writes an Orbax checkpoint; adapters that are there make way once all of it is written, for anything else
        it raises WriteFailed, as it does where writing fails."""
        from orbax.checkpoint import v1 as ocp  # imports for a second or two, which only those should wait for who save

        about = {"version": VERSION, "joint": self.joint, "fingerprint": self.fingerprint, "digest": self.digest}
        leaves = {str(i): layer for i, layer in enumerate(self.layers)}
        path = pathlib.Path(directory).absolute()
        if path.exists() and not _may_be_replaced(path):
            raise WriteFailed(f"{directory} exists and has no adapters, which new ones could replace; choose another "
                              "directory")
        try:
            with _files.replacing_directory(path) as fresh:
                ocp.save(fresh, leaves, custom_metadata=about)
        except Exception as cause:  # Orbax's drivers have errors of their own for a full device
            raise WriteFailed(f"writing {directory} failed: {cause}; choose another directory") from cause


def load(directory: str | os.PathLike) -> Adapters:
    """The adapters that `Adapters.save` wrote.

    Raises ReadFailed where there are none or they cannot be read, FormatMismatch for those of another version, and
    ChecksumMismatch for those that are not what was written.
    """
    about, leaves = _read(pathlib.Path(directory).absolute())
    if about.get("version") != VERSION:
        raise FormatMismatch(f"{directory} holds no adapters of version {VERSION}, which this library reads; fit them "
                             "again (configs/train_svd.py)")
    layers = [leaves[str(i)] for i in range(len(leaves))]
    found = Adapters(layers, about["joint"], about["fingerprint"])
    if found.digest != about["digest"]:
        raise ChecksumMismatch(f"the adapters in {directory} are not what was written; fit them again")
    return found


def _may_be_replaced(path: pathlib.Path) -> bool:
    """Whether a directory is empty, or `Adapters.save` wrote it, of whatever version."""
    from orbax.checkpoint import v1 as ocp

    if path.is_dir() and not any(path.iterdir()):
        return True
    try:
        return {"version", "digest", "joint"} <= set(ocp.metadata(path).custom_metadata or {})
    except Exception:  # whatever Orbax raises for what is no checkpoint
        return False


def _read(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    from orbax.checkpoint import v1 as ocp

    try:
        return dict(ocp.metadata(path).custom_metadata or {}), ocp.load(path)
    except Exception as cause:  # whatever Orbax and its drivers raise for missing or damaged files
        raise ReadFailed(f"{path} has no adapters that can be read: {cause}; give the directory that Adapters.save "
                         "wrote") from cause
