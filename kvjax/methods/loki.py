"""Loki (Singhania et al., 2024): tokens ranked by the leading principal components of their keys, per head.

Each key is stored once more as its coordinates in a few principal components, and each head reads the tokens with the
best approximate scores. This is Loki as KVSwap compares with it: the scores are computed one layer ahead. Components
are fitted to rotated keys that are not centred; the paper centres keys for the fit alone.

Resident: D / sigma numbers per token and KV head. Cost per step: as many products per token and query head.
"""

import dataclasses

from kvjax.errors import ConfigError
from kvjax.methods.kvswap import KVSwap


@dataclasses.dataclass(frozen=True)
class Loki(KVSwap):
    """A cache of single tokens, ranked by per-head components.

    `adapters` must be of form per_head (configs/train_svd.py). Raises ConfigError for joint adapters.
    """

    group: int = 1
    shared: bool = False
    per_head: bool = True

    def __post_init__(self):
        super().__post_init__()
        if self.joint:
            raise ConfigError("Loki needs components of each head; give adapters of form per_head, and leave per_head "
                              "at True")
