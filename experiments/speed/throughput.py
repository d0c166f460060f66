"""Decode speed of methods x stores x contexts, beside the physical limits of the machine.

Caches are filled with made-up keys (`experiments.speed.made_up`). Every figure is a median over steps after a warm-up;
compile time is separate. With several `rounds` the methods alternate, so that other work on the machine slows all of
them alike. Limits are measured beside each row: memory bandwidth by a matrix-vector product before and after each
round's steps, disk bandwidth by raw threaded reads of the store's block size.
"""

import importlib.util
import itertools
import os
import tempfile
import time
from collections.abc import Iterator

import ml_collections
import numpy as np

import kvjax
from experiments import common, plots
from experiments.results import Run
from experiments.speed import layer_times, made_up, pictures, raw_disk, replay, timing
from experiments.speed.replay import Replay
from kvjax.cache.callbacks import default_backend
from kvjax.calibration.tuner import fifo
from kvjax.errors import ConfigError
from kvjax.inference import decode
from kvjax.inference.plan import Plan, Slots, bytes_of
from kvjax.models.config import ModelConfig
from kvjax.ops.weights import types_of
from kvjax.store.geometry import PAGE_BYTES

_GRID = ("models", "methods", "contexts", "batches", "stores", "transformers")
_EXTRAS = ("label", "slots", "dtype", "replay", "only")  # of a method's settings
_ONLY = ("contexts", "batches", "stores")  # what "only" of a method's settings may narrow
_DTYPES = ("float32", "bfloat16", "float16")  # of weights
_LATE = 0.2  # share of an emulated device's commands; above it, times are those of the host rather than of the device
_WARM_UP = 4  # steps left out of medians, including the one that compiles


def room(config) -> int:
    """Returns the tokens that follow the made-up ones in a sequence."""
    return config.rounds * len(config.drivers) * (config.steps + 1) + layer_times.COMMITS


class Subject:
    """One method with a cache of its own, timed round by round; the store and the recordings have directories."""

    def __init__(self, llm, head: dict, settings, batch: int, config, directory, recordings):
        self.llm, self.head, self.config, self.directory = llm, head, config, directory
        self.dtype, self.slots = common.dtype_of(settings), common.make_slots(settings, config.slots)
        self.method = replay.make(settings, config, llm.config, head["context"], recordings)
        staging = {"staging_bytes": config.staging_mib << 20} if "staging_mib" in config else {}
        self.store = common.make_store(head["store"], directory, **staging)
        self.plan, state, self.branch, self.build = made_up.filled_cache(
            llm, self.method, head["context"], room(config), self.store, self.slots, batch, self.dtype,
            run=config.get("clump_run", 1.0),
        )
        self.state = replay.stagger(self.method, state) if isinstance(self.method, Replay) else state
        self.resident = bytes_of(state.layers)
        self.before = self.branch.stats() if self.branch is not None else None
        self.commands = common.commands_of(self.store)
        self.seconds: dict[str, list[np.ndarray]] = {driver: [] for driver in config.drivers}
        self.stats: list[timing.Moved] = []  # of every token
        self.bandwidth: list[float] = []  # bytes per second; on a shared machine it changes within seconds

    def take_turn(self) -> None:
        """Decodes one round: with each driver `config.steps` tokens, after one that may compile."""
        tokens = np.random.default_rng(0).integers(self.llm.config.vocab_size, size=self.config.steps + 1).tolist()
        self.bandwidth.append(timing.memory_bandwidth())
        for driver, seconds in self.seconds.items():
            times, self.state = timing.time_tokens(
                self.llm, self.plan, self.state, tokens, driver,
                lambda done: self.stats.append(timing.moved(done)),
            )
            seconds.append(times)
        self.bandwidth.append(timing.memory_bandwidth())

    def row(self) -> dict:
        """Returns all figures of the subject and closes its branch of the store."""
        head, llm, batch, row = self.head, self.llm, self.plan.batch, {}
        for driver, turns in self.seconds.items():
            row |= _times(driver, turns, self.config.get("outputs", ()))
        best, bandwidth = min(row[f"{driver}_ms"] for driver in self.seconds), float(np.mean(self.bandwidth))
        attended = min(self.method.budget or head["context"], head["context"])
        kept = timing.kv_bytes(llm.config, attended, self.dtype)
        limit = 1e3 * (timing.weight_bytes(llm) + batch * kept) / bandwidth
        return {
            **head, "task": "throughput", "budget": self.method.budget, "seed": 0, "resident_bytes": self.resident,
            "batch": batch, "index_build_s": self.build, "block_ms": best / llm.config.num_layers, **row,
            **self._parts(), "tokens_per_s": batch * 1e3 / best, "limit_ms": limit, "times_limit": best / limit,
            "memory_bandwidth": bandwidth,
        }

    def _parts(self) -> dict:
        """Returns a layer's times, the store's work and size, and temporary memory if the configuration asks for it."""
        branch, figures = self.branch, {}
        after, disk = branch.stats() if branch is not None else None, common.disk_of(self.store, self.commands)
        if branch is not None:
            figures["store_bytes"] = branch.held_bytes
        if self.config.get("temporaries", False):
            figures["temporary_bytes"] = decode.temporary_bytes(self.plan, self.llm.params, self.state)
        figures |= layer_times.parts(self.llm, self.plan, self.state, branch)
        if branch is not None:
            figures |= timing.traffic_row(self.before, after, self.stats, self.plan)
            figures |= reuse_row(self.method, self.plan, self.slots, self.head["context"], self.stats)
            figures |= disk | fetch_row(self.store, figures.pop("fetch_ms"), self.directory)
            branch.close()
        return figures


