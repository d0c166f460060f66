"""Leaderboard: every method x task x budget on the reference model, or on a user's with --config.model.

`config.tasks` takes any name of `kvjax.eval.tasks.TASKS`; a task that reads a file is written NAME:FILE. Prompts are
cut to `config.lengths` tokens, long ones in their middle.

    python -m experiments.main --config=configs/leaderboard.py --workdir=runs/leaderboard

A run prints first what it will hold in memory and how long it will take (--config.estimate_only=True stops there). It
can be stopped at any time, and goes on when it is started again; --config.shard=i/n runs every n-th task, length and
seed. Result: docs/results/leaderboard.md and a report.html for each length. Preset `:smoke` finishes within three
minutes; `:quick` is one task at two budgets, `:long` the second reference model at 8,192 tokens, `:ruler` RULER's
tasks, `:recall` MQAR and many questions about one context.

`:real` is a grid for a model of your own of half a billion parameters or more, for a day and longer on a small machine.
DATA is a folder with leval/*.jsonl and gsm8k/test.jsonl as their authors publish them; the first command makes the
table of delimiters that dynsplit and sentencekv need:

    python -m experiments.main --config=configs/delimiters.py --config.model=MODEL --workdir=runs/delimiters
    python -m experiments.main --config=configs/leaderboard.py:real --config.model=MODEL --config.data=DATA \
        --config.table=runs/delimiters/delimiters.json --workdir=runs/real

It has RULER's tasks without files at 4,096 tokens for all methods; for ten of them RULER's needles at 8,192, three at
16,384, L-Eval, GSM8K, and needles in 4,096 decoded tokens, with loss and recall by segment of these. Budgets are 1/32
and 1/8 of the context (of GSM8K's 1/16 and 1/8, of decoded text 1/8), the other methods' 1/8. Answers of needles end
after 64 tokens, RULER's after 128. It holds 10 GiB beside the weights and compiled programs (--config.hold_bytes).
`:real_ruler`, `:real_long`, `:real_files` and `:real_decoded` are parts of it, and `:real_qa` RULER's questions from
DATA/squad/dev-v2.0.json and DATA/hotpot/hotpot_dev_distractor_v1.json; all may go to one workdir. RULER's prompts are
its own plain ones with the beginning of the answer, GSM8K's eight worked examples in plain text; L-Eval is asked in the
model's chat template, if it has one.
"""

import ml_collections

from experiments.common import REFERENCE, REFERENCE_8K
from kvjax.eval.tasks import ruler

_EVERYWHERE = ("full", "oracle", "streaming_llm", "quest", "dynakv", "icecache", "kvswap", "dynsplit", "pqcache",
               "snapkv")
_SHARES = (1 / 32, 1 / 8)
_RULER = (
    {"tasks": tuple(ruler.NIAH), "lengths": (4096,), "samples": 16, "max_new_tokens": 64},
    {"tasks": ("vt", "cwe", "fwe"), "lengths": (4096,), "samples": 16},
)
_RULER_QA = {"tasks": ("qa_1:squad/dev-v2.0.json", "qa_2:hotpot/hotpot_dev_distractor_v1.json"), "lengths": (4096,),
             "samples": 16}
_LONG = (
    {"tasks": tuple(ruler.NIAH), "lengths": (8192,), "samples": 8, "max_new_tokens": 64, "methods": _EVERYWHERE},
    {"tasks": ("niah_single_2", "niah_multikey_1", "niah_multiquery"), "lengths": (16_384,), "samples": 6,
     "max_new_tokens": 64, "methods": _EVERYWHERE},
)
_FILES = (  # a choice is the first letter of an answer, so that these are short; lengths are about those of the texts
    {"tasks": ("leval:leval/tpo.jsonl",), "lengths": (4096,), "samples": 64, "max_new_tokens": 8,
     "methods": _EVERYWHERE},
    {"tasks": ("leval:leval/coursera.jsonl", "leval:leval/quality.jsonl"), "lengths": (8192,), "samples": 64,
     "max_new_tokens": 8, "methods": _EVERYWHERE},
    {"tasks": ("leval:leval/topic_retrieval_longchat.jsonl",), "lengths": (8192,), "samples": 24,
     "max_new_tokens": 32, "methods": _EVERYWHERE},
    # 1/32 of it would be less than sinks, window and a page.
    {"tasks": ("gsm8k:gsm8k/test.jsonl",), "lengths": (1024,), "samples": 64, "budgets": (64, 1 / 8),
     "methods": _EVERYWHERE},
)
_DECODED = {"tasks": ("decoded_needles",), "lengths": (1024,), "perplexity_tokens": 4096, "samples": 32,
            "budgets": (640,), "methods": _EVERYWHERE}  # 1/8 of 5,120 tokens: every token is a step
_REAL = {"real": (*_RULER, *_LONG, *_FILES, _DECODED), "real_ruler": _RULER, "real_qa": (_RULER_QA,),
         "real_long": _LONG, "real_files": _FILES, "real_decoded": (_DECODED,)}


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
    config.data = ""  # folder of the files in names of tasks
    config.table = ""  # file of the model's delimiters, for methods whose "table" is empty
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
    elif preset in _REAL:
        config.update(parts=_REAL[preset], budgets=_SHARES, hold_bytes=10 << 30, recall_every=16)
        config.methods = tuple(map(_for_any_model, config.methods))
    elif preset != "default":
        known = ", ".join(("default", "quick", "long", "ruler", "recall", "smoke", *_REAL))
        raise ValueError(f"unknown preset {preset!r}; use one of {known}")
    return config


def _for_any_model(settings: dict) -> dict:
    """Returns a method's settings with `config.table`; and with one budget unless it is among those of all parts."""
    own = {} if settings["name"] in _EVERYWHERE else {"budgets": _SHARES[1:]}
    return {**settings, **own, **({"table": ""} if "table" in settings else {})}
