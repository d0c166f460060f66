"""Weight matrices in 8 or 4 bits, and products of any weight matrix with vectors.

A matrix in few bits has symmetric codes: a weight is its code times a scale.

    int8   codes from -127 to 127, a scale of f32 for each row
    int4   codes from -8 to 7, a scale of bfloat16 for each 32 neighbouring weights of a row: 4.5 bits a weight

The weight of largest magnitude among those that share a scale is the smallest code of int4, -8, so that all sixteen
levels are used; in int8 it is 127 or -127. Vectors stay as they are and products are summed in f32.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import _validate
from kvjax.errors import ConfigError
from kvjax.ops import kernels
from kvjax.ops.barriers import computed_once
from kvjax.ops.precise import einsum, matmul
from kvjax.typing import Array, Float, Int32, Num, PyTree, pytree

KINDS = ("int8", "int4")
GROUP = 32  # weights that share a scale in int4
FEW = 64  # most vectors for which the kernel is faster than XLA's product
_WITH_KERNEL = (jnp.float32, jnp.bfloat16)


@pytree
class QuantisedMatrix:
    """A matrix [Y, X] in few bits.

    It has an array's shape, size, type and bytes; the type is the one of its numbers where they are used.
    """

    codes: Num[Array, "Y C"]  # int8 [Y, X], or uint8 [Y, (X + 1) // 2] with the first of two weights in the low bits
    scale: Float[Array, "Y G"]  # f32 [Y, 1] of int8, bfloat16 [Y, ceil(X / 32)] of int4
    shape: tuple[int, int] = dataclasses.field(metadata={"static": True})
    dtype: np.dtype = dataclasses.field(metadata={"static": True})

    @property
    def kind(self) -> str:
        """The type of the codes, one of KINDS."""
        return "int8" if self.codes.dtype == jnp.int8 else "int4"

    @property
    def size(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in memory, scales included."""
        return self.codes.nbytes + self.scale.nbytes

    def __repr__(self) -> str:
        return f"QuantisedMatrix({self.kind}, {list(self.shape)}, {self.nbytes / 2**20:,.1f} MiB)"


Matrix = Float[Array, "Y X"] | QuantisedMatrix


def check_kind(kind: object) -> None:
    """Raises ConfigError unless `kind` is None or one of KINDS."""
    if kind is not None and (not isinstance(kind, str) or kind not in KINDS):
        raise ConfigError(f"weights={kind!r} is no type of weights in few bits{_validate.nearest(kind, KINDS)}; use "
                          f"{' or '.join(KINDS)}, or None for weights of type dtype")


def parameters(params: PyTree) -> list[Array | QuantisedMatrix]:
    """Returns the parameters of a model, each matrix in few bits as one."""
    return jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, QuantisedMatrix))


def types_of(params: PyTree) -> str:
    """Returns the types of a model's parameters in words: "bfloat16", or "int4, int8 and bfloat16"."""
    types = {leaf.kind if isinstance(leaf, QuantisedMatrix) else str(leaf.dtype) for leaf in parameters(params)}
    return " and ".join(", ".join(sorted(types)).rsplit(", ", 1))


# ---- rows of weights on the host


