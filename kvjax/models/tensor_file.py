"""Tensors in files: each is read a few rows at a time into the type that is asked for."""

import functools
import math
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

from kvjax import _files
from kvjax.errors import CheckpointError
from kvjax.ops import weights
from kvjax.ops.weights import QuantisedMatrix

PLAIN: dict[str, Any] = {"F32": np.float32, "BF16": jnp.bfloat16, "F16": np.float16}
WRITABLE = ("float32", "bfloat16")
_PIECE = 1 << 18  # values read at a time
_ALIGNMENT = 64  # bytes
_CHECKED = 1 << 17  # values checked at a time, so that they stay in the processor's cache


class StoredTensor(NamedTuple):
    """A tensor in a file, according to the file's header.

    file    path of the file
    name    name in the file
    shape   sizes of the axes
    dtype   type: a key of PLAIN, or the name of a quantised type of GGUF
    offset  first byte in the file
    heads   heads whose rows are stored in pairs that rotate together; read in Hugging Face's order, first the rows that
            are the first of a pair; 0 = rows are read as they are
    shift   number added to each value
    every   (first, step) = the rows are these columns of the matrix in the file, and a vector these elements of the
            one in the file; None = all of it as it is
    """

    file: pathlib.Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    heads: int = 0
    shift: float = 0.0
    every: tuple[int, int] | None = None

    @property
    def matrix(self) -> tuple[int, int]:
        """Number and size of the rows; an array of one axis is one row, unless its numbers are rows of heads."""
        if len(self.shape) == 1 and not self.heads:
            return 1, self.shape[0]
        return self.shape[0], math.prod(self.shape[1:])

    @property
    def rows(self) -> tuple[int, int]:
        """Number and size of the rows in the file."""
        if self.every is None:
            return self.matrix
        return math.prod(self.shape[1:]), self.every[1] * self.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes in the file. Raises ValueError if the rows are not whole blocks of a quantised type."""
        return self.rows[0] * row_bytes(self.dtype, self.rows[1])


def row_bytes(dtype: str, columns: int) -> int:
    """Returns the bytes of a row; raises ValueError if it is not a whole number of blocks of a quantised type."""
    values, size = _block(dtype)
    if columns % values:
        raise ValueError(f"rows of {columns} numbers are not whole blocks of {values}, as type {dtype} has them")
    return columns // values * size


def read(
    file: BinaryIO, stored: StoredTensor, dtype: DTypeLike, kind: str | None = None
) -> jax.Array | QuantisedMatrix:
    """Returns one tensor on the device as `dtype`, or a matrix in few bits.

    The host holds it once in that form, and a few rows in the stored one. On CPU it is not copied again.

    Args:
      file: file of the tensor, opened without a buffer.
      stored: the tensor.
      dtype: type to convert it to.
      kind: type of the codes of a matrix in few bits, one of `kvjax.ops.weights.KINDS`; None = `dtype`.

    Raises:
      CheckpointError: a value is not finite in the file or as `dtype`, or the file ends too early.
    """
    dtype = jnp.dtype(dtype)
    if kind is None:
        values = _aligned(stored.matrix, dtype)
        _fill([values], file, stored, dtype)
        return _on_device(values.reshape(stored.shape))
    arrays = [_aligned(*part) for part in weights.layout(*stored.matrix, kind)]
    _fill(arrays, file, stored, dtype, kind)
    codes, scale = map(_on_device, arrays)
    return QuantisedMatrix(codes, scale, stored.matrix, dtype)


def read_stacked(
    opened: Callable[[pathlib.Path], BinaryIO], parts: Sequence[StoredTensor], dtype: DTypeLike
) -> jax.Array:
    """Returns tensors of one shape on the device, stacked along a new first axis, and held as `read` says.

    Args:
      opened: function that opens a tensor's file without a buffer.
      parts: the tensors.
      dtype: type to convert them to.

    Raises:
      CheckpointError: as `read`.
    """
    return _on_device(_stacked(opened, parts, jnp.dtype(dtype)))


def read_divided(
    opened: Callable[[pathlib.Path], BinaryIO], parts: Sequence[StoredTensor], dtype: DTypeLike, sharding: Sharding,
    stacked: bool,
) -> jax.Array:
    """Returns one tensor, or tensors of one shape stacked along a new first axis, divided among devices.

    A device's part of a tensor's rows is read from the file for it, and so are its columns, of which the host holds no
    others. Stacked tensors, and those whose rows are in another order in the file, are read once, and cut on the host.

    Args:
      opened: function that opens a tensor's file without a buffer.
      parts: the tensor, or those to stack.
      dtype: type to convert to.
      sharding: where each part of the result goes.
      stacked: whether the tensors are stacked.

    Raises:
      CheckpointError: as `read`.
    """
    dtype, first = jnp.dtype(dtype), parts[0]
    shape = (len(parts), *first.shape) if stacked else first.shape
    known: dict[tuple, np.ndarray] = {}  # what several devices have is read once

    def whole() -> np.ndarray:
        if () not in known:
            known[()] = _stacked(opened, parts, dtype) if stacked else _stacked(opened, parts, dtype)[0]
        return known[()]

    def part(index: Any) -> np.ndarray:
        span = tuple(cut.indices(size)[:2] for cut, size in zip(index, shape, strict=True))
        if stacked or len(shape) != 2 or first.heads or first.every is not None:
            return whole()[index]
        if span not in known:
            (top, bottom), columns = span
            rows = first._replace(shape=(bottom - top, shape[1]))
            rows = rows._replace(offset=first.offset + top * row_bytes(first.dtype, shape[1]))
            known[span] = np.empty((bottom - top, columns[1] - columns[0]), dtype)
            _fill([known[span]], opened(first.file), rows, dtype, columns=slice(*columns))
        return known[span]

    return jax.make_array_from_callback(shape, sharding, part).block_until_ready()


def _stacked(opened: Callable[[pathlib.Path], BinaryIO], parts: Sequence[StoredTensor], dtype: np.dtype) -> np.ndarray:
    rows, columns = parts[0].matrix
    values = _aligned((len(parts) * rows, columns), dtype).reshape(len(parts), rows, columns)
    for i, stored in enumerate(parts):
        _fill([values[i]], opened(stored.file), stored, dtype)
    return values.reshape(len(parts), *parts[0].shape)


def _fill(
    arrays: Sequence[np.ndarray], file: BinaryIO, stored: StoredTensor, dtype: np.dtype, kind: str | None = None,
    columns: slice = slice(None),
) -> None:
    """Reads a tensor into an array [rows, columns] of type `dtype`, or into those of a matrix in few bits.

    Of rows that are in the file as they are, only the given columns are kept.
    """
    what, start = f"{stored.file}: tensor {stored.name}", 0
    for piece in _pieces(file, stored, what):
        check_finite(what, piece, dtype)
        piece = piece.astype(np.float32) + stored.shift if stored.shift else piece
        if stored.every is None:
            kept = (piece[:, columns],) if kind is None else weights.codes_and_scale(piece.astype(np.float32), kind)
            for array, rows in zip(arrays, kept, strict=True):
                _put(array, rows, start, stored.heads)
        elif len(stored.shape) == 1:
            arrays[0][:] = piece[:, stored.every[0] :: stored.every[1]]
        else:
            arrays[0][:, start : start + len(piece)] = piece[:, stored.every[0] :: stored.every[1]].T
        start += len(piece)


def _put(array: np.ndarray, rows: np.ndarray, start: int, heads: int) -> None:
    """Writes rows that begin with row `start` of the file, [heads, size / 2, 2], where memory has [heads, 2, size / 2];
    in the same order for 0 heads."""
    if heads:
        places = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2)
        places[np.unravel_index(np.arange(start, start + len(rows)), places.shape[:3])] = rows
    else:
        array[start : start + len(rows)] = rows


def _on_device(values: np.ndarray) -> jax.Array:
    # Transfers are asynchronous: without waiting, several tensors would be on the host at once.
    return jax.device_put(values).block_until_ready()


def are_equal(first: StoredTensor, second: StoredTensor) -> bool:
    """Returns whether two tensors of equal shape have the same bits."""
    if first.dtype != second.dtype:
        return False
    with _files.open_regular(first.file) as one, _files.open_regular(second.file) as other:
        pieces = zip(_raw(one, first, str(first.file)), _raw(other, second, str(second.file)), strict=True)
        return all(a == b for a, b in pieces)


def check_plain(stored: StoredTensor) -> None:
    """Raises CheckpointError unless a tensor is of a type in PLAIN."""
    if stored.dtype not in PLAIN:
        raise CheckpointError(f"{stored.file}: tensor {stored.name} has dtype {stored.dtype}; supported: "
                              f"{', '.join(PLAIN)}")


def check_finite(what: str, values: np.ndarray, dtype: DTypeLike) -> None:
    """Raises CheckpointError for a value that is not finite, also as `dtype`: it would make every token NaN."""
    largest = _largest(values)
    if not _is_finite(largest):
        raise CheckpointError(f"{what} has a value that is {float(largest)}; download the model again, or another one")
    if not _is_finite(largest, dtype):
        fitting = " or ".join(name for name in WRITABLE if _is_finite(largest, name)) or "smaller weights"
        raise CheckpointError(f"{what} has a value of magnitude {float(largest):.6g}, which is infinite as "
                              f"{jnp.dtype(dtype)}; use {fitting}")


def quantised_type(number: int) -> str:
    """Returns the name of a quantised type of GGUF; raises CheckpointError if it cannot be read.

    Args:
      number: number of the type in a GGUF file.
    """
    gguf = _gguf()
    names = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
    name = names.get(number, f"number {number}")
    try:
        kind = gguf.GGMLQuantizationType(number)
        _dequantised(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), name)
    except (NotImplementedError, ValueError, KeyError) as error:
        raise CheckpointError(f"type {name} cannot be turned into numbers by the package gguf; take a file of a usual "
                              "type, such as Q4_K_M or Q8_0") from error
    return name


def _gguf():
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError("quantised weights are read with the package gguf; run `pip install gguf`, or take a "
                              "file in F32, F16 or BF16") from error
    return gguf


@functools.cache
def _block(dtype: str) -> tuple[int, int]:
    """Returns numbers and bytes of a block."""
    if dtype in PLAIN:
        return 1, np.dtype(PLAIN[dtype]).itemsize
    gguf = _gguf()
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype]]


def _dequantised(blocks: np.ndarray, dtype: str) -> np.ndarray:
    gguf = _gguf()
    with np.errstate(all="ignore"):  # a value that is not finite is an error of its own
        return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[dtype])


def _pieces(file: BinaryIO, stored: StoredTensor, what: str) -> Iterator[np.ndarray]:
    """Yields a few rows at a time as numbers, [rows, columns]."""
    columns = stored.rows[1]
    width = row_bytes(stored.dtype, columns)
    for raw in _raw(file, stored, what):
        if stored.dtype in PLAIN:
            yield np.frombuffer(raw, PLAIN[stored.dtype]).reshape(-1, columns)
        else:
            yield _dequantised(np.frombuffer(raw, np.uint8).reshape(-1, width), stored.dtype)


def _aligned(shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
    """Returns an array of any content, so aligned that JAX on CPU takes it as it is, without a copy."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _raw(file: BinaryIO, stored: StoredTensor, what: str) -> Iterator[bytes]:
    """Yields the bytes of a few rows at a time."""
    (rows, columns), width = stored.rows, row_bytes(stored.dtype, stored.rows[1])
    step = max(1, _PIECE // columns)
    file.seek(stored.offset)
    for start in range(0, rows, step):
        yield take(file, min(step, rows - start) * width, what)


def take(file: BinaryIO, count: int, what: str) -> bytes:
    """Reads `count` bytes from an unbuffered file; raises CheckpointError that begins with `what` if they are fewer."""
    try:
        pieces: list[bytes] = []
        while count and (piece := file.read(count)):
            pieces.append(piece)
            count -= len(piece)
    except OSError as error:
        raise CheckpointError(f"{what} cannot be read ({error}); check the device, then retry") from error
    if count:
        raise CheckpointError(f"{what} ends {count} bytes early; download the file again")
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _is_finite(value: np.ndarray, dtype: DTypeLike = np.float64) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.isfinite(value.astype(dtype).astype(np.float64)))


def _largest(values: np.ndarray) -> np.ndarray:
    """Returns the largest magnitude; NaN is above infinity.

    Magnitudes of floats are ordered as their bits without the sign. Comparing these is as fast as reading them, even
    for types that NumPy has no instructions for.
    """
    unsigned = np.dtype(f"u{values.itemsize}")
    magnitude = unsigned.type(np.iinfo(unsigned).max >> 1)
    bits = values.reshape(-1).view(unsigned)
    largest = max((bits[i : i + _CHECKED] & magnitude).max() for i in range(0, bits.size, _CHECKED))
    return np.asarray(largest, unsigned).view(values.dtype)
