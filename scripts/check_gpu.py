"""Compilation of a token for a GPU that need not be present, and a check of where the host tier's arrays are placed.

    python scripts/check_gpu.py [--methods=quest,dynakv] [--host=64] [--out=DIR]

Needs JAX's CUDA plugin (`pip install "jax[cuda12]"` of the pinned version, in an environment of its own), but no GPU:
XLA compiles for a described one (an H100). Nothing is run: the script shows whether XLA accepts the programs and where
their memory is, but no results and no times. The programs are those of the fused driver, of each half of a staged
layer, and of a chunk. A program fails the check if an array as large as a layer's host tier lies in device memory.
`--out` keeps the compiled programs. Private parts of JAX are patched here as of 0.10.2.
"""

import functools
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the state is made on CPU
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax._src import compiler, xla_bridge
from jax._src.interpreters import mlir
from jax.experimental import topologies
from jaxlib.mlir import ir

import kvjax
from kvjax.cache.write import write_token
from kvjax.inference import chunked_prefill, decode
from kvjax.inference.lookahead import Token
from kvjax.inference.plan import Slots

METHODS = flags.DEFINE_list("methods", ["quest", "dynakv"], "methods, at a budget of 64")
HOST = flags.DEFINE_integer("host", 64, "slots per KV head in host memory")
OUT = flags.DEFINE_string("out", None, "directory for the compiled programs")

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


def described() -> jax.sharding.NamedSharding:
    """Returns the sharding of arrays on the described GPU."""
    topology = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=H100)
    return jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(topology.devices), ("x",)), jax.P())


def compile_without_a_device(client) -> None:
    """Patches JAX to compile without a device.

    JAX asks for the device's own backend where a program calls Python, and hands the calls to XLA, which accepts none
    for a program that is only compiled. kvjax asks for the backend where CPU and accelerators differ.
    """
    known, load = xla_bridge.canonicalize_platform, compiler.backend_compile_and_load
    xla_bridge.canonicalize_platform = lambda name: "cuda" if name == "gpu" else known(name)
    mlir.ModuleContext.get_backend = lambda self, optional=False: client
    compiler.backend_compile_and_load = lambda *args: load(*args[:-1], ())
    jax.default_backend = lambda: "gpu"


def compiled(function: Callable, where: jax.sharding.NamedSharding, cache, *rest):
    """Returns the compiled `function(cache, *rest)` with the cache donated; arrays of it in host memory are there on
    the GPU, too."""
    leaves, tree = jax.tree.flatten(cache)
    on_host = [i for i, leaf in enumerate(leaves) if leaf.sharding.memory_kind == "pinned_host"]

    def call(leaves, *rest):
        moved = [jax.device_put(one, jax.memory.Space.Host) if i in on_host else one for i, one in enumerate(leaves)]
        return function(jax.tree.unflatten(tree, moved), *rest)

    outline = jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=where), (leaves, *rest))
    lowered = jax.jit(call, donate_argnums=0, keep_unused=True).lower(*outline)
    mark_host(lowered._lowering._hlo, on_host)
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


def programs(llm: kvjax.LLM, name: str) -> Iterator[tuple[str, Callable, tuple, int]]:
    """Yields (name, function, its arguments, numbers in a layer's host tier) for each program of a method."""
    context = pathlib.Path(decode.__file__).read_text()[:1500]
    cache = llm.prefill(context, method=kvjax.METHODS[name](budget=64, window=16), store=kvjax.HostStore(),
                        slots=Slots(host=HOST.value, backend="io"))
    plan, state, params, token = cache.plan, cache.state, llm.params, jnp.zeros(1, jnp.int32)
    layer, block, at, active = plan.layers[0], params["layers_0"], state.length, jnp.ones(1, bool)
    size, number, x = state.layers[0].pool.host_rows.size, jnp.int32(0), jnp.zeros((1, plan.config.hidden_size))

    def read(kept):
        operand = Token(x, at, active, number, state.ref)
        return decode.read_layer(plan.config.layers[0], layer, block, kept, None, operand, None)

    def write(kept, fresh):
        return write_token(layer, kept, fresh, at, active, number, state.ref, token)

    def chunk(kept, fresh):
        many = jax.tree.map(lambda leaf: jnp.stack([leaf] * 8), fresh)
        return chunked_prefill._write.__wrapped__(layer, kept, many, jnp.zeros((1, 8), jnp.int32), at, at, True, number,
                                         state.ref, None)

    asked = jax.eval_shape(read, state.layers[0]).pending.new_token
    fresh = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), asked)
    whole = functools.partial(decode.fused_token, plan)
    yield "token", lambda kept, given: whole(given, kept, token, active), (state, params), size
    yield "read", read, (state.layers[0],), size
    yield "write", write, (state.layers[0], fresh), size
    if not layer.method.observes:
        yield "chunk", chunk, (state.layers[0], fresh), size
    cache.close()


def main(argv) -> None:
    kvjax.keep_programs()
    del argv
    llm = kvjax.load(pathlib.Path(kvjax.__file__).parent / "reference")
    work = [(name, *each) for name in METHODS.value for each in programs(llm, name)]
    where = described()
    compile_without_a_device(where.mesh.devices.flat[0].client)
    failed = False
    for name, which, function, arguments, size in work:
        program = compiled(function, where, *arguments)
        text, use = program.as_text(), program.memory_analysis()
        wrong = in_device_memory(text, size)
        failed |= bool(wrong)
        verdict = f"IN DEVICE MEMORY: {', '.join(wrong)}" if wrong else "the host tier stays in host memory"
        on_device, on_host = (f"{given:,} bytes and {more:,} more" for given, more in (
            (use.argument_size_in_bytes, use.temp_size_in_bytes),
            (use.host_argument_size_in_bytes, use.host_temp_size_in_bytes),
        ))
        print(f"{name:12} {which:6} on the device {on_device}, on the host {on_host}; {verdict}")
        if OUT.value:
            pathlib.Path(OUT.value, f"{name}-{which}.hlo").write_text(text)
    sys.exit(failed)


if __name__ == "__main__":
    app.run(main)
