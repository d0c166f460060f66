"""Loki (Singhania et al., 2024): tokens ranked by the leading principal components of their keys, each head for itself.

As compared with in KVSwap: its approximate scores predict, one layer ahead, which tokens to read. Components are those
of the keys as they are, rotated and not centred; the paper centres them for the fit alone.

Resident: D / sigma numbers per token and KV head. Cost per step: as many products per token and query head.
"""

import dataclasses

from kvjax.errors import ConfigError
from kvjax.methods.kvswap import KVSwap


@dataclasses.dataclass(frozen=True)
class Loki(KVSwap):
    """Single tokens by per-head components; `adapters` are those of `form` per_head in configs/train_svd.py."""

    group: int = 1
    shared: bool = False
    per_head: bool = True

    def __post_init__(self):
        super().__post_init__()
        if self.joint:
            raise ConfigError("Loki has components of each head; give adapters of form per_head, and per_head=True")
