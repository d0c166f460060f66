"""The main job: a long document read once, its KV cache on flash, questions answered token by token.

For every method: the answers, whether they are right, what was attended and read, and how fast.
With `prompt_file` and `question` the same job runs on a user's text, without a right answer to
compare with.
"""

import dataclasses
import pathlib

import ml_collections
import numpy as np
from matplotlib.figure import Figure

import kvjax
from experiments import common
from experiments.results import Run
from kvjax.errors import ConfigError, PromptError
from kvjax.metrics import Probe
from kvjax.tasks import corpus, needles, scoring

COLUMNS = (
    ("method", "{:>18}"), ("right", "{:>6}"), ("recall", "{:>7}"), ("attended_tokens", "{:>9}"),
    ("bytes_read_per_token", "{:>11}"), ("resident_bytes", "{:>11}"), ("tokens_per_s", "{:>9}"), ("answers", " {}"),
)
TITLES = ("method", "right", "recall", "attended", "read/token", "resident", "tokens/s", "answers")


@dataclasses.dataclass(frozen=True)
class Job:
    """A context in tokens, and questions with their answers where these are known."""

    context: list[int]
    questions: tuple[str, ...]
    answers: tuple[str | None, ...]


def reference_job(llm: kvjax.LLM, config: ml_collections.ConfigDict) -> Job:
    """Held-out library text of `context` tokens with needles in it, each asked for."""
    rng = np.random.default_rng(config.seed)
    text = "\n".join(corpus.stdlib_documents(held_out=True))
    stream = np.asarray(llm.encode(text, start=False))
    words = rng.choice(corpus.key_words(held_out=True), size=len(config.needles), replace=False)
    facts = [
        needles.Needle(cue.format(key=word), needles.draw_value(rng, config.digits, held_out=True))
        for cue, word in zip(config.needles, words, strict=True)
    ]
    depths = np.linspace(0.1, 0.9, len(facts))
    hay = needles.haystack(rng, llm.tokenizer.tokenizer, stream, config.context, facts, facts, depths)
    return Job(hay.context, tuple("\n" + fact.cue for fact in facts), tuple(fact.value for fact in facts))


def user_job(llm: kvjax.LLM, config: ml_collections.ConfigDict) -> Job:
    """A user's own text and question. Raises PromptError where they are missing or empty."""
    path = pathlib.Path(config.prompt_file)
    if not path.is_file():
        raise PromptError(f"prompt_file={config.prompt_file} is not a file; give the path of a text file")
    text = path.read_text(encoding="utf-8", errors="replace")
    if not text.strip():
        raise PromptError(f"prompt_file={config.prompt_file} is empty; give a file with text in it")
    if not config.question:
        raise PromptError('no question; give --config.question="..." beside prompt_file')
    return Job(llm.encode(text, start=True), (config.question,), (None,))


def answer_all(llm: kvjax.LLM, job: Job, settings, config: ml_collections.ConfigDict, directory: pathlib.Path) -> dict:
    """One row of the table: all questions to one method over one prefilled cache."""
    method = common.make_method(settings)
    store = common.make_store(config.store, directory)
    cache = llm.prefill(job.context, method=method, store=store, capacity=capacity(llm, job, config), keep_keys=True)
    llm.generate(job.questions[0], cache, max_new_tokens=2)  # compiles; not counted
    results, probes = [], []
    for question in job.questions:
        results.append(llm.generate(question, cache, max_new_tokens=config.max_new_tokens, stop=(".", "\n")))
    for question in job.questions:  # apart from the timed runs: it brings every step's selection to the host
        probes.append(Probe(cache, k=config.recall_k))
        llm.generate(question, cache, max_new_tokens=config.max_new_tokens, stop=(".", "\n"), observer=probes[-1])
    row = summarise(method, job, results, probes, cache)
    cache.close()
    return {**row, "store": config.store, "task": "demo", "context": len(job.context), "seed": config.seed}


def capacity(llm, job, config) -> int:
    """Room for the context, the longest question and its answer."""
    longest = max(len(llm.encode(question, start=False)) for question in job.questions)
    return len(job.context) + longest + config.max_new_tokens


def summarise(method, job: Job, results, probes, cache) -> dict:
    """The measured quantities of one method, means over the questions."""
    steps = sum(result.usage.steps for result in results)
    known = [
        scoring.answers_number(result.text, value)
        for result, value in zip(results, job.answers, strict=True) if value is not None
    ]
    recalls = [probe.quality.recall for probe in probes]
    stores = [result.usage.store for result in results]
    return {
        "method": common.label(method), "budget": method.budget,
        "accuracy": float(np.mean(known)) if known else None,
        "right": f"{sum(known)}/{len(known)}" if known else "-",
        "recall": float(np.mean(recalls)),
        "attention_mass": float(np.mean([probe.quality.attention_mass for probe in probes])),
        "attended_tokens": float(np.mean([result.usage.attended_tokens for result in results])),
        "bytes_read_per_token": sum(s.bytes_read for s in stores if s) / steps,
        "reads_per_token": sum(s.reads for s in stores if s) / steps,
        "hit_rate": float(np.mean([result.usage.hit_rate for result in results])),
        "resident_bytes": cache.resident_bytes,
        "tokens_per_s": steps / sum(result.usage.seconds for result in results),
        "answers": " | ".join(result.text.strip() for result in results),
    }


def show(row: dict) -> dict:
    """A row as the table prints it."""
    size = {key: f"{row[key] / 1024:,.0f} KiB" for key in ("bytes_read_per_token", "resident_bytes")}
    return {
        **row, **size, "recall": f"{row['recall']:.3f}", "attended_tokens": f"{row['attended_tokens']:,.0f}",
        "tokens_per_s": f"{row['tokens_per_s']:.1f}",
    }


def plot(rows: list[dict], path: pathlib.Path) -> None:
    """Recall against bytes read, and resident memory."""
    figure = Figure(figsize=(10, 4))
    left, right = figure.subplots(1, 2)
    for row in rows:
        left.plot(row["bytes_read_per_token"] / 1024, row["recall"], "o")
        left.annotate(row["method"], (row["bytes_read_per_token"] / 1024, row["recall"]), fontsize=8)
    right.barh([row["method"] for row in rows], [row["resident_bytes"] / 2**20 for row in rows])
    left.set(xlabel="KiB read from flash per token", ylabel="recall of the true top-k")
    right.set(xlabel="MiB of KV cache in memory")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def run(config: ml_collections.ConfigDict, workdir: str) -> None:
    """Runs the job with every method of the configuration; prints and saves the table."""
    methods = [common.make_method(settings) for settings in config.methods]
    if not methods:
        raise ConfigError("config.methods is empty; name at least one method")
    llm = common.load_model(config.model)
    job = user_job(llm, config) if config.prompt_file else reference_job(llm, config)
    run = Run(config, workdir)
    print(f"{len(job.context):,} tokens of context, KV cache on {config.store}; expected: "
          f"{' | '.join(answer or '?' for answer in job.answers)}")
    print("".join(form.format(title) for (_, form), title in zip(COLUMNS, TITLES, strict=True)))
    rows = []
    for settings in config.methods:
        rows.append(answer_all(llm, job, settings, config, run.path / "store"))
        shown = show(rows[-1])
        print("".join(form.format(shown[key]) for key, form in COLUMNS), flush=True)
    run.summary(rows)
    plot(rows, run.path / "demo.png")
    print(f"results in {run.path / 'summary.json'} and {run.path / 'demo.png'}")
