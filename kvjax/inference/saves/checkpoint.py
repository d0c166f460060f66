"""Saving a cache to a directory, and restoring it in another process.

    DIRECTORY/state-HEX.safetensors   everything in the cache except a store's blocks
    DIRECTORY/blocks.kv               a store's blocks, as a store file (`kvjax.store.format.pages`)
    DIRECTORY/cache.json              only for a cache that is entirely in memory

A *manifest* (`kvjax.inference.saves.manifest`) says which state file is valid and how the cache was made. It is either
the metadata of the store file's commit, or `cache.json`, which is replaced by a rename. The state file is synced to the
device first, so this single step saves both or neither. State files that no manifest names are *strays*. A save removes
its own stray when it fails; the next save or restoration removes those of killed processes. If anything is damaged,
nothing is removed, because it may still be needed.
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
import stat
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvjax import _files, _validate
from kvjax.cache.method import Method
from kvjax.cache.slots import SlotPool
from kvjax.cache.tiers import TieredPool
from kvjax.errors import (
    ChecksumMismatch,
    ConfigError,
    FormatMismatch,
    NothingSaved,
    ReadFailed,
    StaleCache,
    StoreError,
    StoreLocked,
    typed,
)
from kvjax.inference import layer_offload
from kvjax.inference.plan import Plan, Slots, State, make_plan, store_geometry
from kvjax.inference.saves import manifest, state_file
from kvjax.inference.saves.manifest import Manifest
from kvjax.methods import METHODS, name_of
from kvjax.models.config import ModelConfig
from kvjax.store.flash.branch import FlashBranch
from kvjax.store.flash.creation import open_file
from kvjax.store.flash.recovery import recover
from kvjax.store.flash.store import FlashStore
from kvjax.store.format.codec import make_codec
from kvjax.store.interface import Branch
from kvjax.store.io.system import SystemIO
from kvjax.typing import Array

_NOT_SAVED = "not saved"  # marks a setting that JSON cannot represent
BLOCKS, MANIFEST = "blocks.kv", "cache.json"
# Names from `_new_name`, with the suffixes of this and earlier versions. Any other file belongs to the user.
_OURS = re.compile(r"state-[0-9a-f]{12}(\.safetensors|\.kv|\.json|\.orbax-checkpoint-tmp.*)?")
Pending = tuple[tuple[int, ...], ...]  # tokens of each sequence that must be fed before anything else


# ---- saving


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
    directory = _absolute(directory)
    with _saving(directory):
        _check_kind(directory, branch is not None)
        if branch is None:
            _check_manifest(directory)
        try:
            _make_private(directory)
            _remove_strays(directory, _names(directory, branch))
            _save(directory, plan, state, logits, pending, branch, fingerprint)
        except StoreError:
            raise
        except OSError as cause:
            raise typed(f"saving to {directory} failed", cause, remedy="choose another directory") from cause


def _save(
    directory: pathlib.Path, plan: Plan, state: State, logits: Array, pending: Pending, branch: Branch | None,
    fingerprint: str,
) -> None:
    name = _new_name()
    path = _state_path(directory, name)
    method, settings = _describe(plan.method)
    try:
        checksum = state_file.save(path, state, logits)
        commit = Manifest(
            name, checksum, fingerprint, method, settings, plan.batch, plan.capacity, plan.dtype, _slots(plan, state),
            [list(row) for row in pending],
        ).pack()
        if branch is None:
            _replace(directory / MANIFEST, commit)
        else:
            _save_blocks(directory, branch, int(state.ref.generation), fingerprint, commit)
    except BaseException:
        named = _names_on_device(directory)
        if named is not None and name not in named:  # otherwise the last step failed, and the state may be saved
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        raise
    # A copied store file holds only this save, and so does a manifest.
    _remove_strays(directory, _names(directory, branch) if _is_in_place(directory, branch) else {name})


def _state_path(directory: pathlib.Path, name: str) -> pathlib.Path:
    return directory / f"{name}.safetensors"


def _new_name() -> str:
    return f"state-{uuid.uuid4().hex[:12]}"


def _exists(path: pathlib.Path) -> bool:
    try:
        return path.exists()
    except OSError as cause:
        raise ReadFailed(f"cannot tell whether {path} exists: {cause}; choose another directory") from cause


def _is_of_store(directory: pathlib.Path) -> bool:
    """Returns True if the saved blocks are in a store file.

    A store file beside `cache.json` was never saved there, because `save` refuses to mix the two kinds.
    """
    return _exists(directory / BLOCKS) and not _exists(directory / MANIFEST)


def _check_kind(directory: pathlib.Path, store: bool) -> None:
    if _exists(directory / MANIFEST) if store else _is_of_store(directory):
        kinds = ("a store", "memory") if store else ("memory", "a store")
        raise ConfigError(f"{directory} holds a cache in {kinds[1]}, but this cache is in {kinds[0]}; choose another "
                          "directory")


def _check_manifest(directory: pathlib.Path) -> None:
    """Raises FormatMismatch or ReadFailed for a file that is not ours; a damaged manifest may be replaced."""
    with contextlib.suppress(NothingSaved, ChecksumMismatch):
        data = _read_manifest(directory)
        if manifest.names_none(data):
            Manifest.unpack(data, directory / MANIFEST)


@contextlib.contextmanager
def _saving(directory: pathlib.Path) -> Iterator[None]:
    """Creates and locks the directory, so that only one save or writable restoration runs at a time."""
    try:
        _make(directory)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as cause:
        raise typed(f"cannot use {directory}", cause, remedy="choose another directory") from cause
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as cause:
            raise StoreLocked(f"{directory} is being saved to by another process; retry, or choose another directory"
                              ) from cause
        except OSError as cause:
            raise typed(f"{directory} cannot be locked", cause, remedy="choose one on another file system") from cause
        yield
    finally:
        os.close(descriptor)


def _make(directory: pathlib.Path) -> None:
    """Creates a directory that only its owner may enter, and its parents; syncs the names to the device."""
    if not directory.is_dir():
        _make(directory.parent)
        directory.mkdir(mode=0o700, exist_ok=True)
        _files.sync_directory(directory.parent)


def _make_private(directory: pathlib.Path) -> None:
    """Revokes other users' access to the saved files, and to the directory if it holds nothing else.

    Prompts can be reconstructed from a cache.
    """
    content = list(directory.iterdir())
    ours = [path for path in content if _OURS.fullmatch(path.name) or path.name in (BLOCKS, MANIFEST)]
    for path in (*ours, directory) if len(ours) == len(content) else ours:
        mode = stat.S_IMODE(path.lstat().st_mode)
        if mode & 0o077 and not path.is_symlink():
            try:
                path.chmod(mode & 0o700)
            except OSError as cause:
                warnings.warn(f"{path} may be read by other users, because its permissions could not be changed: "
                              f"{cause}", stacklevel=2)


def _save_blocks(directory: pathlib.Path, branch: Branch, generation: int, fingerprint: str, commit: bytes) -> None:
    """Commits to the directory's store file; raises StaleCache if the branch is not, or does not stay, at `generation`.
    """
    path = directory / BLOCKS
    if _is_in_place(directory, branch):
        branch.save(commit, generation)  # type: ignore[attr-defined]
        return
    fresh = directory / f"{_new_name()}.kv"  # an ordinary stray if this process is killed
    with contextlib.ExitStack() as stack:
        if path.exists():  # locked, as replacing a file that another process writes to would lose its saves
            stack.callback(open_file(str(path), SystemIO(), direct=False, read_only=False)[0].close)
        stack.callback(fresh.unlink, missing_ok=True)
        with contextlib.closing(_copied(branch, generation, fresh, fingerprint)) as copy:
            copy.save(commit)
        os.replace(fresh, path)
        _files.sync_directory(directory)


def _is_in_place(directory: pathlib.Path, branch: Branch | None) -> bool:
    """Returns True if the branch belongs to the directory's own store file."""
    path = directory / BLOCKS
    ours = isinstance(branch, FlashBranch) and branch.writable and path.exists()
    return ours and os.path.samefile(branch.path, path)  # type: ignore[union-attr]


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


