"""The main job: a long document is read once, its KV cache is on flash, and questions are answered token by token.

The document is library text with needles in it. One question asks for each needle; all questions use the same prefilled
cache, which they leave as it is.

For every method the table has the answers, how many are right, tokens attended, bytes read, and speed. With
`prompt_file` and `question` the same job runs on a user's text, without a correct answer to compare with. With `chat`
both go into the model's chat template. With `chunk` each method reads the text that many tokens at a time, which takes
little memory, and recall is not measured.
"""

import contextlib
import dataclasses
import hashlib
import pathlib

import ml_collections
import numpy as np
from matplotlib.figure import Figure

import kvjax
from experiments import common
from experiments.results import Run
from kvjax.errors import ConfigError, PromptError
from kvjax.eval.metrics import Probe, Quality
from kvjax.eval.tasks import corpus, needles, scoring

COLUMNS = (
    ("method", "{:>18}"), ("right", "{:>6}"), ("recall", "{:>7}"), ("attended_tokens", "{:>9}"),
    ("bytes_read_per_token", "{:>11}"), ("resident_bytes", "{:>11}"), ("tokens_per_s", "{:>9}"), ("answers", " {}"),
)
TITLES = ("method", "right", "recall", "attended", "read/token", "resident", "tokens/s", "answers")
_EXTRAS = ("label", "slots", "dtype")  # of a method's settings
_NEEDLE_TOKENS, _TEXT_TOKENS = 8, 64  # of an answer


@dataclasses.dataclass(frozen=True)
class Job:
    """A context in tokens, questions about it, and their answers where they are known."""

    context: list[int]
    questions: tuple[str, ...]
    answers: tuple[str | None, ...]
    stop: tuple[str, ...] = ()  # strings that end an answer


def reference_job(llm: kvjax.LLM, config: ml_collections.ConfigDict) -> Job:
    """Draws held-out library text of `context` tokens with needles, and a question for each needle."""
    common.check_some(config, "needles")
    rng = np.random.default_rng(config.seed)
    stream = common.held_out_tokens(llm)
    words = rng.choice(corpus.key_words(held_out=True), size=len(config.needles), replace=False)
    facts = [
        needles.Needle(_cue(cue, word), needles.draw_value(rng, config.digits, held_out=True))
        for cue, word in zip(config.needles, words, strict=True)
    ]
    depths = np.linspace(0.1, 0.9, len(facts)).tolist()
    hidden = needles.haystack(rng, llm.tokenizer.tokenizer, stream, config.context, facts, facts, depths,
                              llm.tokenizer.start_ids)
    questions, answers = zip(*(("\n" + fact.cue, fact.value) for fact in facts), strict=True)
    return Job(hidden.context, questions, answers, (".", "\n"))


def _cue(template: str, word: str) -> str:
    """Returns the sentence with its key word; raises ConfigError for a template that does not accept one."""
    try:
        return template.format(key=word)
    except (LookupError, ValueError, AttributeError, TypeError) as cause:
        raise ConfigError(f"needle {template!r} is not a sentence with at most {{key}} to fill in; "
                          "correct it") from cause


def user_job(llm: kvjax.LLM, config: ml_collections.ConfigDict) -> Job:
    """Reads a user's text and question; raises PromptError if one is missing or empty."""
    if not config.prompt_file:
        raise PromptError("there is a question but no text; give --config.prompt_file=FILE, too")
    path = pathlib.Path(config.prompt_file)
    try:
        if not path.is_file():
            raise PromptError(f"prompt_file={config.prompt_file} is not a file; give the path of a text file")
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise PromptError(f"prompt_file={config.prompt_file} cannot be read: {error}; give a text file") from error
    if not text.strip():
        raise PromptError(f"prompt_file={config.prompt_file} is empty; give a file with text in it")
    if not config.question:
        raise PromptError('there is a text but no question; give --config.question="...", too')
    before, question = _in_template(llm, text, config.question) if config.chat else (text, f"\n\n{config.question}")
    ids = llm.tokenizer.encode(before, add_special_tokens=not config.chat)
    return Job(llm.encode(ids, start=False), (question,), (None,))


