"""Leaderboard: every method x task x budget on the reference model, or on a user's with --config.model.

`config.tasks` takes any name of `kvjax.eval.tasks.TASKS`; a task that reads a file is written NAME:FILE. Prompts are
cut to `config.lengths` tokens, long ones in their middle.

    python -m experiments.main --config=configs/leaderboard.py --workdir=runs/leaderboard

A run prints first what it will hold in memory and how long it will take (--config.estimate_only=True stops there). It
can be stopped at any time, and goes on when it is started again; --config.shard=i/n runs every n-th task, length and
seed. Result: docs/results/leaderboard.md and report.html. Preset `:smoke` finishes within three minutes; `:quick` is
one task at two budgets, `:long` the second reference model at 8,192 tokens, `:ruler` RULER's tasks, `:recall` MQAR and
many questions about one context.
"""

import ml_collections

from experiments.common import REFERENCE, REFERENCE_8K
from kvjax.eval.tasks import ruler


def get_config(preset: str = "default") -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.experiment = "board.leaderboard"
    config.model = str(REFERENCE_8K) if preset == "long" else ""  # empty: the reference model
    config.dtype = "float32"  # of the weights
    table = str((REFERENCE_8K if preset == "long" else REFERENCE) / "delimiters.json")
    config.store = "host"
    config.shard = "0/1"
    config.tasks = ("passkey", "needle", "needle_of_4", "perplexity")
    config.lengths = (2048,)
    config.budgets = (64, 128, 256, 0.1)  # tokens, or a share of the context
    config.seeds = (0,)
    config.samples = 32
    config.batch = 8
    config.continuations = 16  # contexts of tasks that predict given tokens: perplexity, mqar
    config.max_new_tokens = 0  # most tokens of an answer; 0 = the task's number
    config.perplexity_tokens = 32  # predicted by perplexity, or decoded before the questions of decoded_needles
    config.recall_k = 16  # keys of the recall; 0 = steps are not compared with exact attention
    config.recall_every = 1  # steps of which one is compared
    config.question = "after"  # after the prompt, token by token; or "within" it, for methods that compress prompts
    config.hold_bytes = 4 << 30  # most bytes of activations and caches; batches are cut so that it is true
    config.parts = ()  # parts of the grid with fields of their own, as in `experiments.board.grid.PART`; () = one part
    config.estimate_only = False  # stop once the time of the grid is printed
    config.methods = (
        {"name": "full", "whole": True},
        {"name": "oracle", "window": 16},
        {"name": "random", "window": 16},
        {"name": "streaming_llm", "window": 16},
        {"name": "h2o", "window": 16},
        {"name": "snapkv", "window": 16, "observation": 16},
        {"name": "chunkkv", "window": 16, "observation": 16},
        {"name": "sentencekv", "window": 16, "observation": 16, "chunk": 16, "shortest": 6,
         "table": table},
        # The paper's dense layers and its filter layers, which attend everything, would be half the model or more.
        {"name": "omnikv", "window": 16, "dense_layers": 0, "reuse": 2, "dense_filters": False},
        {"name": "quest", "window": 16},
        {"name": "dynakv", "window": 16},
        {"name": "icecache", "window": 16, "dense_layers": 0},  # the paper's two would be half the model
        {"name": "kvswap", "window": 16},
        {"name": "dynsplit", "window": 16, "table": table},
        {"name": "infinigen", "window": 16},
        {"name": "loki", "window": 16},
        {"name": "shadowkv", "window": 16},
        {"name": "pqcache", "window": 16},
        {"name": "magicpig", "window": 16, "bits": 10, "tables": 150},
        {"name": "arkvale", "window": 16, "page": 16},
        {"name": "clusterkv", "window": 16},
        {"name": "infllm", "window": 16, "block": 16},
    )
    if preset == "smoke":
        config.update(tasks=("passkey", "perplexity"), lengths=(256,), budgets=(96,), samples=2, batch=2,
                      continuations=2, perplexity_tokens=2)
        config.methods = ({"name": "full", "whole": True}, {"name": "quest"}, {"name": "kvswap"})
    elif preset == "quick":
        config.update(tasks=("needle",), budgets=(64, 128))
    elif preset == "long":
        config.update(lengths=(8192,), budgets=(128,), continuations=8)
    elif preset == "ruler":
        config.update(tasks=(*ruler.NIAH, "vt", "cwe", "fwe"), budgets=(128, 256), samples=8)
    elif preset == "recall":
        config.update(tasks=("mqar", "multi_request"), budgets=(64, 128, 256))
    elif preset != "default":
        raise ValueError(f"unknown preset {preset!r}; use default, quick, long, ruler, recall or smoke")
    return config
