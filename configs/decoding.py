"""Time of a token of a model that decodes real text, with its own selections, and the store's share of it.

    python -m experiments.main --config=configs/decoding.py --workdir=runs/decoding --config.model=DIR

Without a model the reference model decodes. Preset `:smoke` finishes within a minute.
"""

import ml_collections


def get_config(preset: str = "default") -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.experiment = "speed.decoding"
    config.model = ""  # empty: the reference model
    config.dtype = "float32"  # of weights
    config.context = 1792  # tokens of the prompt
    config.chunk = 0  # tokens of the prompt that are read at once; 0: all
    config.warm_up = 64
    config.steps = 128  # tokens that are timed
    config.batch = 1
    config.driver = "fused"
    config.stores = ("memory", "flash")
    config.methods = (
        {"name": "full"}, {"name": "quest", "budget": 256}, {"name": "dynakv", "budget": 256},
        {"name": "kvswap", "budget": 256, "sigma": 2, "bits": 4, "per_head": True},
    )
    if preset == "smoke":
        config.update(context=384, warm_up=2, steps=6, stores=("flash",))
        config.methods = ({"name": "quest", "budget": 128}, {"name": "full", "slots": {"keep": False}})
    elif preset != "default":
        raise ValueError(f"unknown preset {preset!r}; use default or smoke")
    return config
