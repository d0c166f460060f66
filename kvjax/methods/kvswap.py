"""KVSwap (Zhang, Xia and Wang, "KVSwap: Disk-aware KV Cache Offloading for Long-Context On-device Inference").

The full cache is on disk. In memory there is a low-rank K cache, one r-vector per token for all KV heads together:
K_lr = Flatten(K) A, r = H_k d / sigma (section 3.2). While layer i - 1 computes, its input stands for that of layer i:
layer i's projections make a query of it, Eq. 1 scores every token, the scores of all heads are summed, a group of G
consecutive tokens counts as much as its best token, and the M best groups are read (section 3.3). The reuse buffer is
`kvjax.Slots(policy="fifo")`, the rolling buffer is described in `kvjax.methods.shared.lowrank`.

The mapping table is the slot table (`kvjax.cache.residency`): groups that were kept, those just read and the one that
is still being filled are slots, which one gather collects. Sinks and window are apart, and attention over the parts is
merged by their log-sum-exps (`kvjax.ops.attention`).

Choices the paper leaves open:
  - "attention scores" are summed after each head's softmax (`aggregation="softmax_mean"`). Raw products of different
    heads cancel out in the sum. It is that of one query, the sum of all low-rank queries, so that it takes one product
    instead of one per query head; "mean" does it so.
  - the paper attends the groups and the rolling buffer; sinks and window are there as for every method here. The group
    that is being filled counts as one of those the budget allows, so that of the last one selected only a part may be
    attended.

Adapters are fitted beforehand (`configs/train_svd.py`). Without any, each prompt's own keys are decomposed at prefill,
as ShadowKV does: it costs an eigendecomposition of K D x K D numbers per layer and sequence. Fewer than r tokens
between sinks and window give as many directions as they are, and the others are random; of a prompt that is read in
chunks they are those of the first chunk.

Resident: r numbers per token, K D r of the adapter. Cost per step: r products per token and query head.
"""

import dataclasses
import os
from typing import ClassVar

import jax.numpy as jnp

from kvjax.errors import ConfigError
from kvjax.methods.shared.adapters import Adapters, load
from kvjax.methods.shared.fitted import read_once
from kvjax.methods.shared.lowrank import LowRankMethod, leading_directions, unknown_directions

_SIGMA = 8


@dataclasses.dataclass(frozen=True)
class KVSwap(LowRankMethod):
    """Groups of tokens predicted from a low-rank K cache.

    Attributes:
      adapters: the model's, or the directory that `Adapters.save` wrote; None = an SVD of each prompt's own keys.
      sigma: compression ratio H_k d / r of that SVD; None = 8, or that of the given adapters.
      per_head: whether that SVD is one for each KV head (the paper's per-head compression); adapters say it themselves.

    Raises ConfigError for a sigma below 1 or another than the adapters', or `per_head` beside adapters for all heads,
    and what `kvjax.methods.shared.adapters.load` raises.
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
        fitted = self.fitted  # a directory without adapters is an error here and not at the first prompt
        if fitted is not None and self.sigma is not None and not fitted.has_ratio(self.sigma):
            raise ConfigError(f"sigma={self.sigma}, but the adapters' is {fitted.ratio:g}; leave sigma out")
        if fitted is not None and self.per_head and fitted.joint:
            raise ConfigError("per_head=True, but the adapters are for all heads together; give adapters of form "
                              "per_head (configs/train_svd.py), or per_head=False to KVSwap")

    @property
    def fitted(self) -> Adapters | None:
        """The adapters themselves."""
        return self.adapters if isinstance(self.adapters, Adapters | None) else _loaded(os.fspath(self.adapters))

    @property
    def joint(self) -> bool:
        return not self.per_head if self.fitted is None else self.fitted.joint

    def check_model(self, fingerprint):
        if self.fitted is not None:
            self.fitted.check_model(fingerprint)

    def weights(self, layer):
        if self.fitted is None:
            return ()
        if layer >= len(self.fitted.layers):
            raise ConfigError(f"the adapters are of {len(self.fitted.layers)} layers and the model has more; fit "
                              "adapters to this model (configs/train_svd.py)")
        return self.fitted.layers[layer]

    def init(self, spec, weights):
        if self.fitted is None:
            return self.empty(spec, unknown_directions(spec.kv_heads, spec.head_dim, self._rank(spec), self.joint))
        if weights.shape[:2] != (spec.kv_heads, spec.head_dim):
            raise ConfigError(f"the adapters are for {weights.shape[0]} KV heads of {weights.shape[1]} numbers, the "
                              f"model has {spec.kv_heads} of {spec.head_dim}; fit adapters to this model "
                              "(configs/train_svd.py)")
        return self.empty(spec, jnp.asarray(weights))

    def adapter(self, spec, index, context):
        if self.fitted is not None:
            return index.adapter
        return leading_directions(context.key, context.valid, self._rank(spec), self.joint)

    def _rank(self, spec) -> int:
        """r of the prompt's own SVD."""
        size = spec.head_dim * (spec.kv_heads if self.joint else 1)
        sigma = self.sigma or _SIGMA
        if sigma > size:
            raise ConfigError(f"sigma={sigma} leaves none of {size} dimensions; lower it")
        return size // sigma


_loaded = read_once(load)