def _replace(path: pathlib.Path, data: bytes) -> None:
    """Replaces a file's contents atomically; the old contents stay if anything fails."""
    fresh = path.with_name(f"{_new_name()}.json")
    try:
        _files.write_private(fresh, data)
        os.replace(fresh, path)
    except BaseException:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise
    _files.sync_directory(path.parent)


# ---- strays


def _names(directory: pathlib.Path, branch: Branch | None) -> set[str] | None:
    """Returns `_names_on_device`, without reading the store file if the branch knows what is saved in it."""
    if _is_in_place(directory, branch) and (saves := branch.saves()):  # type: ignore[union-attr]
        return _named([saved.metadata for saved in saves], directory / BLOCKS)
    return _names_on_device(directory)


def _names_on_device(directory: pathlib.Path) -> set[str] | None:
    """Returns the names of states in a directory's manifests; None if damage makes that impossible to tell."""
    try:
        if not _is_of_store(directory):
            return _named([_read_manifest(directory)], directory / MANIFEST)
        file, header = open_file(str(directory / BLOCKS), SystemIO(), direct=False, read_only=True)
        with contextlib.closing(file):
            saves, problems = recover(file, make_codec(header.codec, header.geometry))
        return None if problems else _named([saved.metadata for saved in saves], directory / BLOCKS)
    except NothingSaved:
        return set()
    except StoreError:
        return None


