"""Importance of a model's delimiters (DynSplit-KV, section 3 and Appendix B.1), in the files that `dynsplit` reads.

    python -m experiments.main --config=configs/delimiters.py --workdir=runs/delimiters

Writes `delimiters.json` (all kinds of text together) and `delimiters_KIND.json` to the workdir; `kvjax/reference/` and
`kvjax/reference_8k/` have the former for the reference models. Preset `:smoke` finishes within a minute.
"""

import ml_collections


def get_config(preset: str = "default") -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.experiment = "dynsplit.delimiters"
    config.seed = 0
    config.model = ""  # empty: the reference model
    config.kinds = ("prose", "code")
    config.texts = 12  # of each kind
    config.length = 1024
    config.importance = {"future": 8, "overlap": 128, "alpha": 1.0}
    config.least = 8  # occurrences below which a delimiter gets the mean score
    config.checkpoints = (1, 2, 4, 8, 12)  # texts after which the scores are compared with the final ones
    config.shown = 20  # delimiters in a printed table
    config.control = {  # Figure 3 d: the same method with the order of the delimiters reversed
        "method": {"name": "dynsplit", "budget": 128, "importance": "table"},
        "tasks": ("needle", "passkey", "perplexity"), "lengths": (1024,),
        "samples": 32, "batch": 8, "continuations": 8, "perplexity_tokens": 64,
    }
    if preset == "smoke":
        config.update(texts=2, length=256, least=2, checkpoints=(1, 2), shown=8)
        config.control.update(tasks=("perplexity",), lengths=(256,), samples=2, batch=2, continuations=2,
                              perplexity_tokens=4)
    elif preset != "default":
        raise ValueError(f"unknown preset {preset!r}; use default or smoke")
    return config
