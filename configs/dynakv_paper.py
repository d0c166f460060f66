"""DynaKV's tables and figures that can be run here, beside static and local update and retrieval without clusters.

    python -m experiments.main --config=configs/dynakv_paper.py:PRESET --workdir=runs/dynakv_paper_PRESET

    latency   ms per token and effective bandwidth at 16K tokens on emulated UFS 4.0 and eMMC (Figure 10 b and c)
    length    ms per token from 4K to 64K tokens at one budget (the latency against length of section 8.4)
    buffer    bytes read and written per token against B_max (Figure 11)
    accuracy  needles and loss (Figure 10 a); the default
    smoke     finishes within a minute

No-cluster is exact top-k of single tokens. Static is PQCache's update and local ClusterKV's, as options of the same
method. Table 2 and Table 5 come from `configs/shift.py`, Figures 12 and 13 from `configs/layouts.py`, and the residency
policies from `configs/residency.py`.
"""

import ml_collections

_SIZES = {"cluster": 16, "iterations": 2}
_RIVALS = (
    {"name": "oracle", "label": "no cluster"},
    {"name": "dynakv", "label": "static", "update": "static", **_SIZES},
    {"name": "dynakv", "label": "local", "update": "local", **_SIZES},
    {"name": "dynakv", "label": "dynakv", **_SIZES},
)


def get_config(preset: str = "accuracy") -> ml_collections.ConfigDict:
    makers = {"latency": _latency, "length": _length, "buffer": _buffer, "accuracy": _accuracy, "smoke": _smoke}
    if preset not in makers:
        raise ValueError(f"unknown preset {preset!r}; use one of {', '.join(makers)}")
    return makers[preset]()


def _throughput(**changes) -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict({
        "experiment": "throughput", "models": ("cache-path",), "contexts": (16384,), "stores": ("flash",),
        "drivers": ("fused",), "steps": 24, "slots": 0, "transformers": False,
    })
    config.update(changes)
    return config


def _with_budget(budget: int):
    return tuple({**method, "budget": budget} for method in _RIVALS)


def _latency():
    return _throughput(stores=("flash:ufs4.0", "flash:emmc"), methods=_with_budget(512))


def _length():
    return _throughput(contexts=(4096, 16384, 65536), methods=({**_RIVALS[-1], "budget": 512},))


def _buffer():
    """A budget of 512 holds the largest buffer beside sinks, window and a block."""
    sizes = tuple({**_RIVALS[-1], "budget": 512, "label": f"dynakv B_max={b}", "buffer": b} for b in (1, 2, 4, 8, 16))
    return _throughput(methods=sizes, steps=128)


def _accuracy():
    return ml_collections.ConfigDict({
        "experiment": "evaluate", "seed": 0, "model": "", "tasks": ("needle", "needle_of_4", "perplexity"),
        "lengths": (2048,), "samples": 32, "batch": 8, "perplexity_tokens": 128,
        "methods": _with_budget(128),
    })


def _smoke():
    return _throughput(models=("reference",), contexts=(512,), steps=8, methods=_with_budget(128)[-1:])
