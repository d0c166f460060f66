"""kvjax beside kvpress and transformers: the same weights, prompts and machine, one process for each row.

    python scripts/bench_peers.py --model=DIR [--tasks=niah_single_2,vt] [--length=4096] [--samples=8]
        [--shares=0.125,0.03125] [--workdir=runs/peers]

Needs torch, transformers and kvpress beside kvjax (extra `oracles`). Prompts are RULER's,
drawn once; contexts are read first and the question is asked afterwards, so that nobody compresses knowing it. Answers
are greedy. Weights are float32, and each process has all cores.

A share is that of the context's tokens that may be kept. It is not quite the same thing in both: kvpress drops the rest
for good, and attends the question and the answer beside what it kept; kvjax's budget is what a token attends, question,
answer and recent window included, and methods that retrieve keep the rest where a later token can have it.

Columns: the mean score with its 95 % interval; medians over prompts, with the least and the most, of the seconds from
the prompt to the first token of its answer and of the milliseconds of each token after it; the peak memory of the
process, compiling included, and what is left of it without the weights. The first prompt of each process warms it up
and does not count in times. With --method=NAME only that row is measured, in this process. Linux only.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import kvjax
from experiments import common, results
from kvjax import _files
from kvjax.errors import ConfigError
from kvjax.eval import intervals
from kvjax.eval.tasks import asking, scoring

MODEL = flags.DEFINE_string("model", None, "Hugging Face directory of the model", required=True)
TASKS = flags.DEFINE_list("tasks", ["niah_single_2", "niah_multikey_1", "vt"], "tasks of RULER")
LENGTH = flags.DEFINE_integer("length", 4096, "tokens of a prompt", lower_bound=128)
SAMPLES = flags.DEFINE_integer("samples", 8, "prompts of each task", lower_bound=2)
TOKENS = flags.DEFINE_integer("tokens", 32, "most tokens of an answer", lower_bound=2)
SHARES = flags.DEFINE_list("shares", ["0.125", "0.03125"], "shares of the context that may be kept")
METHODS = flags.DEFINE_list("methods", [
    "transformers", "kvjax.full", "kvpress.snapkv", "kvpress.expected_attention", "kvpress.ada_snapkv",
    "kvpress.kvzip", "kvjax.snapkv", "kvjax.quest", "kvjax.dynakv", "kvjax.kvswap"], "rows, at each share")
METHOD = flags.DEFINE_string("method", "", "a row to measure in this process, NAME or NAME@SHARE")
WORKDIR = flags.DEFINE_string("workdir", "runs/peers", "where prompts.json and summary.json go")

WHOLE = ("transformers", "kvjax.full")  # keep everything
Prompt = dict[str, Any]
Answering = Callable[[Prompt], tuple[list[int], list[float]]]  # token ids, and when each was there, from the start on


def draw_prompts(path: pathlib.Path) -> list[Prompt]:
    """Returns the prompts as token ids; those of an earlier call if they were drawn as asked for now."""
    wanted = {"tasks": TASKS.value, "length": LENGTH.value, "samples": SAMPLES.value, "tokens": TOKENS.value}
    if path.exists() and (kept := json.loads(path.read_text()))["wanted"] == wanted:
        return kept["prompts"]
    llm = kvjax.load(MODEL.value)
    stream, prompts = common.held_out_tokens(llm), []
    for task in TASKS.value:
        samples = asking.tokenised(llm, common.draw_task(llm, stream, task, LENGTH.value, SAMPLES.value, 0, 1))
        prompts += [{"task": task, "context": list(one.context), "question": list(one.question),
                     "answers": one.answers, "metric": one.metric, "stop": one.stop,
                     "most": min(TOKENS.value, one.max_new_tokens)} for one in samples]
    with _files.replacing(path) as fresh:
        fresh.write_text(json.dumps({"wanted": wanted, "prompts": prompts}))
    return prompts


def pressed(name: str, share: float) -> Any:
    """Returns the press of a row of kvpress; None for transformers alone."""
    from kvpress import AdaKVPress, ExpectedAttentionPress, KVzipPress, SnapKVPress

    made = {
        "transformers": lambda: None,
        "kvpress.snapkv": lambda: SnapKVPress(compression_ratio=1 - share),
        "kvpress.expected_attention": lambda: ExpectedAttentionPress(compression_ratio=1 - share),
        "kvpress.ada_snapkv": lambda: AdaKVPress(SnapKVPress(compression_ratio=1 - share)),
        "kvpress.kvzip": lambda: KVzipPress(compression_ratio=1 - share),
    }
    if name not in made:
        raise ConfigError(f"unknown method {name!r}; use one of {', '.join(made)}, or kvjax.NAME")
    return made[name]()


def with_transformers(name: str, share: float) -> tuple[Answering, Callable[[list[int]], str]]:
    """Returns how transformers answers with one of kvpress's presses, and how tokens are decoded."""
    import torch
    import transformers
    from kvpress.pipeline import KVPressTextGenerationPipeline

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL.value, local_files_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL.value, dtype=torch.float32, local_files_only=True)
    pipeline, press = KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer), pressed(name, share)
    ids, at = noted(model, pipeline)

    def answer(prompt):
        started = time.perf_counter()
        given = {"context_ids": torch.tensor([prompt["context"]]),
                 "questions_ids": [torch.tensor([prompt["question"]])]}
        with torch.no_grad():
            pipeline._forward(given, max_new_tokens=prompt["most"], press=press)
        return list(ids), [when - started for when in at]

    return answer, tokenizer.decode


