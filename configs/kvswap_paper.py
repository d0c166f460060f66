"""KVSwap's reproducible tables and figures, beside the methods it is compared with.

    python -m experiments.main --config=configs/kvswap_paper.py:PRESET --workdir=runs/kvswap_paper_PRESET

    budget      needles in 8,192 tokens with about 1/13 (relaxed) and 1/34 (tight) of the full cache's bytes in memory
    accuracy    needles and loss with 1/8 (relaxed) and 1/32 (tight) of the keys' numbers (Table 2); the default
    adapters    needles and loss with the adapters beside the model, and with each prompt's own keys decomposed
    depths      needles at depths from 0 to 1 of 2,048 to 8,192 tokens, `budget`'s tight settings (Figure 9); depths.png
    reasoning   questions over several documents (Table 3) from LongBench's files, for a model that can answer them:
                `--config.model=DIR --config.tasks="('longbench:DIR/hotpotqa.jsonl',)"`
    rolling     with and without the rolling buffer, G = 2 to 12 (appendix Table 3)
    entries     needles and loss against the number of selected entries MG (Figure 13 b)
    sizes       needles and loss against G; 0 stands for heads that select for themselves (Figure 12)
    throughput  tokens/s at 32K tokens on emulated NVMe and eMMC, batches of 1 and 8 (Table 4)
    batches     the same for KVSwap in 4 bits and its nearest rival by batch size and context (appendix Table 2)
    heads       the same by batch size and context at the head size of the paper's Llama-3-8B, with weights, keys and
                values in bfloat16
    models      whole layers of Llama-3.2-1B and 3B and Llama-3-8B in bfloat16 (Figure 10)
    best        as many sequences as fit a total budget, each method with its own paper's settings (Figure 11)
    groups      tokens/s against G, 0 as in `sizes`, with and without reuse (Figure 12)
    selected    tokens/s against MG, groups read each time (Figure 13 b)
    rates       tokens/s against the share of groups that come back, drawn at random (Table 5 from its other end)
    breakdown   where a decode step's time goes, with and without reading ahead (Figure 13 a)
    pretrained  gain of keeping groups with the selections of a pretrained model (docs/results/real_model.md), by five
                ways of selecting, with groups that come back as often as in the paper; `--config.replay.model=DIR`
    gains       gain of keeping groups at batches of 8 and 16 with one of these ways and 1/13 of the full cache's
                memory, three times alternately
    reuse       how often groups come back in real text, for each kind of it (Table 5); seven minutes on two cores
    smoke       finishes within a minute

FlexGen is the full cache, all of it read in every step. InfiniGen* scores all heads together; "+ru" keeps groups for
later steps. Resident bytes are in every row. KVSwap takes the adapters beside the model, where there are some of its
sigma; with `"adapters": "prompt"` among its settings it decomposes each prompt's own keys.

Made-up keys and random weights do not select as real text does. Timed methods that predict attention therefore replay
the reference model's selections on held-out text, at the same share of tokens (`"replay": True`,
`experiments/speed/replay.py`). Groups come back as often as with the reference model: with C twice the selected tokens,
17 to 20 % of 25 of 2,048 tokens (preset reuse, four kinds of text), 32 to 35 % of 100, and 63 to 65 % of 400; texts of
a kind differ by a standard deviation of at most 1 %. The paper's models, thousands of times as large, have 75 to 81 %
of 400 of 32K. On a machine without the model, `--config.replay.model` may be the directory WORKDIR/recordings of a run
elsewhere. `"replay": 0.77` draws selections of which that share comes back, as the paper's tuner does (appendix A.3).

In a row of times, `block_ms` is one layer's share of a step, `select_ms` selection, `plan_ms` the slot table (the cost
of reuse), `attend_ms` attention; of the device's `io_ms_per_step` a step waits for `wait_ms_per_step`.
"""

import ml_collections

from configs import leaderboard
from experiments.common import REFERENCE_8K

