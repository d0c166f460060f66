"""Accuracy of methods on retrieval tasks with held-out words, values and templates, and perplexity.

Questions and answers go token by token through the sparse path; only the context is read densely.
A row of the result is one (task, length, method); rows that the workdir already has are skipped.
"""

import dataclasses
import math

import ml_collections
import numpy as np
from tqdm import tqdm

import kvjax
from experiments import common
from experiments.results import Run
from kvjax.errors import ConfigError
from kvjax.llm import Cache
from kvjax.tasks import needles, scoring

TASKS = ("passkey", "needle", "needle_of_4", "perplexity")


@dataclasses.dataclass(frozen=True)
class Sample:
    """One prompt with its question and the right answer."""

    context: list[int]
    question: list[int]
    value: str
    depth: float


def draw_samples(llm: kvjax.LLM, stream, task: str, length: int, count: int, seed: int) -> list[Sample]:
    """Prompts of `length` tokens, question included; the needle asked for at depths spread over 0..1."""
    drawn = common.draw_task(llm, stream, task, length, count, seed)
    return [Sample(list(one.context), list(one.question), one.answers[0], one.depth) for one in drawn]


def retrieval_row(llm: kvjax.LLM, method, samples: list[Sample], config: ml_collections.ConfigDict) -> dict:
    """Accuracy over the samples, `config.batch` prompts at a time."""
    right, attended, resident = [], [], 0
    for start in range(0, len(samples), config.batch):
        group = samples[start : start + config.batch]
        cache = llm.prefill([s.context for s in group], method=method, capacity=capacity_for(group, config))
        found, result = ask(llm, cache, group, config)
        right += found
        attended.append(result.usage.attended_tokens)
        resident = cache.resident_bytes / len(group)
    middle = [ok for ok, s in zip(right, samples, strict=True) if 0.2 <= s.depth <= 0.8]
    share = float(np.mean(right))
    return {
        "accuracy": share, "interval": wilson(share, len(right)), "accuracy_middle_depth": float(np.mean(middle)),
        "samples": len(right), "attended_tokens": float(np.mean(attended)), "resident_bytes": resident,
    }


def capacity_for(group: list[Sample], config: ml_collections.ConfigDict) -> int:
    """Room for the longest prompt with its question and answer, rounded so that few shapes compile."""
    room = max(len(s.context) + len(s.question) for s in group) + config.max_new_tokens
    return -(-room // 64) * 64


def ask(
    llm: kvjax.LLM, cache: Cache, group: list[Sample], config: ml_collections.ConfigDict, observer=None
) -> tuple[list[bool], kvjax.Result]:
    """Asks every sample's question; which answers are right, and the result."""
    questions = [s.question for s in group]
    result = llm.generate(questions, cache, max_new_tokens=config.max_new_tokens, stop=(".",), observer=observer)
    right = [scoring.answers_number(text, s.value) for text, s in zip(result.text, group, strict=True)]
    return right, result


def wilson(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """95 % confidence interval of a proportion (Wilson, 1927)."""
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(0.0, centre - half), min(1.0, centre + half)


def perplexity_row(
    llm: kvjax.LLM, method, stream, length: int, config: ml_collections.ConfigDict, chunk: int | None = None
) -> dict:
    """Mean negative log-likelihood of held-out text after a prefill of `length` tokens, dense unless in chunks.

    `config.perplexity_tokens` are fed one by one through the method's cache: a parallel forward pass
    would never exercise the selection.
    """
    rng, steps = np.random.default_rng((config.seed, length)), config.perplexity_tokens
    bos, size = llm.config.bos_token_id, length + steps - 1
    rows = [[bos, *needles.random_span(rng, stream, size)] for _ in range(config.batch)]
    tokens = np.asarray(rows, np.int32)
    cache = llm.prefill([row[:length] for row in rows], method=method, capacity=length + steps, chunk=chunk)
    losses = teacher_forced_nll(llm, cache, tokens[:, length:])
    return {"nll": float(np.mean(losses)), "perplexity": float(np.exp(np.mean(losses))), "samples": losses.size}


def teacher_forced_nll(llm: kvjax.LLM, cache: Cache, tokens: np.ndarray) -> np.ndarray:
    """Negative log-likelihood `[B, N]` of the given continuations, in nats."""
    return -np.stack(llm.score(tokens.tolist(), cache).logprobs)


def measure(llm: kvjax.LLM, method, task: str, length: int, stream, config: ml_collections.ConfigDict) -> dict:
    """What one method does at one task and length."""
    if task == "perplexity":
        return perplexity_row(llm, method, stream, length, config)
    samples = draw_samples(llm, stream, task, length, config.samples, config.seed)
    return retrieval_row(llm, method, samples, config)


def run(config: ml_collections.ConfigDict, workdir: str) -> None:
    """Evaluates every task, length and method; prints one line each."""
    unknown = set(config.tasks) - set(TASKS)
    if unknown:
        raise ConfigError(f"unknown tasks {sorted(unknown)}; use some of {', '.join(TASKS)}")
    methods = {common.label_of(settings): common.make_method(settings) for settings in config.methods}
    llm = common.load_model(config.model)
    run = Run(config, workdir)
    stream = common.held_out_tokens(llm)
    rows = run.logged()
    done = {(row["task"], row["context"], row["method"]) for row in rows}
    jobs = [(task, length, method) for task in config.tasks for length in config.lengths for method in methods]
    for task, length, label in tqdm(jobs, disable=None):
        method = methods[label]
        if (task, length, label) in done:
            continue
        measured = measure(llm, method, task, length, stream, config)
        head = {"task": task, "context": length, "method": label, "store": "memory"}
        rows.append({**head, "budget": method.budget, "seed": config.seed, **measured})
        run.log(**rows[-1])
    run.summary(with_delta_nll(rows))


def with_delta_nll(rows: list[dict]) -> list[dict]:
    """Adds the difference to the full cache, at the same task, length and seed, to each row with a loss."""
    def same(row: dict) -> tuple:
        return row["task"], row["context"], row["seed"]

    full = {same(row): row["nll"] for row in rows if "nll" in row and row["method"] == "full"}
    return [
        {**row, "delta_nll": row["nll"] - full[same(row)]} if "nll" in row and same(row) in full else row
        for row in rows
    ]
