"""Drift of long generations: texts written with each method, scored by full attention window by window.

    python -m experiments.main --config=configs/long_generation.py --workdir=runs/long_generation

Resumable. Preset `:smoke` is two methods and 24 tokens.
"""

import ml_collections


def get_config(preset: str = "default") -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.experiment = "board.long_generation"
    config.model = ""  # empty: the reference model
    config.store = "memory"
    config.seed = 0
    config.context = 512
    config.new_tokens = 1024
    config.window = 128
    config.batch = 8
    config.methods = (
        {"name": "full"},
        {"name": "oracle", "budget": 128, "window": 16},
        {"name": "streaming_llm", "budget": 128, "window": 16},
        {"name": "quest", "budget": 128, "window": 16},
        {"name": "dynakv", "budget": 128, "window": 16},
        {"name": "dynakv", "budget": 128, "window": 16, "update": "static", "label": "dynakv_static"},
    )
    if preset == "smoke":
        config.update(context=128, new_tokens=24, window=12, batch=2)
        config.methods = ({"name": "full"}, {"name": "quest", "budget": 64, "window": 16})
    elif preset != "default":
        raise ValueError(f"unknown preset {preset!r}; use default or smoke")
    return config