def _times(driver: str, turns: list[np.ndarray], outputs) -> dict:
    """Returns the figures of a driver over all rounds, without the warm-up. For each number in `outputs`, the seconds
    of that many tokens of the first round, without the first, which compiles."""
    row = {f"{driver}_{tokens}_s": float(np.sum(turns[0][1 : tokens + 1])) for tokens in outputs}
    warm = 1e3 * np.concatenate([seconds[_WARM_UP:] for seconds in turns])
    return row | {f"{driver}_ms": float(np.median(warm)), f"{driver}_p90_ms": float(np.percentile(warm, 90)),
                  f"{driver}_compile_s": float(turns[0][0])}


def reuse_row(method, plan: Plan, slots: Slots, context: int, stats: list[timing.Moved]) -> dict:
    """Returns the share of the needed blocks that were not read, after the warm-up; for a replay over a FIFO also the
    share that the recording alone implies."""
    row = {"reuse_rate": timing.came_back(stats[_WARM_UP:])}
    if isinstance(method, Replay) and slots.keep and slots.policy == "fifo":
        need = replay.asked(method, len(plan.layers), context, plan.batch, len(stats))
        count = slots.count or plan.layers[-1].spec.max_blocks + 1
        row["recorded_reuse_rate"] = fifo.rate(need, count, skip=_WARM_UP)
    return row


def fetch_row(store, fetch: dict, directory) -> dict:
    """Returns the times of one layer's cold fetch; for a store on disk, also those of raw reads of as many blocks of
    the same average size in whole pages."""
    row = {
        "fetch_ms": fetch["call"], "fetch_in_store_ms": fetch["store"], "fetch_blocks": fetch["blocks"],
        "fetch_beyond_store_us": 1e3 * (fetch["call"] - fetch["store"]), "block_bytes": fetch["block_bytes"],
    }
    if not isinstance(store, kvjax.FlashStore):
        return row
    size = PAGE_BYTES * max(1, round(fetch["block_bytes"] / PAGE_BYTES))
    raw = raw_disk.read_seconds(directory, size, fetch["blocks"], threads=4, system=store.system)
    return {**row, "raw_read_ms": 1e3 * raw}


def transformers_row(llm, name: str, context: int, steps: int) -> dict | None:
    """Returns a row of the same checkpoint decoded by transformers over a cache of equal length; None if it is not
    installed or cannot be compared."""
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None:
        return None
    if not llm.config.use_mlp or types_of(llm.params) != "float32":
        return None  # transformers has no model without MLP, and the comparison is in f32
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache
    from transformers.utils import logging

    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory:
        kvjax.save(llm, directory)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    cache = DynamicCache()
    for i in range(llm.config.num_layers):
        key, value = (torch.tensor(np.asarray(x)).swapaxes(1, 2) for x in made_up.keys(llm.config, context, i))
        cache.update(key, value, i)
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # as many as JAX uses
    times = []
    with torch.no_grad():
        for i in range(steps):
            position = torch.tensor([[context + i]])
            started = time.perf_counter()
            model(input_ids=torch.tensor([[i % 7]]), past_key_values=cache, position_ids=position)
            times.append(1e3 * (time.perf_counter() - started))
    median = float(np.median(times[3:]))
    return {"model": name, "method": "transformers", "store": "memory", "context": context, "task": "throughput",
            "budget": None, "seed": 0, "batch": 1, "torch_ms": median, "tokens_per_s": 1e3 / median,
            "threads": torch.get_num_threads()}


def check(config: ml_collections.ConfigDict) -> None:
    """Raises ConfigError or PromptError for settings with which nothing could be measured."""
    common.check_some(config, "models", "methods", "stores", "drivers")
    least_steps = _WARM_UP  # with fewer, all steps would be warm-up
    common.check_counts(config, steps=least_steps, rounds=1, batches=1, contexts=1, slots=0)
    for settings in common.by_label(config.methods).values():
        common.make_method(settings, _EXTRAS)
        common.make_slots(settings, config.slots)
        replay.check(settings, config)
        unknown = set(settings.get("only", {})) - set(_ONLY)
        if unknown:
            raise ConfigError(f"{common.label_of(settings)}: only={sorted(unknown)} is unknown; use some of "
                              f"{', '.join(_ONLY)}")
    if max((0, *config.get("outputs", ()))) > config.steps:
        raise ConfigError(f"outputs={config.outputs} must be at most steps={config.steps}; raise steps")
    if config.get("dtype", "float32") not in _DTYPES:
        raise ConfigError(f"dtype={config.dtype!r} is not a type of weights; use one of {', '.join(_DTYPES)}")
    for store, driver in itertools.product(config.stores, config.drivers):
        common.check_store(store)
        decode.check_driver(driver)
    for name in config.models:
        check_fit(made_up.model_config(name), config)
        for settings in config.methods:
            made_up.check_build(made_up.model_config(name), settings, max(config.contexts))


