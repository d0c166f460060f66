"""Saving a cache to a directory, and restoring it in another process.

    DIRECTORY/state-HEX/   all of the cache but the blocks of a store: an Orbax checkpoint
    DIRECTORY/blocks.kv    the blocks of a store, in a store file (`kvjax.store.format`)
    DIRECTORY/cache.json   only for a cache that is all in memory

A *manifest* says which checkpoint counts, and how the cache was made. It is the metadata of the store file's commit, or
`cache.json`, replaced by renaming. The checkpoint is on the device before, so that this one step saves both or neither.
Checkpoints that no manifest names are left-overs of interrupted saves, which the next save or restoration removes.
"""

import contextlib
import dataclasses
import fcntl
import inspect
import json
import os
import pathlib
import re
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from kvjax import parking, planning, state_checkpoint
from kvjax.errors import (
    ConfigError,
    FormatMismatch,
    NothingSaved,
    ReadFailed,
    StaleCache,
    StoreError,
    StoreLocked,
    WriteFailed,
)
from kvjax.method import Method
from kvjax.methods import METHODS, name_of
from kvjax.models.config import ModelConfig
from kvjax.planning import Plan, Slots, State
from kvjax.store.base import Branch
from kvjax.store.branch import FlashBranch
from kvjax.store.creation import open_file
from kvjax.store.flash import FlashStore
from kvjax.store.slots import SlotPool
from kvjax.store.system import SystemIO
from kvjax.store.tiers import TieredPool
from kvjax.typing import Array

# 3: codes of keys lie dimension by dimension; 4: no positions of tokens that are in their order; 5: vectors that stand
# for blocks, too, lie dimension by dimension
VERSION = 5
_NOT_SAVED = "not saved"  # marks a setting that JSON cannot hold
BLOCKS, MANIFEST = "blocks.kv", "cache.json"
_OURS = re.compile(r"state-[0-9a-f]{12}(\.kv|\.json)?")  # `_new_name`; other files are the user's


# ---- saving


def save(directory, plan: Plan, state: State, logits: Array, branch: Branch | None, fingerprint: str) -> None:
    """Makes a cache the saved one of a directory, which is created where it is missing.

    A store file that lies elsewhere is copied. Raises ConfigError when the directory holds a cache of the other kind,
    FormatMismatch or ReadFailed when it has a `cache.json` that is none, StoreLocked when somebody else writes it,
    StoreError when the device fails; then what was saved before still is.
    """
    directory = _absolute(directory)
    with _saving(directory):
        _check_kind(directory, branch is not None)
        if branch is None and (directory / MANIFEST).exists():
            _read_manifest(directory)  # a file of somebody else's stays, alone
        try:
            _save(directory, plan, state, logits, branch, fingerprint)
        except StoreError:
            raise
        except OSError as cause:
            raise WriteFailed(f"saving to {directory} failed: {cause}; choose another directory") from cause


def _save(
    directory: pathlib.Path, plan: Plan, state: State, logits: Array, branch: Branch | None, fingerprint: str
) -> None:
    state_name = _new_name()
    checksum = state_checkpoint.save(directory / state_name, state, logits)
    manifest = {
        "version": VERSION, "state": state_name, "checksum": checksum, "fingerprint": fingerprint,
        "method": _describe(plan.method), "batch": plan.batch, "capacity": plan.capacity, "dtype": plan.dtype,
        "slots": _slots(state),
    }
    commit = json.dumps(manifest).encode()
    if branch is None:
        _replace(directory / MANIFEST, commit)
        named = [commit]
    else:
        named = _save_blocks(directory, branch, int(state.line.generation), fingerprint, commit)
    _remove_orphans(directory, named)


def _new_name() -> str:
    return f"state-{uuid.uuid4().hex[:12]}"


def _exists(path: pathlib.Path) -> bool:
    try:
        return path.exists()
    except OSError as cause:
        raise ReadFailed(f"{path} cannot be looked for: {cause}; choose another directory") from cause


def _is_of_store(directory: pathlib.Path) -> bool:
    """A store file beside a manifest was never saved: then it would have been refused."""
    return _exists(directory / BLOCKS) and not _exists(directory / MANIFEST)


def _check_kind(directory: pathlib.Path, store: bool) -> None:
    if _exists(directory / MANIFEST) if store else _is_of_store(directory):
        kinds = ("a store", "memory") if store else ("memory", "a store")
        raise ConfigError(f"{directory} holds a cache in {kinds[1]}, and this one is in {kinds[0]}; choose another "
                          "directory")


@contextlib.contextmanager
def _saving(directory: pathlib.Path) -> Iterator[None]:
    """The directory, made and locked: one save or restoration for writing at a time."""
    try:
        _make(directory)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as cause:
        raise WriteFailed(f"cannot use {directory}: {cause}; choose another directory") from cause
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as cause:
            raise StoreLocked(f"{directory} is being saved to by somebody else; try again or choose another") from cause
        except OSError as cause:
            raise WriteFailed(f"{directory} cannot be locked: {cause}; choose one on another file system") from cause
        yield
    finally:
        os.close(descriptor)


