"""Prompts read chunk by chunk through the cache, compared with dense prefill and clustering at the end.

    python -m experiments.main --config=configs/adaptive_prefill.py --workdir=runs/adaptive_prefill

Result: see docs/results/memory.md. Preset `:smoke` finishes within a minute.
"""

import ml_collections


def get_config(preset: str = "default") -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.experiment = "dynakv.adaptive_prefill"
    config.seed = 0
    config.model = ""  # empty: the reference model
    config.methods = ({"name": "dynakv", "budget": 256}, {"name": "quest", "budget": 256})
    config.chunks = (0, 64, 256)  # tokens read at a time; 0: the whole prompt densely
    config.lengths = (2048,)
    config.memory_lengths = (2048, 8192, 16384)
    config.staging_kib = 1024  # of blocks that wait to be written; the default of 64 MiB holds a whole prompt
    config.samples = 32
    config.batch = 8
    config.continuations = 8  # texts whose loss is measured
    config.perplexity_tokens = 32
    if preset == "smoke":
        config.update(lengths=(256,), memory_lengths=(512,), chunks=(64,), samples=2, batch=2, continuations=2,
                      perplexity_tokens=2)
        config.methods = ({"name": "dynakv", "budget": 128},)
    elif preset != "default":
        raise ValueError(f"unknown preset {preset!r}; use default or smoke")
    return config
