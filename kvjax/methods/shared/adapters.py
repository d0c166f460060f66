"""Low-rank adapters of a model (KVSwap, section 3.2), as a value that can be hashed, saved and loaded."""

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
    """Immutable low-rank adapters, one per layer.

    Methods are compared, hashed and printed by their fields, which arrays do not support. Adapters are therefore no
    dataclass; two are equal if their bytes are.

    Attributes:
      layers: float32[K, D, r] of each layer: A_k, which projects a key or query of KV head k to r dimensions.
      joint: whether a token's projections are summed over its heads, which gives one r-vector per token (the paper's
        joint-head compression); if not, each head keeps its own.
      fingerprint: identity of the model whose keys they were fitted to (`kvjax.LLM.identity`).
    """

    def __init__(self, layers: Sequence[np.ndarray], joint: bool, fingerprint: str):
        self.layers = tuple(np.array(layer, np.float32) for layer in layers)
        self.joint, self.fingerprint = joint, fingerprint
        for layer in self.layers:
            layer.flags.writeable = False

    @property
    def rank(self) -> int:
        """r: numbers stored per token, for each head if not `joint`."""
        return self.layers[0].shape[-1]

    @property
    def ratio(self) -> float:
        """sigma: numbers of a token's keys over numbers stored of them."""
        heads, size, rank = self.layers[0].shape
        return heads * size / (rank if self.joint else heads * rank)

    def has_ratio(self, sigma: int) -> bool:
        """Returns whether adapters of compression ratio `sigma` have this rank, which is rounded down."""
        heads, size, rank = self.layers[0].shape
        return (heads * size if self.joint else size) // sigma == rank

    @functools.cached_property
    def digest(self) -> str:
        """Hash of `layers`, `joint` and `fingerprint`."""
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
        """Raises FormatMismatch unless the adapters were fitted to the model of this fingerprint."""
        if fingerprint != self.fingerprint:
            raise FormatMismatch(f"the adapters were fitted to the model {self.fingerprint!r}, not to {fingerprint!r}; "
                                 "use that model, or fit adapters to this one (configs/train_svd.py)")

    def save(self, directory: str | os.PathLike) -> None:
        """Writes an Orbax checkpoint, which replaces adapters in the directory once all of it is written.

        Args:
          directory: directory that is new, is empty, or holds adapters.

        Raises:
          WriteFailed: the directory holds something else, or writing fails.
        """
        from orbax.checkpoint import v1 as ocp  # takes a second or two to import, so only saving and loading do

        about = {"version": VERSION, "joint": self.joint, "fingerprint": self.fingerprint, "digest": self.digest}
        leaves = {str(i): layer for i, layer in enumerate(self.layers)}
        path = pathlib.Path(directory).expanduser().absolute()
        if path.exists() and not _may_be_replaced(path):
            raise WriteFailed(f"{directory} exists and holds something other than adapters, which is not overwritten; "
                              "choose another directory")
        try:
            with _files.replacing_directory(path) as fresh:
                ocp.save(fresh, leaves, custom_metadata=about)
        except Exception as cause:  # Orbax's drivers have errors of their own for a full device
            raise WriteFailed(f"writing {directory} failed: {cause}; choose another directory") from cause


def load(directory: str | os.PathLike) -> Adapters:
    """Returns the adapters that `Adapters.save` wrote.

    Args:
      directory: directory given to `Adapters.save`.

    Raises:
      ReadFailed: there are no adapters, or they cannot be read.
      FormatMismatch: they are of another version.
      ChecksumMismatch: they differ from what was written.
    """
    about, leaves = _read(pathlib.Path(directory).expanduser().absolute())
    if about.get("version") != VERSION:
        raise FormatMismatch(f"{directory} holds no adapters of version {VERSION}, the one this library reads; fit "
                             "them again (configs/train_svd.py)")
    layers = [leaves[str(i)] for i in range(len(leaves))]
    loaded = Adapters(layers, about["joint"], about["fingerprint"])
    if loaded.digest != about["digest"]:
        raise ChecksumMismatch(f"the adapters in {directory} differ from what was written; fit them again "
                               "(configs/train_svd.py)")
    return loaded


def _may_be_replaced(path: pathlib.Path) -> bool:
    """Returns whether a directory is empty or was written by `Adapters.save` of any version."""
    from orbax.checkpoint import v1 as ocp

    if path.is_dir() and not any(path.iterdir()):
        return True
    try:
        return {"version", "digest", "joint"} <= set(ocp.metadata(path).custom_metadata or {})
    except Exception:  # Orbax raises many types for something that is no checkpoint
        return False


def _read(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    from orbax.checkpoint import v1 as ocp

    try:
        return dict(ocp.metadata(path).custom_metadata or {}), ocp.load(path)
    except Exception as cause:  # Orbax and its drivers raise many types for missing or damaged files
        raise ReadFailed(f"{path} has no adapters that can be read: {cause}; give the directory that Adapters.save "
                         "wrote") from cause
