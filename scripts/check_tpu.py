"""Compilation of kvjax's programs for a device that need not be present, and what they cost by its compiler's count.

    python scripts/check_tpu.py [--small] [--methods=quest,dynakv] [--lengths=32768] [--explain=10] [--out=DIR]

Nothing is run: libtpu's compiler counts the bytes that a program accesses and the memory that it takes, for a chip
that is only described. libtpu (some 200 MB) is put into .venv-tpu/ at the first call, in the version of
constraints.txt, and is seen by this script alone; where it cannot be installed the script says so and ends. Shapes are
those of real models, cut to a few layers. `docs/tpu.md` says what the columns mean; a missed mark is printed and is no
failure.

With --chips=h100 it is a GPU; that needs JAX's CUDA plugin as `check_gpu.py` does.
"""

import dataclasses
import itertools
import os
import pathlib
import re
import sys
import time
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
from absl import app, flags
from jax.experimental import topologies

from kvjax.inference.plan import Plan, Slots, State, make_plan
from kvjax.typing import PyTree
from scripts import described, described_gpu, ideal, shapes, tpu_compiler
from scripts.hlo_text import Program, nbytes_off_chip
from scripts.records import keep

ROOT = pathlib.Path(__file__).resolve().parent.parent
CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "h100": None}  # of TPUs the topology
METHODS = (
    "full", "streaming_llm", "quest", "kvswap", "infinigen", "dynakv", "icecache", "pqcache", "dynsplit", "snapkv",
    "h2o",
)
PLACES = ("memory", "slots")
KEYS = ("chip", "model", "layers", "method", "dtype", "batch", "tokens", "place", "program")
HEAD = (
    *KEYS, "ideal", "bytes", "ratio", "", "off chip", "ratio", "temporaries", "of state", "",
    "largest copy", "", "seconds",
)

CHIP = flags.DEFINE_list("chips", ["v5e"], f"described chips: {', '.join(CHIPS)}; h100 alone")
MODEL = flags.DEFINE_list("models", ["llama-3.2-1b"], f"shapes of models: {', '.join(shapes.MODELS)}")
METHOD = flags.DEFINE_list("methods", list(METHODS), "methods")
DTYPE = flags.DEFINE_list("dtypes", ["bfloat16"], "types of keys and values in blocks")
BATCH = flags.DEFINE_list("batches", ["1"], "sequences")
LENGTH = flags.DEFINE_list("lengths", ["32768", "131072"], "tokens of each sequence")
PROGRAM = flags.DEFINE_list("programs", ["token"], f"programs: {', '.join(described.PROGRAMS)}")
WHERE = flags.DEFINE_list("places", ["memory"], "where blocks are: memory, or slots over a store")
BUDGET = flags.DEFINE_integer("budget", 512, "tokens that a method attends")
LAYERS = flags.DEFINE_integer("layers", 2, "layers that the models are cut to; 0 = all")
SMALL = flags.DEFINE_bool("small", False, "a grid of its own that takes minutes on two slow cores")
EXPLAIN = flags.DEFINE_integer("explain", 0, "print so many of each program's instructions that move most; 0 = none")
OUT = flags.DEFINE_string("out", None, "directory for summary.json")
TEXT = flags.DEFINE_string("text", None, "directory for the compiled programs as text")
for _flag, _known in ((CHIP, CHIPS), (MODEL, shapes.MODELS), (PROGRAM, described.PROGRAMS), (WHERE, PLACES)):
    flags.register_validator(_flag, lambda given, known=_known: set(given) <= set(known), f"use {', '.join(_known)}")


@dataclasses.dataclass(frozen=True)
class Point:
    """One point of the grid: what is compiled, and for what."""

    chip: str
    model: str
    layers: int  # that the model is cut to, 0 = all
    method: str
    dtype: str
    batch: int
    tokens: int
    place: str


# ------------------------------------------------------------------------------------ what to do


def grid() -> Iterator[tuple[Point, tuple[str, ...]]]:
    """Yields points and the names of the programs to compile there."""
    if SMALL.value:
        chip, model = CHIP.value[0], MODEL.value[0]
        for method in ("full", "quest", "kvswap", "dynakv"):
            yield Point(chip, model, 1, method, "bfloat16", 1, 32_768, "memory"), ("token",)
        yield Point(chip, model, 1, "quest", "int8", 1, 32_768, "slots"), described.PROGRAMS[:-2]
        yield Point(chip, model, 1, "quest", "bfloat16", 1, 2048, "memory"), described.PROGRAMS[-2:]
        return
    batches, lengths = map(int, BATCH.value), map(int, LENGTH.value)
    axes = CHIP.value, MODEL.value, DTYPE.value, batches, lengths, WHERE.value, METHOD.value
    for chip, model, dtype, batch, tokens, place, method in itertools.product(*axes):
        yield Point(chip, model, LAYERS.value, method, dtype, batch, tokens, place), tuple(PROGRAM.value)