def _make(directory: pathlib.Path) -> None:
    """Makes a directory and those above it, so that their names last."""
    if not directory.is_dir():
        _make(directory.parent)
        directory.mkdir(exist_ok=True)
        SystemIO().sync_directory(str(directory.parent))


def _save_blocks(
    directory: pathlib.Path, branch: Branch, generation: int, fingerprint: str, commit: bytes
) -> list[bytes]:
    """Commits in the store file of the directory; returns the manifests it holds then. Raises StaleCache where the
    branch is not at that generation, or leaves it meanwhile."""
    path = directory / BLOCKS
    if isinstance(branch, FlashBranch) and path.exists() and os.path.samefile(branch.path, path) and branch.writable:
        branch.save(commit, generation)
        return [one.metadata for one in branch.saves()]
    fresh = directory / f"{_new_name()}.kv"  # a left-over is removed like any other
    with contextlib.ExitStack() as stack:
        if path.exists():  # replacing it under somebody who writes to it would lose what he saves
            stack.callback(open_file(str(path), SystemIO(), direct=False, read_only=False)[0].close)
        stack.callback(fresh.unlink, missing_ok=True)
        with contextlib.closing(_copied(branch, generation, fresh, fingerprint)) as copy:
            copy.save(commit)
        os.replace(fresh, path)
        SystemIO().sync_directory(str(directory))
    return [commit]


def _copied(branch: Branch, generation: int, path: pathlib.Path, fingerprint: str) -> FlashBranch:
    """A new store file with what a branch holds, in its codec, one layer in memory at a time; blocks of zeros take no
    space."""
    copy = FlashStore(path, codec=branch.codec).create(branch.geometry, fingerprint)
    assert isinstance(copy, FlashBranch), "as of every layout that places blocks"
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
        raise StaleCache(f"a token was committed while generation {generation} was copied; save what came of it")


