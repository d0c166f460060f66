"""Programs of kvjax from shapes alone, and what JAX needs to compile them for a device that is not there.

`check_gpu.py` and `check_tpu.py` share it. Private parts of JAX are patched here as of 0.10.2.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import compiler
from jax._src.interpreters import mlir

from kvjax.cache.fill import Prompts, empty_state, fill_memory
from kvjax.cache.layer import LayerCache, LayerPlan
from kvjax.cache.pool import StoreRef
from kvjax.cache.write import write_token
from kvjax.inference import chunked_prefill, decode, dense_prefill
from kvjax.inference.layer_offload import shape_only as shape
from kvjax.inference.lookahead import Token, next_layer
from kvjax.inference.plan import Plan, Slots, State, outline
from kvjax.models.transformer import Transformer
from kvjax.typing import PyTree

CHUNK = 512  # tokens of a chunk
PROGRAMS = ("token", "read", "write", "chunk_read", "chunk_write", "prompt", "index")


def compile_without_a_device(platform: str, client) -> None:
    """Patches JAX and kvjax to compile for a platform that has no device here.

    JAX asks for the device's own backend where a program calls Python, and hands the calls to XLA, which accepts none
    for a program that is only compiled. kvjax asks for the backend where CPU and accelerators differ.

    Args:
      platform: "gpu" or "tpu".
      client: client of the described device.
    """
    load = compiler.backend_compile_and_load
    mlir.ModuleContext.get_backend = lambda self, optional=False: client
    compiler.backend_compile_and_load = lambda *args: load(*args[:-1], ())
    jax.default_backend = lambda: platform
    jax.config.update("jax_enable_compilation_cache", False)  # programs in it are loaded onto a device


@dataclasses.dataclass(frozen=True)
class Case:
    """A program to compile: `function(kept, *rest)`, in which `kept` may be overwritten.

    Attributes:
      name: one of PROGRAMS.
      function: the program.
      kept: shapes of what is overwritten: a state, or one layer's cache.
      rest: shapes of the other arguments.
      params: shapes of the weights among them; those of a whole model have an embedding.
    """

    name: str
    function: Callable
    kept: PyTree
    rest: tuple
    params: PyTree


def model_params(plan: Plan, dtype) -> PyTree:
    """Returns the shapes of a model's weights in one type."""
    def weights():
        tokens = jnp.zeros((1, 1), jnp.int32)
        return Transformer(plan.config).init(jax.random.key(0), tokens, tokens)["params"]

    return jax.tree.map(lambda leaf: shape(leaf.shape, dtype), jax.eval_shape(weights))


def model_state(plan: Plan, store: bool, slots: Slots) -> State:
    """Returns the shapes of a model's cache, in memory or over a store."""
    scalar = shape((), np.int32)
    layers = tuple(outline(plan, i, store, slots) for i in range(len(plan.layers)))
    return State(layers, shape((plan.batch,), np.int32), StoreRef(scalar, scalar))


def host_arrays(kept: PyTree) -> list[int]:
    """Returns the numbers of the leaves that are in host memory: a tiered pool's host slots."""
    return [i for i, (path, _) in enumerate(jax.tree.leaves_with_path(kept)) if path and _name(path) == "host_rows"]


def _name(path) -> str:
    return getattr(path[-1], "name", "")


def _hosted(function: Callable) -> Callable:
    """Returns the program with its host arrays in host memory, which shapes alone do not say."""
    def placed(path, leaf):
        return jax.device_put(leaf, jax.memory.Space.Host) if _name(path) == "host_rows" else leaf

    @functools.wraps(function)
    def call(kept, *rest):
        return function(jax.tree.map_with_path(placed, kept), *rest)

    return call


