"""Leaderboard: every method measured alike over tasks, budgets and seeds.

A row is one cell, of any task of `kvjax.eval.tasks`. A task gives its mean score with a confidence interval, and from
its first batch the quality of every step's selection against exact attention; perplexity gives the loss beside that of
the full cache. Blocks are on a store, so that the bytes a method reads are counted and not estimated.

The samples of a task are cut into batches that fit in `hold_bytes`. A batch's contexts are read once, and then every
method answers at every budget; each of these is one line of metrics.jsonl. A run that was stopped at any time goes on
with the first line that is missing; rows are made of a cell's lines once all of them are there. `shard=i/n` takes every
n-th task, length and seed, and workdirs of several shards are joined by concatenating their metrics.jsonl.
"""

import contextlib
import itertools
import pathlib
import time
from collections.abc import Iterator, Sequence

import jax
import ml_collections
from absl import logging
from tqdm import tqdm

from experiments import common, plots
from experiments.board import depths, evaluate, grid, report
from experiments.board.estimate import Estimate, Unit, table
from experiments.board.exams import Batch, Exams, Tally
from experiments.board.grid import Cell
from experiments.board.rows import Lines, filed, joined, row_of
from experiments.board.segments import SEGMENT, Segments, segment_means
from experiments.results import Run
from kvjax.errors import BudgetTooSmall
from kvjax.eval import tasks
from kvjax.eval.tasks import asking
from kvjax.inference.cache import Cache
from kvjax.inference.usage import Usage

_GRID = ("methods", "tasks", "lengths", "budgets", "seeds", "question", "shard", "parts", "hold_bytes", "estimate_only")
TITLES = ("accuracy", "recall", "mass", "out error", "delta NLL", "KiB/token", "KiB kept")
_TRIED = 4  # tokens decoded for a first estimate
_MAPS = pathlib.Path("/proc/self/maps")
_MOST_MAPS = 48_000  # of compiled programs, some 50 KiB each; Linux gives a process 65,530


# -------------------------------------------------------------------------------- one method on one batch


def measure_batch(exams: Exams, cell: Cell, batch: Batch, directory: pathlib.Path, probed: bool) -> dict:
    """Returns the line of one cell and one batch; a budget that is too small for the method makes a line with "refused"
    that stands for all batches.

    Args:
      exams: part of the grid.
      cell: the cell.
      batch: some of its samples.
      directory: place of a flash store.
      probed: whether every step is compared with exact attention.
    """
    head = {**cell.head, "drawn": cell.drawn, "store": exams.config.store, "span": batch.span}
    exams.read_s = 0.0
    try:
        with exams.cached(cell, batch, directory, probed) as (cache, tally):
            measured, usages = (_continued if _continues(cell) else _answered)(exams, batch, cache, tally)
    except BudgetTooSmall as cause:  # a result; any other bad setting ends the run
        logging.warning("%s at budget %s: %s", cell.label, cell.budget, cause)
        return {**head, "span": (0, len(exams.drawn(*cell.exam))), "refused": str(cause)}
    return {**head, **measured, "cost": tally.done(usages),
            "seconds": _seconds(usages, batch, exams.read_s, tally.fill_s, probed)}


def _continues(cell: Cell) -> bool:
    return tasks.find(cell.task)[0].continues


def _seconds(usages: Sequence[Usage], batch: Batch, read_s: float, fill_s: float, probed: bool) -> dict:
    """Returns the times from which the rest of the grid is estimated."""
    steps = max(1, sum(usage.steps for usage in usages))
    return {"read": read_s, "contexts": batch.different, "fill": fill_s, "sequences": len(batch.items),
            "step": sum(usage.seconds for usage in usages) / steps, "steps": steps, "most_steps": batch.steps,
            "probed": probed}


