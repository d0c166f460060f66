"""Every method under one ruler: methods x tasks x budgets x seeds, ranked.

A row is one cell, of any task of `kvjax.eval.tasks`. Tasks give their mean score with its interval, and from the first
batch the quality of every step's selection against exact attention; perplexity gives the loss beside that of the full
cache. Blocks are on a store, so that what a method reads is counted and not estimated. Cells that the workdir has are
skipped, `shard=i/n` takes every n-th pair of method and budget, and workdirs of several shards may be joined by
concatenating their metrics.jsonl.

All tasks of one length get the same capacity, so that a method and budget is compiled once, and contexts that were read
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
    """One combination; `budget` None is the whole cache."""

    settings: tuple[tuple[str, object], ...]
    label: str
    task: str
    context: int
    budget: int | None
    seed: int
    question: str = "after"  # the prompt, token by token; or "within" it

    @property
    def head(self) -> dict:
        """What tells its row from others."""
        return {"method": self.label, "task": self.task, "context": self.context, "budget": self.budget,
                "seed": self.seed, "question": self.question}

    @property
    def method(self) -> Method:
        return common.make_method({**dict(self.settings), "budget": self.budget}, _EXTRAS)


def cells(config: ml_collections.ConfigDict) -> Iterator[Cell]:
    """The grid in the order in which it is run: all that shares compiled programs together."""
    if config.question not in ("after", "within"):
        raise ConfigError(f"question={config.question!r} must be after or within the prompt")
    called: dict[str, object] = {}
    for entry in config.methods:
        settings = dict(entry)
        label, whole = settings.pop("label", settings.get("name")), settings.pop("whole", False)
        if called.setdefault(label, entry) != entry:
            raise ConfigError(f'two methods are called {label}; give one of them a "label"')
        budgets = (None,) if whole else config.budgets
        for context, budget, task, seed in itertools.product(config.lengths, budgets, config.tasks, config.seeds):
            tokens = int(budget * context) if isinstance(budget, float) else budget
            yield Cell(tuple(settings.items()), label, task, context, tokens, seed, config.question)


def take_shard(jobs: list[Cell], shard: str) -> list[Cell]:
    """Every n-th method and budget from the i-th for "i/n", i from 0. Raises ConfigError where that makes no sense."""
    try:
        index, count = map(int, shard.split("/"))
    except ValueError:
        raise ConfigError(f"shard={shard!r} must be i/n, as 0/4") from None
    if not 0 <= index < count:
        raise ConfigError(f"shard={shard!r}: i must be in 0..{count - 1}")
    groups = [list(group) for _, group in itertools.groupby(jobs, lambda one: (one.label, one.context, one.budget))]
    return [cell for group in groups[index::count] for cell in group]


class Exams:
    """What the grid asks, drawn once for all methods, and the contexts as the model has read them."""

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
        """Everything that is asked at one length."""
        return [one for task in self.config.tasks for seed in self.config.seeds
                for one in self.drawn(task, context, seed)]

    def prompts(self, context: int) -> list[int]:
        """Tokens of each prompt at one length."""
        return [len(one.context) for one in self._asked(context)]

    def capacity(self, context: int) -> int:
        """Room for everything that is asked at one length."""
        return asking.rounded(max(
            len(one.context) + (len(one.tokens) if isinstance(one, Continuation) else asking.length(one))
            for one in self._asked(context)
        ))

    def read(self, contexts: Sequence[Sequence[int]]) -> PromptActivations:
        """The contexts read densely: kept, if there is room."""
        key = tuple(map(tuple, contexts))
        if key in self.kept:
            return self.kept[key]
        reading = self.llm.read([list(one) for one in contexts])
        if sum(one.nbytes for one in self.kept.values()) + reading.nbytes <= self.config.keep_bytes:
            self.kept[key] = reading
        return reading

    @contextlib.contextmanager
    def cached(self, cell: Cell, contexts: Sequence[Sequence[int]], directory: pathlib.Path, first: bool):
        """Contexts in the cell's cache, on its store, and a `Tally` with a probe if they are the first."""
        store, reading = common.make_store(self.config.store, directory), self.read(contexts)
        capacity, settings = self.capacity(cell.context), dict(cell.settings)
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
    """Median milliseconds in which one layer chooses its blocks, for all sequences of a batch."""
    plan, one = next((plan, one) for plan, one in zip(cache.plan.layers, cache.state.layers, strict=True)
                     if not plan.follows and plan.method == cache.plan.layers[-1].method)
    config = cache.plan.config
    shape = (cache.plan.batch, config.num_heads, config.head_dim)
    q = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return timing.median_ms(choose, plan, one.state, q)


@dataclasses.dataclass
class Tally:
    """A batch of contexts being asked: what a token cost, and of the first batch the probe and the time to select."""

    batch: int
    resident_bytes: float
    probe: Probe | None = None
    select_ms: float | None = None

    def done(self, usages: Sequence[Usage]) -> dict:
        """Quality if there is a probe, and cost per token of one sequence, of all rounds together."""
        quality = {**dataclasses.asdict(self.probe.quality), "select_ms": self.select_ms} if self.probe else {}
        return {**common.cost_of(usages), "resident_bytes": self.resident_bytes, **quality}


