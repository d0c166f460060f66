"""Compilation of one token for several described TPU chips: what they exchange, and what each of them has to hold.

    python scripts/check_mesh.py [--meshes=1x4,1x8] [--models=llama-3.1-8b] [--methods=full,quest,dynakv]
        [--lengths=131072] [--layers=2] [--out=DIR]

As with `check_tpu.py`, nothing is run. A mesh of AxB divides sequences among A chips and heads among B. Collectives are
counted in the compiled program; the marks are two sums of hidden states a layer, beside one for the embedding, no other
exchange above 64 KiB but of the logits, and no more than a chip's memory. With --layers=0 the model is whole.
"""

import itertools
import os
import pathlib
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import numpy as np
from absl import app, flags
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax.inference import on_mesh
from kvjax.inference.plan import Plan, Slots, make_plan
from kvjax.models.mesh import MeshLayout
from kvjax.typing import PyTree
from scripts import described, hlo_text, shapes, tpu_compiler
from scripts.records import keep

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOPOLOGIES = {4: "v5e:2x2", 8: "v5e:2x4"}
CHIP_BYTES = 16e9  # of a v5e
KEYS = ("mesh", "model", "layers", "method", "tokens", "budget")  # what names a record
EXCHANGED = 64 * 1024  # most bytes of an exchange that is no sum of hidden states

MESHES = flags.DEFINE_list("meshes", ["1x4", "1x8"], f"shapes of meshes, of {' or '.join(map(str, TOPOLOGIES))} chips")
MODEL = flags.DEFINE_list("models", ["llama-3.1-8b"], f"shapes of models: {', '.join(shapes.MODELS)}")
METHOD = flags.DEFINE_list("methods", ["full", "quest", "kvswap", "dynakv"], "methods")
LENGTH = flags.DEFINE_list("lengths", ["131072"], "tokens of each sequence")
BUDGET = flags.DEFINE_integer("budget", 512, "tokens that a method attends")
LAYERS = flags.DEFINE_integer("layers", 2, "layers that the models are cut to; 0 = all")
OUT = flags.DEFINE_string("out", None, "directory for mesh.json")


def layout_of(mesh: str, devices) -> MeshLayout:
    """Returns how models are divided on described devices."""
    return MeshLayout(Mesh(np.array(devices).reshape([int(size) for size in mesh.split("x")]), ("data", "model")))


def placed(layout: MeshLayout, specs: PyTree, tree: PyTree) -> PyTree:
    """Returns shapes with the places that a tree of partition specs gives them, or their branch."""
    def branch(spec, leaves):
        where = NamedSharding(layout.mesh, spec)
        return jax.tree.map(lambda leaf: described.shape_on(leaf, where), leaves)

    return jax.tree.map(branch, specs, tree, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))


def compiled(plan: Plan):
    """Returns a token of the fused driver, compiled for the mesh of the plan."""
    layout, params = plan.layout, described.model_params(plan, jax.numpy.bfloat16)
    case, = described.cases(plan, params, described.model_state(plan, False, Slots()), ("token",))
    _, tokens, flags_ = case.rest
    given = (placed(layout, on_mesh.specs_of_state(plan), case.kept),
             placed(layout, layout.params(plan.config, params), params),
             *(placed(layout, layout.by_sequence, one) for one in (tokens, flags_)))
    return jax.jit(case.function, donate_argnums=0).trace(*given).lower(lowering_platforms=("tpu",)).compile()


def measured(mesh: str, model: str, method: str, tokens: int, devices) -> dict:
    """Compiles a token and returns what it exchanges and holds, ready for JSON."""
    layout, config = layout_of(mesh, devices), shapes.config_of(model, LAYERS.value)
    layout.check(config)
    batch = layout.sequence_parts
    plan = make_plan(config, shapes.method_of(method, BUDGET.value), batch, tokens, "bfloat16", layout)
    begin = time.monotonic()
    program = compiled(plan)
    seconds, memory = time.monotonic() - begin, program.memory_analysis()
    found = hlo_text.Program(program.as_text()).exchanges()
    hidden = [one for one in found if one["kind"] == "all-reduce" and f",{config.hidden_size}]" in one["shape"]]
    others = [one for one in found if one not in hidden and f"{config.vocab_size}]" not in one["shape"]]
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    layers, most = len(plan.layers), held + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
    largest = max((one["bytes"] for one in others), default=0)
    return {
        "mesh": mesh, "model": model, "layers": layers, "method": method, "batch": batch, "tokens": tokens,
        "budget": BUDGET.value, "hidden_sums": len(hidden), "hidden_sums_met": len(hidden) <= 2 * layers + 1,
        "other_exchanges": len(others), "largest_other": largest, "largest_other_met": largest <= EXCHANGED,
        "held_bytes": held, "temporaries": memory.temp_size_in_bytes, "chip_bytes": most,
        "fits": most <= CHIP_BYTES, "exchanges": found, "compile_seconds": round(seconds, 1),
    }


def row(record: dict) -> str:
    """Returns a record as a row of the table."""
    def said(key):
        return "met" if record[key] else "missed"

    mib = {key: f"{record[key] / 2**20:,.0f}" for key in ("held_bytes", "temporaries", "chip_bytes")}
    cells = (record["mesh"], record["model"], record["layers"], record["method"], record["batch"], record["tokens"],
             record["hidden_sums"], said("hidden_sums_met"), record["other_exchanges"],
             f"{record['largest_other'] / 1024:,.1f}", said("largest_other_met"), mib["held_bytes"],
             mib["temporaries"], mib["chip_bytes"], said("fits"), record["compile_seconds"])
    return f"| {' | '.join(map(str, cells))} |"


HEAD = ("mesh", "model", "layers", "method", "batch", "tokens", "sums of hidden states", "", "others", "largest, KiB",
        "", "arguments, MiB a chip", "temporaries", "in all", f"of {CHIP_BYTES / 1e9:.0f} GB", "seconds")


def main(argv) -> None:
    del argv
    missing = tpu_compiler.install(ROOT / ".venv-tpu")
    if missing:
        print(missing)
        return
    records, patched = [], False
    grid = itertools.product(MESHES.value, MODEL.value, METHOD.value, map(int, LENGTH.value))
    for mesh, model, method, tokens in grid:
        count = int(np.prod([int(size) for size in mesh.split("x")]))
        devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[count]).devices
        if not patched:
            described.compile_without_a_device("tpu", devices[0].client)
            patched = True
            print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}", flush=True)
        records.append(measured(mesh, model, method, tokens, devices))
        print(row(records[-1]), flush=True)
        if OUT.value:
            keep(pathlib.Path(OUT.value) / "mesh.json", records, KEYS)


if __name__ == "__main__":
    app.run(main)
