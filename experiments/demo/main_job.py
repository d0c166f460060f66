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
import math

import ml_collections
import numpy as np
from absl import logging

import kvjax
from experiments import common
from experiments.demo.conversation import Conversation
from experiments.demo.job import Job, answer_tokens, capacity, fingerprint, reference_job, user_job
from experiments.demo.memory_limit import EXTRAS, MIB, STAGING_BYTES, THREADS, limit_of, slots_for
from experiments.demo.table import COLUMNS, plot, print_head, show
from experiments.results import Run
from kvjax.errors import ConfigError
from kvjax.eval.tasks import scoring
from kvjax.inference import decode
from kvjax.inference.plan import Plan
from kvjax.ops import quantize


def answer_all(llm: kvjax.LLM, job: Job, settings, config: ml_collections.ConfigDict, directory) -> dict:
    """Returns one row of the table: all questions answered by one method in one cache."""
    method = common.make_method(settings, EXTRAS)
    limit, slots = limit_of(config), slots_for(llm, job, settings, config)
    bounded = {"staging_bytes": STAGING_BYTES, "threads": THREADS} if limit else {}
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
        raise ConfigError(f"{common.label_of(settings)} held {row['memory_bytes'] / MIB:.1f} MiB and the limit is "
                          f"{limit / MIB:.1f}: what its store takes was estimated too low; raise --config.memory")
    head = {"method": common.label_of(settings), "name": settings["name"], "store": config.store,
            **common.disk_of(store)}
    return {**row, **head, "task": "demo", "context": len(job.context), "seed": config.seed, "limit_bytes": limit}


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
        common.make_method(settings, EXTRAS)


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