def answered(exams: Exams, cell: Cell, directory: pathlib.Path) -> dict:
    """Mean score of the answers; every question of a context goes to a fork of its cache."""
    scores, runs = [], []
    for batch in asking.batches(exams.llm, exams.drawn(cell.task, cell.context, cell.seed), exams.config.batch):
        with exams.cached(cell, asking.contexts(batch), directory, first=not runs) as (cache, tally):
            found, results = asking.ask(exams.llm, cache, batch, tally.probe)
        scores += [score for of_context in found for score in of_context]
        runs.append(tally.done([result.usage for result in results]))
    return {**evaluate.accuracy(scores), "scores": scores, **together(runs)}


def continued(exams: Exams, cell: Cell, directory: pathlib.Path) -> dict:
    """How well the scored tokens are predicted: the loss where all are scored, else the share of right ones."""
    samples, size = exams.drawn(cell.task, cell.context, cell.seed), exams.config.batch
    losses, hits, runs = [], [], []
    for start in range(0, len(samples), size):
        batch = samples[start : start + size]
        with exams.cached(cell, [one.context for one in batch], directory, first=not runs) as (cache, tally):
            scores = exams.llm.score([list(one.tokens) for one in batch], cache, observer=tally.probe)
            scores.cache.close()
        for one, logprobs, greedy in zip(batch, scores.logprobs, scores.greedy, strict=True):
            losses.append(-logprobs[list(one.scored)])
            hits += greedy[list(one.scored)].tolist()
        runs.append(tally.done([scores.usage]))
    if not all(all(one.scored) for one in samples):
        return {**evaluate.accuracy(hits), **together(runs)}
    nll = float(np.mean(np.concatenate(losses)))
    return {"nll": nll, "perplexity": float(np.exp(nll)), "samples": len(hits),
            "nll_by_text": [float(np.mean(one)) for one in losses], **together(runs)}


def together(runs: list[dict]) -> dict:
    """Means over batches of what they have measured."""
    return {key: report.mean(runs, key) for key in dict.fromkeys(key for one in runs for key in one)}


def measure(exams: Exams, cell: Cell, directory: pathlib.Path) -> dict:
    """One row. A budget that is too small for a method is a row, not the end of the run."""
    head = {**cell.head, "store": exams.config.store}
    try:
        return head | (continued if tasks.find(cell.task)[0].continues else answered)(exams, cell, directory)
    except BudgetTooSmall as cause:  # a finding, where any other bad setting ends the run
        logging.warning("%s at budget %s: %s", cell.label, cell.budget, cause)
        return head | {"refused": str(cause)}


def check(config: ml_collections.ConfigDict) -> None:
    """Raises ConfigError on settings that make no grid."""
    common.check_some(config, "methods", "tasks")
    common.check_counts(config, lengths=1, seeds=0, samples=1, batch=1, continuations=1, max_new_tokens=0,
                        perplexity_tokens=1, recall_k=1, keep_bytes=0)
    common.check_store(config.store)
    for settings in config.methods:
        common.check_extras(settings, _EXTRAS)
    for cell in cells(config):
        _ = cell.method, tasks.find(cell.task)  # a wrong setting is an error now, not in an hour


def check_fit(exams: Exams, jobs: list[Cell]) -> None:
    """Raises ConfigError or PromptError where a method, its type or slots do not fit the model or what is asked, which
    is drawn for this. A budget that is too small is none of these."""
    for _, group in itertools.groupby(jobs, lambda one: (one.label, one.context, one.budget)):
        cell = next(group)
        settings = {**dict(cell.settings), "budget": cell.budget}
        slots, capacity = common.slots_of(settings, exams.config.store), exams.capacity(cell.context)
        with contextlib.suppress(BudgetTooSmall):
            common.check_fit(exams.llm.config, settings, exams.prompts(cell.context), capacity, slots=slots)


def run(config: ml_collections.ConfigDict, workdir: str) -> None:
    """Measures every cell of the shard that is not there yet, then writes summary.json and report.html."""
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
            jax.clear_caches()  # no other method uses them, and a process may have so many memory maps only
    rows = asked_for(evaluate.with_delta_nll(rows), jobs)
    run.summary(rows)
    (run.path / "report.html").write_text(report.page("kvjax leaderboard", run.header, rows))
    print_table(rows)
    print(f"results in {run.path / 'summary.json'} and {run.path / 'report.html'}")


def asked_for(rows: list[dict], jobs: list[Cell]) -> list[dict]:
    """The rows of these cells: a workdir may have others, of an earlier grid."""
    return [row for row in rows if any(cell.head.items() <= row.items() for cell in jobs)]


def print_table(rows: list[dict]) -> None:
    """A line per method and budget: means over tasks, contexts and seeds."""
    print(f"{'method':>22}{'budget':>8}" + "".join(f"{title:>11}" for title in TITLES))
    for row in report.summarise(rows):
        shares = [row[key] for key in ("accuracy", "recall", "attention_mass", "output_error", "delta_nll")]
        sizes = [row[key] for key in ("bytes_read_per_token", "resident_bytes")]
        shown = "".join(f"{'-':>11}" if share is None else f"{share:11.3f}" for share in shares)
        shown += "".join(f"{'-':>11}" if size is None else f"{size / 1024:11,.0f}" for size in sizes)
        print(f"{row['method']:>22}{row['budget'] or 'all':>8}{shown}")