def _answered(exams: Exams, batch: Batch, cache: Cache, tally: Tally) -> tuple[dict, list[Usage]]:
    """Returns the score of each answer, every question about a context going to a fork of its cache, and the loss of
    what was decoded before."""
    probe = Segments(tally.probe, batch.decoded - 1)
    answers = asking.ask(exams.llm, cache, batch.items, probe.observer)
    measured = {"scores": [score for of_context in answers.scores for score in of_context]}
    if answers.logprobs is not None:
        losses = [-logprobs for logprobs in answers.logprobs]
        measured |= {"nll_by_segment": [segment_means(of_text) for of_text in losses], **probe.means}
    return measured, answers.usages


def _continued(exams: Exams, batch: Batch, cache: Cache, tally: Tally) -> tuple[dict, list[Usage]]:
    """Returns how well the scored tokens of each sample are predicted: losses, and whether each was the likeliest."""
    probe = Segments(tally.probe, batch.steps - 1)
    scores = exams.llm.score([list(sample.tokens) for sample in batch.items], cache, observer=probe.observer)
    scores.cache.close()
    kept = [list(sample.scored) for sample in batch.items]
    losses = [-logprobs[which] for logprobs, which in zip(scores.logprobs, kept, strict=True)]
    hits = [greedy[which].tolist() for greedy, which in zip(scores.greedy, kept, strict=True)]
    measured = {"losses": [of_text.tolist() for of_text in losses], "hits": hits}
    if batch.steps > SEGMENT:
        measured |= {"nll_by_segment": [segment_means(of_text) for of_text in losses], **probe.means}
    return measured, [scores.usage]


def measure(exams: Exams, cell: Cell, directory: pathlib.Path) -> dict:
    """Returns the row of one cell, all of whose batches are measured now."""
    lines: list[dict] = []
    for i, batch in enumerate(exams.batches(*cell.exam)):
        lines.append(measure_batch(exams, cell, batch, directory, probed=_probed(exams, i)))
        if "refused" in lines[-1]:
            break
    return joined(exams, cell, lines)


def _probed(exams: Exams, number: int) -> bool:
    """Returns whether the batch of this number is compared with exact attention: the first is."""
    return number == 0 and exams.config.recall_k > 0


# ------------------------------------------------------------------------------------------- the grid


def check(config: ml_collections.ConfigDict) -> None:
    """Raises ConfigError for settings that make no grid."""
    common.check_some(config, "methods")
    common.check_counts(config, batch=1, recall_k=0, recall_every=1, hold_bytes=1)
    common.check_store(config.store)
    for settings in config.methods:
        common.check_extras(settings, grid.EXTRAS)
    for part in grid.parts(config):
        common.check_some(part, "methods", "tasks")
        common.check_counts(part, lengths=1, seeds=0, samples=1, continuations=1, max_new_tokens=0, perplexity_tokens=1)
        for cell in grid.cells(part):
            _ = cell.method, tasks.find(cell.task)  # a wrong setting raises before a long run


def check_fit(exams: Exams, jobs: Sequence[Cell]) -> None:
    """Raises ConfigError or PromptError if a method, its type, its slots or its memory do not fit the model, the
    samples or `hold_bytes`; samples are drawn for this. A budget that is too small is not an error."""
    for cell in {(job.label, job.context, job.budget): job for job in jobs}.values():
        settings = {**dict(cell.settings), "budget": cell.budget}
        slots, capacity = common.slots_of(settings, exams.config.store), exams.capacity(cell.context)
        with contextlib.suppress(BudgetTooSmall):
            common.check_fit(exams.llm.config, settings, exams.prompts(cell.context), capacity, slots=slots)
        exams.size(cell.context)


def units(exams: Exams, jobs: Sequence[Cell], lines: Lines) -> Iterator[Unit]:
    """Yields what is left of a part in the order of the run: for each batch, all methods and budgets."""
    for exam, group in itertools.groupby(jobs, lambda cell: cell.exam):
        left = [cell for cell in group if row_of(exams, cell, lines) is None]
        for i, batch in enumerate(exams.batches(*exam) if left else ()):
            for cell in left:
                if all(tuple(line["span"]) != batch.span for line in lines.get(cell.key, ())):
                    yield Unit(cell, batch, _probed(exams, i))


