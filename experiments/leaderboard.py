"""Every method under one ruler: methods x tasks x budgets x seeds, ranked.

A row is one cell, of any task of `kvjax.tasks`. Tasks give their mean score with its interval, and from the first batch
the quality of every step's selection against exact attention; perplexity gives the loss beside that of the full cache.
Blocks are on a store, so that what a method reads is counted and not estimated. Cells that the workdir has are skipped,
`shard=i/n` takes every n-th, and workdirs of several shards may be joined by concatenating their metrics.jsonl.
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator, Sequence

import ml_collections
import numpy as np
from absl import logging
from tqdm import tqdm

from experiments import common, evaluate, report
from experiments.results import Run
from kvjax import tasks
from kvjax.errors import ConfigError
from kvjax.llm import LLM, Usage
from kvjax.method import Method
from kvjax.metrics import Probe
from kvjax.tasks import Continuation, Sample, asking

TITLES = ("accuracy", "recall", "mass", "out error", "delta NLL", "KiB/token", "KiB kept")


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


def answered(llm: LLM, cell: Cell, samples: Sequence[Sample], config, directory: pathlib.Path) -> dict:
    """Mean score of the answers; every question of a context goes to a fork of its cache."""
    if config.max_new_tokens:
        most = config.max_new_tokens
        samples = [dataclasses.replace(one, max_new_tokens=min(most, one.max_new_tokens)) for one in samples]
    scores, runs = [], []
    for batch in asking.batches(llm, samples, config.batch):
        contexts, room = asking.contexts(batch), asking.capacity(batch)
        with reading(llm, cell, contexts, room, config, directory, first=not runs) as (cache, run):
            found, results = asking.ask(llm, cache, batch, run.probe)
        scores += [score for of_context in found for score in of_context]
        runs.append(run.done([result.usage for result in results]))
    return {**evaluate.accuracy(scores), **together(runs)}


def continued(llm: LLM, cell: Cell, samples: Sequence[Continuation], config, directory: pathlib.Path) -> dict:
    """How well the scored tokens are predicted: the loss where all are scored, else the share of right ones."""
    losses, hits, runs = [], [], []
    for start in range(0, len(samples), config.batch):
        batch = samples[start : start + config.batch]
        room = max(len(one.context) + len(one.tokens) for one in batch)
        contexts = [list(one.context) for one in batch]
        with reading(llm, cell, contexts, room, config, directory, first=not runs) as (cache, run):
            scores = llm.score([list(one.tokens) for one in batch], cache, observer=run.probe)
            scores.cache.close()
        for one, logprobs, greedy in zip(batch, scores.logprobs, scores.greedy, strict=True):
            losses.append(-logprobs[list(one.scored)])
            hits += greedy[list(one.scored)].tolist()
        runs.append(run.done([scores.usage]))
    if not all(all(one.scored) for one in samples):
        return {**evaluate.accuracy(hits), **together(runs)}
    nll = float(np.mean(np.concatenate(losses)))
    return {"nll": nll, "perplexity": float(np.exp(nll)), "samples": len(hits), **together(runs)}


@dataclasses.dataclass
class Reading:
    """A batch of contexts being asked: the probe of the first batch, and what a token cost."""

    batch: int
    resident_bytes: float
    probe: Probe | None

    def done(self, usages: Sequence[Usage]) -> dict:
        """Quality if there is a probe, and cost per token of one sequence, of all rounds together."""
        tokens = self.batch * max(1, sum(usage.steps for usage in usages))
        cost = {"attended_tokens": float(np.mean([usage.attended_tokens for usage in usages])),
                "resident_bytes": self.resident_bytes, "hit_rate": float(np.mean([one.hit_rate for one in usages]))}
        stores = [usage.store for usage in usages if usage.store is not None]
        if stores:
            cost |= {"bytes_read_per_token": sum(one.bytes_read for one in stores) / tokens,
                     "reads_per_token": sum(one.reads for one in stores) / tokens}
        return cost | (dataclasses.asdict(self.probe.quality) if self.probe else {})


@contextlib.contextmanager
def reading(llm: LLM, cell: Cell, contexts: list[list[int]], capacity: int, config, directory, first: bool):
    """Reads contexts into the cell's cache, on its store; keeps what a probe needs if they are the first."""
    store = common.make_store(config.store, directory)
    cache = llm.prefill(contexts, method=cell.method, store=store, capacity=capacity, keep_keys=first)
    resident = cache.resident_bytes / len(contexts)
    try:
        yield cache, Reading(len(contexts), resident, Probe(cache, k=config.recall_k) if first else None)
    finally:
        cache.close()


def together(runs: list[dict]) -> dict:
    """Means over batches of what they have measured."""
    return {key: report.mean(runs, key) for key in dict.fromkeys(key for one in runs for key in one)}


def measure(llm: LLM, cell: Cell, stream: np.ndarray, config, directory: pathlib.Path) -> dict:
    """One row."""
    continues = tasks.find(cell.task)[0].continues
    count = config.continuations if continues else config.samples
    samples = common.draw_task(llm, stream, cell.task, cell.context, count, cell.seed, config.perplexity_tokens)
    measured = (continued if continues else answered)(llm, cell, samples, config, directory)
    return {"method": cell.label, "task": cell.task, "context": cell.context, "budget": cell.budget, "seed": cell.seed,
            "store": config.store, **measured}


def run(config: ml_collections.ConfigDict, workdir: str) -> None:
    """Measures every cell of the shard that is not there yet, then writes summary.json and report.html."""
    jobs = take_shard(list(cells(config)), config.shard)
    for cell in jobs:
        _ = cell.method, tasks.find(cell.task)  # a wrong setting is an error now, not in an hour
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
        shares = [row[key] for key in ("accuracy", "recall", "attention_mass", "output_error", "delta_nll")]
        sizes = [row[key] for key in ("bytes_read_per_token", "resident_bytes")]
        shown = "".join(f"{'-':>11}" if share is None else f"{share:11.3f}" for share in shares)
        shown += "".join(f"{'-':>11}" if size is None else f"{size / 1024:11,.0f}" for size in sizes)
        print(f"{row['method']:>22}{row['budget'] or 'all':>8}{shown}")