def check_fit(model: ModelConfig, config: ml_collections.ConfigDict) -> None:
    """Raises ConfigError or PromptError if a method, its type or its slots do not fit the model or a context."""
    for context, batch, store, settings in _combinations(config):
        slots = None if store == "memory" else common.make_slots(settings, config.slots)
        common.check_fit(model, settings, [context] * batch, context + room(config), slots=slots)
        replay.check_context(settings, config, context)


def run(config: ml_collections.ConfigDict, workdir: str) -> None:
    """Measures every combination; rows that the workdir has are skipped."""
    check(config)
    replay.check_model(config)
    run = Run(config, workdir, _GRID)
    rows = run.logged()
    done = {_key(row) for row in rows}
    print(f"callbacks: {default_backend()}")
    for name in config.models:
        llm = made_up.make_model(name, config.get("dtype", "float32"))
        for group in _groups(name, config, done):
            for row in in_turns(llm, group, config, run.path):
                rows.append(row)
                run.log(**row)
        for context in config.contexts if config.transformers else ():
            if (name, "transformers", "memory", context, 1) not in done:
                other = transformers_row(llm, name, context, config.steps)
                if other is not None:
                    rows.append(other)
                    run.log(**other)
    run.summary(rows)
    plots.save(pictures.throughput(rows), run.path / "throughput.png")
    print_table(rows)


def in_turns(llm, group: list[tuple], config, path) -> Iterator[dict]:
    """Yields a row for each (head, settings, batch) after rounds in which they alternate; their files are under
    `path`."""
    subjects = [
        Subject(llm, head, settings, batch, config, path / f"store_{i}", path / "recordings")
        for i, (head, settings, batch) in enumerate(group)
    ]
    for _ in range(config.rounds):
        for subject in subjects:
            subject.take_turn()
    while subjects:
        yield subjects.pop(0).row()


def _groups(name: str, config, done: set) -> Iterator[list[tuple]]:
    """Yields groups of what is left to measure: one method each, or with several rounds all methods that alternate."""
    groups: dict[tuple, list[tuple]] = {}
    for context, batch, store, settings in _combinations(config):
        head = {"model": name, "method": common.label_of(settings), "store": store, "context": context}
        if _key({**head, "batch": batch}) not in done:
            apart = () if config.rounds > 1 else (head["method"],)
            groups.setdefault((context, batch, store, *apart), []).append((head, settings, batch))
    yield from groups.values()


def _key(row: dict) -> tuple:
    return row["model"], row["method"], row["store"], row["context"], row["batch"]


def _combinations(config) -> Iterator[tuple]:
    """Yields (context, batch, store, settings) of every row; "only" in a method's settings limits the contexts, batches
    and stores that it is measured with."""
    for context, batch, store, settings in itertools.product(
        config.contexts, config.batches, config.stores, config.methods
    ):
        only = settings.get("only", {})
        if all(value in only.get(name, (value,)) for name, value in zip(_ONLY, (context, batch, store), strict=True)):
            yield context, batch, store, settings


def print_table(rows: list[dict]) -> None:
    """Prints the main figures, a line per row."""
    width = 2 + max((len(row["method"]) for row in rows), default=6)
    print(f"{'model':>12}{'method':>{width}}{'store':>24}{'context':>9}{'batch':>6}{'ms/token':>10}{'limit':>8}{'select':>8}"
          f"{'attend':>8}{'commit':>8}{'fetch':>8}{'raw':>8}{'wait':>8}{'reuse %':>8}{'late %':>8}{'KV MiB':>9}"
          f"{'store MiB':>10}")
    for row in rows:
        cells = [row.get(key) for key in ("limit_ms", "select_ms", "attend_ms", "commit_ms", "fetch_ms",
                                          "raw_read_ms", "wait_ms_per_step")]
        cells.extend(100 * row[key] if key in row else None for key in ("reuse_rate", "late_share"))
        shown = "".join(f"{cell:8.2f}" if cell is not None else f"{'-':>8}" for cell in cells)
        resident = f"{row['resident_bytes'] / 2**20:9.1f}" if "resident_bytes" in row else f"{'-':>9}"
        resident += f"{row['store_bytes'] / 2**20:10.1f}" if "store_bytes" in row else f"{'-':>10}"
        print(f"{row['model']:>12}{row['method']:>{width}}{row['store']:>24}{row['context']:>9,}{row['batch']:>6}"
              f"{1e3 / row['tokens_per_s']:10.2f}{shown}{resident}")
    if any(row.get("late_share", 0.0) > _LATE for row in rows):
        print(f"late % above {100 * _LATE:.0f}: the disk under an emulated device is slower than that device; put "
              "--workdir on a RAM disk (docs/store.md), or stop other work")
