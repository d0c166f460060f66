"""Runs the tuner and shows what it chose; each solution is kept as it is found.

For some of the pairs also decodes with what was chosen, and with the middle of the grid, beside what the tuner expects
of either. As many groups come back there as the tuner found on its text (`experiments.replay`).
"""

import itertools
import pathlib
from collections.abc import Iterator

import ml_collections
import numpy as np

import kvjax
from experiments import common, throughput
from experiments.results import Run
from kvjax import tuner
from kvjax.errors import ConfigError
from kvjax.tasks import needles


def make_model(name: str) -> kvjax.LLM:
    """A shape of the throughput experiment, or a model directory."""
    return common.load_model(name) if pathlib.Path(name).is_dir() else throughput.make_model(name)


def sample_text(llm: kvjax.LLM, count: int, seed: int) -> list[int]:
    """Token ids of held-out library text; of a model without tokenizer, random ones, which the weights are as well."""
    rng = np.random.default_rng(seed)
    if llm.tokenizer is None:
        return rng.integers(0, llm.config.vocab_size, count).tolist()
    return needles.random_span(rng, common.held_out_tokens(llm), count)


def found_adapters(config: ml_collections.ConfigDict) -> dict[int, str]:
    """Directory of the adapters of each sigma. Raises ConfigError where one is missing."""
    if not config.adapters:
        return {}
    paths = {sigma: pathlib.Path(config.adapters) / f"{config.adapted}_{sigma}" for sigma in config.sigmas}
    missing = [str(path) for path in paths.values() if not path.is_dir()]
    if missing:
        raise ConfigError(f"no adapters at {', '.join(missing)}; fit them with configs/train_svd.py --config.ratios="
                          f"{tuple(config.sigmas)}")
    return {sigma: str(path) for sigma, path in paths.items()}


def run(config: ml_collections.ConfigDict, workdir: str) -> None:
    """Solves every batch size and context length."""
    adapters, solved = found_adapters(config), set(itertools.product(config.batches, config.contexts))
    if not set(config.checked) <= solved:
        raise ConfigError(f"checked={config.checked} must be pairs of one of batches={config.batches} and one of "
                          f"contexts={config.contexts}")
    llm, run = make_model(config.model), Run(config, workdir, ("checked",))
    store = common.make_store(config.store, run.path / "store")
    if store is None:
        raise ConfigError("store='memory' reads nothing; use host, flash or flash:DEVICE")
    space = tuner.Space(tuple(config.groups), tuple(config.sigmas), tuple(config.reuses))
    found = tuner.tune(
        llm, store, sample_text(llm, config.text, config.seed), max_bytes=config.max_mib << 20,
        batches=tuple(config.batches), contexts=tuple(config.contexts), selected=config.selected, bits=config.bits,
        per_head=config.per_head, relax=config.relax, space=space, adapters=adapters, path=run.path / "tuning.json",
    )
    rows = [row(config, *pair, solution) for pair, solution in sorted(found.solutions.items())]
    print_table(rows)
    rows += [one for pair in config.checked for one in check(llm, store, space, found, config, pair, run)]
    run.summary(rows)


def check(llm, store, space: tuner.Space, found: tuner.Tuning, config, pair, run: Run) -> Iterator[dict]:
    """Expected and measured memory and time of the choice for (batch, context), and of the middle of the grid."""
    batch, context = pair
    middle = tuner.Setting(*(one[len(one) // 2] for one in (space.groups, space.sigmas, space.reuses)))
    text = sample_text(llm, config.text, config.seed)
    expected = {"tuned": lambda: found.solutions[pair], "middle of the grid": lambda: tuner.expect(
        llm, store, text, found.family, middle, batch=batch, context=context, space=space,
    )}
    done = {(one["label"], one["batch"], one["context"]) for one in run.logged()}
    for label, solve in expected.items():
        if (label, batch, context) not in done:
            solution = solve()
            measured = decoded(llm, found, config, solution, batch, context, run.path)
            head = {**row(config, batch, context, solution), "task": "check", "label": label}
            run.log(**head, **compared(solution, measured))
    yield from (one for one in run.logged() if (one["batch"], one["context"]) == pair)


def decoded(llm, found: tuner.Tuning, config, solution: tuner.Solution, batch: int, context: int, path) -> dict:
    """A row of the throughput experiment with these settings, while as many groups come back as expected."""
    slots, method = found.family.slots(solution.setting), found.family.method(solution.setting)
    fields = ("name", "group", "sigma", "bits", "per_head", "adapters", "budget")
    settings = {
        **{name: getattr(method, name) for name in fields},
        "replay": solution.reuse_rate,
        "slots": {"count": slots.count, "policy": slots.policy, "prefetch": slots.prefetch},
    }
    how = ml_collections.ConfigDict({
        "steps": config.steps, "drivers": ("fused",), "slots": 0,
        "replay": {"model": "", "tokens": min(context, config.text), "steps": config.steps, "kinds": ("code",),
                   "seed": config.seed},
    })
    return throughput.measure(
        llm, config.model, settings, config.store, context, batch, how, path, throughput.memory_bandwidth()
    )


def compared(solution: tuner.Solution, measured: dict) -> dict:
    """Measured figures, and how far off what was expected is: 0.1 = a tenth more was expected.

    A layer's measured time is its share of a whole token, embedding and output included.
    """
    return {
        "tokens_per_s": measured["tokens_per_s"], "block_ms": measured["block_ms"],
        "expected_block_ms": 1e3 * solution.seconds, "time_off": 1e3 * solution.seconds / measured["block_ms"] - 1,
        "measured_bytes": measured["resident_bytes"], "memory_off": solution.memory / measured["resident_bytes"] - 1,
        "expected_reuse_rate": solution.reuse_rate, "reuse_rate": measured["reuse_rate"],
    }


def row(config, batch: int, context: int, solution: tuner.Solution) -> dict:
    setting = solution.setting
    return {
        "method": "kvswap", "store": config.store, "task": "tune", "batch": batch, "context": context,
        "budget": config.max_mib << 20, "seed": config.seed, "group": setting.group, "sigma": setting.sigma,
        "reuse_tokens": setting.reuse, "resident_bytes": solution.memory, "fetch_ms": 1e3 * solution.read,
        "busy_ms": 1e3 * solution.busy, "compute_ms": 1e3 * solution.compute,
        "hidden": solution.exposed <= config.relax * solution.compute,
    }


def print_table(rows: list[dict]) -> None:
    print(f"{'batch':>6}{'context':>9}{'G':>4}{'sigma':>7}{'C':>7}{'MiB':>9}{'read ms':>9}{'busy ms':>9}"
          f"{'compute ms':>12}")
    for one in rows:
        print(f"{one['batch']:6}{one['context']:9,}{one['group']:4}{one['sigma']:7}{one['reuse_tokens']:7}"
              f"{one['resident_bytes'] / 2**20:9.1f}{one['fetch_ms']:9.2f}{one['busy_ms']:9.2f}"
              f"{one['compute_ms']:12.2f}")
