"""Runs of KVSwap's tuner, with a table of its choices; each solution is kept as it is found.

For some pairs of batch and context, the choice and the middle of the grid are also decoded with, alternately, and
compared with what the tuner expects of either. As many groups come back there as the tuner found on its text
(`experiments.speed.replay`).
"""

import contextlib
import dataclasses
import itertools
import pathlib
import time
from collections.abc import Iterator

import ml_collections
import numpy as np
from absl import logging
from matplotlib.figure import Figure

import kvjax
from experiments import common, plots
from experiments.results import Run
from experiments.speed import made_up, replay, timing
from kvjax.calibration import tuner
from kvjax.errors import ConfigError
from kvjax.eval.tasks import needles
from kvjax.inference.plan import Plan, State, bytes_of
from kvjax.store.interface import Branch

_CHOICE, _MIDDLE = "tuned", "middle of the grid"


def make_model(name: str, dtype: str) -> kvjax.LLM:
    """Makes a shape of `experiments.speed.made_up`, or loads a model directory; `dtype` is that of its weights."""
    return common.load_model(name, dtype) if pathlib.Path(name).is_dir() else made_up.make_model(name, dtype)


def sample_text(llm: kvjax.LLM, count: int, seed: int) -> list[int]:
    """Returns token ids of held-out library text; random ones for a model without tokenizer, whose weights are random,
    too."""
    rng = np.random.default_rng(seed)
    if llm.tokenizer is None:
        return rng.integers(0, llm.config.vocab_size, count).tolist()
    return needles.random_span(rng, common.held_out_tokens(llm), count)


def found_adapters(config: ml_collections.ConfigDict) -> dict[int, str]:
    """Returns the file of the adapters of each sigma; raises ConfigError if one is missing."""
    if not config.adapters:
        return {}
    paths = {sigma: pathlib.Path(config.adapters) / f"{config.adapted}_{sigma}.safetensors" for sigma in config.sigmas}
    missing = [str(path) for path in paths.values() if not path.is_file()]
    if missing:
        raise ConfigError(f"no adapters at {', '.join(missing)}; fit them with configs/train_svd.py --config.ratios="
                          f"{tuple(config.sigmas)}")
    return {sigma: str(path) for sigma, path in paths.items()}


def check(config: ml_collections.ConfigDict) -> None:
    """Raises ConfigError for settings that do not go together."""
    common.check_counts(config, steps=2, rounds=2)  # the first token of a round and the first round are left out
    if not set(config.checked) <= set(itertools.product(config.batches, config.contexts)):
        raise ConfigError(f"checked={config.checked} must be pairs of one of batches={config.batches} and one of "
                          f"contexts={config.contexts}")
    if config.store == "memory":
        raise ConfigError("store='memory' reads nothing; use host, flash or flash:DEVICE")
    space_of(config)
    found_adapters(config)


def space_of(config: ml_collections.ConfigDict) -> tuner.Space:
    """Returns the grid of the configuration."""
    return tuner.Space(tuple(config.groups), tuple(config.sigmas), tuple(config.reuses))


def run(config: ml_collections.ConfigDict, workdir: str) -> None:
    """Solves every batch size and context length."""
    check(config)
    adapters, space, llm = found_adapters(config), space_of(config), make_model(config.model, config.dtype)
    run = Run(config, workdir, ("checked",))
    store, started = common.make_store(config.store, run.path / "store"), time.monotonic()
    tuning = tuner.tune(
        llm, store, sample_text(llm, config.text, config.seed), max_bytes=config.max_mib << 20,
        batches=tuple(config.batches), contexts=tuple(config.contexts), selected=config.selected, bits=config.bits,
        per_head=config.per_head, aggregation=config.aggregation, dtype=config.kv_dtype, relax=config.relax,
        space=space, adapters=adapters, knots=tuple(config.knots), path=run.path / "tuning.json",
    )
    logging.info("tuned in %.1f minutes, beside solutions that the workdir had", (time.monotonic() - started) / 60)
    rows = [row(config, *pair, solution) for pair, solution in sorted(tuning.solutions.items())]
    print_table(rows)
    checks = [line for pair in config.checked for line in checked(llm, store, space, tuning, config, pair, run)]
    print_checks(checks)
    run.summary(rows + checks)
    plots.save(plot(rows), run.path / "tuning.png")


