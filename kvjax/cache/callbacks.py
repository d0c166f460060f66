"""Calls of the store from inside a compiled program, through two backends with bit-identical results.

`buffer` reads straight into XLA's own memory (CPU only). `io` returns fetched blocks from an `io_callback` (on any
platform that has them; under `jax.disable_jit()` it is the oracle for both). If it could be compiled, `buffer` is our
own FFI call (callback.c), because JAX's `buffer_callback` takes 15 to 20 us more.

Callbacks never raise and never touch JAX: they keep the first error in the branch and return 0, and the step then
changes nothing. None declares side effects, as JAX dispatches every call of a program with such effects in Python,
which takes some 20 us for each array that goes in or out. Only data dependencies keep XLA from removing, merging or
reordering calls: each call has operands of its own, its result is part of what the step returns, and a write depends on
the reads before it (`kvjax.ops.barriers`).
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.experimental.buffer_callback import buffer_callback

from kvjax.cache.pool import StoreRef
from kvjax.ops import kernels
from kvjax.store import interface
from kvjax.store.native import native
from kvjax.typing import Array, Bool, Int32, Num

BACKENDS = ("buffer", "io")
_OK = jax.ShapeDtypeStruct((), jnp.int32)


def default_backend() -> str:
    """Returns "buffer" on CPU, where XLA's buffers are host memory, and "io" elsewhere."""
    return "buffer" if jax.default_backend() == "cpu" else "io"


# ---------------------------------------------------------------- functions that programs call
# These are module-level functions, because a callback's identity is part of the compiled program: a new closure per
# call would compile again. They get numbers, and arrays or any memory that NumPy can view.


def _call(name: str, handle, generation, layer, *arrays) -> np.int32:
    branch = interface.lookup(handle)
    return np.int32(branch is not None and getattr(branch, name)(int(layer), int(generation), *arrays))


def _read(rows, handle, generation, layer, block, slot) -> np.int32:
    return _call("read_into", handle, generation, layer, block, slot, rows)


def _submit(handle, generation, layer, block) -> np.int32:
    return _call("submit", handle, generation, layer, block)


def _put_rows(handle, generation, layer, block, row, packed) -> np.int32:
    return _call("put_rows", handle, generation, layer, block, row, packed)


def _put_blocks(handle, generation, layer, block, packed) -> np.int32:
    return _call("put_blocks", handle, generation, layer, block, packed)


def _commit(handle, generation, ok, written) -> np.int32:
    branch = interface.lookup(handle)
    if branch is None or not ok:
        return np.int32(0)
    try:
        branch.commit(int(generation))
    except BaseException as cause:  # even KeyboardInterrupt would cost the caller its donated buffers
        branch.keep(cause)
        return np.int32(0)
    return np.int32(1)


def _failed(cause: BaseException, *operands) -> None:
    """Keeps an error in the branch that was raised outside its methods, above all Ctrl-C.

    Python raises it on entering one of the functions above. The handle is always the first number among the operands.
    """
    branch = interface.lookup(next(operand for operand in operands if isinstance(operand, int)))
    if branch is not None:
        branch.keep(cause)


def _read_copies(like, handle, generation, layer, block, places):
    """Reads the blocks whose indices in `block`, flattened, are `places`, and returns as many; an index out of range is
    for none."""
    block, places = np.asarray(block), np.asarray(places)
    wanted = np.zeros(block.size, bool)
    wanted[places[places < block.size]] = True
    wanted = wanted.reshape(block.shape)
    order = np.cumsum(wanted, axis=-1, dtype=np.int32) - 1
    landed = np.zeros((*block.shape[:-1], max(1, int(order.max(initial=0)) + 1), *like.shape[1:]), like.dtype)
    ok = _read(landed, handle, generation, layer, np.where(wanted, block, -1).astype(np.int32), order)
    fetched = np.zeros((len(places), *like.shape[1:]), like.dtype)
    head = np.nonzero(wanted)[:-1]
    fetched[: wanted.sum()] = landed[(*head, order[wanted])]
    return fetched, ok


# ----------------------------------------------------------------------------- backends

_FUNCTIONS: dict[str, Callable[..., np.int32]] = {
    "read": _read, "submit": _submit, "put_rows": _put_rows, "put_blocks": _put_blocks, "commit": _commit}
COMPILED = kernels.register(native, ("callback",))
if COMPILED:
    native.serve(tuple(_FUNCTIONS.values()), _failed, interface.by_handle())


def _through_jax(function: Callable[..., np.int32]) -> Callable[..., None]:
    """Adapts a function to `buffer_callback`: the results alias as many first operands, followed by the return value.
    """
    def call(ctx, results, *operands) -> None:
        *written, ok = results if isinstance(results, (tuple, list)) else (results,)
        arrays = map(np.asarray, (*written, *operands[len(written):]))
        np.asarray(ok)[...] = function(*(array if array.ndim else int(array) for array in arrays))
    return call