def noted(model, pipeline) -> tuple[list[int], list[float]]:
    """Returns two lists to which each answer's tokens, and when each was there, are added while it is made."""
    ids: list[int] = []
    at: list[float] = []

    def note(module, inputs, output):
        at.append(time.perf_counter())
        ids.append(int(output.logits[0, -1].argmax()))

    generate_answer = pipeline.generate_answer

    def started(*args, **settings):
        ids.clear()  # of what KVzip asked the model while it read the context
        at.clear()
        return generate_answer(*args, **settings)

    model.register_forward_hook(note)
    pipeline.generate_answer = started
    return ids, at


def with_kvjax(name: str, share: float) -> tuple[Answering, Callable[[list[int]], str]]:
    """Returns how kvjax answers with one of its methods, and how tokens are decoded."""
    import jax

    llm, kind = kvjax.load(MODEL.value), kvjax.METHODS[name.removeprefix("kvjax.")]

    def answer(prompt):
        at: list[float] = []

        def note(step, tokens):
            jax.block_until_ready(step.logits)
            at.append(time.perf_counter())

        started, context = time.perf_counter(), prompt["context"]
        method = kind() if name in WHOLE else kind(budget=round(share * len(context)))
        room = asking.rounded(len(context) + len(prompt["question"]) + prompt["most"])
        with llm.prefill(context, method=method, capacity=room) as cache:
            result = llm.generate(prompt["question"], cache, max_new_tokens=prompt["most"], observer=note,
                                  driver="fused")
            with result.cache:
                times = [when - started for when in at[len(prompt["question"]) - 1 :]]
                ids = [int(token) for token in result.tokens[0]]
                return ids, times[: len(ids)]

    return answer, lambda ids: llm.tokenizer.decode(ids)


def measured(row: str, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Returns what one row measured in this process."""
    name, _, share = row.partition("@")
    make = with_kvjax if name.startswith("kvjax.") else with_transformers
    answer, decode = make(name, float(share or 1))
    lines = []
    answer(prompts[0])
    for prompt in prompts:
        ids, at = answer(prompt)
        text = cut(decode(ids), prompt["stop"])
        lines.append({"task": prompt["task"], "score": scoring.score(prompt["metric"], text, prompt["answers"]),
                      "first": at[0], "each": float(np.diff(at).mean()) if len(at) > 1 else None, "text": text})
        print(f"{row} {prompt['task']} {lines[-1]['score']:.2f} {at[0]:.1f} s {text!r:.60}", file=sys.stderr)
    return {"method": name, "share": float(share or 1), "weight_bytes": weight_bytes(),
            "peak_rss_bytes": peak_bytes(), "prompts": lines}


def cut(text: str, stops: Iterable[str]) -> str:
    """Returns a text up to the first of the stop texts."""
    return re.split("|".join(map(re.escape, stops)), text)[0] if stops else text


def peak_bytes() -> int:
    """Returns the largest memory of this process so far; getrusage would return its parent's, if that had more."""
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0])


def weight_bytes() -> int:
    """Returns the bytes of the model's files, whose weights have to be in float32, as both libraries hold them."""
    return sum(path.stat().st_size for path in pathlib.Path(MODEL.value).glob("*.safetensors"))


def rows_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a row for each task, and one for all of them together."""
    tasks = list(dict.fromkeys(line["task"] for line in found["prompts"]))
    rows = []
    for task in [*tasks, "all"]:
        lines = [line for line in found["prompts"] if task in (line["task"], "all")]
        share = float(np.mean([line["score"] for line in lines]))
        row = {name: found[name] for name in ("method", "share", "weight_bytes", "peak_rss_bytes")}
        row |= {"task": task, "context": LENGTH.value, "samples": len(lines), "accuracy": share,
                "interval": intervals.wilson(share, len(lines))}
        for name, scale in (("first", 1), ("each", 1e3)):
            values = [scale * line[name] for line in lines if line[name] is not None]
            row[f"{name}_{'s' if scale == 1 else 'ms'}"] = [float(np.quantile(values, q)) for q in (0.5, 0, 1)]
        rows.append(row)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the rows of all tasks together as a Markdown table."""
    lines = ["| method | kept | score | to the first token, s | a token, ms | peak MiB | of it without weights |",
             "|---|---|---|---|---|---|---|"]
    for row in rows:
        if row["task"] == "all":
            low, high = row["interval"]
            first, each = ("{:.1f} ({:.1f}, {:.1f})".format(*row[name]) for name in ("first_s", "each_ms"))
            more = row["peak_rss_bytes"] - row["weight_bytes"]
            lines.append(f"| {row['method']} | {row['share']:.3g} | {row['accuracy']:.2f} ({low:.2f}, {high:.2f}) "
                         f"| {first} | {each} | {row['peak_rss_bytes'] / 2**20:,.0f} | {more / 2**20:,.0f} |")
    return "\n".join(lines)


def main(argv) -> None:
    del argv
    kvjax.keep_programs()
    workdir = pathlib.Path(WORKDIR.value)
    workdir.mkdir(parents=True, exist_ok=True)
    prompts = draw_prompts(workdir / "prompts.json")
    if METHOD.value:
        file = workdir / f"{METHOD.value}.json"
        found = measured(METHOD.value, prompts)
        with _files.replacing(file) as fresh:
            fresh.write_text(json.dumps(found))
        return
    rows, asked = [], [f"{name}@{share}" if name not in WHOLE else name
                       for share in SHARES.value for name in METHODS.value]
    for row in dict.fromkeys(asked):
        file = workdir / f"{row}.json"
        if not file.exists():
            subprocess.run([sys.executable, *sys.argv, f"--method={row}"], check=True)
        rows += rows_of(json.loads(file.read_text()))
    summary = {"experiment": "bench_peers", **results.machine(), "rows": rows}
    with _files.replacing(workdir / "summary.json") as fresh:
        fresh.write_text(json.dumps(summary, indent=1))
    print(table(rows))


if __name__ == "__main__":
    app.run(main)
