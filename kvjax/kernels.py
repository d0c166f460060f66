"""What XLA:CPU is slow at, as kernels for CPU (kernels.c), which compiled programs call.

Of every kernel there is an equal in XLA's operations: it runs on other platforms, and where pip found no C compiler and
left the kernels out (`COMPILED` is False then). The two round differently.

  - `row_products`: rows[R, D], index[K, N], q[K, G, D] to [K, G, N], each KV head's rows with its queries;
  - `row_sums`: rows[R, D], index[K, N], weight[K, G, N] to [K, G, D], each KV head's rows times their weights;
  - `code_products`: codes[F, X, N], q[F, Q, D], first[F, Q] to [F, Q, N], each vector of codes with each query, beyond
    `first`; a byte has the codes of D / X dimensions, the lowest bits the first's.

Rows are f32, or bfloat16 as uint16, codes uint8, indices int32 and clipped, all else is f32.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from kvjax.typing import Array

try:
    from kvjax import _kernels
except ImportError:  # built without a C compiler
    _kernels = None  # type: ignore[assignment]

COMPILED = _kernels is not None


# How `jax.vmap` calls them: one after the other where rows of one pool are not to be copied for each.
_MAPPED = {"row_products": "sequential", "row_sums": "sequential", "code_products": "broadcast_all"}


def on_cpu(name: str, shape: tuple[int, ...], otherwise: Callable[..., Array], *operands: Array) -> Array:
    """The kernel's f32 result on CPU, and `otherwise` of the operands elsewhere."""
    if not COMPILED:
        return otherwise(*operands)

    def kernel(*operands):
        call = jax.ffi.ffi_call(f"kvjax_{name}", jax.ShapeDtypeStruct(shape, jnp.float32), vmap_method=_MAPPED[name])
        return call(*(one.astype(jnp.float32) if jnp.issubdtype(one.dtype, jnp.floating) else one for one in operands))

    return jax.lax.platform_dependent(*operands, cpu=kernel, default=otherwise)


for _name, _handler in _kernels.handlers().items() if COMPILED else ():
    jax.ffi.register_ffi_target(f"kvjax_{_name}", _handler, platform="cpu")