_THROUGH_JAX = {name: _through_jax(function) for name, function in _FUNCTIONS.items()}


def _in_buffers(name: str, operands: tuple[Array, ...], written: int = 0) -> Sequence[Array]:
    """Calls a function that may write to its first `written` operands; returns these and its return value."""
    results = [*(jax.ShapeDtypeStruct(operand.shape, operand.dtype) for operand in operands[:written]), _OK]
    aliases = {i: i for i in range(written)}
    if COMPILED:
        call = jax.ffi.ffi_call("kvjax_callback", results, input_output_aliases=aliases)
        return call(*operands, function=np.int32(list(_FUNCTIONS).index(name)))
    return buffer_callback(_THROUGH_JAX[name], results, input_output_aliases=aliases)(*operands)


def effect(name: str, backend: str, ref: StoreRef, layer, *arrays) -> Int32[Array, ""]:
    """Calls a method of the branch that returns no data.

    Args:
      name: "submit", "put_rows" or "put_blocks".
      backend: "buffer" or "io".
      ref: branch and generation.
      layer: number of the layer.
      *arrays: further arguments of the method.

    Returns:
      1 if the call succeeded; else 0, and the branch keeps the error.
    """
    return _called(name, backend, ref.handle, ref.generation, layer, *arrays)


def _called(name: str, backend: str, *operands) -> Int32[Array, ""]:
    """Calls a function that returns no data; returns whether it succeeded."""
    if backend == "buffer":
        return _in_buffers(name, operands)[0]
    return io_callback(_FUNCTIONS[name], _OK, *operands)


def commit(backend: str, ref: StoreRef, ok: Bool[Array, ""], written: Int32[Array, ""]) -> Int32[Array, ""]:
    """Commits a token inside the program that computed it.

    Args:
      backend: "buffer" or "io".
      ref: branch, and generation before the token.
      ok: False = nothing is committed.
      written: scheduling dependency on all writes of the token.

    Returns:
      1 if the token was committed; else 0, and the branch keeps the error, if there was one.
    """
    return _called("commit", backend, ref.handle, ref.generation, ok.astype(jnp.int32), written)


def read_in_place(
    rows: Num[Array, "B KB NS C X2"], ref: StoreRef, layer, block: Int32[Array, "B KB M1"],
    slot: Int32[Array, "B KB M1"],
) -> tuple[Num[Array, "B KB NS C X2"], Bool[Array, ""]]:
    """Reads blocks into their slots, in the same memory.

    Args:
      rows: contents of the slots.
      ref: branch and generation.
      layer: number of the layer.
      block: blocks to read, NB = nothing.
      slot: slot of each block.

    Returns:
      (Contents of the slots, True if all blocks were read).
    """
    rows, ok = _in_buffers("read", (rows, ref.handle, ref.generation, layer, block, slot), written=1)
    return rows, ok > 0


def read_blocks(
    like: Num[Array, "B KB NS C X2"], ref: StoreRef, layer, block: Int32[Array, "B KB M1"], none: int
) -> tuple[Num[Array, "B KB M1 C X2"], Bool[Array, ""]]:
    """Reads blocks into a new array.

    No more than the blocks that are read are moved to the device, rounded up to one of a few numbers (`_sizes`), and
    the host is not called if there are none.

    Args:
      like: contents of the slots, which give shape and type of a block.
      ref: branch and generation.
      layer: number of the layer.
      block: blocks to read.
      none: from this number on, an entry of `block` is no block.

    Returns:
      (Blocks in that order, zeros for those that are none; True if all were read).
    """
    wanted, sizes = (block < none).reshape(-1), _sizes(block.size)

    def reading(size: int):
        def read():
            place = jnp.nonzero(wanted, size=size, fill_value=block.size)[0].astype(jnp.int32)
            result = (jax.ShapeDtypeStruct((size, *like.shape[-2:]), like.dtype), _OK)
            one = jnp.zeros((1, *like.shape[-2:]), like.dtype)
            fetched, ok = io_callback(_read_copies, result, one, ref.handle, ref.generation, layer, block, place)
            return empty.at[place].set(fetched, mode="drop"), ok

        return read if size else lambda: (empty, jnp.int32(1))

    empty = jnp.zeros((block.size, *like.shape[-2:]), like.dtype)
    which = jnp.searchsorted(jnp.array(sizes, jnp.int32), jnp.sum(wanted, dtype=jnp.int32), method="compare_all")
    fetched, ok = jax.lax.switch(which, list(map(reading, sizes)))
    return fetched.reshape(*block.shape, *like.shape[-2:]), ok > 0


def _sizes(most: int) -> list[int]:
    """Returns the numbers of blocks that one call may move: none, all, a quarter and a sixteenth; few, as each is
    compiled."""
    return [0, *sorted({-(-most // share) for share in (1, 4, 16)})]
