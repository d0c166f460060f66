"""Low-rank adapters of a model (KVSwap, section 3.2), as a value that can be hashed, saved and loaded."""

import functools
import os
import pathlib
from collections.abc import Sequence

import numpy as np
import safetensors
import xxhash
from safetensors.numpy import save as serialise

from kvjax import _files
from kvjax.errors import ChecksumMismatch, FormatMismatch, ReadFailed, WriteFailed

_MOST_BYTES = 4 << 30  # limit for a file
_ABOUT = {"version", "joint", "fingerprint", "digest"}
_VERSION = "3"


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
    def ranks(self) -> tuple[int, ...]:
        """r of each layer: numbers stored per token, for each head if not `joint`."""
        return tuple(layer.shape[-1] for layer in self.layers)

    @property
    def ratio(self) -> float:
        """sigma: numbers of a token's keys over numbers stored of them, in all layers together."""
        size = self._size
        return size * len(self.layers) / sum(self.ranks)

    def has_ratio(self, sigma: int) -> bool:
        """Returns whether adapters of compression ratio `sigma` have so many dimensions; a layer's are rounded down."""
        return self._size // sigma * len(self.layers) == sum(self.ranks)

    @property
    def _size(self) -> int:
        """Dimensions that are projected together."""
        heads, size, _ = self.layers[0].shape
        return heads * size if self.joint else size

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
        ranks = sorted(set(self.ranks))
        return (f"Adapters(layers={len(self.layers)}, rank={'..'.join(map(str, ranks[:1] + ranks[1:][-1:]))}, "
                f"joint={self.joint}, digest={self.digest})")

    def check_model(self, fingerprint: str) -> None:
        """Raises FormatMismatch unless the adapters were fitted to the model of this fingerprint."""
        if fingerprint != self.fingerprint:
            raise FormatMismatch(f"the adapters were fitted to the model {self.fingerprint!r}, not to {fingerprint!r}; "
                                 "use that model, or fit adapters to this one (configs/train_svd.py)")

    def save(self, path: str | os.PathLike) -> None:
        """Writes a safetensors file, which replaces adapters at the path once all of it is written.

        Args:
          path: path of the file, at which there is nothing, or adapters; missing directories are made.

        Raises:
          WriteFailed: there is something else at the path, or writing fails.
        """
        target = pathlib.Path(path).expanduser()
        about = {"version": _VERSION, "joint": str(self.joint), "fingerprint": self.fingerprint, "digest": self.digest}
        leaves = {f"layers.{i}": layer for i, layer in enumerate(self.layers)}
        try:
            if target.exists() and not set(_about(target)) >= _ABOUT:
                raise ValueError("it holds something other than adapters, which is not overwritten")
            target.parent.mkdir(parents=True, exist_ok=True)
            with _files.replacing(target) as fresh:
                fresh.write_bytes(serialise(leaves, about))  # of the mode that the umask leaves
        except (OSError, ValueError, safetensors.SafetensorError) as cause:
            raise WriteFailed(f"writing {path} failed: {cause}; choose another path") from cause


class FoundAdapters(Adapters):
    """Adapters that were found beside their model, so that saved caches need not name them."""


def beside(folder: pathlib.Path, joint: bool, sigma: int) -> pathlib.Path:
    """Returns where the adapters of a form lie in the folder of what was fitted to a model (`kvjax.LLM.folder`)."""
    return folder / "adapters" / f"{'joint' if joint else 'per_head'}_{sigma}.safetensors"


def load(path: str | os.PathLike, kind: type[Adapters] = Adapters) -> Adapters:
    """Returns the adapters that `Adapters.save` wrote.

    Args:
      path: path given to `Adapters.save`.
      kind: class of the result.

    Raises:
      ReadFailed: there are no adapters, or they cannot be read.
      FormatMismatch: they are of another version.
      ChecksumMismatch: they differ from what was written.
    """
    file = pathlib.Path(path).expanduser()
    try:
        about = _about(file)
        entries = dict(safetensors.deserialize(_files.read_regular(file, _MOST_BYTES)))
        layers = [np.frombuffer(entry["data"], np.float32).reshape(entry["shape"])
                  for entry in (entries[f"layers.{i}"] for i in range(len(entries)))]
    except (OSError, ValueError, KeyError, safetensors.SafetensorError) as cause:
        raise ReadFailed(f"{path} has no adapters that can be read: {cause}; give the file that Adapters.save "
                         "wrote") from cause
    if about.get("version") != _VERSION or not set(about) >= _ABOUT:
        raise FormatMismatch(f"{path} holds no adapters of version {_VERSION}, the one this library reads; fit them "
                             "again (configs/train_svd.py)")
    loaded = kind(layers, about["joint"] == "True", about["fingerprint"])
    if not layers or loaded.digest != about["digest"]:
        raise ChecksumMismatch(f"the adapters in {path} differ from what was written; fit them again "
                               "(configs/train_svd.py)")
    return loaded


def _about(file: pathlib.Path) -> dict[str, str]:
    """Returns what a file says about its adapters; empty if it is a safetensors file of something else."""
    with _files.open_regular(file):  # a FIFO would block
        pass
    with safetensors.safe_open(file, "np") as opened:
        return dict(opened.metadata() or {})
