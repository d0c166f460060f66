"""Shift of the distribution of keys during decoding, and its effect on all that is fitted to keys.

    python -m experiments.main --config=configs/shift.py[:PRESET] --workdir=runs/shift[_PRESET]

    default    clusters, codebooks, adapters and pages, 8 texts of each of four kinds
    clusters   DynaKV's ways to update clusters, one text of each kind
    large      fewer strategies, shorter and smaller batches, for --config.model=DIR of some hundred million parameters
    smoke      finishes within a minute

Resumable. A strategy is a key of `config.structures`; `config.method` has the settings that they share.
"""

import ml_collections

_CLUSTERS = ("adaptive", "static", "local", "global", "no_cluster")


def get_config(preset: str = "default") -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.experiment = "shift.study"
    config.seed = 0
    config.model = ""  # empty: the reference model
    config.dtype = "float32"  # of the weights
    config.kinds = ("code", "prose", "needles", "mixed")
    config.texts = 8  # of each kind
    config.batch = 32  # texts decoded at once
    config.modes = ("teacher", "free")
    config.temperature = 1.0  # of sampled text
    config.prompt = 256  # tokens
    config.checkpoints = (0, 1, 2, 4, 8)  # decoded tokens, in prompt lengths
    config.steps = 48  # measured at each checkpoint
    config.recall_k = 16
    config.method = {"budget": 128, "window": 16, "cluster": 16}
    kvswap = {"name": "kvswap", "sigma": 4, "adapters": "prompt"}
    config.structures = {
        "adaptive": {"name": "dynakv"}, "static": {"name": "dynakv", "update": "static"},
        "local": {"name": "dynakv", "update": "local"},
        "global": {"name": "dynakv", "update": "static", "refit": True},  # k-means over the whole cache
        "clusterkv": {"name": "clusterkv"},
        "pqcache 2x6": {"name": "pqcache", "parts": 2, "bits": 6},
        "pqcache 4x8": {"name": "pqcache", "parts": 4, "bits": 8},
        "pqcache 4x8 refit": {"name": "pqcache", "parts": 4, "bits": 8, "refit": True},
        "kvswap fitted": {"name": "kvswap", "adapters": "fitted"},  # beforehand, to other texts
        "kvswap prompt": kvswap, "kvswap refit": {**kvswap, "refit": True},
        "quest": {"name": "quest"},
        "no_cluster": {"name": "oracle"},
    }
    config.strategies = tuple(config.structures)
    config.fit = {"kinds": ("code", "prose"), "ratio": 4, "batches": 16, "batch": 2, "length": 1024, "documents": 400,
                  "seed": 0}
    config.pca = {"kind": "mixed", "layer": 1, "head": 0}
    if preset == "clusters":
        config.update(texts=1, modes=("teacher", "sampled", "free"), strategies=_CLUSTERS)
    elif preset == "large":
        config.update(batch=8, checkpoints=(0, 1, 4), strategies=(
            "adaptive", "static", "pqcache 2x6", "pqcache 4x8", "kvswap fitted", "kvswap prompt", "quest",
        ))
        config.fit.update(batches=4, batch=1)
    elif preset == "smoke":
        config.update(kinds=("mixed", "code"), texts=2, batch=4, modes=("teacher",), prompt=64, checkpoints=(0, 2),
                      steps=16, strategies=("adaptive", "kvswap fitted"))
        config.fit.update(batches=1, length=128, documents=8)
    elif preset != "default":
        raise ValueError(f"unknown preset {preset!r}; use default, clusters, large or smoke")
    return config