def codes_and_scale(rows: Float[np.ndarray, "Y X"], kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Quantises rows of a matrix; each row by itself, so that a matrix can be quantised a few rows at a time.

    Args:
      rows: weights in f32, finite.
      kind: one of KINDS.

    Returns:
      Codes and scale of a `QuantisedMatrix`.
    """
    if kind == "int8":
        scale = np.max(np.abs(rows), axis=1, keepdims=True) / np.float32(127)
        return np.rint(rows / _divisor(scale)).astype(np.int8), scale
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % GROUP)))
    groups = padded.reshape(len(rows), -1, GROUP)
    extreme = np.take_along_axis(groups, np.argmax(np.abs(groups), axis=2)[..., None], axis=2)
    # Codes are of the scale as it is stored: its rounding changes the grid and adds no error of its own.
    scale = (extreme / -8).astype(jnp.bfloat16)
    codes = np.clip(np.rint(groups / _divisor(scale.astype(np.float32))), -8, 7).astype(np.int8).astype(np.uint8) & 15
    codes = codes.reshape(padded.shape)[:, : rows.shape[1] + rows.shape[1] % 2]
    return codes[:, ::2] | codes[:, 1::2] << 4, scale[..., 0]


def layout(rows: int, columns: int, kind: str) -> list[tuple[tuple[int, int], np.dtype]]:
    """Returns shape and type of the codes, and of the scale, of a matrix."""
    if kind == "int8":
        return [((rows, columns), np.dtype(np.int8)), ((rows, 1), np.dtype(np.float32))]
    return [((rows, -(-columns // 2)), np.dtype(np.uint8)), ((rows, -(-columns // GROUP)), np.dtype(jnp.bfloat16))]


def _divisor(scale: np.ndarray) -> np.ndarray:
    """Returns the scale, and 1 where all weights are 0."""
    return np.where(scale == 0, np.float32(1), scale)


# ---- products


def widened(matrix: Float[Array, "*N"] | QuantisedMatrix) -> Float[Array, "*N"]:
    """Returns the numbers that a matrix in few bits stands for, in its type; other parameters as they are."""
    if not isinstance(matrix, QuantisedMatrix):
        return matrix
    scale = matrix.scale.astype(jnp.float32)
    if matrix.kind == "int8":
        return (matrix.codes.astype(jnp.float32) * scale).astype(matrix.dtype)
    (rows, columns), codes = matrix.shape, matrix.codes.astype(jnp.int8)
    both = jnp.stack([(codes << 4) >> 4, codes >> 4], axis=-1).reshape(rows, -1)  # arithmetic shifts keep the sign
    both = jnp.pad(both, ((0, 0), (0, scale.shape[1] * GROUP - both.shape[1])))
    numbers = both.reshape(rows, -1, GROUP).astype(jnp.float32) * scale[..., None]
    return numbers.reshape(rows, -1)[:, :columns].astype(matrix.dtype)


def take_rows(matrix: Matrix, index: Int32[Array, "*T"]) -> Float[Array, "*T X"]:
    """Returns the rows of these numbers, NaN for a number that is not there."""
    if not isinstance(matrix, QuantisedMatrix):
        return jnp.take(matrix, index, axis=0)
    places = index.reshape(-1)
    scale = jnp.take(matrix.scale, places, axis=0)  # NaN outside, which the row then is
    codes = jnp.take(matrix.codes, places, axis=0, mode="clip")
    rows = QuantisedMatrix(codes, scale, (len(places), matrix.shape[1]), matrix.dtype)
    return widened(rows).reshape(*index.shape, -1)


def apply_rows(weight: Matrix, x: Float[Array, "*T X"]) -> Float[Array, "*T Y"]:
    """Multiplies each vector with the weights: `weight @ x` over the last axis of `x`.

    On CPU a kernel multiplies up to `FEW` vectors with weights in bfloat16, int8 or int4, which XLA would widen in
    memory first; a vector's products are the same to the bit alone and among others. For a few vectors in f32 XLA:CPU
    rewrites the weights transposed, unless the vectors are columns, behind a barrier that hides that they were rows.
    """
    count = math.prod(x.shape[:-1])
    if count > FEW or x.dtype not in _WITH_KERNEL or jax.default_backend() != "cpu":
        return _multiplied(weight, x)
    if not isinstance(weight, QuantisedMatrix) and weight.dtype == x.dtype == jnp.float32 and count > 1:
        return computed_once(matmul(weight, computed_once(x.reshape(count, -1).T))).T.reshape(*x.shape[:-1], -1)
    if not isinstance(weight, QuantisedMatrix) and (weight.dtype != jnp.bfloat16 or x.dtype != jnp.bfloat16):
        return _multiplied(weight, x)
    return _few(weight, x.reshape(count, -1)).reshape(*x.shape[:-1], -1)


def _multiplied(weight: Matrix, x: Float[Array, "*T X"]) -> Float[Array, "*T Y"]:
    return einsum("yx,...x->...y", widened(weight), x).astype(x.dtype)


@jax.custom_jvp
def _few(weight: Matrix, x: Float[Array, "T X"]) -> Float[Array, "T Y"]:
    leaves, tree = jax.tree.flatten(weight)
    result = jax.ShapeDtypeStruct((len(x), weight.shape[0]), x.dtype)
    codes, scale = leaves if len(leaves) == 2 else (*leaves, jnp.zeros((weight.shape[0], 0)))

    def otherwise(codes, scale, x):
        return _multiplied(jax.tree.unflatten(tree, [codes, scale][: len(leaves)]), x)

    return kernels.on_cpu("weight_products", result, otherwise, codes, scale, x)


@_few.defjvp
def _slope_of_few(primals, tangents):
    return _few(*primals), jax.jvp(_multiplied, primals, tangents)[1]