def _in_template(llm: kvjax.LLM, text: str, question: str) -> tuple[str, str]:
    """Returns the chat template around a text and a question, cut before the question."""
    mark = "<<<the question>>>"
    chat = llm.tokenizer.apply_chat_template([{"role": "user", "content": f"{text}\n\n{mark}"}])
    if chat.count(mark) != 1:
        raise PromptError("the model's chat template alters or repeats the message; use --config.chat=False")
    before, _, after = chat.rpartition(mark)
    return before, question + after


def answer_all(llm: kvjax.LLM, job: Job, reading, settings, config: ml_collections.ConfigDict, directory) -> dict:
    """Returns one row of the table: all questions answered by one method over one prefilled cache."""
    method = common.make_method(settings, _EXTRAS)
    store = common.make_store(config.store, directory)
    filled = llm.prefill(
        reading or [job.context], method=method, store=store, capacity=capacity(llm, job, config),
        chunk=config.chunk or None, dtype=common.dtype_of(settings),
        slots=common.slots_of(settings, config.store),
    )
    with contextlib.closing(filled) as cache:
        qualities = follow_all(llm, job, cache, reading, config)
        results = [ask(llm, job, question, cache, answer_tokens(config)) for question in job.questions]
        row = summarise(method, job, results, qualities, cache)
    head = {"method": common.label_of(settings), "store": config.store, **common.disk_of(store)}
    return {**row, **head, "task": "demo", "context": len(job.context), "seed": config.seed}


def follow_all(llm: kvjax.LLM, job: Job, cache: kvjax.Cache, reading, config) -> list[Quality]:
    """Returns the quality of each question's selections; none for a text that is read in chunks.

    Called before the timed run, as it compiles, and copies every step's selection to the host.
    """
    if not reading:
        ask(llm, job, job.questions[0], cache, 1)
        return []
    qualities = []
    for question in job.questions:
        probe = Probe(cache, reading, k=config.recall_k)
        ask(llm, job, question, cache, answer_tokens(config), probe)
        qualities.append(probe.quality)
    return qualities


def ask(
    llm: kvjax.LLM, job: Job, question: str, cache: kvjax.Cache, most: int, probe: Probe | None = None
) -> kvjax.Result:
    """Returns the answer, of at most `most` tokens, and closes the cache that it leaves behind."""
    result = llm.generate([question], cache, max_new_tokens=most, stop=job.stop, observer=probe)
    result.cache.close()
    return result


def fingerprint(llm: kvjax.LLM, job: Job) -> str:
    """Returns a digest of the model and the job, independent of file names."""
    return hashlib.sha256(repr((llm.fingerprint, job)).encode()).hexdigest()[:16]


def capacity(llm, job, config) -> int:
    """Returns the tokens of the context, the longest question and its answer."""
    question = max(len(llm.encode(question, start=False)) for question in job.questions)
    return len(job.context) + question + answer_tokens(config)


def answer_tokens(config: ml_collections.ConfigDict) -> int:
    """Returns the most tokens of an answer: the configured number, else enough for a needle's digits or a few
    sentences."""
    return config.max_new_tokens or (_TEXT_TOKENS if config.prompt_file else _NEEDLE_TOKENS)


def summarise(method, job: Job, results: list[kvjax.Result], qualities: list[Quality], cache: kvjax.Cache) -> dict:
    """Returns the measured figures of one method, over all questions."""
    texts, usages = [result.text[0] for result in results], [result.usage for result in results]
    known = [
        scoring.answers_number(text, value) for text, value in zip(texts, job.answers, strict=True) if value is not None
    ]
    return {
        "bytes_read_per_token": 0.0, "reads_per_token": 0.0, **common.cost_of(usages),
        "budget": method.budget,
        "accuracy": float(np.mean(known)) if known else None,
        "right": f"{sum(known)}/{len(known)}" if known else "-",
        "recall": _known([quality.recall for quality in qualities]),
        "attention_mass": _known([quality.attention_mass for quality in qualities]),
        "resident_bytes": cache.resident_bytes,
        "tokens_per_s": sum(usage.tokens for usage in usages) / sum(usage.seconds for usage in usages),
        "answers": " | ".join(text.strip() for text in texts),
    }