_SELECTED, _TAIL = 400, 36  # MG; sinks and window
_READ_ONCE = {"keep": False, "prefetch": "layer"}
_REUSE_TOKENS = 800  # C
_REPLAY = {"model": "", "tokens": 2048, "steps": 256, "kinds": ("prose", "code"), "seed": 0}
_PRETRAINED = {**_REPLAY, "model": "runs/smollm2", "tokens": 8192, "steps": 128}
_FLEXGEN = {"name": "full", "label": "flexgen", "page": 64, "slots": {"keep": False}}


def _reuse(group: int, tokens: int = _REUSE_TOKENS) -> dict:
    return {"count": max(tokens // group, _SELECTED // group + 2), "policy": "fifo", "prefetch": "layer"}


def _compared(sigma: int, suffix: str, budget: int) -> tuple[dict, ...]:
    """Returns methods that keep 1 / sigma of the keys' numbers in memory to select by; ShadowKV keeps as many again to
    rebuild keys from."""
    return tuple({**method, "label": method["label"] + suffix, "budget": budget} for method in (
        {"name": "infinigen", "label": "infinigen", "sigma": sigma},
        {"name": "infinigen", "label": "infinigen*", "sigma": sigma, "shared": True},
        {"name": "loki", "label": "loki", "sigma": sigma},
        {"name": "shadowkv", "label": "shadowkv", "chunk": sigma, "sigma": sigma},
        {"name": "kvswap", "label": "kvswap", "sigma": sigma},
    ))


def get_config(preset: str = "accuracy") -> ml_collections.ConfigDict:
    makers = {"budget": _budget, "accuracy": _accuracy, "adapters": _adapters, "depths": _depths,
              "reasoning": _reasoning, "rolling": _rolling,
              "entries": _entries, "sizes": _sizes, "throughput": _throughput, "batches": _batches, "heads": _heads,
              "models": _models, "best": _best, "groups": _groups, "selected": _selected, "rates": _rates,
              "breakdown": _breakdown, "pretrained": _pretrained, "gains": _gains, "reuse": _reuse_rates,
              "smoke": _smoke}
    if preset not in makers:
        raise ValueError(f"unknown preset {preset!r}; use one of {', '.join(makers)}")
    return makers[preset]()


def _evaluate(methods, **changes) -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict({
        "experiment": "board.evaluate", "seed": 0, "model": "", "tasks": ("needle", "needle_of_4", "perplexity"),
        "lengths": (2048,), "samples": 32, "batch": 8, "continuations": 8, "perplexity_tokens": 128,
        "methods": methods,
    })
    config.update(changes)
    return config


def _timed(methods, **changes) -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict({
        "experiment": "speed.throughput", "models": ("cache-path",), "contexts": (32768,),
        "stores": ("flash:nvme", "flash:emmc"), "drivers": ("fused",), "steps": 24, "rounds": 1, "slots": 0,
        "batches": (1,), "transformers": False, "methods": methods, "replay": dict(_REPLAY),
        "staging_mib": 4,  # in a long decode a quarter of it waits to be written, and counts as the cache's memory
    })
    config.update(changes)
    return config


def _accuracy():
    """Compares KVSwap with its rivals and its variants; G = 0 stands for heads that select for themselves, as in
    section 6."""
    kvswap = {"name": "kvswap", "budget": 128}
    variants = tuple({**kvswap, **change, "label": f"kvswap {label}"} for label, change in (
        ("own layer", {"lookahead": False}), ("per head", {"shared": False}), ("G=1", {"group": 1}),
        ("G=0", {"group": 1, "shared": False}),
    ))
    return _evaluate(({"name": "full"}, *_compared(8, "", 128), *_compared(32, "-t", 128), *variants))


def _adapters():
    """Compares the adapters beside the model with each prompt's own, at the memory and budget of `accuracy`."""
    kvswap = {"name": "kvswap", "budget": 128, "sigma": 8}
    return _evaluate(
        ({"name": "full"}, {**kvswap, "label": "kvswap"}, {**kvswap, "label": "prompt", "adapters": "prompt"}),
        tasks=("passkey", "needle", "needle_of_4", "perplexity"), samples=64,
    )


def _relaxed() -> tuple[dict, ...]:
    """Returns methods with about 1/13 of the full cache's bytes at 8,192 tokens when nothing is kept between steps, and
    the window of the other boards."""
    methods = (
        {"name": "kvswap", "sigma": 8},
        {"name": "kvswap", "label": "kvswap, 4 bits", "sigma": 2, "bits": 4, "per_head": True},
        {"name": "kvswap", "label": "kvswap, all in 4 bits", "sigma": 1, "bits": 4, "per_head": True},
        {"name": "infinigen", "sigma": 8}, {"name": "infinigen", "label": "infinigen*", "sigma": 8, "shared": True},
        {"name": "loki", "sigma": 8}, {"name": "shadowkv", "chunk": 16, "sigma": 16},
    )
    return tuple({**method, "window": 16} for method in methods)


def _tight() -> tuple[dict, ...]:
    """Returns methods with about 1/34 of the full cache's bytes, labelled "-t"."""
    methods = (
        {"name": "kvswap", "sigma": 32}, {"name": "kvswap", "label": "kvswap, 4 bits", "sigma": 3, "bits": 4},
        {"name": "infinigen", "sigma": 32}, {"name": "infinigen", "label": "infinigen*", "sigma": 32, "shared": True},
        {"name": "loki", "sigma": 32}, {"name": "shadowkv", "chunk": 64, "sigma": 128},
    )
    return tuple({**method, "window": 16, "label": method.get("label", method["name"]) + "-t"} for method in methods)


def _within_budgets() -> tuple[dict, ...]:
    """Returns methods that keep nothing between steps; their rows have the bytes that each holds in memory."""
    kept = tuple({**method, "slots": {"keep": False}} for method in (*_relaxed(), *_tight()))
    return ({"name": "full", "whole": True}, *kept)


def _budget():
    config = leaderboard.get_config("long")
    config.update(methods=_within_budgets(), tasks=("passkey", "needle", "needle_of_4"))
    return config


def _depths():
    """Draws three samples for each tenth of a context."""
    methods = ({**method, "budget": 128} for method in _tight() if method["name"] in ("kvswap", "loki", "shadowkv"))
    return _evaluate(({"name": "full"}, *methods), model=str(REFERENCE_8K), tasks=("niah_grid",),
                     lengths=(2048, 4096, 8192), samples=30)


def _reasoning():
    config = leaderboard.get_config()
    config.update(
        model="runs/smollm2", methods=_within_budgets(), lengths=(8192,), budgets=(_SELECTED + _TAIL,), samples=50,
        batch=1,
        tasks=tuple(f"longbench:runs/longbench/{name}.jsonl" for name in ("hotpotqa", "2wikimqa", "musique")),
    )
    return config


def _rolling():
    """Uses the smallest possible window, so that the recent tokens are those of the unfinished group."""
    return _evaluate(tuple(
        {"name": "kvswap", "label": f"G={group} {'with' if rolling else 'no'} buffer", "group": group, "window": 2,
         "budget": 128, "rolling_buffer": rolling}
        for group in (2, 4, 8, 12) for rolling in (True, False)
    ))


def _entries():
    sizes = tuple({"name": "kvswap", "label": f"MG={n}", "budget": n + _TAIL} for n in (25, 50, 100, 200, 400))
    return _evaluate(sizes, tasks=("needle_of_4", "perplexity"))


def _sizes():
    sizes = ({"name": "kvswap", "label": f"G={group}", "group": group, "budget": 128} for group in (1, 2, 4, 8, 16))
    alone = {"name": "kvswap", "label": "G=0", "group": 1, "shared": False, "budget": 128}
    return _evaluate((alone, *sizes), model=str(REFERENCE_8K), lengths=(8192,))


def _systems() -> dict[str, dict]:
    """Returns the timed methods by label; groups or tokens are read in every step unless the label says otherwise."""
    systems = {system["label"]: {**system, "slots": _READ_ONCE, "replay": True}
               for system in _compared(8, "", _SELECTED + _TAIL)}
    kvswap, shadow = systems.pop("kvswap"), {**systems.pop("shadowkv"), "label": "shadowkv, chunk 8"}
    del shadow["replay"]  # it keeps nothing, and recordings do not have its outliers
    shadow["slots"] = {"keep": False}  # it selects by its own queries: reads ahead would be wasted
    half = {**kvswap, "sigma": 2, "bits": 4, "per_head": True}  # four times as many numbers in half the memory
    others = (
        _FLEXGEN, {**systems["infinigen*"], "label": "infinigen*+ru", "slots": _reuse(1)},
        {**kvswap, "label": "kvswap no reuse"}, {**kvswap, "slots": _reuse(4)},
        {**half, "label": "4 bits no reuse"}, {**half, "label": "4 bits", "slots": _reuse(4)},
        {**kvswap, "label": "4 bits a third", "sigma": 3, "bits": 4},
        shadow, {**shadow, "label": "shadowkv", "chunk": 16, "sigma": 16},  # within 1/13, half as many reads
    )
    return systems | {system["label"]: system for system in others}


def _throughput():
    """Uses batches of 8 only for KVSwap and its nearest rival: methods that read many small pieces take minutes a
    step."""
    flash = ("flash:nvme", "flash:emmc")
    both = ("shadowkv", "shadowkv, chunk 8", "kvswap no reuse", "kvswap", "4 bits no reuse", "4 bits")
    methods = tuple(
        {**system, "only": {"stores": flash, "batches": (1, 8) if label in both else (1,)}}
        for label, system in _systems().items()
    )
    full = {"name": "full", "only": {"stores": ("memory",), "batches": (1,)}}
    return _timed((full, *methods), stores=("memory", *flash), batches=(1, 8))


def _batches():
    systems = _systems()
    return _timed((systems["shadowkv"], systems["4 bits"]), contexts=(8192, 16384, 32768), batches=(1, 2, 4, 8))


def _heads():
    """Uses groups of as many bytes as in `throughput`: twice the numbers, of half the size."""
    systems = _systems()
    rivals = ({**systems["flexgen"], "only": {"batches": (1,)}}, systems["shadowkv"], systems["4 bits no reuse"],
              systems["4 bits"])
    methods = tuple({**rival, "dtype": "bfloat16"} for rival in rivals)
    return _timed(methods, models=("cache-path-8b",), dtype="bfloat16", contexts=(16384, 32768), batches=(1, 8))


def _models():
    """Times whole layers of three models; eight sequences of the largest need about 11 GB of memory beside the file."""
    systems = _systems()
    full = {"name": "full", "only": {"stores": ("memory",)}}
    rivals = (systems["shadowkv"], systems["4 bits"])
    methods = tuple({**rival, "dtype": "bfloat16", "only": {"stores": ("flash:nvme", "flash:emmc")}}
                    for rival in rivals)
    return _timed(({**full, "dtype": "bfloat16"}, *methods), models=("llama-1b-4l", "llama-3b-4l", "llama-8b-4l"),
                  stores=("memory", "flash:nvme", "flash:emmc"), dtype="bfloat16", batches=(1, 8))


def _best():
    """Times as many sequences as fit 250 and 100 MiB for `cache-path`; the paper has 2,000 and 800 where a sequence of
    KVSwap's takes 310 and 120.

    Half of the keys' numbers for InfiniGen, a quarter for Loki and 160 of 1,024 for ShadowKV, as published. Beside each
    method are the numbers of sequences that fit, the store's part included; one that fits no sequence has no row.
    """
    systems = _systems()
    relaxed = {**systems["4 bits"], "slots": _reuse(4, 1100)}
    tight = {**systems["4 bits no reuse"], "label": "4 bits-t", "sigma": 4, "per_head": False}
    fits = (
        (relaxed, (6, 2)), (tight, (6,)), ({**systems["shadowkv, chunk 8"], "sigma": 6.4}, (3, 1)),
        ({**systems["loki"], "sigma": 4}, (2,)), ({**systems["infinigen"], "sigma": 2}, (1,)),
    )
    methods = tuple({**method, "only": {"batches": batches}} for method, batches in fits)
    return _timed(methods, batches=(1, 2, 3, 6))


def _groups():
    kvswap = {"name": "kvswap", "budget": _SELECTED + _TAIL, "replay": True}
    sizes = {"G=0": {"group": 1, "shared": False}, **{f"G={group}": {"group": group} for group in (1, 2, 4, 8, 16)}}
    return _timed(tuple(
        {**kvswap, **size, "label": f"{label} {kind}", "slots": slots}
        for label, size in sizes.items()
        for kind, slots in (("reuse", _reuse(size["group"])), ("no reuse", _READ_ONCE))
    ))


def _selected():
    kvswap = {"name": "kvswap", "slots": _READ_ONCE, "replay": True}
    sizes = tuple({**kvswap, "label": f"MG={n}", "budget": n + _TAIL} for n in (100, 200, 400, 800))
    return _timed(sizes, batches=(8,))


def _rates():
    kvswap = {"name": "kvswap", "budget": _SELECTED + _TAIL}
    return _timed((
        {**kvswap, "label": "no reuse", "slots": _READ_ONCE, "replay": 0.77},
        *({**kvswap, "label": f"{share:.0%} come back", "slots": _reuse(4), "replay": share}
          for share in (0.2, 0.4, 0.6, 0.77, 0.9)),
    ))


def _breakdown():
    """Times whole blocks, MLP included, of each method with and without reading the next layer's blocks ahead."""
    systems = _systems()
    return _timed(tuple(
        {**systems[label], "label": f"{label} {prefetch}", "slots": {**systems[label]["slots"], "prefetch": prefetch}}
        for label in ("flexgen", "infinigen*", "infinigen*+ru", "kvswap no reuse", "kvswap")
        for prefetch in ("layer", "off")
    ), models=("llama-1b-4l",), stores=("flash:nvme",))


def _pretrained():
    """Compares scores summed over heads after each head's softmax, of floats and of 4 bits, with raw scores summed
    (section 3.3), which have an SVD of each head, one of all heads, or 4 bits."""
    systems = _systems()
    raw = {**systems["kvswap"], "label": "raw", "aggregation": "mean"}
    ways = (systems["kvswap"], systems["4 bits"], {**raw, "label": "raw, heads", "per_head": True}, raw,
            {**systems["4 bits"], "label": "raw, 4 bits", "aggregation": "mean"})
    methods = tuple(
        {**way, "label": way["label"] + suffix, "slots": slots}
        for way in ways for suffix, slots in ((" no reuse", _READ_ONCE), ("", _reuse(4)))
    )
    return _timed(methods, batches=(1, 8), replay=dict(_PRETRAINED))


def _gains():
    raw = {**_systems()["4 bits"], "aggregation": "mean"}
    ways = (("read each time", _READ_ONCE), ("kept", _reuse(4, 1100)))
    methods = tuple({**raw, "label": f"{label} {turn}", "slots": slots} for turn in (1, 2, 3) for label, slots in ways)
    return _timed(methods, batches=(8, 16), steps=72, replay=dict(_PRETRAINED))  # a buffer is full after about 20


def _reuse_rates():
    return ml_collections.ConfigDict({
        "experiment": "kvswap.reuse", "model": "", "contexts": (_REPLAY["tokens"],), "texts": 16, "warm_up": 4,
        "selected": (25, 100, 400),  # of 2,048 tokens: the same share as 400 of 32,768, and more
        "times_selected": (1.0, 1.5, 2.0, 3.0, 4.0),  # C, as multiples of a step's selection
        "replay": {**_REPLAY, "kinds": ("prose", "code", "needles", "mixed")},
        "methods": ({"name": "kvswap", "label": "kvswap"},),
    })


def _smoke():
    config = _throughput()
    config.update(models=("reference",), contexts=(512,), stores=("flash:nvme",), steps=4)
    config.replay.update(tokens=256, steps=16)
    kvswap = {**_systems()["kvswap"], "budget": 100, "slots": {**_reuse(4), "count": 32}}
    config.methods = (kvswap, {**kvswap, "label": "kvswap drawn", "replay": 0.77})
    return config
