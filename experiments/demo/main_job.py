"""The main job: questions to a document whose KV cache does not fit the memory that it is given.

The document is library text with needles in it. Every method reads it into a cache on flash, takes as many slots as the
memory limit leaves, and answers one question for each needle. The questions follow one another in one cache, of which
no copy is made, so that what the cache takes is what the process holds of it; this is measured after every token. What
a compiled program takes while it runs is not part of it.

For every method the table has the answers, how many are right, speed, bytes read and memory. With `prompt_file` and
`question` the same job runs on a user's text, without a correct answer to compare with. With `chat` both go into the
model's chat template. With `chunk` each method reads the text that many tokens at a time.
"""

import contextlib
import dataclasses
import hashlib
import math
import pathlib
import time

import ml_collections
import numpy as np
from absl import logging
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import kvjax
from experiments import common, plots
from experiments.results import Run
from kvjax.errors import ConfigError, PromptError
from kvjax.eval.tasks import corpus, needles, scoring
from kvjax.inference import decode
from kvjax.inference.generate import Generation
from kvjax.inference.plan import Plan, bytes_of, check_plan, make_plan, outline, store_geometry
from kvjax.ops import quantize
from kvjax.store.interface import Stats
from kvjax.store.io.workers import ArenaStack

COLUMNS = (
    ("method", "{:<26}"), ("right", "{:>6}"), ("tokens_per_s", "{:>9}"), ("wait_share", "{:>7}"),
    ("bytes_read_per_token", "{:>15}"), ("memory_bytes", "{:>10}"), ("slots", "{:>7}"), ("answers", "  {}"),
)
TITLES = ("method", "right", "tokens/s", "waits", "MiB read/token", "MiB held", "slots", "answers")
_EXTRAS = ("label", "slots", "dtype")  # of a method's settings
_NEEDLE_TOKENS, _TEXT_TOKENS = 8, 64  # of an answer
_MEMORY = 20.0  # MiB for the needles: full attention takes up to 19.5, its slots for one layer and what reads land in
_STAGING_BYTES = 3 << 19  # so that no write is in the way of an answer's reads, and memory has a bound
# What the store's thread reads into where an asynchronous read was cut short, or met a block that had just been moved.
_THREADS, _ARENA_BYTES = 1, 2 * ArenaStack.MAX_BYTES
_TABLE_BYTES = 64  # of the store's tables for each block, at most
_WARM = 2  # tokens that are not timed: the first one compiles
_MIB = 2**20


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


def limit_of(config: ml_collections.ConfigDict) -> int:
    """Returns the bytes that a method's cache may take; 0 = no limit."""
    if config.memory < 0:
        return 0 if config.prompt_file or common.check_store(config.store)[0] != "flash" else round(_MEMORY * _MIB)
    return round(config.memory * _MIB)


def store_bytes_at_most(plan: Plan) -> int:
    """Returns a bound of the memory that the store takes: tables, rows to be written, and what reads land in."""
    geometry = store_geometry(plan)
    step = max(min(layer.spec.num_blocks, layer.spec.max_blocks + 1) for layer in plan.layers)
    fetches = 1 + (geometry.layers if plan.method.lookahead else 0)  # at a time; each layer may be guessed ahead
    blocks = geometry.layers * geometry.batch * geometry.kv_heads * geometry.num_blocks
    landing = fetches * geometry.batch * geometry.kv_heads * step * geometry.extent_bytes
    return _TABLE_BYTES * blocks + _STAGING_BYTES + _ARENA_BYTES + landing


def resident_bytes(plan: Plan, slots: kvjax.Slots) -> int:
    """Returns the bytes that a cache over a store takes in memory with these slots."""
    return bytes_of(tuple(outline(plan, i, True, slots) for i in range(len(plan.layers))))


