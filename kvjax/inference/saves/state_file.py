"""The state file: the part of a cache that is not in a store, as one safetensors file that is verified when read."""

import contextlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import xxhash
from safetensors.numpy import save as serialise

from kvjax import _files
from kvjax.cache.in_memory import suited
from kvjax.cache.layer import LayerCache
from kvjax.cache.pool import InMemory, StoreRef
from kvjax.errors import ChecksumMismatch, FormatMismatch, ReadFailed, typed
from kvjax.inference import layer_offload
from kvjax.inference.plan import Plan, Slots, State, outline, slot_pool
from kvjax.store.interface import Branch
from kvjax.typing import Array, PyTree

_HEADER_BYTES = 1 << 20  # limit for names, types and shapes of a file's arrays
_TYPES = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16, "U32": np.uint32,
    "I32": np.int32, "F16": np.float16, "BF16": jnp.bfloat16, "F32": np.float32,
}


def _tree(state: State, logits) -> PyTree:
    """Returns the arrays to save; slots are left out, because the store holds their blocks."""
    layers = [(layer.state, layer.pool.apart() if isinstance(layer.pool, InMemory) else None) for layer in state.layers]
    return {"layers": layers, "length": state.length, "logits": logits}


def _name(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _checksum(leaves: dict[str, np.ndarray]) -> str:
    """Computes a digest of names, types, shapes and bytes."""
    total = xxhash.xxh3_64()
    for name, array in sorted(leaves.items()):
        total.update(f"{name} {array.dtype} {array.shape}".encode())
        total.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return total.hexdigest()


def save(path: pathlib.Path, state: State, logits: Array) -> str:
    """Writes a state to a new file that only its owner may read, and syncs it and its name to the device.

    Args:
      path: path of the file.
      state: state, with every layer in memory.
      logits: logits [B, V] of the next token.

    Returns:
      The checksum of the arrays.

    Raises:
      NoSpace, WriteFailed: the file cannot be written; none is left.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(_tree(state, logits))
    leaves = {_name(path): np.asarray(leaf) for path, leaf in flat}
    try:
        _files.write_private(path, serialise(leaves))
    except OSError as cause:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        raise typed(f"{path} cannot be written", cause) from cause
    return _checksum(leaves)


def load(path: pathlib.Path, checksum: str, plan: Plan, slots: Slots, branch: Branch | None) -> tuple[State, Array]:
    """Loads a state that `save` wrote. Nothing is read or allocated that is larger than the plan requires.

    Args:
      path: path of the file.
      checksum: expected checksum of the arrays.
      plan: static part of the cache.
      slots: how a store's blocks are kept in memory.
      branch: branch of the store that holds the blocks; None = they are in memory.

    Returns:
      (State, logits [B, V]). Slots are empty.

    Raises:
      ReadFailed: the file cannot be read.
      ChecksumMismatch: the file was damaged.
      FormatMismatch: the file was saved with another plan.
    """
    empty = [outline(plan, i, branch is not None, slots) for i in range(len(plan.layers))]
    handle, generation = (-1, 0) if branch is None else (branch.handle, branch.generation)
    ref = StoreRef(jnp.int32(handle), jnp.int32(generation))
    like = layer_offload.shape_only((plan.batch, plan.config.vocab_size), np.dtype(np.float32))
    expected = _tree(State(tuple(empty), jnp.zeros(plan.batch, jnp.int32), ref), like)
    flat, structure = jax.tree_util.tree_flatten_with_path(expected)
    leaves = _read(path, checksum, sum(like.nbytes for _, like in flat))
    taken = []
    for path_of, like in flat:
        name = _name(path_of)
        leaf = leaves.pop(name, None)
        alike = leaf is not None and (leaf.dtype == like.dtype or name == "logits")  # logits have the weights' type
        if leaf is None or leaf.shape != like.shape or not alike:
            saved = "nothing" if leaf is None else f"{leaf.dtype}{list(leaf.shape)}"
            raise FormatMismatch(f"{path}: {saved} was saved as {name}, but this method needs "
                                 f"{like.dtype}{list(like.shape)}; prefill again")
        taken.append(jnp.asarray(leaf))
    tree = jax.tree.unflatten(structure, taken)
    pairs = enumerate(tree["layers"])
    layers = [LayerCache(state, suited(pool) if pool else slot_pool(plan, i, slots)) for i, (state, pool) in pairs]
    return State(tuple(layers), tree["length"], ref), tree["logits"]


def _read(path: pathlib.Path, checksum: str, most: int) -> dict[str, np.ndarray]:
    """Reads the arrays of a file, which may take at most `most` bytes besides the header."""
    try:
        entries = safetensors.deserialize(_files.read_regular(path, most + _HEADER_BYTES))
        leaves = {name: np.frombuffer(entry["data"], _TYPES[entry["dtype"]]).reshape(entry["shape"])
                  for name, entry in entries}
    except (OSError, ValueError, KeyError, safetensors.SafetensorError) as cause:
        raise ReadFailed(f"the state {path} cannot be read: {cause}; prefill again") from cause
    if _checksum(leaves) != checksum:
        raise ChecksumMismatch(f"the state {path} is not what was written; prefill again")
    return leaves
