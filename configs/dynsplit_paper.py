"""The tables of DynSplit-KV on the reference model.

    python -m experiments.main --config=configs/dynsplit_paper.py[:PRESET] --workdir=runs/dynsplit_paper[_PRESET]

    default    accuracy at 7.5 to 15 % of the cache (Figure 6), the ablations of Figure 11 and Table 6 at 10 %
    weights    where the weights of delimiters come from, and which are candidates, at 10 %
    sweep      Delta, alpha and the form of p_e at 10 %
    uncapped   the ablations without the cap of 18 tokens, with blocks of up to 64 tokens
    tenth      10 % of the cache compared with all of it, with four times as many samples
    passkey    passkey retrieval by budget (Table 3)
    passkey_8k the same at 8,192 tokens, the most that the second reference model reads
    latency    ms per token and memory at 32K tokens, 7.5 and 10 % of them, beside the full cache (Figures 8 and 9)
    outputs    seconds for 256 to 4,096 tokens after 32K (Figure 8)
    memory     memory by batch and length: the cache's, and what a step takes beside it (Figure 10)
    reuse      ms per token without reuse, and with blocks of earlier steps reused by each head, or equally many by all
               (Figure 12)
    smoke      finishes within a minute
"""

import ml_collections

from experiments.common import REFERENCE, REFERENCE_8K

_DYNSPLIT = {"name": "dynsplit", "table": str(REFERENCE / "delimiters.json")}
_TIMED = {**_DYNSPLIT, "importance": "table"}
_CHANGES = {
    "dynsplit": {}, "fixed": {"splitting": "fixed"}, "sentence": {"splitting": "sentence"},
    "no length": {"splitting": "no_length"}, "no weight": {"splitting": "no_weight"}, "mean": {"vectors": "mean"},
}
_WEIGHTS = {
    "prompt": {}, **{f"last {count} of the prompt": {"observation": count} for count in (256, 1024)},
    "table": {"importance": "table"},
    "equal": {"splitting": "no_weight"}, "prompt, 13 marks": {"candidates": "paper"},
    "table, 13 marks": {"candidates": "paper", "importance": "table"},
    "equal, 13 marks": {"candidates": "paper", "splitting": "no_weight"}, "fixed": {"splitting": "fixed"},
}
_SWEEP = {
    "dynsplit": {}, **{f"Delta {tokens}": {"deviation": tokens} for tokens in (1, 2, 6, 8)},
    **{f"alpha {share:g}": {"alpha": share} for share in (0.0, 0.25, 0.75, 1.0)},
    **{f"p_e {form}": {"closeness": form} for form in ("quadratic", "inverse")},
}
_UNCAPPED = {  # the window has to hold the tokens that decide where a block of 64 tokens ends
    "dynsplit": {"window": 64}, "fixed": {"window": 64, "splitting": "fixed"},
    **{f"{name.replace('_', ' ')}, up to {most}": {"window": 64, "splitting": name, "longest": most}
       for name in ("sentence", "no_length") for most in (18, 64)},
}


def get_config(preset: str = "default") -> ml_collections.ConfigDict:
    timed = {
        "latency": _timed, "reuse": _reused, "memory": _memory,
        "outputs": lambda: _timed(stores=("memory",), steps=4096, outputs=(256, 512, 1024, 2048, 4096)),
    }
    config = ml_collections.ConfigDict()
    config.seed = 0
    config.model = ""  # empty: the reference model
    config.continuations = 8
    config.perplexity_tokens = 64
    config.samples = 32
    config.batch = 8
    config.experiment = "board.evaluate"
    config.tasks = ("needle", "needle_of_4", "perplexity")
    config.lengths = (2048,)
    tenth = 205  # of 2,048 tokens
    by_rate = tuple({**_DYNSPLIT, "budget": round(rate * 2048)} for rate in (0.075, 0.125, 0.15))
    config.methods = (*_beside_full(_CHANGES, tenth), *by_rate)
    changes = {"weights": _WEIGHTS, "sweep": _SWEEP, "uncapped": _UNCAPPED}
    if preset in changes:
        config.methods = _beside_full(changes[preset], tenth)
    elif preset == "tenth":
        config.update(tasks=("passkey", "needle", "needle_of_4"), samples=128)
        config.methods = ({"name": "full"}, {**_DYNSPLIT, "budget": tenth})
    elif preset in ("passkey", "passkey_8k"):
        config.update(tasks=("passkey",))
        dynsplit = _DYNSPLIT
        if preset == "passkey_8k":
            config.update(model=str(REFERENCE_8K), lengths=(8192,), batch=4)
            dynsplit = {**_DYNSPLIT, "table": str(REFERENCE_8K / "delimiters.json")}
        config.methods = tuple(
            {**method, "budget": budget, "window": 14}  # leaves room for a block in the smallest budget
            for budget in (36, 64, 128, 256, 512)
            for method in ({"name": "streaming_llm"}, {"name": "quest"}, dynsplit)
        )
    elif preset in timed:
        return timed[preset]()
    elif preset == "smoke":
        config.update(tasks=("passkey", "perplexity"), lengths=(256,), samples=4, batch=4, continuations=4,
                      perplexity_tokens=4)
        config.methods = ({"name": "full"}, *({**_DYNSPLIT, "budget": 96, "label": name, **_WEIGHTS[name]}
                                              for name in ("prompt", "table")))
    elif preset != "default":
        raise ValueError(f"unknown preset {preset!r}; use default, {', '.join(changes)}, tenth, passkey, "
                         f"passkey_8k, {', '.join(timed)} or smoke")
    return config


def _beside_full(changes: dict[str, dict], budget: int) -> tuple[dict, ...]:
    """Returns the full cache, Quest and DynSplit-KV with each change, under the names of the changes."""
    changed = ({**_DYNSPLIT, "budget": budget, "label": name, **change} for name, change in changes.items())
    return {"name": "full"}, {"name": "quest", "budget": budget}, *changed


def _timed(**changes) -> ml_collections.ConfigDict:
    """Returns a timed run. Made-up prompts have neither token ids nor queries, so that weights are a table's and blocks
    have the ideal length; sizes and costs are those of any text."""
    config = ml_collections.ConfigDict({
        "experiment": "speed.throughput", "models": ("cache-path",), "contexts": (32768,), "batches": (1,),
        "stores": ("memory", "flash"), "drivers": ("fused",), "steps": 24, "rounds": 1, "slots": 0,
        "transformers": False,
        "methods": ({"name": "full"}, {**_TIMED, "budget": 2458}, {**_TIMED, "budget": 3277}),
    })
    config.update(changes)
    return config


def _reused():
    """Uses slots for twice the attended blocks, over flash and over memory; with "even", heads reuse equally many
    (Appendix B.2)."""
    method, slots = {**_TIMED, "budget": 3277}, {"count": 656, "policy": "lru"}
    return _timed(stores=("flash", "host"), methods=(
        {**method, "label": "none", "slots": {"keep": False}}, {**method, "label": "each head", "slots": slots},
        {**method, "label": "even", "slots": {**slots, "even": True}},
    ))


def _memory():
    """Attends a tenth of the tokens with blocks on flash, beside the full cache in memory."""
    contexts, full = (8192, 16384, 32768), {"name": "full", "only": {"stores": ("memory",)}}
    tenth = tuple(
        {**_TIMED, "budget": round(context / 10), "only": {"stores": ("flash",), "contexts": (context,)}}
        for context in contexts
    )
    return _timed(contexts=contexts, batches=(1, 4), steps=4, temporaries=True, methods=(full, *tenth))
