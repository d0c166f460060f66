"""Shift of the distribution of keys during decoding, and its effect with each way to update clusters.

    python -m experiments.main --config=configs/shift.py --workdir=runs/shift

Runtime: 3.5 CPU minutes for four of the strategies in one mode. Preset `:smoke` finishes within a minute.
"""

import ml_collections


def get_config(preset: str = "default") -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.experiment = "shift.study"
    config.seed = 0
    config.model = ""  # empty: the reference model
    config.kinds = ("code", "prose", "needles", "mixed")
    config.texts = 1  # of each kind
    config.modes = ("teacher", "sampled", "free")
    config.temperature = 1.0  # of sampled text
    config.prompt = 256  # tokens
    config.checkpoints = (0, 1, 2, 4, 8)  # decoded tokens, in prompt lengths
    config.steps = 48  # measured at each checkpoint
    config.recall_k = 16
    config.strategies = ("adaptive", "static", "local", "global", "no_cluster")
    config.method = {"budget": 128, "window": 16, "cluster": 16}
    config.pca = {"kind": "mixed", "layer": 1, "head": 0}
    if preset == "smoke":
        config.update(kinds=("mixed",), texts=1, modes=("teacher",), prompt=64, checkpoints=(0, 2), steps=16)
        config.strategies = ("adaptive", "global")
    elif preset != "default":
        raise ValueError(f"unknown preset {preset!r}; use default or smoke")
    return config
