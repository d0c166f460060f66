"""Leaderboard: every method measured alike over tasks, budgets and seeds.

A row is one cell, of any task of `kvjax.eval.tasks`. A task gives its mean score with a confidence interval, and from
its first batch the quality of every step's selection against exact attention; perplexity gives the loss beside that of
the full cache. Blocks are on a store, so that the bytes a method reads are counted and not estimated. Cells that the
workdir has are skipped, `shard=i/n` takes every n-th pair of method and budget, and workdirs of several shards are
joined by concatenating their metrics.jsonl.

All tasks of one length get the same capacity, so that a method with a budget is compiled once. Contexts that were read
once are kept for the next method while they fit in `keep_bytes`.
"""

import contextlib
import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Iterator, Sequence

import jax
import ml_collections
import numpy as np
from absl import logging
from tqdm import tqdm

from experiments import common
from experiments.board import evaluate, report
from experiments.results import Run
from experiments.speed import timing
from kvjax.cache.method import Method
from kvjax.cache.read import choose
from kvjax.errors import BudgetTooSmall, ConfigError
from kvjax.eval import tasks
from kvjax.eval.metrics import Probe
from kvjax.eval.tasks import Continuation, Sample, asking
from kvjax.inference.cache import Cache
from kvjax.inference.generate import Usage
from kvjax.inference.prefill import PromptActivations
from kvjax.llm import LLM

_GRID = ("methods", "tasks", "lengths", "budgets", "seeds", "question", "shard", "keep_bytes")
_EXTRAS = ("label", "dtype", "whole", "slots")  # of a method's settings
TITLES = ("accuracy", "recall", "mass", "out error", "delta NLL", "KiB/token", "KiB kept")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One combination; with `budget` None the whole cache is attended."""

    settings: tuple[tuple[str, object], ...]
    label: str
    task: str
    context: int
    budget: int | None
    seed: int
    question: str = "after"  # "after": token by token after the prompt; "within": part of the prompt

    @property
    def head(self) -> dict:
        """Fields that tell its row from others."""
        return {"method": self.label, "task": self.task, "context": self.context, "budget": self.budget,
                "seed": self.seed, "question": self.question}

    @property
    def method(self) -> Method:
        return common.make_method({**dict(self.settings), "budget": self.budget}, _EXTRAS)


def cells(config: ml_collections.ConfigDict) -> Iterator[Cell]:
    """Yields the grid in the order in which it is run: cells that share compiled programs are neighbours."""
    if config.question not in ("after", "within"):
        raise ConfigError(f"question={config.question!r} must be after or within the prompt")
    entries: dict[str, object] = {}
    for entry in config.methods:
        settings = dict(entry)
        label, whole = settings.pop("label", settings.get("name")), settings.pop("whole", False)
        if entries.setdefault(label, entry) != entry:
            raise ConfigError(f'two methods are called {label}; give one of them a "label"')
        budgets = (None,) if whole else config.budgets
        for context, budget, task, seed in itertools.product(config.lengths, budgets, config.tasks, config.seeds):
            tokens = int(budget * context) if isinstance(budget, float) else budget
            yield Cell(tuple(settings.items()), label, task, context, tokens, seed, config.question)


def take_shard(jobs: list[Cell], shard: str) -> list[Cell]:
    """Returns, for shard "i/n", every n-th group of equal method, context and budget from the i-th (from 0) on; raises
    ConfigError for any other text."""
    try:
        index, count = map(int, shard.split("/"))
    except ValueError:
        raise ConfigError(f"shard={shard!r} must be i/n, such as 0/4") from None
    if not 0 <= index < count:
        raise ConfigError(f"shard={shard!r}: i must be in 0..{count - 1}")
    groups = [list(group) for _, group in itertools.groupby(jobs, lambda job: (job.label, job.context, job.budget))]
    return [cell for group in groups[index::count] for cell in group]


class Exams:
    """Questions of the grid, drawn once for all methods, and the contexts as the model has read them."""

    def __init__(self, llm: LLM, config: ml_collections.ConfigDict):
        self.llm, self.config, self.stream = llm, config, common.held_out_tokens(llm)
        self.drawn = functools.cache(self._draw)
        self.kept: dict[tuple, PromptActivations] = {}

    def _draw(self, task: str, context: int, seed: int) -> Sequence[Sample] | Sequence[Continuation]:
        config, continues = self.config, tasks.find(task)[0].continues
        count = config.continuations if continues else config.samples
        samples = common.draw_task(self.llm, self.stream, task, context, count, seed, config.perplexity_tokens)
        if continues:
            return samples
        if config.max_new_tokens:
            most = config.max_new_tokens
            samples = [dataclasses.replace(one, max_new_tokens=min(most, one.max_new_tokens)) for one in samples]
        samples = asking.tokenised(self.llm, samples)
        return asking.within_prompt(samples) if config.question == "within" else samples

    def _asked(self, context: int) -> list[Sample | Continuation]:
        """Returns all samples of one length."""
        return [sample for task in self.config.tasks for seed in self.config.seeds
                for sample in self.drawn(task, context, seed)]

    def prompts(self, context: int) -> list[int]:
        """Returns the tokens of each prompt of one length."""
        return [len(sample.context) for sample in self._asked(context)]

    def capacity(self, context: int) -> int:
        """Returns the tokens of the longest prompt of one length with its questions and answers, rounded up."""
        return asking.rounded(max(
            len(sample.context) + (len(sample.tokens) if isinstance(sample, Continuation) else asking.length(sample))
            for sample in self._asked(context)
        ))

    def read(self, contexts: Sequence[Sequence[int]], capacity: int) -> PromptActivations:
        """Returns the contexts read densely for caches of this capacity, and keeps the result if there is room."""
        key = capacity, tuple(map(tuple, contexts))
        if key in self.kept:
            return self.kept[key]
        reading = self.llm.read([list(context) for context in contexts], capacity=capacity)
        if sum(context.nbytes for context in self.kept.values()) + reading.nbytes <= self.config.keep_bytes:
            self.kept[key] = reading
        return reading

    @contextlib.contextmanager
    def cached(self, cell: Cell, contexts: Sequence[Sequence[int]], directory: pathlib.Path, first: bool):
        """Yields contexts in the cell's cache, on its store, and a `Tally`; the first batch has a probe."""
        capacity, settings = self.capacity(cell.context), dict(cell.settings)
        store, reading = common.make_store(self.config.store, directory), self.read(contexts, capacity)
        cache = self.llm.prefill(
            reading, method=cell.method, store=store, capacity=capacity, dtype=common.dtype_of(settings),
            slots=common.slots_of(settings, self.config.store),
        )
        try:
            tally = Tally(len(contexts), cache.resident_bytes / len(contexts))
            if first:
                tally.probe, tally.select_ms = Probe(cache, reading, k=self.config.recall_k), select_ms(cache)
            yield cache, tally
        finally:
            cache.close()


