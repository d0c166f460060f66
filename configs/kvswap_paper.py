"""KVSwap's tables and figures that can be run here, beside the methods it is compared with.

    python -m experiments.main --config=configs/kvswap_paper.py:PRESET --workdir=runs/kvswap_paper_PRESET

    accuracy    needles and loss with 1/8 (relaxed) and 1/32 (tight) of the keys' numbers (Table 2); the default
    rolling     with and without the rolling buffer, G = 2 to 12 (appendix Table 3)
    entries     loss against the number of selected entries MG (Figure 13 b)
    throughput  tokens/s at 32K tokens on emulated NVMe and eMMC (Table 4; `--config.batch=8` for other batches)
    groups      tokens/s against G, with and without reuse (Figure 12)
    smoke       finishes within a minute

Made-up keys and random weights select as they do: reuse on them is not that of real text, for which see
`configs/residency.py`. FlexGen is the full cache, all of it read in every step. InfiniGen* scores all heads together,
"+ru" keeps groups for later steps. Resident bytes are in every row. Adapters of `configs/train_svd.py` are used with
`"adapters": DIR` among a method's settings; without, each prompt's own keys are decomposed.
"""

import ml_collections

_SELECTED, _TAIL = 400, 36  # MG; sinks and window
_READ_ONCE = {"keep": False, "prefetch": "layer"}
_REUSE_TOKENS = 800  # C


def _reuse(group: int) -> dict:
    return {"count": max(_REUSE_TOKENS // group, _SELECTED // group + 2), "policy": "fifo", "prefetch": "layer"}


def _compared(sigma: int, suffix: str, budget: int) -> tuple[dict, ...]:
    """Each keeps 1 / sigma of the keys' numbers in memory to choose by."""
    return tuple({**method, "label": method["label"] + suffix, "budget": budget} for method in (
        {"name": "infinigen", "label": "infinigen", "sigma": sigma},
        {"name": "infinigen", "label": "infinigen*", "sigma": sigma, "shared": True},
        {"name": "loki", "label": "loki", "sigma": sigma},
        {"name": "shadowkv", "label": "shadowkv", "chunk": sigma},
        {"name": "kvswap", "label": "kvswap", "sigma": sigma},
    ))


def get_config(preset: str = "accuracy") -> ml_collections.ConfigDict:
    makers = {"accuracy": _accuracy, "rolling": _rolling, "entries": _entries, "throughput": _throughput,
              "groups": _groups, "smoke": _smoke}
    if preset not in makers:
        raise ValueError(f"unknown preset {preset!r}; use one of {', '.join(makers)}")
    return makers[preset]()


def _evaluate(methods, **changes) -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict({
        "experiment": "evaluate", "seed": 0, "model": "", "tasks": ("needle", "needle_of_4", "perplexity"),
        "lengths": (2048,), "samples": 32, "batch": 8, "perplexity_tokens": 128,
        "methods": methods,
    })
    config.update(changes)
    return config


def _timed(methods, **changes) -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict({
        "experiment": "throughput", "models": ("cache-path",), "contexts": (32768,),
        "stores": ("flash:nvme", "flash:emmc"), "drivers": ("fused",), "steps": 24, "slots": 0, "batch": 1,
        "transformers": False, "methods": methods,
    })
    config.update(changes)
    return config


def _accuracy():
    return _evaluate(({"name": "full"}, *_compared(8, "", 128), *_compared(32, "-t", 128)))


def _rolling():
    """The smallest window there is, so that an unfinished group is what is recent."""
    return _evaluate(tuple(
        {"name": "kvswap", "label": f"G={group} {'with' if rolling else 'no'} buffer", "group": group, "window": 2,
         "budget": 128, "rolling_buffer": rolling}
        for group in (2, 4, 8, 12) for rolling in (True, False)
    ))


def _entries():
    sizes = tuple({"name": "kvswap", "label": f"MG={n}", "budget": n + _TAIL} for n in (25, 50, 100, 200, 400))
    return _evaluate(sizes, tasks=("needle_of_4", "perplexity"))


def _throughput():
    budget = _SELECTED + _TAIL
    once = tuple({**method, "slots": _READ_ONCE} for method in _compared(8, "", budget))
    infinigen, kvswap = once[1], once[-1]
    return _timed((
        {"name": "full", "label": "flexgen", "page": 64, "slots": {"keep": False}}, *once[:-1],
        {**infinigen, "label": "infinigen*+ru", "slots": _reuse(1)}, {**kvswap, "label": "kvswap no reuse"},
        {**kvswap, "slots": _reuse(4)},
    ))


def _groups():
    return _timed(tuple(
        {"name": "kvswap", "label": f"G={group} {kind}", "group": group, "budget": _SELECTED + _TAIL, "slots": slots}
        for group in (1, 2, 4, 8, 16) for kind, slots in (("reuse", _reuse(group)), ("no reuse", _READ_ONCE))
    ))


def _smoke():
    config = _throughput()
    config.update(models=("reference",), contexts=(512,), stores=("flash:nvme",), steps=4, batch=2)
    config.methods = tuple({**method, "budget": 100} for method in config.methods[-2:])
    return config