def run(config: ml_collections.ConfigDict, workdir: str) -> None:
    """Estimates what is left of the shard, measures it, then writes summary.json and the reports."""
    check(config)
    llm = common.load_model(config.model, config.dtype)
    stream = common.held_out_tokens(llm)
    parts = [(Exams(llm, part, stream), list(grid.cells(part))) for part in grid.parts(config)]
    for exams, _ in parts:
        common.check_model(llm, exams.config.methods)
    jobs = [cell for _, cells in parts for cell in cells]
    grid.check_apart(jobs)
    mine = {cell.key for cell in grid.take_shard(jobs, config.shard)}
    parts = [(exams, [cell for cell in cells if cell.key in mine]) for exams, cells in parts]
    for exams, cells in parts:
        check_fit(exams, cells)
    run = Run(config, workdir, _GRID)
    lines, estimate = run.logged(), Estimate(llm.config)
    for line in lines:
        estimate.add(line)
    left = [(exams, list(units(exams, cells, filed(lines)))) for exams, cells in parts]
    announce(parts, left, estimate, run.path / "store")
    if config.estimate_only:
        return
    work_off(left, estimate, run)
    done = filed(run.logged())
    rows = [row for exams, cells in parts for cell in cells if (row := row_of(exams, cell, done)) is not None]
    rows = evaluate.with_differences(rows)
    run.summary(rows)
    pages = write_pages(run.path, run.header, rows)
    places = [row for row in rows if "by_depth" in row]
    if places:
        plots.save(depths.figure(places, "needles found in the decoded text", "depth in the decoded text, %"),
                   run.path / "depths.png")
    print_segments(rows)
    print(f"results in {run.path / 'summary.json'} and {', '.join(map(str, pages))}")


def write_pages(directory: pathlib.Path, header: dict, rows: list[dict]) -> list[pathlib.Path]:
    """Writes and prints a report for each group of rows whose means can be compared (`report.comparable`).

    Returns the pages: report.html; or report_LENGTH.html of several lengths, numbered from the second of a length on.
    """
    groups, pages = report.comparable(rows), []
    for mine in sorted(groups, key=lambda group: group[0]["context"]):
        length, tasks_asked = mine[0]["context"], ", ".join(dict.fromkeys(row["task"] for row in mine))
        within = ", asked within the prompt" if mine[0]["question"] == "within" else ""
        number = sum(page.name.startswith(f"report_{length}") for page in pages) + 1
        name = f"report_{length}" + (f"_{number}" if number > 1 else "")
        pages.append(directory / ("report.html" if len(groups) == 1 else f"{name}.html"))
        pages[-1].write_text(report.page(f"kvjax leaderboard, {length:,} tokens{within}", header, mine))
        print(f"contexts of {length:,} tokens{within}: {tasks_asked}")
        print_table(mine)
    return pages


def announce(parts: Sequence[tuple[Exams, list[Cell]]], left: Sequence[tuple[Exams, list[Unit]]], estimate: Estimate,
             directory: pathlib.Path) -> None:
    """Prints what the run holds in memory and, after a short trial of each method, the time that is left."""
    lengths = [(exams, context) for exams, cells in parts for context in {cell.context for cell in cells}]
    held = max((exams.held(context) for exams, context in lengths), default=0)
    print(f"holds at most {held / 2**20:,.0f} MiB of activations and caches, beside the weights and compiled programs")
    begun = [(exams, todo) for exams, todo in left if todo]
    for number, (exams, (first, *others)) in enumerate(begun):
        same = [unit.cell for unit in (first, *others) if unit.batch == first.batch]
        unknown = [cell for cell in same if not estimate.knows(cell)]
        try_out(exams, unknown, first.batch, estimate, directory, first.probed)
        if number:  # only the first part goes on with what was read
            exams.kept.clear()
    if estimate.costs:
        print(table(estimate.seconds(unit for _, todo in left for unit in todo)), flush=True)