def select_ms(cache: Cache) -> float:
    """Returns the median milliseconds in which one layer selects its blocks, for all sequences of a batch."""
    plan, layer = next((plan, layer) for plan, layer in zip(cache.plan.layers, cache.state.layers, strict=True)
                     if not plan.follows and plan.method == cache.plan.layers[-1].method)
    config = cache.plan.config
    shape = (cache.plan.batch, config.num_heads, config.head_dim)
    q = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return timing.median_ms(choose, plan, layer.state, q)


@dataclasses.dataclass
class Tally:
    """Measurements on a batch of contexts: cost of a token, and for the first batch the probe and the time of a
    selection."""

    batch: int
    resident_bytes: float
    probe: Probe | None = None
    select_ms: float | None = None

    def done(self, usages: Sequence[Usage]) -> dict:
        """Returns the cost per token of one sequence over all rounds, and with a probe the quality."""
        quality = {**dataclasses.asdict(self.probe.quality), "select_ms": self.select_ms} if self.probe else {}
        return {**common.cost_of(usages), "resident_bytes": self.resident_bytes, **quality}


def answered(exams: Exams, cell: Cell, directory: pathlib.Path) -> dict:
    """Returns the mean score of the answers; every question about a context goes to a fork of its cache."""
    scores, runs = [], []
    for batch in asking.batches(exams.llm, exams.drawn(cell.task, cell.context, cell.seed), exams.config.batch):
        with exams.cached(cell, asking.contexts(batch), directory, first=not runs) as (cache, tally):
            of_batch, results = asking.ask(exams.llm, cache, batch, tally.probe)
        scores += [score for of_context in of_batch for score in of_context]
        runs.append(tally.done([result.usage for result in results]))
    return {**evaluate.accuracy(scores), "scores": scores, **together(runs)}


def continued(exams: Exams, cell: Cell, directory: pathlib.Path) -> dict:
    """Returns how well the scored tokens are predicted: the loss if all are scored, else the share predicted
    correctly."""
    samples, size = exams.drawn(cell.task, cell.context, cell.seed), exams.config.batch
    losses, hits, runs = [], [], []
    for start in range(0, len(samples), size):
        batch = samples[start : start + size]
        with exams.cached(cell, [sample.context for sample in batch], directory, first=not runs) as (cache, tally):
            scores = exams.llm.score([list(sample.tokens) for sample in batch], cache, observer=tally.probe)
            scores.cache.close()
        for sample, logprobs, greedy in zip(batch, scores.logprobs, scores.greedy, strict=True):
            losses.append(-logprobs[list(sample.scored)])
            hits += greedy[list(sample.scored)].tolist()
        runs.append(tally.done([scores.usage]))
    if not all(all(sample.scored) for sample in samples):
        return {**evaluate.accuracy(hits), **together(runs)}
    nll = float(np.mean(np.concatenate(losses)))
    return {"nll": nll, "perplexity": float(np.exp(nll)), "samples": len(hits),
            "nll_by_text": [float(np.mean(sample)) for sample in losses], **together(runs)}