def cases(
    plan: Plan, params: PyTree, state: State, names: tuple[str, ...], chunk: int = CHUNK,
) -> Iterator[Case]:
    """Yields programs as `step`, `extend` and `prefill` compile them, of layer 0 where a program is one layer's.

    Args:
      plan: static part of the cache.
      params: shapes of the weights.
      state: shapes of the cache.
      names: of PROGRAMS; those of chunks are left out where the method reads none.
      chunk: tokens of a chunk.
    """
    batch, config, layer, ref = plan.batch, plan.config.layers[0], plan.layers[0], state.ref
    tokens, flags, number = shape((batch,), jnp.int32), shape((batch,), bool), shape((), jnp.int32)
    kind = params["embedding"]["embedding"].dtype
    cache, weights = state.layers[0], params["layers_0"]
    x = jax.eval_shape(lambda p, t: Transformer(plan.config).apply({"params": p}, t, method="embed"), params, tokens)

    @_hosted
    def token(kept, params, tokens, active):
        return decode.fused_token(plan, params, kept, tokens, active)

    @_hosted
    def read(kept, params, following, x, at, active, number, ref):
        return decode.read_layer(config, layer, params, kept, following, Token(x, at, active, number, ref), None)

    @_hosted
    def write(kept, new, at, gate, number, ref, token):
        return write_token(layer, kept, new, at, gate, number, ref, token)

    @_hosted
    def chunk_read(kept, params, x, at, count, number, ref):
        return chunked_prefill._read(config, layer, params, kept, x, at, count, number, ref, None)

    @_hosted
    def chunk_write(kept, new, tokens, at, count, ok, number, ref):
        return chunked_prefill._write(layer, kept, new, tokens, at, count, ok, number, ref, None)

    def prompt(x, params):
        return dense_prefill.read_layer(config, min(dense_prefill.CHUNK, x.shape[1]), params, x)

    following = next_layer(plan, params, state.layers, 0, lambda i: state.layers[i])
    reading = (weights, following, x, tokens, flags, number, ref)
    many = (shape((batch, chunk, x.shape[-1]), x.dtype), tokens, tokens, number, ref)
    made: dict[str, Callable[[], Case]] = {
        "token": lambda: Case("token", token, state, (params, tokens, flags), params),
        "read": lambda: Case("read", read, cache, reading, weights),
        "write": lambda: Case("write", write, cache, (
            jax.eval_shape(read, cache, *reading).pending.new_token, tokens, flags, number, ref, tokens), {}),
        "prompt": lambda: Case(
            "prompt", prompt, shape((batch, plan.capacity, x.shape[-1]), x.dtype), (weights,), weights),
        "index": lambda: Case("index", *_index(plan, layer, kind), {}),
    }
    if chunked_prefill.reads(plan):
        made["chunk_read"] = lambda: Case("chunk_read", chunk_read, cache, (weights, *many), weights)
        made["chunk_write"] = lambda: Case("chunk_write", chunk_write, cache, (
            jax.eval_shape(chunk_read, cache, weights, *many).pending.new_token, shape((batch, chunk), jnp.int32),
            tokens, tokens, shape((), bool), number, ref), {})
    yield from (made[name]() for name in names if name in made)


def _index(plan: Plan, layer: LayerPlan, kind) -> tuple[Callable, PyTree, tuple]:
    """Returns the program that places a whole prompt of one layer in memory, with its arguments."""
    spec, length = layer.spec, plan.capacity
    rows = shape((plan.batch, length, spec.kv_heads, spec.head_dim), kind)
    asked = layer.method.observed
    asked = length if asked is None else min(asked, length)
    query = shape((plan.batch, asked, spec.kv_heads * spec.group, spec.head_dim), kind) if asked else None
    empty = jax.eval_shape(functools.partial(empty_state, layer, plan.batch, plan.dtype, layer.method.weights(0)))
    prompts = Prompts(rows, rows, shape((plan.batch,), jnp.int32), shape((plan.batch, length), jnp.int32), query)

    def index(kept, prompts) -> LayerCache:
        return fill_memory(layer, kept, prompts, plan.dtype)

    return index, empty, (prompts,)


def compiled(case: Case, where: jax.sharding.Sharding, platform: str):
    """Returns a program compiled for a described device."""
    outlines = jax.tree.map(lambda leaf: shape_on(leaf, where), (case.kept, *case.rest))
    traced = jax.jit(case.function, donate_argnums=0).trace(*outlines)
    return traced.lower(lowering_platforms=(platform,)).compile()


def shape_on(leaf, where: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    """Returns the shape of an array that is on a described device."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)
