"""Times of a whole model by the type of its weights: of a token, beside the memory's limit, and of reading a prompt.

    python scripts/bench_model.py --model=runs/model [--types=float32,bfloat16,int8,int4] [--prompt=4096]

All models are held at once. In each repeat every one answers the same question with full attention to a short context,
so that a token is its weights, beginning with another one each time, and memory is read plainly by a thread for each
processor; "limit" is what the weights of a token would take at that rate, and the share is limit over time. The first
answer of each compiles, and is left out. Prompts are read with each type of floats, as the others are widened for them.
"""

import json
import pathlib
import sys
import time

import jax
import numpy as np
from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import kvjax
from experiments import results
from scripts import bench_weights, ideal

MODEL = flags.DEFINE_string("model", None, "directory or GGUF file of the model", required=True)
TYPES = flags.DEFINE_list("types", ["float32", "bfloat16", "int8", "int4"], "types of the weights")
TOKENS = flags.DEFINE_integer("tokens", 32, "tokens of an answer", lower_bound=1)
CONTEXT = flags.DEFINE_integer("context", 256, "tokens of its context")
ANSWERS = flags.DEFINE_integer("answers", 9, "timed answers of each type", lower_bound=5)
PROMPT = flags.DEFINE_integer("prompt", 4096, "tokens of the prompt that is read; 0 = none is")
PROMPTS = flags.DEFINE_integer("prompts", 5, "timed readings with each type", lower_bound=5)
OUT = flags.DEFINE_string("out", None, "directory for summary.json; None: only the table is printed")
FLOATS = ("float32", "bfloat16")
READ_MIB = 512


def load(kind: str) -> kvjax.LLM:
    """Returns the model with weights of a type; hidden states are f32 beside few bits."""
    return kvjax.load(MODEL.value, kind) if kind in FLOATS else kvjax.load(MODEL.value, weights=kind)


def ids(count: int) -> np.ndarray:
    return np.arange(count) * 7919 % 997 + 3


def in_turns(things: dict, repeats: int):
    """Yields the things by name, all in each repeat, and whether the time counts; the first repeat does not."""
    names = list(things)
    for turn in range(-1, repeats):
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            yield name, things[name], turn >= 0


def tokens(models: dict[str, kvjax.LLM]) -> tuple[dict[str, list[float]], list[float]]:
    """Returns the seconds of a token in each answer, and those of a byte in each plain read of memory."""
    read, size = bench_weights.plain_read(READ_MIB)
    seconds: dict[str, list[float]] = {kind: [] for kind in models}
    room, bytes_read = CONTEXT.value + TOKENS.value + 8, []
    caches = {kind: llm.prefill(ids(CONTEXT.value), capacity=room) for kind, llm in models.items()}
    for kind, llm, counts in in_turns(models, ANSWERS.value):
        started = time.perf_counter()
        done = llm.generate([5], caches[kind], max_new_tokens=TOKENS.value, driver="fused", eos=())
        answered = time.perf_counter()
        done.cache.discard()
        read()
        if counts:
            seconds[kind].append((answered - started) / (TOKENS.value + 1))
            bytes_read.append((time.perf_counter() - answered) / size)
    return seconds, bytes_read


def prompts(models: dict[str, kvjax.LLM]) -> dict[str, list[float]]:
    """Returns the seconds of each reading of the prompt."""
    floats = {kind: llm for kind, llm in models.items() if kind in FLOATS}
    seconds: dict[str, list[float]] = {kind: [] for kind in floats}
    for kind, llm, counts in in_turns(floats, PROMPTS.value):
        started = time.perf_counter()
        with llm.prefill(ids(PROMPT.value)) as cache:
            jax.block_until_ready(cache.logits)
        if counts:
            seconds[kind].append(time.perf_counter() - started)
    return seconds


def spread(times, scale: float, digits: int) -> str:
    times = scale * np.asarray(times)
    return f"{np.median(times):.{digits}f} ({times.min():.{digits}f}, {times.max():.{digits}f})"


def main(argv):
    del argv
    models = {kind: load(kind) for kind in TYPES.value}
    sizes = {kind: ideal.weight_bytes(llm.params, 1) for kind, llm in models.items()}
    taken, byte = tokens(models)
    read = prompts(models) if PROMPT.value else {}
    limit = float(np.median(byte))
    print(f"memory is read at {1e-9 / limit:.1f} GB/s\n")
    print(f"| weights | MB of a token | a token, ms | limit | share | a prompt of {PROMPT.value:,}, s |\n{'|---' * 6}|")
    rows = []
    for kind, size in sizes.items():
        share = size * limit / np.median(taken[kind])
        rows.append({"weights": kind, "bytes": size, "token_seconds": taken[kind], "limit_seconds": size * limit,
                     "share": share, "prompt_seconds": read.get(kind)})
        print(f"| {kind} | {size / 1e6:,.0f} | {spread(taken[kind], 1e3, 1)} | {1e3 * size * limit:.1f} | {share:.0%} "
              f"| {spread(read[kind], 1, 1) if kind in read else ''} |")
    if OUT.value:
        folder = pathlib.Path(OUT.value)
        folder.mkdir(parents=True, exist_ok=True)
        summary = {"experiment": "bench_model", **results.machine(), "byte_seconds": byte, "rows": rows}
        (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    app.run(main)
