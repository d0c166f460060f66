"""Compiled CPU kernels for operations that are slow in XLA:CPU, called from within compiled programs.

Every kernel has an equivalent in XLA operations, which rounds differently unless the list says "exact". The equivalent
runs on other platforms, and where the kernels were not built for want of GCC 12 or clang (`COMPILED` is False then).

  - `row_attention`: keys[R, D], index[K, N], values[R2, D], index[K, N], valid[K, N], q[K, G, D] and bias[K, G, N] or
    [K, G, 0] to out[K, S, G, D], top[K, S, G], total[K, S, G]: a `kvjax.ops.attention.Part` for each segment of 4,096
    rows of a KV head. Scores are products with q, plus the bias; G is a multiple of 4;
  - `code_products`: codes[F, X, N], q[F, Q, D], step[F, Q], stored[] to [F, Q, N], the product of each vector of codes
    with each query, times the step; -1e30 from vector `stored` on. A byte has the codes of D / X dimensions, the first
    in the lowest bits, with 127, 7 and 1.5 added for 8, 4 and 2 bits; exact while sums stay below 2^24;
  - `code_softmax`: the same operands to sums[G, C, N] and the mean[G, N] of the softmaxes of those scores over the
    queries of each F / G neighbouring heads, 0 for vectors that are not stored. The sums are scratch: each has one of C
    parts of these queries, which threads work on separately. A thread keeps memory for scores of 4 queries;
  - `vector_products`: vectors[F, D, N] and q[F, Q, D] to [F, Q, N];
  - `weight_products`: weights[Y, X] in bfloat16 with scale[Y, 0], in int8 with scale[Y, 1], or uint8[Y, C] with
    two weights of 4 bits in a byte and scale[Y, G] in bfloat16 for each 32 of them; and x[T, X] to [T, Y] in x's type,
    f32 or bfloat16. A vector's products are the same to the bit for any T;
  - `copy`: numbers[*N] to a copy, for `kvjax.ops.barriers.written_out`;
  - `assign`: block[KB, NS], keys[KB, NS, P], need[KB, M], NB to slot[KB, M], read[KB, M], new[KB, NS], pinned[KB, NS],
    as in `kvjax.cache.residency`; exact.

Kernels for TPUs and GPUs are Pallas's, each in a module of its own beside this.

Rows are f32, or bfloat16 as uint16; codes of keys are uint8 and their queries int8; indices are int32 and clipped;
other integers are int32, masks boolean, and all else f32. Kernels have no derivatives.
"""

import functools
import logging
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib

from kvjax import _native
from kvjax.typing import Array

NAMES = ("row_attention", "code_products", "code_softmax", "vector_products", "weight_products", "copy", "assign")
# Run sequentially under `jax.vmap`, which would else copy a shared pool, or weights, for each.
_ONE_BY_ONE = ("row_attention", "weight_products")
_AS_STORED = ("weight_products",)  # take bfloat16 as it is
_VERSION = ("XLA_FFI_API_MAJOR", "XLA_FFI_API_MINOR")  # in modules as in the header that they include
NEGATIVE = -1e30  # score of tokens or blocks that do not exist
TOGETHER = 4  # queries multiplied with a code at a time
MOST_CHUNKS = 4  # parts of the queries with separate sums: more can use more processors, and take more memory


def register(module: Any, names: tuple[str, ...]) -> bool:
    """Registers the handlers of a compiled module with XLA, unless it does not fit the installed versions.

    XLA serves modules that were compiled for older minor versions of its interface; one compiled for a newer one would
    keep its CPU backend from starting. A module older than this code lacks handlers, or does not tell its version. In
    each of these cases a warning is logged.

    Args:
      module: compiled module, or None if it was not built.
      names: handlers that must be there.

    Returns:
      Whether the handlers can be called.
    """
    if module is None:
        return False
    handlers = module.handlers()
    missing = sorted(set(names) - set(handlers)) + [part for part in _VERSION if not hasattr(module, part)]
    if missing:
        logging.warning("programs do without %s: it was compiled without %s; install kvjax again", module.__name__,
                        ", ".join(missing))
        return False
    header = (pathlib.Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
    (major, minor), (served, newest) = ([getattr(module, part) for part in _VERSION],
                                        [int(re.findall(rf"#define {part} (\d+)", header)[0]) for part in _VERSION])
    if major != served or minor > newest:
        logging.warning("programs do without %s: it was compiled for XLA's interface %d.%d, and jaxlib %s has %d.%d; "
                        "install kvjax again with --no-build-isolation", module.__name__, major, minor,
                        jaxlib.__version__, served, newest)
        return False
    for name, handler in handlers.items():
        jax.ffi.register_ffi_target(f"kvjax_{name}", handler, platform="cpu")
    return True


_compiled = _native.load("kvjax.ops.kernels._compiled")
COMPILED = register(_compiled, NAMES)


def capability() -> tuple[int, ...]:
    """Returns NVIDIA's compute capability of the device, such as (9, 0); (0, 0) of devices of others."""
    told = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(jax.local_devices()[0], "compute_capability", "")))
    return tuple(map(int, told.groups())) if told else (0, 0)


def on_cpu(name: str, result: Any, otherwise: Callable[..., Any], *operands: Array) -> Any:
    """Calls a kernel on CPU and its equivalent in XLA operations elsewhere.

    Args:
      name: name of the kernel.
      result: shape and type of the result, a `jax.ShapeDtypeStruct` or a list of them.
      otherwise: equivalent function of the same operands.
      *operands: arrays as the module's docstring lists them.

    Returns:
      An array for each `jax.ShapeDtypeStruct`, with its type.
    """
    def declared(*operands):
        return jax.tree.map(lambda like, found: found.astype(like.dtype), result, otherwise(*operands))

    if not COMPILED:
        return declared(*operands)
    return jax.lax.platform_dependent(*operands, cpu=functools.partial(call, name, result), default=declared)


def call(name: str, result: Any, *operands: Array) -> Any:
    """Calls a kernel; only valid on CPU and if `COMPILED` is True. Arguments are those of `on_cpu`."""
    mapped = "sequential" if name in _ONE_BY_ONE else "broadcast_all"
    kernel = jax.ffi.ffi_call(f"kvjax_{name}", result, vmap_method=mapped)
    return kernel(*(operands if name in _AS_STORED else map(_narrow, operands)))


def _narrow(x: Array) -> Array:
    """Returns an operand in a type that kernels take: floats as f32, int64 (with `jax_enable_x64`) as int32."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(jnp.float32)
    return x.astype(jnp.int32) if x.dtype == jnp.int64 else x