def together(runs: list[dict]) -> dict:
    """Returns the means over batches of their measurements."""
    return {key: report.mean(runs, key) for key in dict.fromkeys(key for one in runs for key in one)}


def measure(exams: Exams, cell: Cell, directory: pathlib.Path) -> dict:
    """Returns the row of one cell; a budget that is too small for a method makes a row with "refused", and the run goes
    on."""
    head = {**cell.head, "store": exams.config.store}
    try:
        return head | (continued if tasks.find(cell.task)[0].continues else answered)(exams, cell, directory)
    except BudgetTooSmall as cause:  # a result; any other bad setting ends the run
        logging.warning("%s at budget %s: %s", cell.label, cell.budget, cause)
        return head | {"refused": str(cause)}


def check(config: ml_collections.ConfigDict) -> None:
    """Raises ConfigError for settings that make no grid."""
    common.check_some(config, "methods", "tasks")
    common.check_counts(config, lengths=1, seeds=0, samples=1, batch=1, continuations=1, max_new_tokens=0,
                        perplexity_tokens=1, recall_k=1, keep_bytes=0)
    common.check_store(config.store)
    for settings in config.methods:
        common.check_extras(settings, _EXTRAS)
    for cell in cells(config):
        _ = cell.method, tasks.find(cell.task)  # a wrong setting raises before a long run


def check_fit(exams: Exams, jobs: list[Cell]) -> None:
    """Raises ConfigError or PromptError if a method, its type or its slots do not fit the model or the samples, which
    are drawn for this; a budget that is too small is not an error."""
    for _, group in itertools.groupby(jobs, lambda job: (job.label, job.context, job.budget)):
        cell = next(group)
        settings = {**dict(cell.settings), "budget": cell.budget}
        slots, capacity = common.slots_of(settings, exams.config.store), exams.capacity(cell.context)
        with contextlib.suppress(BudgetTooSmall):
            common.check_fit(exams.llm.config, settings, exams.prompts(cell.context), capacity, slots=slots)


def run(config: ml_collections.ConfigDict, workdir: str) -> None:
    """Measures every missing cell of the shard, then writes summary.json and report.html."""
    check(config)
    jobs = take_shard(list(cells(config)), config.shard)
    llm = common.load_model(config.model, config.dtype)
    common.check_model(llm, config.methods)
    exams = Exams(llm, config)
    check_fit(exams, jobs)
    run = Run(config, workdir, _GRID)
    rows = run.logged()
    left = [cell for cell in jobs if not any(cell.head.items() <= row.items() for row in rows)]
    with tqdm(total=len(left), disable=None) as progress:
        for _, group in itertools.groupby(left, lambda one: one.label):
            for cell in group:
                rows.append(measure(exams, cell, run.path / "store"))
                run.log(**rows[-1])
                progress.update()
            jax.clear_caches()  # no other method uses them, and the memory maps of a process are limited
    rows = asked_for(evaluate.with_differences(rows), jobs)
    run.summary(rows)
    (run.path / "report.html").write_text(report.page("kvjax leaderboard", run.header, rows))
    print_table(rows)
    print(f"results in {run.path / 'summary.json'} and {run.path / 'report.html'}")


def asked_for(rows: list[dict], jobs: list[Cell]) -> list[dict]:
    """Returns the rows of these cells; a workdir may also have rows of an earlier grid."""
    return [row for row in rows if any(cell.head.items() <= row.items() for cell in jobs)]


def print_table(rows: list[dict]) -> None:
    """Prints a line per method and budget: means over tasks, contexts and seeds."""
    print(f"{'method':>22}{'budget':>8}" + "".join(f"{title:>11}" for title in TITLES))
    for row in report.summarise(rows):
        shares = [row[key] for key in ("accuracy", "recall", "attention_mass", "output_error", "delta_nll")]
        sizes = [row[key] for key in ("bytes_read_per_token", "resident_bytes")]
        shown = "".join(f"{'-':>11}" if share is None else f"{share:11.3f}" for share in shares)
        shown += "".join(f"{'-':>11}" if size is None else f"{size / 1024:11,.0f}" for size in sizes)
        print(f"{row['method']:>22}{row['budget'] or 'all':>8}{shown}")