def _named(manifests: Sequence[bytes], path: pathlib.Path) -> set[str] | None:
    try:
        return {Manifest.unpack(data, path).state for data in manifests if not manifest.names_none(data)}
    except StoreError:
        return None


def _strays(directory: pathlib.Path, named: set[str]) -> list[pathlib.Path]:
    """Lists the files that failed saves left behind, given the states that manifests name."""
    kept = {_state_path(directory, name).name for name in named}
    return [path for path in directory.iterdir() if _OURS.fullmatch(path.name) and path.name not in kept]


def _remove_strays(directory: pathlib.Path, named: set[str] | None) -> None:
    """Removes strays, unless `named` is unknown (None). The directory must be locked."""
    for path in [] if named is None else _strays(directory, named):
        try:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        except OSError as cause:  # the save itself has succeeded, and a stray only takes space
            warnings.warn(f"{path} is no longer needed, but could not be removed: {cause}", stacklevel=2)


# ---- restoring


@dataclasses.dataclass(frozen=True)
class Restored:
    """A cache as it was saved."""

    plan: Plan
    state: State
    logits: Array
    pending: Pending
    branch: FlashBranch | None


class _Saved(NamedTuple):
    """One save that a directory holds."""

    manifest: bytes
    path: pathlib.Path  # file that holds the manifest
    branch: FlashBranch | None


def restore(
    directory, config: ModelConfig, fingerprint: str, *, method: Method | None = None, slots: Slots | None = None,
    read_only: bool = False, store_settings: dict[str, Any] | None = None,
) -> Restored:
    """Restores the cache that `save` put into a directory.

    If the newest save in a store file is damaged, the one before it is returned, with a warning.

    Args:
      directory: path given to `save`.
      config: configuration of the model, which must be that of the saved cache.
      fingerprint: fingerprint of model and tokenizer, which must be that of the saved cache.
      method: method of the saved cache (`cache.plan.method`, that is, as fitted to the prompts). Required only if it is
        not in `METHODS`; if given, it must equal the saved one.
      slots: how a store's blocks are kept in memory; None = as saved, except `offload` and `backend`, which are not
        saved.
      read_only: see `FlashStore.open`.
      store_settings: arguments of `FlashStore` other than its place.

    Returns:
      The saved cache, with empty slots.

    Raises:
      NothingSaved: the directory does not exist or holds no saved cache.
      ConfigError: the method must be given, a store setting does not exist, or slots or store settings were given for a
        cache that was saved from memory.
      FormatMismatch: the cache was saved with another model or method, or by another version.
      StoreLocked: another process has the cache open for writing.
      StoreError: the saved files are damaged or cannot be read.
    """
    directory = _absolute(directory)
    if not _exists(directory):
        raise NothingSaved(f"{directory} does not exist; give the directory of an earlier save")

    def load(saved: _Saved) -> Restored:
        return _restored(saved, config, fingerprint, method, slots)

    if _is_of_store(directory):
        store = _store(directory / BLOCKS, store_settings or {})
        with contextlib.nullcontext() if read_only else _saving(directory):
            restored, named = _newest(lambda: _in_store(store, fingerprint, read_only), load)
            if not read_only:
                _tidy(directory, named)
        return restored
    if store_settings or (slots is not None and not slots.for_memory):
        raise ConfigError(f"{directory} was saved from memory; leave out `slots`, which are for blocks in a store, and "
                          f"store settings (given: {', '.join(store_settings or ('none',))})")
    restored, named = _newest(lambda: [_Saved(_read_manifest(directory), directory / MANIFEST, None)], load)
    if not read_only:
        with contextlib.suppress(StoreError), _saving(directory):  # a process that is saving removes strays itself
            _tidy(directory, named)
    return restored


