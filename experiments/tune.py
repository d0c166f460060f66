"""Runs the tuner and shows what it chose; each solution is kept as it is found."""

import pathlib

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
    adapters = found_adapters(config)
    llm, run = make_model(config.model), Run(config, workdir)
    store = common.make_store(config.store, run.path / "store")
    if store is None:
        raise ConfigError("store='memory' reads nothing; use host, flash or flash:DEVICE")
    space = tuner.Space(tuple(config.groups), tuple(config.sigmas), tuple(config.reuses))
    found = tuner.tune(
        llm, store, sample_text(llm, config.text, config.seed), max_bytes=config.max_mib << 20,
        batches=tuple(config.batches), contexts=tuple(config.contexts), selected=config.selected, relax=config.relax,
        space=space, adapters=adapters, path=run.path / "tuning.json",
    )
    rows = [row(config, *pair, solution) for pair, solution in sorted(found.solutions.items())]
    run.summary(rows)
    print_table(rows)


def row(config, batch: int, context: int, solution: tuner.Solution) -> dict:
    setting = solution.setting
    return {
        "method": "kvswap", "store": config.store, "task": "tune", "batch": batch, "context": context,
        "budget": config.max_mib << 20, "seed": config.seed, "group": setting.group, "sigma": setting.sigma,
        "reuse_tokens": setting.reuse, "resident_bytes": solution.memory, "fetch_ms": 1e3 * solution.read,
        "compute_ms": 1e3 * solution.compute, "hidden": solution.exposed <= 0,
    }


def print_table(rows: list[dict]) -> None:
    print(f"{'batch':>6}{'context':>9}{'G':>4}{'sigma':>7}{'C':>7}{'MiB':>9}{'read ms':>9}{'compute ms':>12}")
    for one in rows:
        print(f"{one['batch']:6}{one['context']:9,}{one['group']:4}{one['sigma']:7}{one['reuse_tokens']:7}"
              f"{one['resident_bytes'] / 2**20:9.1f}{one['fetch_ms']:9.2f}{one['compute_ms']:12.2f}")
