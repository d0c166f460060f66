"""Prompts read chunk by chunk through the cache, compared with dense reading and clustering at the end.

DynaKV's first discussion point: clusters that adapt while the prompt arrives bound the memory that a long prompt needs.
A row is one (method, chunk, length). Rows of accuracy have the score on held-out needles, the loss of held-out text
after the prompt, and the time. Rows of memory have the peak of a second, warm prefill above the process's memory before
it (blocks are on flash, and at most `staging_kib` of them wait to be written), and the bytes that the cache keeps.
"""

import ctypes
import itertools
import multiprocessing
import os
import pathlib
import threading
import time
from collections.abc import Callable, Sequence

import jax
import ml_collections
import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

from experiments import common, plots
from experiments.board import evaluate
from experiments.results import Run
from kvjax.eval.tasks import Sample, asking

_EXTRAS = ("label",)  # of a method's settings
_SIZES = ("peak_bytes", "resident_bytes")
# With these settings glibc returns freed arrays at once, and `_resident` makes it return smaller pieces, so that the
# resident set shows the memory in use: its arenas, one for each of XLA's threads, keep many times as much after a long
# prompt.
_RETURN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def accuracy_row(llm, method, chunk: int | None, samples: Sequence[Sample], config) -> dict:
    """Returns the share of needles found, and the median seconds of a prefill, without the first."""
    right, seconds = [], []
    for batch in asking.batches(llm, samples, config.batch):
        capacity, began = asking.capacity(batch), time.perf_counter()
        cache = llm.prefill(asking.contexts(batch), method=method, capacity=capacity, chunk=chunk)
        jax.block_until_ready(cache.state)
        seconds.append(time.perf_counter() - began)
        right += [score for scores in asking.ask(llm, cache, batch).scores for score in scores]
    return {**evaluate.accuracy(right), "prefill_s": float(np.median(seconds[1:] or seconds))}


def peak_bytes(
    model: str, settings: dict, chunk: int | None, length: int, staging: int, workdir: str
) -> tuple[int, int]:
    """Runs `_peak_bytes` in a process of its own."""
    before = {name: os.environ.get(name) for name in _RETURN_MEMORY}
    os.environ.update(_RETURN_MEMORY)
    try:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(_peak_bytes, (model, settings, chunk, length, staging, workdir))
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _peak_bytes(
    model: str, settings: dict, chunk: int | None, length: int, staging: int, workdir: str
) -> tuple[int, int]:
    """Returns the most bytes that a second prefill takes, and the bytes that a cache keeps in memory."""
    llm, method = common.load_model(model), common.make_method(settings, _EXTRAS)
    prompt = np.random.default_rng(0).integers(1, llm.config.vocab_size, length).tolist()

    def prefill() -> int:
        store = common.make_store("flash", pathlib.Path(workdir), staging_bytes=staging)
        cache = llm.prefill(prompt, method=method, store=store, capacity=length + 64, chunk=chunk)
        jax.block_until_ready(cache.state)
        kept = cache.resident_bytes
        cache.close()
        return kept

    kept = prefill()
    return _growth(prefill), kept


