"""KVSwap (Zhang, Xia and Wang, "KVSwap: Disk-aware KV Cache Offloading for Long-Context On-device Inference").

The full cache is on disk. Memory holds a low-rank K cache, one r-vector per token for all KV heads together:
K_lr = Flatten(K) A, r = H_k d / sigma (section 3.2). While layer i - 1 computes, its input stands in for that of layer
i: layer i's projections turn it into a query, Eq. 1 scores every token, the scores of all heads are summed, a group of
G consecutive tokens scores as its best token, and the M best groups are read (section 3.3). The reuse buffer is
`kvjax.Slots(policy="fifo")`; the rolling buffer is described in `kvjax.methods.shared.lowrank`.

The mapping table is the slot table (`kvjax.cache.residency`): the groups that were kept, those just read and the one
that is still being filled are slots, which one gather collects. Sinks and window are separate, and attention over the
parts is merged by their log-sum-exps (`kvjax.ops.attention`).

Choices the paper leaves open:
  - "Attention scores" are summed after each head's softmax (`aggregation="softmax_mean"`), because raw products of
    different heads cancel out in a sum. A sum of raw products is the product with the sum of all low-rank queries, so
    `aggregation="mean"` takes one product instead of one per query head.
  - The paper attends the groups and the rolling buffer; sinks and window are added as for every method here. The group
    that is being filled counts among the groups that the budget allows, so the last selected group may be attended in
    part.

Adapters are fitted beforehand and lie beside the model (`configs/train_svd.py:beside`), as both reference models have
them. Where there are none, each prompt's own keys are decomposed at prefill, as in ShadowKV, at the cost of an
eigendecomposition of K D x K D numbers per layer and sequence. If there are fewer than r tokens between sinks and
window, they give as many directions as there are tokens, and the remaining directions are random. A prompt that is read
in chunks takes its directions from the first chunk.

Resident: r numbers per token, K D r of the adapter. Cost per step: r products per token and query head.
"""

import dataclasses
import functools
import logging
import os
import time
from typing import ClassVar

import jax
import jax.numpy as jnp

from kvjax.errors import ConfigError
from kvjax.methods.shared.adapters import Adapters, FoundAdapters, beside, load
from kvjax.methods.shared.fitted import read_once
from kvjax.methods.shared.lowrank import LowRankMethod, leading_directions, unknown_directions

