"""Time of a token of a model that decodes real text with its blocks on a store.

The text is held-out library text, teacher-forced. Selections, and so the blocks that come back, are the model's own,
where `experiments.speed.made_up` makes keys up. The first tokens warm up, until slots hold what such text asks for; the
others are timed.

Figures of a row, for one layer and token: the blocks that were needed and those read from the device; `store_us`, the
time inside the store's read; `device_us`, from the first request to the device's last answer; `beyond_us`, the rest,
which finding, verifying and copying take. The way to the store is not included (`scripts/bench_fetch.py`). Blocks that
are read ahead arrive while other things are computed, so that such a row has no `beyond_us`.
"""

import contextlib
import itertools
from typing import Any

import jax
import ml_collections
import numpy as np

import kvjax
from experiments import common
from experiments.results import Run
from experiments.speed import timing
from kvjax.inference.decode import check_driver
from kvjax.inference.plan import copy_state, on_store

_EXTRAS = ("label", "slots", "dtype")  # of a method's settings
_COLUMNS = (  # key, title and format of a row's figures
    ("method", "method", ">24"), ("store", "store", ">14"), ("ms_per_token", "ms/token", ">10.2f"),
    ("limit_ms", "limit", ">8.2f"), ("attended_tokens", "attended", ">10.0f"), ("blocks_needed", "needed", ">8.1f"),
    ("blocks_read", "read", ">8.1f"), ("store_us", "store us", ">10.0f"), ("device_us", "device us", ">11.0f"),
    ("beyond_us", "beyond us", ">11.0f"),
)


def measure(llm: kvjax.LLM, settings, store_name: str, config, directory, bandwidth: float) -> dict[str, Any]:
    """Returns one row: reads the prompts, then continues the text. `bandwidth` is the memory's, in bytes per second."""
    method, slots = common.make_method(settings, _EXTRAS), common.make_slots(settings)
    store, dtype = common.make_store(store_name, directory), common.dtype_of(settings)
    text = common.held_out_rows(llm, config.batch, config.context + config.warm_up + config.steps)
    cache = llm.prefill(
        text[:, : config.context].tolist(), method=method, store=store, capacity=text.shape[1],
        chunk=config.chunk or None, dtype=dtype, slots=None if store is None else slots,
    )
    head = {"method": common.label_of(settings), "store": store_name, "task": "decoding", "context": config.context,
            "budget": method.budget, "batch": config.batch, "seed": 0, "resident_bytes": cache.resident_bytes}
    with contextlib.closing(cache):
        cache.flush()  # reads then come from the device, except for blocks that the text's own tokens write
        commands = common.commands_of(store)
        row = decode(llm, cache, text[:, config.context :].T, config.warm_up, config.driver)
    if slots.prefetch != "off":
        row.pop("beyond_us", None)
    attended = config.batch * timing.kv_bytes(llm.config, row["attended_tokens"], dtype)
    limit = 1e3 * (timing.weight_bytes(llm) + attended) / bandwidth
    return {**head, **row, **common.disk_of(store, commands), "limit_ms": limit, "memory_bandwidth": bandwidth}


def decode(llm: kvjax.LLM, cache: kvjax.Cache, tokens: np.ndarray, warm_up: int, driver: str) -> dict[str, float]:
    """Returns the figures of tokens[T, B] after the first `warm_up`."""
    plan, branch, moved, attended = cache.plan, cache.branch, [], []

    def see(done) -> None:
        moved.append(timing.moved(done))
        attended.append(np.mean(jax.device_get([report.attended for report in done.reports])))

    _, state = timing.time_tokens(llm, plan, copy_state(cache.state), tokens[:warm_up], driver)
    before = branch.stats() if branch else None
    seconds, _ = timing.time_tokens(llm, plan, state, tokens[warm_up:], driver, see)
    row = {"ms_per_token": 1e3 * float(np.median(seconds)), "p90_ms": 1e3 * float(np.percentile(seconds, 90)),
           "attended_tokens": float(np.mean(attended))}
    if not branch:
        return row
    layers = sum(on_store(plan, i) for i in range(len(plan.layers)))
    after, spec = branch.stats(), plan.layers[-1].spec
    row |= timing.traffic_row(before, after, moved, plan)
    store, device = (1e3 * row[f"{name}_ms_per_step"] / layers for name in ("store", "io"))
    return row | {
        "blocks_needed": float(np.mean([step.needed for step in moved])) / layers / (spec.kv_heads // spec.block_heads),
        "blocks_read": (after.blocks_read - before.blocks_read) / len(seconds) / layers,
        "store_us": store, "device_us": device, "beyond_us": store - device,
    }


def check(config: ml_collections.ConfigDict) -> None:
    """Raises ConfigError for settings with which nothing could be measured."""
    common.check_some(config, "methods", "stores")
    common.check_counts(config, context=1, batch=1, warm_up=1, steps=1, chunk=0)
    check_driver(config.driver)
    for store in config.stores:
        common.check_store(store)
    for settings in common.by_label(config.methods).values():
        common.make_method(settings, _EXTRAS)
        common.make_slots(settings)


def check_fit(llm: kvjax.LLM, config: ml_collections.ConfigDict) -> None:
    """Raises ConfigError or PromptError if there is too little text, or a method does not fit it or the model."""
    common.check_model(llm, config.methods)
    prompts, capacity = [config.context] * config.batch, config.context + config.warm_up + config.steps
    common.held_out_rows(llm, config.batch, capacity)
    for settings, store in itertools.product(config.methods, config.stores):
        slots = None if store == "memory" else common.make_slots(settings)
        common.check_fit(llm.config, settings, prompts, capacity, chunk=config.chunk, slots=slots)


def run(config: ml_collections.ConfigDict, workdir: str) -> None:
    """Measures every method on every store; rows that the workdir has are skipped."""
    check(config)
    llm = common.load_model(config.model, config.dtype)
    check_fit(llm, config)
    run = Run(config, workdir, ("methods", "stores"))
    rows, bandwidth = run.logged(), timing.memory_bandwidth()
    done = {(row["method"], row["store"]) for row in rows}
    print(f"memory bandwidth of a matrix-vector product: {bandwidth / 1e9:.1f} GB/s")
    for settings, store in itertools.product(config.methods, config.stores):
        if (common.label_of(settings), store) not in done:
            rows.append(measure(llm, settings, store, config, run.path / "store", bandwidth))
            run.log(**rows[-1])
    run.summary(rows)
    print_table(rows)


def print_table(rows: list[dict[str, Any]]) -> None:
    """Prints the main figures, a line per row."""
    widths = {key: form.partition(".")[0] for key, _, form in _COLUMNS}
    print("".join(format(title, widths[key]) for key, title, _ in _COLUMNS))
    for row in rows:
        print("".join(format(row[key], form) if key in row else format("-", widths[key]) for key, _, form in _COLUMNS))