def _growth(call: Callable[[], object]) -> int:
    """Returns by how many bytes at most the process grows during a call, sampled every 10 to 20 ms."""
    before = peak = _resident()
    done = threading.Event()

    def watch():
        nonlocal peak
        while not done.wait(0.0005):
            peak = max(peak, _resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    call()
    done.set()
    watcher.join()
    return peak - before


def _resident() -> int:
    """Returns the bytes of the process that are in memory and in use (Linux with glibc)."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def check(config: ml_collections.ConfigDict) -> None:
    """Raises ConfigError for settings with which nothing can be read."""
    common.check_some(config, "methods")
    common.make_methods(config.methods, _EXTRAS)
    common.check_counts(config, chunks=0, samples=1, batch=1, continuations=1, perplexity_tokens=1, staging_kib=1)


def run(config: ml_collections.ConfigDict, workdir: str) -> None:
    """Measures every method, chunk and length; rows that the workdir has are skipped."""
    check(config)
    methods = common.by_label(config.methods)
    by_label = common.make_methods(config.methods, _EXTRAS)
    llm = common.load_model(config.model)
    common.check_model(llm, config.methods)
    for length, settings, chunk in itertools.product(
        (*config.lengths, *config.memory_lengths), config.methods, config.chunks
    ):
        common.check_fit(llm.config, settings, [length], length + 64, chunk=chunk)
    run = Run(config, workdir, ("methods", "chunks", "lengths", "memory_lengths"))
    stream, rows = common.held_out_tokens(llm), run.logged()
    done = {(row["task"], row["method"], row["chunk"], row["context"]) for row in rows}
    jobs = [(task, label, chunk, length)
            for task, lengths in (("accuracy", config.lengths), ("memory", config.memory_lengths))
            for length in lengths for label in methods for chunk in config.chunks]
    for task, label, chunk, length in tqdm(jobs, disable=None):
        head = {"task": task, "method": label, "chunk": chunk, "context": length}
        if tuple(head.values()) in done:
            continue
        if task == "memory":
            store = str(run.path / "store")
            staging = config.staging_kib << 10
            peak, kept = peak_bytes(config.model, dict(methods[label]), chunk or None, length, staging, store)
            measured = {"peak_bytes": peak, "resident_bytes": kept, "staging_bytes": staging}
        else:
            samples = common.draw_task(llm, stream, "needle", length, config.samples, config.seed)
            measured = accuracy_row(llm, by_label[label], chunk or None, samples, config)
            loss = evaluate.perplexity_row(llm, by_label[label], stream, length, config, chunk or None)
            measured["nll"] = loss["nll"]
        store = "flash" if task == "memory" else "memory"
        rows.append({**head, "store": store, "budget": by_label[label].budget, "seed": config.seed, **measured})
        run.log(**rows[-1])
    run.summary(rows)
    plots.save(plot(rows), run.path / "prefill.png")
    print_table(rows)


def plot(rows: list[dict]) -> Figure:
    """Plots answers, loss and time against the chunk (dense prefill is one chunk of the whole context), and memory
    against the context."""
    rows = [{**row, "read": row["chunk"] or row["context"], **{key: row[key] / 2**20 for key in _SIZES if key in row}}
            for row in rows]
    figure, panels = plots.panels(5)
    looks = plots.styles([*map(_with_context, rows), *map(_with_chunk, rows)])
    for axes, (task, y, title) in zip(panels, (
        ("accuracy", "accuracy", "share of needles found"), ("accuracy", "nll", "loss, nats per token"),
        ("accuracy", "prefill_s", "prefill of a batch, s"), ("memory", "peak_bytes", "peak of a prefill, MiB"),
        ("memory", "resident_bytes", "kept by the cache, MiB"),
    ), strict=True):
        mine = [row for row in rows if row["task"] == task]
        x, by, xlabel = (("read", _with_context, "tokens read at a time") if task == "accuracy" else
                         ("context", _with_chunk, "context, tokens"))
        plots.curves(axes, mine, x, y, by, "interval" if y == "accuracy" else None, looks)
        plots.steps(axes, [row[x] for row in mine])
        axes.set(xlabel=xlabel, ylabel=title)
    return figure


def _with_context(row: dict) -> str:
    return f"{row['method']}, context {row['context']:,}"


def _with_chunk(row: dict) -> str:
    return f"{row['method']}, {row['chunk']} at a time" if row["chunk"] else f"{row['method']}, dense"


def print_table(rows: list[dict]) -> None:
    """Prints a line per row; chunk 0 is dense prefill and global clustering."""
    print(f"{'method':>14}{'chunk':>7}{'context':>9}{'found':>8}{'loss':>8}{'s':>8}{'peak MiB':>10}{'kept MiB':>10}")
    for row in rows:
        cells = [f"{row[key]:8.3f}" if key in row else f"{'-':>8}" for key in ("accuracy", "nll", "prefill_s")]
        sizes = [f"{row[key] / 2**20:10.1f}" if key in row else f"{'-':>10}" for key in _SIZES]
        print(f"{row['method']:>14}{row['chunk']:>7}{row['context']:>9,}{''.join(cells)}{''.join(sizes)}")
