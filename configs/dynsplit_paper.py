"""The tables of DynSplit-KV on the reference model.

    python -m experiments.main --config=configs/dynsplit_paper.py[:PRESET] --workdir=runs/dynsplit_paper[_PRESET]

    default    accuracy at 7.5 to 15 % of the cache (Figure 6), the ablations of Figure 11 and Table 6 at 10 %
    tenth      10 % of the cache compared with all of it, with four times as many samples
    passkey    passkey retrieval by budget (Table 3)
    latency    ms per token and memory at 32K tokens, 7.5 and 10 % of them, beside the full cache (Figures 8 and 9)
    outputs    seconds for 256 to 4,096 tokens after 32K (Figure 8)
    memory     memory by batch and length: the cache's, and what a step takes beside it (Figure 10)
    reuse      ms per token without reuse, and with blocks of earlier steps reused by each head, or equally many by all
               (Figure 12)
    smoke      finishes within a minute
"""

import pathlib

import ml_collections

_TABLE = str(pathlib.Path(__file__).parents[1] / "kvjax" / "reference" / "delimiters.json")
_DYNSPLIT = {"name": "dynsplit", "table": _TABLE}
_CHANGES = (
    {}, {"splitting": "fixed"}, {"splitting": "sentence"}, {"splitting": "no_length"}, {"splitting": "no_weight"},
    {"vectors": "mean"},
)


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
    ablations = tuple({**_DYNSPLIT, "budget": tenth, **change} for change in _CHANGES)
    config.methods = ({"name": "full"}, {"name": "quest", "budget": tenth}, *ablations, *by_rate)
    if preset == "tenth":
        config.update(tasks=("passkey", "needle", "needle_of_4"), samples=128)
        config.methods = ({"name": "full"}, {**_DYNSPLIT, "budget": tenth})
    elif preset == "passkey":
        config.update(tasks=("passkey",))
        config.methods = tuple(
            {**method, "budget": budget, "window": 14}  # leaves room for a block in the smallest budget
            for budget in (36, 64, 128, 256, 512)
            for method in ({"name": "streaming_llm"}, {"name": "quest"}, _DYNSPLIT)
        )
    elif preset in timed:
        return timed[preset]()
    elif preset == "smoke":
        config.update(tasks=("passkey", "perplexity"), lengths=(256,), samples=4, batch=4, continuations=4,
                      perplexity_tokens=4)
        config.methods = ({"name": "full"}, {**_DYNSPLIT, "budget": 96})
    elif preset != "default":
        raise ValueError(f"unknown preset {preset!r}; use default, tenth, passkey, {', '.join(timed)} or smoke")
    return config


def _timed(**changes) -> ml_collections.ConfigDict:
    """Returns a timed run. Made-up keys have no token ids, so that blocks have the ideal length; sizes and costs are
    those of any text."""
    config = ml_collections.ConfigDict({
        "experiment": "speed.throughput", "models": ("cache-path",), "contexts": (32768,), "batches": (1,),
        "stores": ("memory", "flash"), "drivers": ("fused",), "steps": 24, "rounds": 1, "slots": 0,
        "transformers": False,
        "methods": ({"name": "full"}, {**_DYNSPLIT, "budget": 2458}, {**_DYNSPLIT, "budget": 3277}),
    })
    config.update(changes)
    return config


def _reused():
    """Uses slots for twice the attended blocks, over flash and over memory; with "even", heads reuse equally many
    (Appendix B.2)."""
    method, slots = {**_DYNSPLIT, "budget": 3277}, {"count": 656, "policy": "lru"}
    return _timed(stores=("flash", "host"), methods=(
        {**method, "label": "none", "slots": {"keep": False}}, {**method, "label": "each head", "slots": slots},
        {**method, "label": "even", "slots": {**slots, "even": True}},
    ))


def _memory():
    """Attends a tenth of the tokens with blocks on flash, beside the full cache in memory."""
    contexts, full = (8192, 16384, 32768), {"name": "full", "only": {"stores": ("memory",)}}
    tenth = tuple(
        {**_DYNSPLIT, "budget": round(context / 10), "only": {"stores": ("flash",), "contexts": (context,)}}
        for context in contexts
    )
    return _timed(contexts=contexts, batches=(1, 4), steps=4, temporaries=True, methods=(full, *tenth))