OWN_KEYS = "prompt"  # `adapters` of each prompt's own keys
_SIGMA = 8
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class KVSwap(LowRankMethod):
    """A cache of token groups, selected by scores from a low-rank K cache.

    Attributes:
      adapters: the model's adapters, or the file that `Adapters.save` wrote; "prompt" = an SVD of each prompt's own
        keys; None = those that lie beside the model, or that SVD if there are none, which is logged.
      sigma: compression ratio H_k d / r; None = 8, or the ratio of the given adapters.
      per_head: whether each KV head is compressed by itself (the paper's per-head compression); given adapters decide
        this themselves.

    Raises:
      ConfigError: `sigma` is below 1 or differs from that of the adapters, or `per_head` is set but the adapters are
        for all heads together.
      ReadFailed, FormatMismatch, ChecksumMismatch: the adapters cannot be loaded (`kvjax.methods.shared.adapters`).
    """

    adapters: Adapters | str | os.PathLike | None = None
    sigma: int | None = None
    per_head: bool = False
    files: ClassVar[tuple[str, ...]] = ("adapters",)

    def __post_init__(self):
        super().__post_init__()
        if self.sigma is not None and self.sigma < 1:
            raise ConfigError(f"sigma={self.sigma} must be at least 1")
        if isinstance(self.adapters, os.PathLike):
            object.__setattr__(self, "adapters", os.fspath(self.adapters))
        fitted = self.fitted  # loaded now, so that a directory without adapters fails here, not at the first prompt
        if fitted is not None and self.sigma is not None and not fitted.has_ratio(self.sigma):
            raise ConfigError(f"sigma={self.sigma}, but the adapters' is {fitted.ratio:g}; leave `sigma` out")
        if fitted is not None and self.per_head and fitted.joint:
            raise ConfigError("per_head=True, but the adapters are for all heads together; give adapters of form "
                              "per_head (configs/train_svd.py), or set per_head=False")

    @property
    def fitted(self) -> Adapters | None:
        """The adapters as a value, loaded if a file was given; None if there are none."""
        if isinstance(self.adapters, Adapters | None) or self.adapters == OWN_KEYS:
            return self.adapters if isinstance(self.adapters, Adapters) else None
        return _loaded(os.fspath(self.adapters))

    @property
    def joint(self) -> bool:
        return not self.per_head if self.fitted is None else self.fitted.joint

    def for_model(self, folder, fingerprint, keys):
        if self.adapters is not None:
            return self
        layers, heads, size = keys
        path = beside(folder, self.joint, self.sigma or _SIGMA)
        found = _loaded(os.fspath(path), FoundAdapters) if path.exists() else None
        if found is not None and found.fingerprint == fingerprint:
            return dataclasses.replace(self, adapters=found)
        why = f"there is no {path}" if found is None else f"{path} was fitted to this model with other weights"
        _say_online(why, layers, heads * size if self.joint else size)
        return self

    def as_saved(self):
        return dataclasses.replace(self, adapters=None) if isinstance(self.adapters, FoundAdapters) else self

    def check_model(self, fingerprint):
        if self.fitted is not None:
            self.fitted.check_model(fingerprint)

    def weights(self, layer):
        if self.fitted is None:
            return ()
        if layer >= len(self.fitted.layers):
            raise ConfigError(f"the adapters are for {len(self.fitted.layers)} layers, but the model has more; fit "
                              "adapters to this model (configs/train_svd.py)")
        return self.fitted.layers[layer]

    def init(self, spec, weights):
        if self.fitted is None:
            return self.empty(spec, unknown_directions(spec, self._rank(spec), self.joint))
        if weights.shape[:2] != (spec.all_heads, spec.head_dim):
            raise ConfigError(f"the adapters are for {weights.shape[0]} KV heads of size {weights.shape[1]}, but the "
                              f"model has {spec.all_heads} of size {spec.head_dim}; fit adapters to this model "
                              "(configs/train_svd.py)")
        return self.empty(spec, spec.shards.own(jnp.asarray(weights)))

    def adapter(self, spec, index, context):
        if self.fitted is not None:
            return index.adapter
        return leading_directions(context.key, context.valid, self._rank(spec), self.joint, spec.shards)

    def _rank(self, spec) -> int:
        """Returns r of the prompt's own SVD."""
        size = spec.head_dim * (spec.all_heads if self.joint else 1)
        sigma = self.sigma or _SIGMA
        if sigma > size:
            raise ConfigError(f"sigma={sigma} leaves none of the {size} dimensions; lower it")
        return size // sigma


_loaded = read_once(load)


@functools.cache
def _say_online(why: str, layers: int, size: int) -> None:
    """Logs, once for each reason, that each prompt's own keys are decomposed, and what that takes on this machine.

    Args:
      why: why there are no adapters.
      layers: number of layers.
      size: dimensions that are decomposed together.
    """
    rows = jnp.zeros((1, 1, size), jnp.float32)
    decompose = jax.jit(functools.partial(leading_directions, rank=1, joint=True))
    jax.block_until_ready(decompose(rows, jnp.zeros(1, bool)))
    begin = time.perf_counter()
    jax.block_until_ready(decompose(rows, jnp.zeros(1, bool)))
    seconds = time.perf_counter() - begin
    _log.warning("kvswap decomposes the keys of each prompt, about %.2g s for each of %d layers, as %s; fit adapters "
                 "to this model (configs/train_svd.py:beside), or give adapters='prompt' to leave it so",
                 seconds, layers, why)
