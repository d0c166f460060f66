"""Every method under one ruler: methods x tasks x budgets x seeds, ranked.

A row is one cell. Retrieval tasks give accuracy with its interval, and from the first batch the quality of every step's
selection against exact attention; perplexity gives the loss beside that of the full cache. Blocks are on a store, so
that what a method reads is counted and not estimated. Cells that the workdir has are skipped, `shard=i/n` takes every
n-th, and workdirs of several shards may be joined by concatenating their metrics.jsonl.
"""

import dataclasses
import pathlib
from collections.abc import Iterator

import ml_collections
import numpy as np
from absl import logging
from tqdm import tqdm

from experiments import common, evaluate, report
from experiments.results import Run
from kvjax.errors import ConfigError
from kvjax.llm import LLM
from kvjax.method import Method
from kvjax.metrics import Probe

TITLES = ("accuracy", "recall", "mass", "delta NLL", "KiB/token", "KiB kept")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One combination; `budget` None is the whole cache."""

    settings: tuple[tuple[str, object], ...]
    label: str
    task: str
    context: int
    budget: int | None
    seed: int

    @property
    def key(self) -> tuple:
        return self.label, self.task, self.context, self.budget, self.seed

    @property
    def method(self) -> Method:
        return common.make_method({**dict(self.settings), "budget": self.budget})


def cells(config: ml_collections.ConfigDict) -> Iterator[Cell]:
    """The grid in the order in which it is run: one task after the other, so that an early stop has whole tasks."""
    for task, context, seed in ((t, c, s) for t in config.tasks for c in config.lengths for s in config.seeds):
        for entry in config.methods:
            settings = dict(entry)
            label = settings.pop("label", settings["name"])
            whole = settings.pop("whole", False)
            for budget in (None,) if whole else config.budgets:
                tokens = int(budget * context) if isinstance(budget, float) else budget
                yield Cell(tuple(settings.items()), label, task, context, tokens, seed)


def take_shard(jobs: list[Cell], shard: str) -> list[Cell]:
    """Every n-th cell from the i-th for "i/n", i from 0. Raises ConfigError where that makes no sense."""
    try:
        index, count = map(int, shard.split("/"))
    except ValueError:
        raise ConfigError(f"shard={shard!r} must be i/n, as 0/4") from None
    if not 0 <= index < count:
        raise ConfigError(f"shard={shard!r}: i must be in 0..{count - 1}")
    return jobs[index::count]


def retrieval(llm: LLM, cell: Cell, stream, config, directory: pathlib.Path) -> dict:
    """Accuracy over the samples, a batch at a time; selection quality and traffic of the batches it was measured in."""
    samples = evaluate.draw_samples(llm, stream, cell.task, cell.context, config.samples, cell.seed)
    right, costs, quality = [], [], {}
    for start in range(0, len(samples), config.batch):
        group = samples[start : start + config.batch]
        found, cost, probe = _ask(llm, cell, group, config, directory, first=start == 0)
        right += found
        costs.append(cost)
        quality = quality or probe
    share = float(np.mean(right))
    means = {key: float(np.mean([cost[key] for cost in costs])) for key in costs[0]}
    found = {"accuracy": share, "interval": evaluate.wilson(share, len(right)), "samples": len(right)}
    return {**found, **quality, **means}


def _ask(llm: LLM, cell: Cell, group: list[evaluate.Sample], config, directory, first: bool):
    """Answers of one batch: which are right, what it cost per token and sequence, and quality if it is the first."""
    store = common.make_store(config.store, directory)
    cache = llm.prefill([s.context for s in group], method=cell.method, store=store,
                        capacity=evaluate.capacity_for(group, config), keep_keys=first)
    probe = Probe(cache, k=config.recall_k) if first else None
    right, result = evaluate.ask(llm, cache, group, config, observer=probe)
    tokens, usage = len(group) * result.usage.steps, result.usage
    cost = {"attended_tokens": usage.attended_tokens, "resident_bytes": cache.resident_bytes / len(group),
            "hit_rate": usage.hit_rate}
    if usage.store is not None:
        cost |= {"bytes_read_per_token": usage.store.bytes_read / tokens, "reads_per_token": usage.store.reads / tokens}
    result.cache.close()
    cache.close()
    return right, cost, dataclasses.asdict(probe.quality) if probe else {}


def measure(llm: LLM, cell: Cell, stream, config, directory: pathlib.Path) -> dict:
    """One row."""
    if cell.task == "perplexity":
        settings = ml_collections.ConfigDict({**config.to_dict(), "seed": cell.seed})
        measured = evaluate.perplexity_row(llm, cell.method, stream, cell.context, settings)
    else:
        measured = retrieval(llm, cell, stream, config, directory)
    return {"method": cell.label, "task": cell.task, "context": cell.context, "budget": cell.budget, "seed": cell.seed,
            "store": config.store, **measured}


def run(config: ml_collections.ConfigDict, workdir: str) -> None:
    """Measures every cell of the shard that is not there yet, then writes summary.json and report.html."""
    jobs = take_shard(list(cells(config)), config.shard)
    for cell in jobs:
        _ = cell.method  # a wrong setting is an error now, not in an hour
    llm, run = common.load_model(config.model), Run(config, workdir)
    stream, rows = common.held_out_tokens(llm), run.logged()
    done = {(row["method"], row["task"], row["context"], row["budget"], row["seed"]) for row in rows}
    for cell in tqdm([cell for cell in jobs if cell.key not in done], disable=None):
        try:
            measured = measure(llm, cell, stream, config, run.path / "store")
        except ConfigError as cause:  # a budget that a method cannot be given is a finding, not the end of the run
            logging.warning("%s at budget %s: %s", cell.label, cell.budget, cause)
            measured = {"method": cell.label, "task": cell.task, "context": cell.context, "budget": cell.budget,
                        "seed": cell.seed, "store": config.store, "refused": str(cause)}
        rows.append(measured)
        run.log(**measured)
    rows = evaluate.with_delta_nll(rows)
    run.summary(rows)
    (run.path / "report.html").write_text(report.page("kvjax leaderboard", run.header, rows))
    print_table(rows)
    print(f"results in {run.path / 'summary.json'} and {run.path / 'report.html'}")


def print_table(rows: list[dict]) -> None:
    """A line per method and budget: means over tasks, contexts and seeds."""
    print(f"{'method':>22}{'budget':>8}" + "".join(f"{title:>11}" for title in TITLES))
    for row in report.summarise(rows):
        shares = [row[key] for key in ("accuracy", "recall", "attention_mass", "delta_nll")]
        sizes = [row[key] for key in ("bytes_read_per_token", "resident_bytes")]
        shown = "".join(f"{'-':>11}" if share is None else f"{share:11.3f}" for share in shares)
        shown += "".join(f"{'-':>11}" if size is None else f"{size / 1024:11,.0f}" for size in sizes)
        print(f"{row['method']:>22}{row['budget'] or 'all':>8}{shown}")
