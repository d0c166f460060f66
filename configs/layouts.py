"""Reads, writes and moves of every layout on flash, with DynaKV on the reference model.

    python -m experiments.main --config=configs/layouts.py --workdir=runs/layouts

Preset `:smoke` finishes within a minute.
"""

import ml_collections


def get_config(preset: str = "default") -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.experiment = "dynakv.layouts"
    config.model = ""  # empty: the reference model
    config.layouts = ("sequential", "grouped", "cluster_major", "dual_head")
    config.method = {"name": "dynakv", "budget": 256}
    config.batch = 2
    config.context = 2048
    config.steps = 2048  # times batch: 4,096 decoded tokens, up to the longest the reference model was trained on
    config.slots = 0  # 0: as few as one step may need
    config.staging_bytes = 1 << 20  # rows of a block wait until a quarter of this is used, and then become one write
    config.probe_every = 8
    if preset == "smoke":
        config.update(context=256, steps=24)
        config.method = {"name": "dynakv", "budget": 128}
    elif preset != "default":
        raise ValueError(f"unknown preset {preset!r}; use default or smoke")
    return config
