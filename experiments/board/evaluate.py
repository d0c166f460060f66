"""Accuracy of methods on retrieval tasks with held-out words, values and templates, and perplexity.

Questions and answers go token by token through the sparse path; only the context is read densely. A row of the result
is one (task, length, method); rows that the workdir has are skipped. scores.png has a panel for each task; the needles
of `niah_grid` are also in depths.png.
"""

import itertools
from collections.abc import Sequence

import ml_collections
import numpy as np
from scipy import stats
from tqdm import tqdm

import kvjax
from experiments import common, plots
from experiments.board import depths, pictures
from experiments.board.report import same_samples
from experiments.results import Run
from kvjax.eval import intervals
from kvjax.eval.tasks import Sample, asking

TASKS = ("passkey", "needle", "needle_of_4", "niah_grid", "perplexity")
_EXTRAS = ("label", "dtype")  # of a method's settings


def retrieval_row(
    llm: kvjax.LLM, method, samples: Sequence[Sample], config: ml_collections.ConfigDict, dtype: str = "float32"
) -> dict:
    """Returns the accuracy over the samples, measured on `config.batch` prompts at a time."""
    right, usages, resident = [], [], 0
    for batch in asking.batches(llm, samples, config.batch):
        cache = llm.prefill(asking.contexts(batch), method=method, capacity=asking.capacity(batch), dtype=dtype)
        answers = asking.ask(llm, cache, batch)
        right += [score for scores in answers.scores for score in scores]
        usages += answers.usages
        resident = cache.resident_bytes / len(batch)
    middle = [ok for ok, s in zip(right, samples, strict=True) if 0.2 <= s.depth <= 0.8]
    return {
        **accuracy(right), "scores": right, "accuracy_middle_depth": float(np.mean(middle)),
        "by_depth": [(sample.depth, score) for sample, score in zip(samples, right, strict=True)],
        "attended_tokens": common.cost_of(usages)["attended_tokens"], "resident_bytes": resident,
    }


def accuracy(scores: Sequence[float], texts: Sequence[int] | None = None) -> dict:
    """Returns the mean and its 95 % interval: right for scores of 0 and 1, too wide for scores between.

    Args:
      scores: scores by sample.
      texts: context of each sample; None = each has its own.
    """
    share, count = float(np.mean(scores)), intervals.independent(scores, texts)
    return {"accuracy": share, "interval": intervals.wilson(share, count), "samples": len(scores),
            "independent_samples": count}


def share_of(scores: Sequence[float], full: Sequence[float]) -> dict:
    """Returns the share of the full cache's score on the same samples that is kept, with the 95 % interval of the mean
    difference; no share where the full cache scores 0.
    """
    whole = float(np.mean(full))
    if whole == 0:
        return {"samples": len(scores)}
    interval = [1 + bound / whole for bound in intervals.paired_bootstrap(scores, full)]
    return {"share_of_full": float(np.mean(scores)) / whole, "share_interval": interval, "samples": len(scores)}


def perplexity_row(
    llm: kvjax.LLM, method, stream, length: int, config: ml_collections.ConfigDict, chunk: int | None = None,
    dtype: str = "float32",
) -> dict:
    """Returns the mean negative log-likelihood of held-out text after a prefill of `length` tokens, dense unless in
    chunks.

    Of each of `config.continuations` texts, `config.perplexity_tokens` are fed one by one through the method's cache: a
    parallel forward pass would never exercise the selection.
    """
    steps, size = config.perplexity_tokens, config.batch
    drawn = common.draw_task(llm, stream, "perplexity", length, config.continuations, config.seed, steps)
    losses = []
    for some in (drawn[start : start + size] for start in range(0, len(drawn), size)):
        contexts = [list(text.context) for text in some]
        cache = llm.prefill(contexts, method=method, capacity=length + steps, chunk=chunk, dtype=dtype)
        losses += [-logprobs for logprobs in llm.score([list(text.tokens) for text in some], cache).logprobs]
    losses = np.stack(losses)
    nll = float(np.mean(losses))
    return {"nll": nll, "perplexity": float(np.exp(nll)), "samples": losses.size,
            "nll_by_text": losses.mean(axis=1).tolist()}


def measure(llm: kvjax.LLM, settings, task: str, length: int, stream, config: ml_collections.ConfigDict) -> dict:
    """Returns the figures of one method at one task and length."""
    method, dtype = common.make_method(settings, _EXTRAS), common.dtype_of(settings)
    if task == "perplexity":
        return perplexity_row(llm, method, stream, length, config, dtype=dtype)
    samples = common.draw_task(llm, stream, task, length, config.samples, config.seed)
    return retrieval_row(llm, method, samples, config, dtype)