def fit_slots(plan: Plan, limit: int, label: str) -> kvjax.Slots:
    """Chooses as many slots as a memory limit leaves.

    Where not even the slots of one step fit for each layer, all layers share those of one and nothing is kept between
    steps (FlexGen).

    Args:
      plan: static part of the cache.
      limit: bytes.
      label: name of the method, for the error.

    Returns:
      The slots.

    Raises:
      ConfigError: the method needs more memory.
    """
    left, specs = limit - store_bytes_at_most(plan), [layer.spec for layer in plan.layers]
    least, most = (max(getattr(spec, name) for spec in specs) + 1 for name in ("max_blocks", "num_blocks"))
    kept = resident_bytes(plan, kvjax.Slots(count=least))
    if kept <= left:
        each = resident_bytes(plan, kvjax.Slots(count=least + 1)) - kept
        return kvjax.Slots(count=max(least, min(most, least + (left - kept) // each)))
    shared = kvjax.Slots(keep=False)
    needed = min(kept, resident_bytes(plan, shared)) + limit - left
    if needed > limit:
        raise ConfigError(f"{label} needs {_rounded_up(needed):.1f} MiB and the limit is {limit / _MIB:.1f}; raise "
                          "--config.memory, or leave the method out")
    return shared


def _rounded_up(size: int) -> float:
    """Returns MiB that are enough for a size in bytes, with one decimal."""
    return math.ceil(10 * size / _MIB) / 10


def slots_for(llm: kvjax.LLM, job: Job, settings, config: ml_collections.ConfigDict) -> kvjax.Slots | None:
    """Returns a method's slots: its own, or as many as fit the limit; None for the default.

    Raises:
      ConfigError: the method cannot be kept below the limit.
    """
    slots, limit = common.slots_of(settings, config.store), limit_of(config)
    if not limit:
        return slots
    plan = make_plan(llm.config, common.make_method(settings, _EXTRAS), 1, capacity(llm, job, config),
                     common.dtype_of(settings))
    if slots is None:
        return fit_slots(plan, limit, common.label_of(settings))
    check_plan(plan, True, slots)
    needed = resident_bytes(plan, slots) + store_bytes_at_most(plan)
    if needed > limit:
        raise ConfigError(f"{common.label_of(settings)} needs {_rounded_up(needed):.1f} MiB with its slots and the "
                          f"limit is {limit / _MIB:.1f}; raise --config.memory, or leave its slots out")
    return slots


def answer_all(llm: kvjax.LLM, job: Job, settings, config: ml_collections.ConfigDict, directory) -> dict:
    """Returns one row of the table: all questions answered by one method in one cache."""
    method = common.make_method(settings, _EXTRAS)
    limit, slots = limit_of(config), slots_for(llm, job, settings, config)
    bounded = {"staging_bytes": _STAGING_BYTES, "threads": _THREADS} if limit else {}
    store = common.make_store(config.store, directory, **bounded)
    filled = llm.prefill(
        [job.context], method=method, store=store, capacity=capacity(llm, job, config), chunk=config.chunk or None,
        dtype=common.dtype_of(settings), slots=slots,
    )
    filled.flush()  # what the prompt wrote is on its way no longer
    talk = Conversation(llm, filled, config.driver)
    del filled
    with contextlib.closing(talk):
        answers = [talk.ask(question, job.stop, answer_tokens(config)) for question in job.questions]
        row = summarise(method, job, answers, talk)
    if limit and row["memory_bytes"] > limit:
        raise ConfigError(f"{common.label_of(settings)} held {row['memory_bytes'] / _MIB:.1f} MiB and the limit is "
                          f"{limit / _MIB:.1f}: what its store takes was estimated too low; raise --config.memory")
    head = {"method": common.label_of(settings), "name": settings["name"], "store": config.store,
            **common.disk_of(store)}
    return {**row, **head, "task": "demo", "context": len(job.context), "seed": config.seed, "limit_bytes": limit}


class Conversation:
    """Questions and answers in one cache, which is not copied: `LLM.generate` would keep the one before each answer.

    Attributes:
      run: the run that owns the cache.
      seconds: time of each token, until its logits are known.
      memory_bytes: the most that the cache has held after a token.
    """

    def __init__(self, llm: kvjax.LLM, cache: kvjax.Cache, driver: decode.Driver):
        self.run, self._llm = Generation(llm.params, cache, driver, None), llm
        self.seconds: list[float] = []
        self._before: Stats | None = None  # totals of the store before the first token that is timed
        self.memory_bytes = self._held()

    def ask(self, question: str, stop: tuple[str, ...], most: int) -> str:
        """Feeds a question and returns the likeliest answer, of at most `most` tokens."""
        for token in self._llm.encode(question, start=False):
            self._feed(token)
        answer: list[int] = []
        while len(answer) < most:
            token = int(np.argmax(self.run.cache.logits[0]))
            if token in self._llm.eos_ids:
                break
            answer.append(token)
            self._feed(token)
            if any(mark in self._text(answer) for mark in stop):
                break
        return self._text(answer)

    def _text(self, answer: list[int]) -> str:
        return self._llm.tokenizer.decode_continuation(answer)

    def _feed(self, token: int) -> None:
        branch = self.run.cache.branch
        if branch is not None and len(self.seconds) <= _WARM:
            self._before = branch.stats()
        began = time.perf_counter()
        self.run.step(np.array([token], np.int32), np.ones(1, bool))
        self.run.cache.logits.block_until_ready()
        self.seconds.append(time.perf_counter() - began)
        self.memory_bytes = max(self.memory_bytes, self._held())

    def _held(self) -> int:
        return self.run.cache.resident_bytes + self.run.cache.store_bytes

    def cost(self) -> dict:
        """Returns what a timed token has cost: tokens a second and, with a store, bytes, reads, and the share of the
        time in which the answer waited for reads."""
        seconds, tokens = sum(self.seconds[_WARM:]), len(self.seconds[_WARM:])
        cost = {"tokens": tokens, "tokens_per_s": tokens / seconds if tokens else None, "wait_share": None,
                "bytes_read_per_token": 0.0, "reads_per_token": 0.0, "engine": None, "direct": None}
        branch = self.run.cache.branch
        if branch is not None and self._before is not None and tokens:
            before, after = self._before, branch.stats()
            cost |= {"wait_share": (after.wait_seconds - before.wait_seconds) / seconds,
                     "bytes_read_per_token": (after.bytes_read - before.bytes_read) / tokens,
                     "reads_per_token": (after.reads - before.reads) / tokens,
                     "engine": getattr(branch, "engine", None), "direct": getattr(branch, "direct", None)}
        return cost

    def close(self) -> None:
        """Releases the cache."""
        self.run.cache.close()


def fingerprint(llm: kvjax.LLM, job: Job) -> str:
    """Returns a digest of the model and the job, independent of file names."""
    return hashlib.sha256(repr((llm.fingerprint, job)).encode()).hexdigest()[:16]


def capacity(llm, job, config) -> int:
    """Returns the tokens of the context, all questions and their answers."""
    asked = sum(len(llm.encode(question, start=False)) for question in job.questions)
    return len(job.context) + asked + len(job.questions) * answer_tokens(config)


def answer_tokens(config: ml_collections.ConfigDict) -> int:
    """Returns the most tokens of an answer: the configured number, else enough for a needle's digits or a few
    sentences."""
    return config.max_new_tokens or (_TEXT_TOKENS if config.prompt_file else _NEEDLE_TOKENS)


def summarise(method, job: Job, texts: list[str], talk: Conversation) -> dict:
    """Returns the measured figures of one method, over all questions."""
    known = [
        scoring.answers_number(text, value) for text, value in zip(texts, job.answers, strict=True) if value is not None
    ]
    usage, cache = talk.run.usage(), talk.run.cache
    pools = [layer.pool for layer in cache.state.layers if hasattr(layer, "pool")]
    return {
        **talk.cost(), "attended_tokens": usage.attended_tokens, "hit_rate": usage.hit_rate,
        "budget": method.budget,
        "accuracy": float(np.mean(known)) if known else None,
        "right": f"{sum(known)}/{len(known)}" if known else "-",
        "resident_bytes": cache.resident_bytes,
        "memory_bytes": talk.memory_bytes,
        "cache_bytes": full_bytes(cache.plan, len(job.context)),
        "slots": max((getattr(pool, "slots", 0) for pool in pools), default=0) or None,
        "answers": " | ".join(text.strip() for text in texts),
    }


def full_bytes(plan: Plan, tokens: int) -> int:
    """Returns the bytes of all keys and values of some tokens, in the type of the cache."""
    vector = quantize.width(plan.dtype, plan.config.head_dim) * np.dtype(quantize.stored_type(plan.dtype)).itemsize
    return 2 * plan.config.num_layers * plan.config.num_kv_heads * vector * tokens


def show(row: dict) -> dict:
    """Returns a row as the table prints it."""
    return {
        **row, "bytes_read_per_token": f"{row['bytes_read_per_token'] / _MIB:.2f}",
        "memory_bytes": f"{row['memory_bytes'] / _MIB:.1f}",
        "tokens_per_s": _or_dash(row["tokens_per_s"], "{:.1f}"), "wait_share": _or_dash(row["wait_share"], "{:.0%}"),
        "slots": _or_dash(row["slots"], "{}"), "answers": " ".join(row["answers"].split()),
    }


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def reads_of(row: dict) -> str:
    """Names what the reads of a row came from, as times depend on it."""
    if "emulated" in row.get("disk", ""):
        return f"from an emulated device, {row['disk'].partition(' ')[0]}, which answers by a model of its speed"
    if common.check_store(row["store"])[0] != "flash":
        return "from memory"
    return ("from this machine's disk, past the page cache (O_DIRECT)" if row["direct"] else
            "through the page cache, as the file system refuses O_DIRECT, so that times are those of memory")


def title_of(rows: list[dict]) -> str:
    """Returns the sentence above table and picture."""
    limit, sizes = rows[0]["limit_bytes"], sorted({row["cache_bytes"] for row in rows})
    size = " to ".join(f"{size / _MIB:.1f}" for size in (sizes[:1] + sizes[-1:] if len(sizes) > 1 else sizes))
    return (f"{rows[0]['context']:,} tokens, {size} MiB of keys and values on flash; "
            + (f"limit {limit / _MIB:.1f} MiB of memory" if limit else "no limit of memory"))


def plot(rows: list[dict], path: pathlib.Path) -> None:
    """Draws speed, bytes read and memory of each method as bars, one colour a method."""
    figure = Figure(figsize=(8.2, 1.2 + 0.42 * len(rows)), layout="constrained")
    figure.suptitle(title_of(rows), fontsize=10)
    panels = figure.subplots(1, 3, sharey=True)
    values = (
        ("tokens a second", [row["tokens_per_s"] or 0.0 for row in rows], "{:,.0f}"),
        ("MiB read from flash a token", [row["bytes_read_per_token"] / _MIB for row in rows], "{:,.2f}"),
        ("MiB of memory held, at most", [row["memory_bytes"] / _MIB for row in rows], "{:,.1f}"),
    )
    marks = {"all keys and values": max(row["cache_bytes"] for row in rows) / _MIB,
             "limit": rows[0]["limit_bytes"] / _MIB}
    for axes, (title, numbers, form) in zip(panels, values, strict=True):
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=8)
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right"]].set_visible(False)
        most = max(numbers + (list(marks.values()) if axes is panels[2] else [])) or 1.0
        axes.set_xlim(0, 1.2 * most)
        _bars(axes, [row["name"] for row in rows], numbers, form, 0.3 * most)
    names = [row["method"] if row["accuracy"] is None else f"{row['method']}\n{row['right']} right" for row in rows]
    panels[0].set_yticks(range(len(rows)), names)
    panels[0].set_ylim(len(rows) - 0.5, -0.5)
    for name, place in marks.items():
        if place:
            panels[2].axvline(place, color="black", linewidth=1, linestyle="--" if name == "limit" else ":")
            panels[2].annotate(name, (place, len(rows) - 0.55), xytext=(2, 0), textcoords="offset points",
                               rotation=90, ha="left", va="bottom", fontsize=8)
    figure.savefig(path, dpi=200)


def _bars(axes: Axes, names: list[str], numbers: list[float], form: str, wide: float) -> None:
    """Draws a bar for each number, and the number in it, or beside a bar that is shorter than `wide`."""
    colors = plots.styles(names)
    for place, (name, number) in enumerate(zip(names, numbers, strict=True)):
        again = name in names[:place]  # the same method with other settings
        axes.barh(place, number, color=colors[name]["color"], height=0.66, alpha=0.55 if again else 1.0)
        inside = number >= wide
        axes.annotate(form.format(number), (number, place), xytext=(-3 if inside else 3, 0), fontsize=8, va="center",
                      textcoords="offset points", ha="right" if inside else "left",
                      color="white" if inside and not again else "black")


def check(config: ml_collections.ConfigDict) -> None:
    """Raises ConfigError for settings that make no job, before a model is loaded."""
    common.check_some(config, "methods")
    # No value of one digit is held out, and numbers of more than 18 digits do not fit in 64 bits.
    common.check_counts(config, context=1, digits=2, max_new_tokens=0, chunk=0, seed=0)
    if config.digits > 18:
        raise ConfigError(f"digits={config.digits} must be at most 18")
    if config.chat and not config.prompt_file:
        raise ConfigError("chat=True needs a text of your own; give --config.prompt_file=FILE and --config.question")
    kind, _ = common.check_store(config.store)
    if not -1.0 <= config.memory < math.inf:
        raise ConfigError(f"memory={config.memory} must be MiB, 0 for no limit, or -1 for the usual one")
    if config.memory > 0 and kind != "flash":
        raise ConfigError(f"memory={config.memory} limits caches on flash, and store={config.store}; give "
                          "--config.store=flash or --config.memory=0")
    decode.check_driver(config.driver)
    for settings in config.methods:
        common.make_method(settings, _EXTRAS)


def check_fit(llm: kvjax.LLM, job: Job, settings, config: ml_collections.ConfigDict) -> None:
    """Raises ConfigError or PromptError if a method, its type or its slots do not fit the job or its memory."""
    room, slots = capacity(llm, job, config), common.slots_of(settings, config.store)
    common.check_fit(llm.config, settings, [len(job.context)], room, chunk=config.chunk, slots=slots)
    slots_for(llm, job, settings, config)


def run(config: ml_collections.ConfigDict, workdir: str) -> None:
    """Runs the job with every method of the configuration; prints and saves the table."""
    check(config)
    entries = common.by_label(config.methods)
    llm = common.load_model(config.model or str(common.REFERENCE_8K), config.dtype)
    common.check_model(llm, config.methods)
    job = user_job(llm, config) if config.prompt_file or config.question else reference_job(llm, config)
    for settings in entries.values():  # fails before anything is written
        check_fit(llm, job, settings, config)
    run, content = Run(config, workdir, grid=("methods",)), fingerprint(llm, job)
    done = {row["method"]: row for row in run.logged()}
    if any(row["fingerprint"] != content for row in done.values()):
        raise ConfigError(f"{workdir} has results of another text or model by the same name; give another --workdir")
    if set(entries) - set(done):
        print(f"each method reads {len(job.context):,} tokens and compiles its programs; then it is timed", flush=True)
    for i, (label, settings) in enumerate(entries.items()):
        if label not in done:
            with _quiet():
                row = answer_all(llm, job, settings, config, run.path / "store")
            done[label] = {**row, "fingerprint": content}
            run.keep(**done[label])
        if i == 0:
            print_head(job, done[label])
        shown = show(done[label])
        print("".join(form.format(shown[key]) for key, form in COLUMNS), flush=True)
    rows = [done[label] for label in entries]
    run.summary(rows)
    plot(rows, run.path / "demo.png")
    print(f"results in {run.path / 'summary.json'} and {run.path / 'demo.png'}")


@contextlib.contextmanager
def _quiet():
    """Keeps notes on how files are read out of the table, which says it itself."""
    before = logging.get_verbosity()
    logging.set_verbosity(min(before, logging.WARNING))
    try:
        yield
    finally:
        logging.set_verbosity(before)


def print_head(job: Job, row: dict) -> None:
    """Prints what the table is about."""
    print(f"\n{title_of([row])}\nreads are {reads_of(row)}; \"waits\" is their share of the time\n"
          f"answers expected: {' | '.join(answer or '?' for answer in job.answers)}\n")
    print("".join(form.format(title) for (_, form), title in zip(COLUMNS, TITLES, strict=True)))