def _known(shares: list[float]) -> float | None:
    """Returns the mean; None if a value could not be measured, as recall@k with fewer than k tokens."""
    return float(np.mean(shares)) if shares and not np.isnan(shares).any() else None


def show(row: dict) -> dict:
    """Returns a row as the table prints it."""
    size = {key: f"{row[key] / 1024:,.0f} KiB" for key in ("bytes_read_per_token", "resident_bytes")}
    return {
        **row, **size, "recall": "-" if row["recall"] is None else f"{row['recall']:.3f}",
        "attended_tokens": f"{row['attended_tokens']:,.0f}",
        "tokens_per_s": f"{row['tokens_per_s']:.1f}",
    }


def plot(rows: list[dict], path: pathlib.Path) -> None:
    """Plots recall against bytes read, and resident memory."""
    figure = Figure(figsize=(10, 4))
    left, right = figure.subplots(1, 2)
    for row in [row for row in rows if row["recall"] is not None]:
        left.plot(row["bytes_read_per_token"] / 1024, row["recall"], "o")
        left.annotate(row["method"], (row["bytes_read_per_token"] / 1024, row["recall"]), fontsize=8)
    right.barh([row["method"] for row in rows], [row["resident_bytes"] / 2**20 for row in rows])
    left.set(xlabel="KiB read from flash per token", ylabel="recall of the true top-k")
    right.set(xlabel="MiB of KV cache in memory")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def check(config: ml_collections.ConfigDict) -> None:
    """Raises ConfigError for settings that make no job, before a model is loaded."""
    common.check_some(config, "methods")
    # No value of one digit is held out, and numbers of more than 18 digits do not fit in 64 bits.
    common.check_counts(config, context=1, digits=2, max_new_tokens=0, chunk=0, recall_k=1, seed=0)
    if config.digits > 18:
        raise ConfigError(f"digits={config.digits} must be at most 18")
    if config.chat and not config.prompt_file:
        raise ConfigError("chat=True needs a text of your own; give --config.prompt_file=FILE and --config.question")
    common.check_store(config.store)
    for settings in config.methods:
        common.make_method(settings, _EXTRAS)


def check_fit(llm: kvjax.LLM, job: Job, settings, config: ml_collections.ConfigDict) -> None:
    """Raises ConfigError or PromptError if a method, its type or its slots do not fit the job."""
    slots, room = common.slots_of(settings, config.store), capacity(llm, job, config)
    common.check_fit(llm.config, settings, [len(job.context)], room, chunk=config.chunk, slots=slots)


def run(config: ml_collections.ConfigDict, workdir: str) -> None:
    """Runs the job with every method of the configuration; prints and saves the table."""
    check(config)
    entries = common.by_label(config.methods)
    llm = common.load_model(config.model, config.dtype)
    common.check_model(llm, config.methods)
    job = user_job(llm, config) if config.prompt_file or config.question else reference_job(llm, config)
    for settings in entries.values():  # fails before anything is written
        check_fit(llm, job, settings, config)
    run, content = Run(config, workdir, grid=("methods",)), fingerprint(llm, job)
    done = {row["method"]: row for row in run.logged()}
    if any(row["fingerprint"] != content for row in done.values()):
        raise ConfigError(f"{workdir} has results of another text or model by the same name; give another --workdir")
    print(f"{len(job.context):,} tokens of context, KV cache on {config.store}; answers expected: "
          f"{' | '.join(answer or '?' for answer in job.answers)}")
    print("".join(form.format(title) for (_, form), title in zip(COLUMNS, TITLES, strict=True)))
    reading = None if config.chunk or set(entries) <= set(done) else llm.read([job.context])
    for label, settings in entries.items():
        if label not in done:
            row = answer_all(llm, job, reading, settings, config, run.path / "store")
            done[label] = {**row, "fingerprint": content}
            run.keep(**done[label])
        shown = show(done[label])
        print("".join(form.format(shown[key]) for key, form in COLUMNS), flush=True)
    rows = [done[label] for label in entries]
    run.summary(rows)
    plot(rows, run.path / "demo.png")
    print(f"results in {run.path / 'summary.json'} and {run.path / 'demo.png'}")
