"""The part of a cache that is not in a store, as an Orbax checkpoint: written to the device, verified when read."""

import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash

from kvjax import planning
from kvjax.errors import ChecksumMismatch, FormatMismatch, ReadFailed, WriteFailed
from kvjax.layer import LayerCache
from kvjax.planning import Plan, Slots, State
from kvjax.pool import Line, MemoryPool
from kvjax.store.base import Branch
from kvjax.typing import Array, PyTree


def _tree(state: State, logits: Any) -> PyTree:
    """What is saved beside the store: slots are left out, as they only repeat what the store holds."""
    layers = [(one.state, one.pool if isinstance(one.pool, MemoryPool) else None) for one in state.layers]
    return {"layers": layers, "length": state.length, "logits": logits}


def _leaves(tree: PyTree) -> dict[str, np.ndarray]:
    """Leaves by name, on the host; those without elements are left out, which Orbax refuses."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {_name(path): np.asarray(leaf) for path, leaf in flat if leaf.size}


def _name(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _checksum(leaves: dict[str, np.ndarray]) -> int:
    """Over names, types, shapes and bytes: not every file of a checkpoint has a checksum of its own."""
    total = xxhash.xxh3_64()
    for name, array in sorted(leaves.items()):
        total.update(f"{name} {array.dtype} {array.shape}".encode())
        total.update(array.tobytes())
    return total.intdigest()


def save(path: pathlib.Path, state: State, logits: Array) -> int:
    """Writes a checkpoint that is on the device when this returns; returns its checksum. Raises WriteFailed."""
    from orbax.checkpoint import v1 as ocp  # imports for a second or two, which only those should wait for who save

    leaves = _leaves(_tree(state, logits))
    try:
        ocp.save(path, leaves)
        for folder, _, files in os.walk(path):
            for name in (*files, "."):
                _sync(os.path.join(folder, name))
        _sync(path.parent)
    except Exception as cause:  # Orbax's drivers have errors of their own for a full device
        raise WriteFailed(f"writing {path} failed: {cause}; free some space or choose another directory") from cause
    return _checksum(leaves)


def _sync(path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: pathlib.Path, checksum: int) -> dict[str, np.ndarray]:
    from orbax.checkpoint import v1 as ocp

    try:
        leaves = ocp.load(path)
    except Exception as cause:  # whatever Orbax and its drivers raise for missing or damaged files
        raise ReadFailed(f"the checkpoint {path} cannot be read: {cause}; prefill again") from cause
    if _checksum(leaves) != checksum:
        raise ChecksumMismatch(f"the checkpoint {path} is not what was written; prefill again")
    return leaves


def load(path: pathlib.Path, checksum: int, plan: Plan, slots: Slots, branch: Branch | None) -> tuple[State, Array]:
    """State and logits of a checkpoint, for this branch; slots are empty.

    Raises ReadFailed, ChecksumMismatch, or FormatMismatch when the plan is not the one it was saved with.
    """
    leaves = _read(path, checksum)
    empty = [planning.outline(plan, i, branch is not None, slots) for i in range(len(plan.layers))]
    handle, generation = (-1, 0) if branch is None else (branch.handle, branch.generation)
    line = Line(jnp.int32(handle), jnp.int32(generation))
    expected = _tree(State(tuple(empty), jnp.zeros(plan.batch, jnp.int32), line), leaves["logits"])
    flat, structure = jax.tree_util.tree_flatten_with_path(expected)
    taken = []
    for path_of, like in flat:
        name = _name(path_of)
        leaf = np.zeros(like.shape, like.dtype) if like.size == 0 else leaves.get(name)
        if leaf is None or leaf.shape != like.shape or leaf.dtype != like.dtype:
            found = "nothing" if leaf is None else f"{leaf.dtype}{list(leaf.shape)}"
            raise FormatMismatch(f"{path}: {found} was saved as {name}, and this method wants "
                                 f"{like.dtype}{list(like.shape)}; prefill again")
        taken.append(jnp.asarray(leaf))
    tree = jax.tree.unflatten(structure, taken)
    pairs = enumerate(tree["layers"])
    layers = [LayerCache(state, pool or planning.slot_pool(plan, i, slots)) for i, (state, pool) in pairs]
    return State(tuple(layers), tree["length"], line), tree["logits"]
