"""Accuracy of the reference model on retrieval tasks, and of each method relative to it.

    python -m experiments.main --config=configs/evaluate.py --workdir=runs/evaluate

Runtime and result: see docs/results/leaderboard.md. Preset `:smoke` finishes within a minute.
"""

import ml_collections


def get_config(preset: str = "default") -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.experiment = "board.evaluate"
    config.seed = 0
    config.model = ""  # empty: the reference model
    config.tasks = ("passkey", "needle", "needle_of_4", "perplexity")
    config.lengths = (512, 2048)
    config.samples = 128
    config.batch = 8
    config.continuations = 8  # texts whose perplexity is measured
    config.perplexity_tokens = 64
    config.methods = (
        {"name": "full"},
        {"name": "oracle", "budget": 128},
        {"name": "streaming_llm", "budget": 128},
        {"name": "quest", "budget": 128},
        {"name": "dynakv", "budget": 128},
    )
    if preset == "smoke":
        config.update(tasks=("passkey", "perplexity"), lengths=(256,), samples=4, batch=4, continuations=4,
                      perplexity_tokens=4)
        config.methods = ({"name": "full"}, {"name": "quest", "budget": 128})
    elif preset != "default":
        raise ValueError(f"unknown preset {preset!r}; use default or smoke")
    return config
