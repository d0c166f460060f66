"""Saving a cache to a directory: all of it, or nothing."""

import contextlib
import os
import pathlib

import numpy as np

from kvjax import _files
from kvjax.errors import StaleCache, StoreError, typed
from kvjax.inference.plan import Plan, State
from kvjax.inference.saves import as_json, place, state_file, strays
from kvjax.inference.saves.manifest import Manifest, Pending
from kvjax.store.flash.branch import FlashBranch
from kvjax.store.flash.creation import open_file
from kvjax.store.flash.store import FlashStore
from kvjax.store.interface import Branch
from kvjax.store.io.system import SystemIO
from kvjax.typing import Array


def save(
    directory, plan: Plan, state: State, logits: Array, pending: Pending, branch: Branch | None, fingerprint: str
) -> None:
    """Saves a cache to a directory, in place of the cache saved there before.

    The directory is created if it is missing. A store file that lies elsewhere is copied into it. Only the owner may
    read the saved files, and enter the directory if it contains nothing else. If the save fails, the previous one stays
    intact.

    Args:
      directory: path of the directory.
      plan: static part of the cache.
      state: state of the cache, with every layer in memory.
      logits: logits [B, V] of the next token.
      pending: token ids [B][n] that must be fed before anything else; () = none.
      branch: branch of the store that holds the blocks; None = they are in memory.
      fingerprint: fingerprint of model and tokenizer.

    Raises:
      ConfigError: the directory holds a cache of the other kind (in a store, or in memory).
      FormatMismatch, ReadFailed: the directory has a `cache.json` that is not a manifest, or that cannot be read.
      StoreLocked: another process is saving to the directory or has its store file open for writing.
      StaleCache: a token was decoded since the cache was made.
      StoreError: the device failed.
    """
    directory = place.absolute(directory)
    with place.locked(directory):
        place.check_kind(directory, branch is not None)
        if branch is None:
            place.check_manifest(directory)
        try:
            place.make_private(directory)
            strays.remove(directory, strays.names(directory, branch))
            _save(directory, plan, state, logits, pending, branch, fingerprint)
        except StoreError:
            raise
        except OSError as cause:
            raise typed(f"saving to {directory} failed", cause, remedy="choose another directory") from cause


def _save(
    directory: pathlib.Path, plan: Plan, state: State, logits: Array, pending: Pending, branch: Branch | None,
    fingerprint: str,
) -> None:
    name = place.new_name()
    path = place.state_path(directory, name)
    method, settings = as_json.describe(plan.method)
    try:
        checksum = state_file.save(path, state, logits)
        commit = Manifest(
            name, checksum, fingerprint, method, settings, plan.batch, plan.capacity, plan.dtype,
            as_json.slots_of(plan, state), [list(row) for row in pending],
        ).pack()
        if branch is None:
            place.replace(directory / place.MANIFEST, commit)
        else:
            _save_blocks(directory, branch, int(state.ref.generation), fingerprint, commit)
    except BaseException:
        named = strays.names_on_device(directory)
        if named is not None and name not in named:  # otherwise the last step failed, and the state may be saved
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        raise
    # A copied store file holds only this save, and so does a manifest.
    strays.remove(directory, strays.names(directory, branch) if place.is_in_place(directory, branch) else {name})


def _save_blocks(directory: pathlib.Path, branch: Branch, generation: int, fingerprint: str, commit: bytes) -> None:
    """Commits to the directory's store file; raises StaleCache if the branch is not, or does not stay, at `generation`.
    """
    path = directory / place.BLOCKS
    if place.is_in_place(directory, branch):
        branch.save(commit, generation)  # type: ignore[attr-defined]
        return
    fresh = directory / f"{place.new_name()}.kv"  # an ordinary stray if this process is killed
    with contextlib.ExitStack() as stack:
        if path.exists():  # locked, as replacing a file that another process writes to would lose its saves
            stack.callback(open_file(str(path), SystemIO(), direct=False, read_only=False)[0].close)
        stack.callback(fresh.unlink, missing_ok=True)
        with contextlib.closing(_copied(branch, generation, fresh, fingerprint)) as copy:
            copy.save(commit)
        os.replace(fresh, path)
        _files.sync_directory(directory)


def _copied(branch: Branch, generation: int, path: pathlib.Path, fingerprint: str) -> FlashBranch:
    """Copies a branch to a new store file with the same codec, one layer at a time; blocks of zeros take no space."""
    copy = FlashStore(file=path, codec=branch.codec).create(branch.geometry, fingerprint)
    assert isinstance(copy, FlashBranch), "every layout that places blocks has such branches"
    try:
        _copy_layers(branch, generation, copy)
    except BaseException:
        copy.discard()
        raise
    return copy


def _copy_layers(branch: Branch, generation: int, copy: FlashBranch) -> None:
    geometry = branch.geometry
    shape = (geometry.batch, geometry.kv_heads, geometry.num_blocks)
    block = np.broadcast_to(np.arange(geometry.num_blocks, dtype=np.int32), shape)
    for number in range(geometry.layers):
        rows = np.zeros((*shape, geometry.block_rows, geometry.width), geometry.numpy_dtype)
        if not branch.read_into(number, generation, block, block, rows):
            raise branch.failure(f"layer {number}")
        used = rows.reshape(*shape, -1).view(np.uint8).any(-1)
        copy.write_layer(number, rows, np.where(used, geometry.block_rows, 0).astype(np.int32))
    if branch.generation != generation:
        raise StaleCache(f"a token was committed while generation {generation} was copied; save the newer cache")
