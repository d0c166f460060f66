"""What XLA:CPU is slow at, as kernels for CPU, which compiled programs call.

Of every kernel there is an equal in XLA's operations, which rounds differently if nothing is said. It runs on other
platforms, and where pip found no GCC 12 or clang and left the kernels out (`COMPILED` is False then).

  - `row_attention`: keys[R, D], index[K, N], values[R2, D], index[K, N], valid[K, N], q[K, G, D] and bias[K, G, N] or
    [K, G, 0] to out[K, S, G, D], top[K, S, G], total[K, S, G], as `kvjax.ops.attention.Part` says, of each 4,096 rows
    of a KV head; scores are products with q, plus the bias; G is a multiple of 4;
  - `code_products`: codes[F, X, N], q[F, Q, D], step[F, Q], stored[] to [F, Q, N], each vector of codes with each
    query, times the step; -1e30 from the stored token on. A byte has the codes of D / X dimensions, the lowest bits the
    first's, of 8, 4 and 2 bits with 127, 7 and 1.5 added; exactly equal while sums stay below 2^24;
  - `code_softmax`: the same to the mean [G, N] of the softmaxes of those scores over the queries of each F / G of the
    heads, 0 for tokens that are not stored; before it come sums [G, C, N] over each of C parts of these queries, which
    are worked on at a time. A thread keeps memory for scores of 4 queries;
  - `vector_products`: vectors[F, D, N] and q[F, Q, D] to [F, Q, N];
  - `vector`: vectors[F, D, N] and one's number[F] to [F, D]; exactly equal;
  - `softmax_mean`: scores[F, G, N] to the mean [F, N] of the softmaxes of each head's queries;
  - `best_blocks`: scores[F, N] and occupied[F, N] to the M best occupied blocks [F, M] of each head, as
    `kvjax.ops.topk.top_blocks` says; exactly equal;
  - `cut`: blocks[K, M], forced[K], room[K], counts[KT, NB] and positions[KT, _, C] to need[K, M1] and rank, row, valid
    and pos[K, N], as `kvjax.cache.state.needed_blocks` says; exactly equal;
  - `survey`: squared distances[F, NB], counts[F, NB], split[F, NB] and C[F] to numbers[F, 7], as
    `kvjax.methods.clusters.survey.Survey` says; exactly equal;
  - `split`: points[F, N, D], valid[F, N], the largest half[F] and iterations[F], which are of all alike, to the first
    half[F, N], as `kvjax.ops.kmeans.two_means` says;
  - `copy`: numbers[*N] to the same, for `kvjax.ops.barriers.written_out`;
  - `assign`: block[KB, NS], keys[KB, NS, P], need[KB, M], NB to slot[KB, M], read[KB, M], new[KB, NS], pinned[KB, NS],
    as `kvjax.cache.residency` says; exactly equal.

Rows are f32, or bfloat16 as uint16, codes uint8, their queries int8, indices int32 and clipped, other whole numbers
int32, what is occupied or valid boolean, all else f32. There are no derivatives.
"""

import functools
import importlib.metadata
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kvjax import _native
from kvjax.typing import Array

_NAMES = ("row_attention", "code_products", "code_softmax", "vector_products", "vector", "softmax_mean", "best_blocks",
          "cut", "survey", "split", "copy", "assign")
_ONE_BY_ONE = ("row_attention",)  # where `jax.vmap` maps them: rows of one pool are not to be copied for each
NEGATIVE = -1e30  # score of what is not there
TOGETHER = 4  # queries that meet a code at a time
MOST_CHUNKS = 4  # of queries whose sums are apart: more are for more processors, and take more memory


def register(module: Any, names: tuple[str, ...]) -> bool:
    """Whether XLA knows the functions of a compiled part; None = left out. One newer than XLA would keep its CPU
    backend from starting, and one older than this code lacks some of them."""
    if module is None:
        return False
    handlers = module.handlers()
    missing = sorted(set(names) - set(handlers))
    if missing:
        logging.warning("programs do without %s: it was compiled before %s; install kvjax again", module.__name__,
                        ", ".join(missing))
        return False
    compiled, installed = (tuple(map(int, version.split(".")[:3]))
                           for version in (module.JAXLIB, importlib.metadata.version("jaxlib")))
    if compiled > installed:
        logging.warning("programs do without %s: it was compiled for jaxlib %s, and %s is here; install kvjax again",
                        module.__name__, module.JAXLIB, importlib.metadata.version("jaxlib"))
        return False
    for name, handler in handlers.items():
        jax.ffi.register_ffi_target(f"kvjax_{name}", handler, platform="cpu")
    return True


_compiled = _native.load("kvjax.ops.kernels._compiled")
COMPILED = register(_compiled, _NAMES)


def on_cpu(name: str, result: Any, otherwise: Callable[..., Any], *operands: Array) -> Any:
    """The kernel's result on CPU, one `jax.ShapeDtypeStruct` or several, and `otherwise` of the operands elsewhere."""
    def declared(*operands):
        return jax.tree.map(lambda like, found: found.astype(like.dtype), result, otherwise(*operands))

    if not COMPILED:
        return declared(*operands)
    return jax.lax.platform_dependent(*operands, cpu=functools.partial(call, name, result), default=declared)


def call(name: str, result: Any, *operands: Array) -> Any:
    """The kernel's result; only for CPU, and where they are `COMPILED`."""
    mapped = "sequential" if name in _ONE_BY_ONE else "broadcast_all"
    kernel = jax.ffi.ffi_call(f"kvjax_{name}", result, vmap_method=mapped)
    return kernel(*map(_narrow, operands))


def _narrow(x: Array) -> Array:
    """An operand as kernels take it: floats as f32, and int64, which there is with `jax_enable_x64`, as int32."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(jnp.float32)
    return x.astype(jnp.int32) if x.dtype == jnp.int64 else x