def _tidy(directory: pathlib.Path, named: set[str] | None) -> None:
    """Removes the strays of killed saves, given the states that manifests named. The directory must be locked.

    If there are any, the manifests are read again first: a superblock may be damaged, or another process may have saved
    in the meantime.
    """
    with contextlib.suppress(OSError):
        if named is not None and _strays(directory, named):
            _remove_strays(directory, _names_on_device(directory))


def _absolute(directory) -> pathlib.Path:
    return pathlib.Path(_validate.path("path", directory)).absolute()


def _store(path: pathlib.Path, settings: dict[str, Any]) -> FlashStore:
    known = sorted(inspect.signature(FlashStore).parameters.keys() - {"directory", "file"})
    unknown = sorted(settings.keys() - set(known))
    if unknown:
        raise ConfigError(f"unknown store settings {', '.join(unknown)}; use some of {', '.join(known)}")
    return FlashStore(file=path, **settings)


def _in_store(store: FlashStore, fingerprint: str, read_only: bool) -> list[_Saved]:
    """Lists the saves in a store file, newest first, each with a branch of its own."""
    with contextlib.closing(store.open(fingerprint=fingerprint, read_only=read_only)) as branch:
        return [_Saved(saved.metadata, pathlib.Path(store.path), branch.at(saved)) for saved in branch.saves()]


def _newest(
    find: Callable[[], list[_Saved]], load: Callable[[_Saved], Restored]
) -> tuple[Restored, set[str] | None]:
    """Loads the newest undamaged save.

    Returns it with the states that manifests name, or None instead of these if a save is damaged. Searches again if
    another process saved in the meantime and thereby removed the files being read.
    """
    before: list[bytes] = []
    while True:
        saves = find()
        restored, damage = _first_whole(saves, load)
        if restored is not None:
            if damage:
                warnings.warn(f"{damage[0]}; restored the save before it", stacklevel=4)
            return restored, None if damage else _named([saved.manifest for saved in saves], saves[0].path)
        manifests = [saved.manifest for saved in saves]
        if manifests == before:
            raise damage[0]
        before = manifests


def _first_whole(saves: list[_Saved], load: Callable[[_Saved], Restored]) -> tuple[Restored | None, list[StoreError]]:
    """Loads the first usable save; returns it and the errors of those before it, and closes all other branches."""
    damage: list[StoreError] = []
    restored = None
    try:
        for saved in saves:
            try:
                restored = load(saved)
                break
            except (ReadFailed, ChecksumMismatch) as error:
                damage.append(error)
        return restored, damage
    finally:
        for saved in saves:
            if saved.branch is not None and (restored is None or saved.branch is not restored.branch):
                saved.branch.discard()


def _read_manifest(directory: pathlib.Path) -> bytes:
    """Reads a directory's `cache.json`; raises NothingSaved, FormatMismatch or ReadFailed."""
    path = directory / MANIFEST
    try:
        return _files.read_regular(path, _files.MOST_JSON_BYTES)
    except FileNotFoundError as cause:
        raise NothingSaved(f"{directory} holds no saved cache; give the directory of an earlier save") from cause
    except ValueError as cause:
        raise FormatMismatch(f"{path} is not the manifest of a cache: {cause}; choose another directory") from cause
    except OSError as cause:
        raise ReadFailed(f"{path} cannot be read: {cause}; prefill again") from cause


