"""Hit rates of the residency policies beside Belady's optimum, on a recorded decode.

    python -m experiments.main --config=configs/residency.py --workdir=runs/residency

Four minutes on two busy CPU cores; result: docs/results/store.md. Preset `:smoke` finishes within a minute.
"""

import ml_collections


def get_config(preset: str = "default") -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.experiment = "kvswap.residency"
    config.seed = 0
    config.model = ""  # empty: the reference model
    config.context = 1024  # tokens of the prompt
    config.steps = 1024  # tokens decoded
    config.batch = 2
    config.times_needed = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)  # slots, as multiples of a step's most blocks
    config.methods = ({"name": "dynakv", "budget": 128}, {"name": "quest", "budget": 128})
    if preset == "smoke":
        config.update(context=192, steps=32, batch=1, times_needed=(1.5,))
        config.methods = ({"name": "dynakv", "budget": 80}, {"name": "quest", "budget": 64})
    elif preset != "default":
        raise ValueError(f"unknown preset {preset!r}; use default or smoke")
    return config