def check(config: ml_collections.ConfigDict) -> None:
    """Raises ConfigError for tasks or numbers that make no experiment."""
    common.check_some(config, "tasks", "methods")
    common.check_counts(config, lengths=1, samples=1, batch=1, continuations=1, perplexity_tokens=1, seed=0)
    common.check_names(config, "tasks", TASKS)
    common.make_methods(config.methods, _EXTRAS)


def prompts(
    llm: kvjax.LLM, stream, task: str, length: int, config: ml_collections.ConfigDict
) -> list[tuple[list[int], int]]:
    """Returns, for every batch of a task, the tokens of each prompt and the capacity; raises ConfigError if the task
    does not fit its length."""
    if task == "perplexity":
        steps = config.perplexity_tokens
        drawn = common.draw_task(llm, stream, task, length, config.continuations, config.seed, steps)
        return [([len(text.context) for text in drawn], length + steps)]
    samples = common.draw_task(llm, stream, task, length, config.samples, config.seed)
    batches = asking.batches(llm, samples, config.batch)
    return [([len(text) for text in asking.contexts(batch)], asking.capacity(batch)) for batch in batches]


def check_fit(llm: kvjax.LLM, stream, config: ml_collections.ConfigDict) -> None:
    """Raises ConfigError or PromptError if a task does not fit its length, or a method does not fit the model or a
    task."""
    common.check_model(llm, config.methods)
    for task, length in itertools.product(config.tasks, config.lengths):
        for tokens, capacity in prompts(llm, stream, task, length, config):
            for settings in config.methods:
                common.check_fit(llm.config, settings, tokens, capacity)


def run(config: ml_collections.ConfigDict, workdir: str) -> None:
    """Evaluates every task, length and method; logs one line each."""
    check(config)
    methods = common.by_label(config.methods)
    budgets = {label: method.budget for label, method in common.make_methods(config.methods, _EXTRAS).items()}
    llm = common.load_model(config.model)
    stream = common.held_out_tokens(llm)
    check_fit(llm, stream, config)
    run = Run(config, workdir, ("methods", "tasks", "lengths"))
    rows = run.logged()
    done = {(row["task"], row["context"], row["method"]) for row in rows}
    jobs = [(task, length, method) for task in config.tasks for length in config.lengths for method in methods]
    for task, length, label in tqdm(jobs, disable=None):
        if (task, length, label) in done:
            continue
        measured = measure(llm, methods[label], task, length, stream, config)
        head = {"task": task, "context": length, "method": label, "store": "memory"}
        rows.append({**head, "budget": budgets[label], "seed": config.seed, **measured})
        run.log(**rows[-1])
    rows = asked_for(with_differences(rows), jobs)
    run.summary(rows)
    plots.save(pictures.scores(rows), run.path / "scores.png")
    grid = [row for row in rows if row["task"] == "niah_grid"]
    if grid:
        plots.save(depths.figure(grid, "needles found"), run.path / "depths.png")


def asked_for(rows: list[dict], jobs: list[tuple[str, int, str]]) -> list[dict]:
    """Returns the rows of these tasks, lengths and methods; a workdir may also have rows of an earlier grid."""
    return [row for row in rows if (row["task"], row["context"], row["method"]) in jobs]


def with_differences(rows: list[dict]) -> list[dict]:
    """Adds to each row its difference to the full cache on the same samples, of losses or of scores, and the 95 %
    interval of that if those of each text or sample are known."""
    full = {same_samples(row): row for row in rows if row["method"] == "full"}
    return [row | difference(row, full[same_samples(row)]) if same_samples(row) in full else row for row in rows]


def difference(row: dict, full: dict) -> dict:
    """Returns how much a row's loss or its score exceeds that of the full cache: a loss with Student's interval over
    texts, a score with that of `kvjax.eval.intervals.paired`."""
    if "nll" in row and "nll" in full:
        return _nll_difference(row, full)
    if "scores" in row and "scores" in full and row is not full:
        return {"delta_accuracy": row["accuracy"] - full["accuracy"],
                "delta_accuracy_interval": intervals.paired(row["scores"], full["scores"], row.get("texts"))}
    return {}


def _nll_difference(row: dict, full: dict) -> dict:
    figures = {"delta_nll": row["nll"] - full["nll"]}
    if len(row.get("nll_by_text", ())) > 1 and "nll_by_text" in full:
        apart = np.subtract(row["nll_by_text"], full["nll_by_text"])
        half = float(stats.t.ppf(0.975, len(apart) - 1) * stats.sem(apart))
        figures["delta_nll_interval"] = (figures["delta_nll"] - half, figures["delta_nll"] + half)
    return figures
