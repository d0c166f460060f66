"""Share of reading that is hidden behind computing: a sleeping reader and the real disk, with and without prefetch.

    python -m experiments.main --config=configs/overlap.py --workdir=runs/overlap

About three minutes; preset `:smoke` finishes within one.
"""

import ml_collections


def get_config(preset: str = "default") -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.experiment = "kvswap.overlap"
    config.layers = 16
    config.hidden = 1024
    config.context = 8192
    config.steps = 30
    config.threads = 4
    config.io_share = 0.8  # a layer's reads take this share of a layer's computing on the sleeping device
    config.method = ml_collections.ConfigDict({"budget": 292, "page": 64, "max_blocks": 4})
    config.devices = ("sleeping", "disk")
    config.drivers = ("staged", "fused")
    if preset == "smoke":
        config.update(layers=3, hidden=256, context=1024, steps=5)
    elif preset != "default":
        raise ValueError(f"unknown preset {preset!r}; use default or smoke")
    return config
