"""Compilation of a token for a GPU that need not be present, and a check of where the host tier's arrays are placed.

    python scripts/check_gpu.py [--methods=quest,dynakv] [--host=64] [--out=DIR]

Needs JAX's CUDA plugin (`pip install "jax[cuda12]"` of the pinned version, in an environment of its own), but no GPU:
XLA compiles for a described one (an H100). Nothing is run: the script shows whether XLA accepts the programs and where
their memory is, but no results and no times. The programs are those of the fused driver, of each half of a staged
layer, and of a chunk. A program fails the check if an array as large as a layer's host tier lies in device memory.
`--out` keeps the compiled programs. Private parts of JAX are patched here and in `scripts/described.py` as of 0.10.2.
"""

import os
import pathlib
import re
import sys
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing runs on a GPU
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jaxlib.mlir import ir

import kvjax
from kvjax.inference.plan import Slots, make_plan
from kvjax.models.hf_config import read_config
from scripts import described, described_gpu

METHODS = flags.DEFINE_list("methods", ["quest", "dynakv"], "methods, at a budget of 64")
HOST = flags.DEFINE_integer("host", 64, "slots per KV head in host memory")
OUT = flags.DEFINE_string("out", None, "directory for the compiled programs")

PROGRAMS = ("token", "read", "write", "chunk_read", "chunk_write")


def compiled(case: described.Case, where: jax.sharding.NamedSharding):
    """Returns a compiled program whose host slots are in host memory on the GPU, too."""
    outline = jax.tree.map(lambda leaf: described.shape_on(leaf, where), (case.kept, *case.rest))
    lowered = jax.jit(case.function, donate_argnums=0, keep_unused=True).lower(*outline)
    mark_host(lowered._lowering._hlo, described.host_arrays(case.kept))
    return lowered.compile()


def mark_host(module: ir.Module, numbers: list[int]) -> None:
    """Marks arguments of a program as being in host memory, as the described device has no memories to name."""
    with module.context, ir.Location.unknown(module.context):
        main = next(entry for entry in module.body.operations if str(entry.name).strip('"') == "main")
        kinds = [{given[i].name: given[i].attr for i in range(len(given))} for given in main.arg_attrs]
        for number in numbers:
            kinds[number]["mhlo.memory_kind"] = ir.StringAttr.get("pinned_host")
        main.arg_attrs = ir.ArrayAttr.get([ir.DictAttr.get(entry) for entry in kinds])


def in_device_memory(program: str, size: int) -> list[str]:
    """Returns the shapes of `size` numbers in a program that lie in device memory; host memory is S(5), except in the
    program's own host threads."""
    parts = [text for text in program.split("\n\n") if not text.rstrip().endswith('execution_thread="host"')]
    shapes = set(re.findall(r"\w+\[[\d,]+\]\{[^}]*\}", "".join(parts)))
    counts = {text: int(np.prod([int(n) for n in re.search(r"\[([\d,]+)\]", text)[1].split(",")])) for text in shapes}
    return sorted(text for text, count in counts.items() if count == size and "S(5)" not in text)


def programs(names: list[str]) -> Iterator[tuple[str, described.Case, int]]:
    """Yields each program of each method, after its name, and before the numbers in a layer's host tier."""
    config = read_config(pathlib.Path(kvjax.__file__).parent / "reference")
    for name in names:
        plan = make_plan(config, kvjax.METHODS[name](budget=64, window=16), batch=1, capacity=2048)
        params = described.model_params(plan, jnp.float32)
        state = described.model_state(plan, True, Slots(host=HOST.value, backend="io"))
        for case in described.cases(plan, params, state, PROGRAMS, chunk=8):
            yield name, case, state.layers[0].pool.host_rows.size


def main(argv) -> None:
    del argv
    where = described_gpu.sharding()
    failed = False
    for name, case, size in programs(METHODS.value):
        program = compiled(case, where)
        text, use = program.as_text(), program.memory_analysis()
        wrong = in_device_memory(text, size)
        failed |= bool(wrong)
        verdict = f"IN DEVICE MEMORY: {', '.join(wrong)}" if wrong else "the host tier stays in host memory"
        on_device, on_host = (f"{given:,} bytes and {more:,} more" for given, more in (
            (use.argument_size_in_bytes, use.temp_size_in_bytes),
            (use.host_argument_size_in_bytes, use.host_temp_size_in_bytes),
        ))
        print(f"{name:12} {case.name:11} on the device {on_device}, on the host {on_host}; {verdict}")
        if OUT.value:
            pathlib.Path(OUT.value, f"{name}-{case.name}.hlo").write_text(text)
    sys.exit(failed)


if __name__ == "__main__":
    app.run(main)