def made(point: Point) -> tuple[Plan, PyTree, State]:
    """Returns plan, shapes of the weights in bf16, and shapes of the cache at a point of the grid."""
    config = shapes.config_of(point.model, point.layers)
    plan = make_plan(config, shapes.method_of(point.method, BUDGET.value), point.batch, point.tokens, point.dtype)
    params = described.model_params(plan, jax.numpy.bfloat16)
    # Full's slots are all blocks: what a step needs of a store passes through them.
    return plan, params, described.model_state(plan, point.place == "slots", Slots(backend="io"))


# ------------------------------------------------------------------------------------ what it is


def measured(point: Point, case: described.Case, plan: Plan, state: State, where, texts: pathlib.Path | None) -> dict:
    """Compiles a program and returns its record.

    Args:
      point: point of the grid.
      case: the program.
      plan: static part of the cache.
      state: shapes of the cache.
      where: sharding of arrays on the described chip, and its platform.
      texts: directory for the program's text; None = it is not kept.

    Returns:
      Bytes and verdicts, ready for JSON.
    """
    begin = time.monotonic()
    program = described.compiled(case, *where)
    seconds, text = time.monotonic() - begin, program.as_text()
    record = dataclasses.asdict(point) | {"layers": len(plan.layers), "program": case.name, "budget": BUDGET.value}
    if texts is not None:
        (texts / f"{'-'.join(str(record[key]) for key in KEYS)}.hlo").write_text(text)
    parsed, memory, counted = Program(text), program.memory_analysis(), program.cost_analysis()
    copy, copied = parsed.largest_copy()
    record |= {
        # XLA counts nothing for a GPU that is only described: there it is the estimate, too.
        "bytes": int(counted["bytes accessed"]) if counted else sum(size for size, _ in parsed.costs()),
        "bytes_off_chip_estimate": sum(size for size, _ in parsed.costs(nbytes_off_chip)),
        "state": ideal.nbytes(case.kept), "temporaries": memory.temp_size_in_bytes, "largest_copy": copy,
        "largest_copy_shape": copied, "launches": parsed.launches(), "compile_seconds": round(seconds, 1),
        "temporaries_met": memory.temp_size_in_bytes <= ideal.TEMPORARIES * ideal.nbytes(case.kept),
        "copy_met": copy < ideal.COPY,
    }
    if case.name in ("token", "read", "chunk_read"):
        least = ideal.of_token(plan, case.params, state, None if case.name == "token" else 1)
        record["ideal"] = dataclasses.asdict(least) | {"total": least.total}
        record["ratio"] = round(record["bytes"] / least.total, 2)
        if case.name == "token" and point.method in ideal.RATIO:
            record["ratio_met"] = record["ratio"] <= ideal.RATIO[point.method]
    if EXPLAIN.value:
        explain(parsed, EXPLAIN.value)
    return record


def explain(program: Program, count: int) -> None:
    """Prints the instructions of a program that move most, with the lines of kvjax that they were made for.

    Those that differ only in number, as of two layers, are one line.
    """
    costs, alike = program.costs(), {}
    for size, instruction in costs:
        reason = program.reason(instruction)
        lines = [f"{name.split('/kvjax/')[-1]}:{line}" for name, line in program.stack(reason) if "/kvjax/" in name]
        added = "" if reason is instruction else f", added for {reason.name.rstrip('.0123456789')}"
        op_name = re.sub(r"\[\d+\]", "[i]", instruction.op_name)[-80:]  # of any layer
        text = (f"{instruction.name.rstrip('.0123456789')} ({instruction.opcode}{added}) -> {instruction.shape[:100]}; "
                f"{op_name or 'no name'}; {' < '.join(lines[:3]) or 'no line'}")
        alike.setdefault(text, []).append(size)
    off_chip = sum(size for size, _ in program.costs(nbytes_off_chip))
    print(f"\nestimated from shapes: {mib(sum(size for size, _ in costs))} MiB, {mib(off_chip)} of them off the chip")
    for text, sizes in sorted(alike.items(), key=lambda pair: -sum(pair[1]))[:count]:
        print(f"{mib(sum(sizes)):>9} MiB in {len(sizes)}: {text}")
    print(flush=True)