def try_out(
    exams: Exams, cells: Sequence[Cell], batch: Batch, estimate: Estimate, directory: pathlib.Path, probed: bool
) -> None:
    """Adds to an estimate what filling a cache and a few tokens take for each of the cells, on one batch."""
    for cell in tqdm(cells, desc="estimating", disable=None):
        exams.read_s = 0.0
        room = exams.capacity(cell.context) - max(map(len, batch.contexts))
        texts = [list(row[: min(_TRIED + 1, room)]) for row in batch.contexts]
        with contextlib.suppress(BudgetTooSmall), exams.cached(cell, batch, directory, probed) as (cache, tally):
            for observer in (None, Segments(tally.probe, 0).observer):  # the first loads programs
                scores = exams.llm.score(texts, cache, observer=observer)
                scores.cache.close()
            seconds = _seconds([scores.usage], batch, exams.read_s, tally.fill_s, probed)
            estimate.add({**cell.head, "seconds": seconds | {"steps": batch.steps}})


def work_off(left: Sequence[tuple[Exams, list[Unit]]], estimate: Estimate, run: Run) -> None:
    """Measures all units and logs a line for each; the bar counts seconds, those done and those estimated."""
    with tqdm(total=0, unit="s", disable=None) as progress:
        for number, (exams, todo) in enumerate(left):
            later = [unit for _, others in left[number + 1 :] for unit in others]
            refused, batch = set[tuple](), None
            for i, unit in enumerate(todo):
                if unit.cell.key in refused:
                    continue
                if batch is not None and unit.batch != batch:
                    exams.kept.clear()  # every method has answered; the next batch's contexts take this one's place
                batch = unit.batch
                started = time.perf_counter()
                line = measure_batch(exams, unit.cell, unit.batch, run.path / "store", unit.probed)
                run.keep(**line)
                logging.info("%s, samples %d to %d: %s", unit.cell.head, *line["span"], line.get("cost", "refused"))
                if "refused" in line:
                    refused.add(unit.cell.key)
                estimate.add(line)
                progress.update(round(time.perf_counter() - started))
                if estimate.costs:
                    progress.total = progress.n + round(estimate.seconds([*todo[i + 1 :], *later]).total())
                drop_programs()
            exams.kept.clear()


def drop_programs() -> None:
    """Drops compiled programs before a process runs out of memory maps, of which each holds some."""
    if _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > _MOST_MAPS:
        jax.clear_caches()


def print_table(rows: list[dict]) -> None:
    """Prints a line per method and budget: means over tasks, contexts and seeds."""
    print(f"{'method':>22}{'budget':>8}" + "".join(f"{title:>11}" for title in TITLES))
    for row in report.summarise(rows):
        shares = [row[key] for key in ("accuracy", "recall", "attention_mass", "output_error", "delta_nll")]
        sizes = [row[key] for key in ("bytes_read_per_token", "resident_bytes")]
        shown = "".join(f"{'-':>11}" if share is None else f"{share:11.3f}" for share in shares)
        shown += "".join(f"{'-':>11}" if size is None else f"{size / 1024:11,.0f}" for size in sizes)
        print(f"{row['method']:>22}{row['budget'] or 'all':>8}{shown}")


def print_segments(rows: list[dict]) -> None:
    """Prints loss and recall of each segment of what was decoded, for rows that have them."""
    for row in rows:
        for key in ("nll_by_segment", "recall_by_segment"):
            if key in row:
                shown = "".join(f"{'-':>8}" if value is None else f"{value:8.3f}" for value in row[key])
                print(f"{row['method']:>22}{row['budget'] or 'all':>8} {row['task']} {key}, {SEGMENT} tokens:{shown}")