def _restored(saved: _Saved, config, fingerprint, method, slots) -> Restored:
    found, path, branch = Manifest.unpack(saved.manifest, saved.path), saved.path, saved.branch
    if found.fingerprint != fingerprint:
        raise FormatMismatch(f"{path} was saved with the model {found.fingerprint!r}, not with {fingerprint!r}; use "
                             "that model and tokenizer")
    method = _same_method(path, found, method)
    plan, saved_slots = _as_saved(path, found, config, method, branch)
    slots = slots or saved_slots
    if branch is not None and (geometry := store_geometry(plan)) != branch.geometry:
        raise FormatMismatch(f"{path} has blocks of {branch.geometry}, but its manifest describes {geometry}; prefill "
                             "again")
    state, logits = state_file.load(_state_path(path.parent, found.state), found.checksum, plan, slots, branch)
    if slots.offload is not None:
        offloaded = layer_offload.offload_all(slots.offload, layer_offload.everything(state.layers))
        state = dataclasses.replace(state, layers=offloaded)
    return Restored(plan, state, logits, tuple(map(tuple, found.pending)), branch)


def _as_saved(
    path: pathlib.Path, found: Manifest, config: ModelConfig, method: Method, branch: Branch | None
) -> tuple[Plan, Slots]:
    """Rebuilds plan and slots from a manifest; raises FormatMismatch if they are impossible for this model."""
    try:
        plan = make_plan(config, method, found.batch, found.capacity, found.dtype)
        slots = Slots(**found.slots)
    except (ConfigError, TypeError) as cause:
        raise FormatMismatch(f"{path} describes a cache that cannot be made: {cause}; prefill again") from cause
    most = _most_slots(plan)
    if max(slots.count or 0, slots.host or 0) > most or (branch is None and found.slots):
        raise FormatMismatch(f"{path} holds slots={found.slots!r:.200}, but at most {most} are ever saved, and none "
                             "for a cache in memory; prefill again")
    if any(not 0 <= token < config.vocab_size for row in found.pending for token in row):
        raise FormatMismatch(f"{path} holds pending tokens that are not in the model's vocabulary; prefill again")
    return plan, slots


# ---- methods and slots as JSON


def _describe(method: Method) -> tuple[str, dict[str, Any]]:
    """Returns the name of a method and its settings as JSON holds them."""
    kind, method = type(method), method.as_saved()
    settings = json.loads(json.dumps(dataclasses.asdict(method), default=_plain))
    for name in kind.files:  # made absolute, so that they are found from any working directory
        if isinstance(settings[name], str) and settings[name]:
            settings[name] = os.path.abspath(settings[name])
    return name_of(kind) or f"{kind.__module__}.{kind.__qualname__}", settings


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else {_NOT_SAVED: repr(value)}


def _same_method(path: pathlib.Path, saved: Manifest, method: Method | None) -> Method:
    if method is None:
        return _made(path, saved)
    name, settings = _describe(method)
    if (name, settings) != (saved.method, saved.settings):
        raise FormatMismatch(f"{path} was saved with the method {saved.method} {saved.settings}, not with {name} "
                             f"{settings}; use that method")
    return method


def _made(path: pathlib.Path, saved: Manifest) -> Method:
    """Creates the method that a manifest describes."""
    if saved.method not in METHODS:
        raise ConfigError(f"{path} was saved with the method {saved.method}, which is not in kvjax.METHODS; give "
                          "restore that method")
    for name, value in saved.settings.items():
        if isinstance(value, dict) and _NOT_SAVED in value:
            raise ConfigError(f"{path} was saved with {saved.method}({name}={value[_NOT_SAVED]}), a setting that is "
                              "not saved; give restore that method")
    try:
        return METHODS[saved.method](**saved.settings)
    except (ConfigError, TypeError) as cause:
        raise FormatMismatch(f"{path} was saved with settings that {saved.method} does not accept: {cause}; prefill "
                             "again") from cause


def _most_slots(plan: Plan) -> int:
    """Returns the largest number of slots that is saved: more than there are blocks would be useless."""
    return max(layer.spec.num_blocks + layer.spec.max_blocks + 1 for layer in plan.layers)


def _slots(plan: Plan, state: State) -> dict[str, Any]:
    """Returns the arguments of `Slots` to save; {} for a cache in memory."""
    pools = [layer.pool for layer in state.layers if isinstance(layer.pool, SlotPool)]
    if not pools:
        return {}
    pool, most = pools[-1], _most_slots(plan)
    host = min(pool.host_rows.shape[2], most) if isinstance(pool, TieredPool) else None
    return {"count": min(pool.slots, most), "host": host, "policy": pool.policy, "prefetch": pool.prefetch,
            "keep": pool.keep, "even": pool.even}
