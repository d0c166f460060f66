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
from jax._src import xla_bridge
from jax.experimental import topologies
from jaxlib.mlir import ir

import kvjax
from kvjax.inference.plan import Slots, make_plan
from kvjax.models.hf_config import read_config
from scripts import described

METHODS = flags.DEFINE_list("methods", ["quest", "dynakv"], "methods, at a budget of 64")
HOST = flags.DEFINE_integer("host", 64, "slots per KV head in host memory")
OUT = flags.DEFINE_string("out", None, "directory for the compiled programs")

PROGRAMS = ("token", "read", "write", "chunk_read", "chunk_write")
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84929347584 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 12 minor: 8 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def described_gpu() -> jax.sharding.NamedSharding:
    """Returns the sharding of arrays on the described GPU."""
    topology = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=H100)
    return jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(topology.devices), ("x",)), jax.P())


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
    where = described_gpu()
    known = xla_bridge.canonicalize_platform
    xla_bridge.canonicalize_platform = lambda name: "cuda" if name == "gpu" else known(name)
    described.compile_without_a_device("gpu", where.mesh.devices.flat[0].client)
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