def plot(rows: list[dict]) -> Figure:
    """Plots the choices against the context, a line per batch size: time of a layer to compute and to read, memory, and
    the settings."""
    shown = (("compute_ms", "to compute, ms per layer"), ("fetch_ms", "to read, ms per layer"),
             ("resident_mib", "memory, MiB"), ("group", "group G, tokens"), ("sigma", "compression sigma"),
             ("reuse_tokens", "kept for later steps C, tokens"))
    figure, panels = plots.panels(len(shown))
    rows = [{**row, "resident_mib": row["resident_bytes"] / 2**20} for row in rows]
    for axes, (y, title) in zip(panels, shown, strict=True):
        plots.curves(axes, rows, "context", y, lambda row: f"batch {row['batch']}")
        plots.steps(axes, [row["context"] for row in rows])
        axes.set(xlabel="context, tokens", ylabel=title)
        axes.set_ylim(bottom=0)
    return figure


def checked(llm, store, space: tuner.Space, found: tuner.Tuning, config, pair, run: Run) -> Iterator[dict]:
    """Yields expected and measured memory and time of the choice for (batch, context), and of the middle of the
    grid."""
    batch, context = pair
    done = {entry["label"] for entry in run.logged() if (entry["batch"], entry["context"]) == pair}
    if done != {_CHOICE, _MIDDLE}:
        middle = tuner.Setting(*(entry[len(entry) // 2] for entry in (space.groups, space.sigmas, space.reuses)))
        solutions = {_CHOICE: found.solutions[pair], _MIDDLE: tuner.expect(
            llm, store, sample_text(llm, config.text, config.seed), found.family, middle, batch=batch, context=context,
            space=space,
        )}
        decodings = in_turn(llm, found.family, config, solutions, batch, context, run.path)
        for label in (entry for entry in solutions if entry not in done):
            head = {**row(config, batch, context, solutions[label]), "task": "check", "label": label}
            run.log(**head, **compared(solutions[label], decodings[label], decodings[_MIDDLE]))
    yield from (entry for entry in run.logged() if (entry["batch"], entry["context"]) == pair)


@dataclasses.dataclass
class Decoding:
    """A filled cache that is being decoded."""

    plan: Plan
    state: State
    branch: Branch
    bytes: int  # of the cache's arrays
    store_bytes: int = 0  # of the store's own memory, after the last token
    seconds: list[float] = dataclasses.field(default_factory=list)  # median of each round's tokens
    stats: list[timing.Moved] = dataclasses.field(default_factory=list)  # of each token


def begun(llm, family: tuner.Family, config, solution: tuner.Solution, batch: int, context: int, path) -> Decoding:
    """Returns a cache of made-up tokens with these settings, of which as many groups come back as expected."""
    steps, method = config.rounds * config.steps, family.method(solution.setting)
    replayed = replay.at_random(method, solution.reuse_rate, steps, llm.config, context, config.seed)
    store = common.make_store(config.store, path / "store", staging_bytes=config.staging_mib << 20)
    slots = family.slots(solution.setting)
    plan, state, branch, _ = made_up.filled_cache(llm, replayed, context, steps, store, slots, batch, family.dtype)
    state = replay.stagger(replayed, state)
    return Decoding(plan, state, branch, bytes_of(state.layers))


def in_turn(
    llm, family: tuner.Family, config, solutions: dict[str, tuner.Solution], batch: int, context: int, path
) -> dict[str, Decoding]:
    """Decodes a few tokens with each solution alternately, so that other work on the machine affects both alike. The
    first token of a round, which finds the other's data in the CPU's caches, is left out of the times, and the first
    round of everything."""
    decodings, rng = {}, np.random.default_rng(config.seed)
    with contextlib.ExitStack() as stack:
        for name, solution in solutions.items():
            decodings[name] = begun(llm, family, config, solution, batch, context, path)
            stack.callback(decodings[name].branch.close)
        for turn in range(config.rounds):
            tokens = rng.integers(llm.config.vocab_size, size=config.steps).tolist()
            for decoding in decodings.values():
                stats: list[timing.Moved] = []
                times, decoding.state = timing.time_tokens(
                    llm, decoding.plan, decoding.state, tokens, "fused",
                    lambda done, to=stats: to.append(timing.moved(done)),
                )
                if turn:
                    decoding.seconds.append(float(np.median(times[1:])))
                    decoding.stats.extend(stats)
        for decoding in decodings.values():
            decoding.store_bytes = decoding.branch.held_bytes
    return decodings


def compared(solution: tuner.Solution, one: Decoding, middle: Decoding) -> dict:
    """Returns measured figures, and the relative error of the expected ones: 0.1 = a tenth more was expected.

    A layer's measured time is its share of a whole token, embedding and output included. `over_middle` is the speed
    relative to the middle of the grid, a median over rounds.
    """
    seconds = float(np.median(one.seconds))
    block = seconds / len(one.plan.layers)
    return {
        "tokens_per_s": one.plan.batch / seconds,
        "over_middle": float(np.median(np.divide(middle.seconds, one.seconds))),
        "block_ms": 1e3 * block, "expected_block_ms": 1e3 * solution.seconds, "time_off": solution.seconds / block - 1,
        "measured_bytes": one.bytes + one.store_bytes, "store_bytes": one.store_bytes,
        "memory_off": solution.memory / (one.bytes + one.store_bytes) - 1,
        "expected_reuse_rate": solution.reuse_rate, "reuse_rate": timing.came_back(one.stats),
    }


def row(config, batch: int, context: int, solution: tuner.Solution) -> dict:
    """Returns a row of a solution."""
    setting = solution.setting
    return {
        "method": "kvswap", "store": config.store, "task": "tune", "batch": batch, "context": context,
        "budget": config.max_mib << 20, "seed": config.seed, "group": setting.group, "sigma": setting.sigma,
        "reuse_tokens": setting.reuse, "resident_bytes": solution.memory, "fetch_ms": 1e3 * solution.read,
        "busy_ms": 1e3 * solution.busy, "compute_ms": 1e3 * solution.compute,
        "hidden": solution.exposed <= config.relax * solution.compute,
    }


def print_table(rows: list[dict]) -> None:
    """Prints the solutions, a line each."""
    print(f"{'batch':>6}{'context':>9}{'G':>4}{'sigma':>7}{'C':>7}{'MiB':>9}{'read ms':>9}{'busy ms':>9}"
          f"{'compute ms':>12}")
    for row in rows:
        print(f"{row['batch']:6}{row['context']:9,}{row['group']:4}{row['sigma']:7}{row['reuse_tokens']:7}"
              f"{row['resident_bytes'] / 2**20:9.1f}{row['fetch_ms']:9.2f}{row['busy_ms']:9.2f}"
              f"{row['compute_ms']:12.2f}")


def print_checks(rows: list[dict]) -> None:
    """Prints measured and expected figures, a line per row."""
    print(f"{'batch':>6}{'context':>9} {'setting':<20}{'tokens/s':>9}{'over middle':>12}{'ms/layer':>9}{'expected':>9}"
          f"{'MiB':>8}{'expected':>9}{'store':>7}{'reuse %':>9}{'expected':>9}")
    for row in rows:
        print(f"{row['batch']:6}{row['context']:9,} {row['label']:<20}{row['tokens_per_s']:9.1f}"
              f"{row['over_middle']:11.2f}x{row['block_ms']:9.1f}{row['expected_block_ms']:9.1f}"
              f"{row['measured_bytes'] / 2**20:8.1f}{row['resident_bytes'] / 2**20:9.1f}"
              f"{row['store_bytes'] / 2**20:7.1f}{100 * row['reuse_rate']:9.1f}{100 * row['expected_reuse_rate']:9.1f}")