def mib(size: int) -> str:
    """Returns bytes in MiB as text."""
    return f"{size / ideal.MIB:,.{1 if size < 100 * ideal.MIB else 0}f}"


def row(record: dict) -> str:
    """Returns a record as a row of the table."""
    least = record["ideal"]["total"] if "ideal" in record else None
    cells = (
        *(record[key] for key in KEYS), "" if least is None else mib(least), mib(record["bytes"]),
        record.get("ratio", ""), said(record.get("ratio_met")), mib(record["bytes_off_chip_estimate"]),
        "" if least is None else f"{record['bytes_off_chip_estimate'] / least:.2f}", mib(record["temporaries"]),
        f"{record['temporaries'] / record['state']:.0%}", said(record["temporaries_met"]), mib(record["largest_copy"]),
        said(record["copy_met"]), record["compile_seconds"],
    )
    return f"| {' | '.join(map(str, cells))} |"


def said(met: bool | None) -> str:
    """Returns how a mark is reported; nothing where there is none."""
    return "" if met is None else "met" if met else "missed"


def beside_full(records: list[dict]) -> list[dict]:
    """Returns how the bytes beyond weights of methods that select compare with those of full, at 128K."""
    def like(record):
        return tuple(record[key] for key in ("chip", "model", "layers", "dtype", "batch", "tokens"))

    tokens = [one for one in records if one["program"] == "token" and one["tokens"] >= ideal.LONG]
    full = {like(one): one for one in tokens if one["method"] == "full" and one["place"] == "memory"}
    found = []
    for one in tokens:
        if one["method"] != "full" and like(one) in full:
            beyond, all_of = (each["bytes"] - each["ideal"]["weights"] for each in (one, full[like(one)]))
            met = beyond <= ideal.SHARE_OF_FULL * all_of
            found.append({key: one[key] for key in KEYS} | {"over_full": round(beyond / all_of, 2), "met": met})
    return found


def place_of(chip: str) -> jax.sharding.Sharding:
    """Returns the sharding of arrays on a described chip, for whose platform JAX compiles from then on."""
    if chip == "h100":
        return described_gpu.sharding()
    devices = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip]).devices
    if jax.default_backend() != "tpu":
        described.compile_without_a_device("tpu", devices[0].client)
    return jax.sharding.SingleDeviceSharding(devices[0])


def main(argv) -> None:
    del argv
    if "h100" in CHIP.value and len(CHIP.value) > 1:
        raise app.UsageError("--chips: a process compiles for TPUs or for an h100; run it again for the other")
    platform = "cuda" if CHIP.value == ["h100"] else "tpu"
    missing = tpu_compiler.install(ROOT / ".venv-tpu") if platform == "tpu" else None
    if missing:
        print(missing)
        return
    texts = None if TEXT.value is None else pathlib.Path(TEXT.value)
    if texts is not None:
        texts.mkdir(parents=True, exist_ok=True)
    records, every, failed = [], [], []
    places = {chip: (place_of(chip), platform) for chip in CHIP.value}
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}", flush=True)
    for point, names in grid():
        done, bad = of_point(point, names, places[point.chip], texts)
        records += done
        failed += bad
        every = records
        if OUT.value:
            every = keep(pathlib.Path(OUT.value) / "summary.json", records, (*KEYS, "budget"),
                         lambda every: {"beside_full": beside_full(every)})
    for one in beside_full(every):
        print(f"{' '.join(str(one[key]) for key in KEYS)}: bytes beyond weights are {one['over_full']:.2f} of full's, "
              f"{said(one['met'])}")
    if failed:
        sys.exit(f"{len(failed)} programs did not compile: " + "; ".join(failed))


def of_point(point: Point, names, where, texts) -> tuple[list[dict], list[str]]:
    """Compiles and prints the programs of a point; returns their records, and those that do not compile."""
    records, failed, absent = [], [], set(names)
    plan, params, state = made(point)
    for case in described.cases(plan, params, state, names):
        absent.discard(case.name)
        try:
            records.append(measured(point, case, plan, state, where, texts))
        except jax.errors.JaxRuntimeError as error:
            failed.append(f"{point} {case.name}")
            print(f"{point} {case.name} DOES NOT COMPILE: {str(error)[:2000]}", flush=True)
        else:
            print(row(records[-1]), flush=True)
    if absent:
        print(f"{point.method} reads no chunks, so that it has no {' and '.join(sorted(absent))}")
    jax.clear_caches()  # programs of one point after another would fill the memory
    return records, failed


if __name__ == "__main__":
    app.run(main)
