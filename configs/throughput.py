"""Decode speed of methods, stores and contexts, beside the machine's limits.

    python -m experiments.main --config=configs/throughput.py --workdir=runs/throughput

With the `oracles` extra installed, transformers is measured in the same run. Preset `:smoke`
finishes within a minute; `:quick` is one shape at two contexts, with alternating methods.
"""

import ml_collections

_DYNAKV = {"name": "dynakv", "budget": 512, "cluster": 32, "iterations": 2}  # a budget of about 15 clusters


def get_config(preset: str = "default") -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.experiment = "speed.throughput"
    config.models = ("reference", "llama-1b-4l", "cache-path")
    config.dtype = "float32"  # of weights; a method's "dtype" is that of keys and values
    config.contexts = (8192, 32768)
    config.batches = (1,)
    config.stores = ("memory", "flash")
    config.methods = (
        {"name": "full"}, {"name": "quest", "budget": 512}, _DYNAKV, {"name": "streaming_llm", "budget": 512},
    )
    config.drivers = ("staged", "fused")
    config.steps = 40
    config.rounds = 1  # more: methods of one shape, store, context and batch alternate, with all their caches held
    config.slots = 0  # 0: as few as one step may need
    config.transformers = True
    if preset == "smoke":
        config.update(models=("reference",), contexts=(512,), steps=8, rounds=2)
        config.methods = ({"name": "full"}, {"name": "quest", "budget": 128})
    elif preset == "quick":
        config.update(models=("cache-path",), stores=("memory",), rounds=5)
    elif preset != "default":
        raise ValueError(f"unknown preset {preset!r}; use default, quick or smoke")
    return config