def _replace(path: pathlib.Path, data: bytes) -> None:
    """Lets a file have these contents, or the old ones if anything fails."""
    fresh = path.with_name(f"{_new_name()}.json")
    with open(fresh, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
    SystemIO().sync_directory(str(path.parent))


def _remove_orphans(directory: pathlib.Path, manifests: list[bytes]) -> None:
    named = set()
    for manifest in manifests:
        with contextlib.suppress(FormatMismatch, ReadFailed):  # of a branch that was saved by itself: it names none
            named.add(_parsed(manifest, directory / BLOCKS)["state"])
    for path in directory.iterdir():
        if _OURS.fullmatch(path.name) and path.name not in named:
            try:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            except OSError as cause:  # what was to be saved is, and what is left over takes space and nothing else
                warnings.warn(f"{path} is not needed any more, and could not be removed: {cause}", stacklevel=2)


# ---- restoring


@dataclasses.dataclass(frozen=True)
class Restored:
    """A cache as it was saved."""

    plan: Plan
    state: State
    logits: Array
    branch: FlashBranch | None


def restore(
    directory, config: ModelConfig, fingerprint: str, *, method: Method | None = None, slots: Slots | None = None,
    read_only: bool = False, store_settings: dict[str, Any] | None = None,
) -> Restored:
    """The cache that `save` put into a directory.

    Args:
      config, fingerprint: of the model; must be those of the saved cache.
      method: needed where the saved one is not in `METHODS`; must be equal to it in any case, as it fitted itself to
        the prompts if it did (`cache.plan.method`).
      slots: how a store's blocks are kept in memory; None = as when it was saved, but for `park` and `backend`, which
        are not saved.
      read_only: see `FlashStore.open`.
      store_settings: arguments of `FlashStore`.

    Raises NothingSaved, FormatMismatch for another model or method, StoreLocked when somebody else has it, and other
    StoreErrors when something is damaged or cannot be read.
    """
    directory = _absolute(directory)
    if _is_of_store(directory):
        store = _store(directory / BLOCKS, store_settings or {})
        with contextlib.nullcontext() if read_only else _saving(directory):
            return _newest(lambda: _open_blocks(store, directory, fingerprint, read_only),
                           lambda saved: _restored(directory, saved, config, fingerprint, method, slots))
    if store_settings or (slots is not None and not slots.for_memory):
        raise ConfigError(f"{directory} was saved from memory; leave out slots, which are for blocks on a store, and "
                          f"settings of a store ({', '.join(store_settings or ('none',))})")
    return _newest(lambda: _Saved(_read_manifest(directory), None),
                   lambda saved: _restored(directory, saved, config, fingerprint, method, slots))


def _absolute(directory) -> pathlib.Path:
    if not isinstance(directory, str | os.PathLike) or not os.fspath(directory):
        raise ConfigError(f"{directory!r} is no directory; give its path")
    return pathlib.Path(directory).absolute()


def _store(path: pathlib.Path, settings: dict[str, Any]) -> FlashStore:
    known = sorted(inspect.signature(FlashStore).parameters.keys() - {"path"})
    unknown = sorted(settings.keys() - set(known))
    if unknown:
        raise ConfigError(f"{', '.join(unknown)}: no setting of a store; use {', '.join(known)}")
    return FlashStore(path, **settings)


class _Saved(NamedTuple):
    manifest: dict[str, Any]
    branch: FlashBranch | None


def _newest(find: Callable[[], _Saved], load: Callable[[_Saved], Restored]) -> Restored:
    """What is saved, loaded; once more if somebody saved meanwhile, and removed what was being read."""
    saved, before = find(), None
    while True:
        try:
            return load(saved)
        except BaseException as error:
            if saved.branch is not None:
                saved.branch.discard()
            if not isinstance(error, ReadFailed) or saved.manifest == before:
                raise
        before, saved = saved.manifest, find()


def _open_blocks(store: FlashStore, directory: pathlib.Path, fingerprint: str, read_only: bool) -> _Saved:
    branch = store.open(fingerprint=fingerprint, read_only=read_only)
    try:
        manifests = [one.metadata for one in branch.saves()]
        if not read_only:
            _remove_orphans(directory, manifests)
        return _Saved(_parsed(manifests[0], directory / BLOCKS), branch)
    except BaseException:
        branch.discard()
        raise


def _read_manifest(directory: pathlib.Path) -> dict[str, Any]:
    """What a save left there. Raises NothingSaved, ReadFailed, or FormatMismatch for a file of somebody else's."""
    try:
        manifest = (directory / MANIFEST).read_bytes()
    except FileNotFoundError as cause:
        raise NothingSaved(f"{directory} holds no saved cache; give the directory of an earlier save") from cause
    except OSError as cause:
        raise ReadFailed(f"{directory / MANIFEST} cannot be read: {cause}; prefill again") from cause
    return _parsed(manifest, directory / MANIFEST)


def _parsed(manifest: bytes, path: pathlib.Path) -> dict[str, Any]:
    """A manifest that is in the file `path`. Raises ReadFailed where it is broken, FormatMismatch for what is none, as
    of a branch that was saved by itself."""
    try:
        found = json.loads(manifest or b"null")
    except ValueError as cause:
        raise ReadFailed(f"{path} cannot be read: {cause}; prefill again") from cause
    if not isinstance(found, dict) or not {"version", "state"} <= found.keys():
        raise FormatMismatch(f"{path} holds something else than a saved cache; choose another directory")
    return found


def _restored(directory, saved: _Saved, config, fingerprint, method, slots) -> Restored:
    manifest, branch = saved
    if manifest["version"] != VERSION:
        raise FormatMismatch(f"{directory} was saved in version {manifest['version']}, this library reads {VERSION}; "
                             "prefill again, or restore it with the kvjax that saved it")
    if manifest["fingerprint"] != fingerprint:
        raise FormatMismatch(f"{directory} was saved with the model {manifest['fingerprint']!r}, not with "
                             f"{fingerprint!r}; use that model and tokenizer")
    method = _same_method(directory, manifest["method"], method)
    plan = planning.make_plan(config, method, manifest["batch"], manifest["capacity"], manifest["dtype"])
    slots = slots or Slots(**manifest["slots"])
    state, logits = state_checkpoint.load(directory / manifest["state"], manifest["checksum"], plan, slots, branch)
    if slots.park is not None:
        state = dataclasses.replace(state, layers=parking.park_all(slots.park, parking.everything(state.layers)))
    return Restored(plan, state, logits, branch)


# ---- methods and slots as JSON


def _describe(method: Method) -> dict[str, Any]:
    kind = type(method)
    settings = json.loads(json.dumps(dataclasses.asdict(method), default=_plain))
    for name in kind.files:  # which are to be found from any directory
        if isinstance(settings[name], str) and settings[name]:
            settings[name] = os.path.abspath(settings[name])
    return {"name": name_of(kind) or f"{kind.__module__}.{kind.__qualname__}", "settings": settings}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else {_NOT_SAVED: repr(value)}


def _same_method(directory, saved: dict[str, Any], method: Method | None) -> Method:
    if method is None:
        if saved["name"] not in METHODS:
            raise ConfigError(f"{directory} was saved with the method {saved['name']}; give restore that method")
        for name, value in saved["settings"].items():
            if isinstance(value, dict) and _NOT_SAVED in value:
                raise ConfigError(f"{directory} was saved with {saved['name']}({name}={value[_NOT_SAVED]}), which no "
                                  "file holds; give restore that method")
        return METHODS[saved["name"]](**saved["settings"])
    if _describe(method) != saved:
        raise FormatMismatch(f"{directory} was saved with {saved}, not with {_describe(method)}; use that method")
    return method


def _slots(state: State) -> dict[str, Any]:
    pools = [one.pool for one in state.layers if isinstance(one.pool, SlotPool)]
    if not pools:
        return {}
    pool = pools[-1]
    host = pool.host_rows.shape[2] if isinstance(pool, TieredPool) else None
    return {"count": pool.slots, "host": host, "policy": pool.policy, "prefetch": pool.prefetch,
            "keep": pool.keep, "even": pool.even}
