"""Saving a cache to a directory, and restoring it in another process.

    DIRECTORY/state-HEX.safetensors   all of the cache but the blocks of a store
    DIRECTORY/blocks.kv               the blocks of a store, in a store file (`kvjax.store.format.pages`)
    DIRECTORY/cache.json              only for a cache that is all in memory

A *manifest* (`kvjax.inference.manifest`) says which state counts, and how the cache was made. It is the metadata of the
store file's commit, or `cache.json`, replaced by renaming. The state is on the device before, so that this one step
saves both or neither. States that no manifest names are strays: a save removes its own whatever happens to it, and the
next save or restoration those of a process that was killed. Where something is damaged nothing is removed, as it may be
needed.
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
from kvjax.inference import layer_offload, manifest, state_file
from kvjax.inference.manifest import Manifest
from kvjax.inference.plan import Plan, Slots, State, make_plan, store_geometry
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

_NOT_SAVED = "not saved"  # marks a setting that JSON cannot hold
BLOCKS, MANIFEST = "blocks.kv", "cache.json"
# `_new_name` with what it may end with, in this version and in those before; other files are the user's.
_OURS = re.compile(r"state-[0-9a-f]{12}(\.safetensors|\.kv|\.json|\.orbax-checkpoint-tmp.*)?")
Pending = tuple[tuple[int, ...], ...]  # tokens of each sequence that are to be fed before anything else


# ---- saving


def save(
    directory, plan: Plan, state: State, logits: Array, pending: Pending, branch: Branch | None, fingerprint: str
) -> None:
    """Makes a cache the saved one of a directory, which is created where it is missing.

    A store file that lies elsewhere is copied. Only the owner may read what is saved, and enter the directory if there
    is nothing else in it. Raises ConfigError when the directory holds a cache of the other kind, FormatMismatch or
    ReadFailed when it has a `cache.json` that is none, StoreLocked when somebody else writes it, StoreError when the
    device fails; then what was saved before still is.
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
        if named is not None and name not in named:  # else the last step failed, and it may be saved
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        raise
    # A copy of a store holds this save alone, as does a manifest.
    _remove_strays(directory, _names(directory, branch) if _is_in_place(directory, branch) else {name})


def _state_path(directory: pathlib.Path, name: str) -> pathlib.Path:
    return directory / f"{name}.safetensors"


def _new_name() -> str:
    return f"state-{uuid.uuid4().hex[:12]}"


def _exists(path: pathlib.Path) -> bool:
    try:
        return path.exists()
    except OSError as cause:
        raise ReadFailed(f"{path} cannot be looked for: {cause}; choose another directory") from cause


def _is_of_store(directory: pathlib.Path) -> bool:
    """Whether blocks are in a store file. One beside a manifest was never saved: then it would have been refused."""
    return _exists(directory / BLOCKS) and not _exists(directory / MANIFEST)


def _check_kind(directory: pathlib.Path, store: bool) -> None:
    if _exists(directory / MANIFEST) if store else _is_of_store(directory):
        kinds = ("a store", "memory") if store else ("memory", "a store")
        raise ConfigError(f"{directory} holds a cache in {kinds[1]}, and this one is in {kinds[0]}; choose another "
                          "directory")


def _check_manifest(directory: pathlib.Path) -> None:
    """Raises FormatMismatch or ReadFailed for a file of somebody else's, which stays; a damaged one may be replaced."""
    with contextlib.suppress(NothingSaved, ChecksumMismatch):
        data = _read_manifest(directory)
        if manifest.names_none(data):
            Manifest.unpack(data, directory / MANIFEST)


@contextlib.contextmanager
def _saving(directory: pathlib.Path) -> Iterator[None]:
    """The directory, made and locked: one save or restoration for writing at a time."""
    try:
        _make(directory)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as cause:
        raise typed(f"cannot use {directory}", cause, remedy="choose another directory") from cause
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as cause:
            raise StoreLocked(f"{directory} is being saved to by somebody else; try again or choose another") from cause
        except OSError as cause:
            raise typed(f"{directory} cannot be locked", cause, remedy="choose one on another file system") from cause
        yield
    finally:
        os.close(descriptor)


def _make(directory: pathlib.Path) -> None:
    """Makes a directory for its owner alone, and those above it, so that their names last."""
    if not directory.is_dir():
        _make(directory.parent)
        directory.mkdir(mode=0o700, exist_ok=True)
        _files.sync_directory(directory.parent)


def _make_private(directory: pathlib.Path) -> None:
    """Takes the rights of others to what is saved, and to the directory where nothing else is in it: prompts can be
    read back from a cache."""
    content = list(directory.iterdir())
    ours = [path for path in content if _OURS.fullmatch(path.name) or path.name in (BLOCKS, MANIFEST)]
    for path in (*ours, directory) if len(ours) == len(content) else ours:
        mode = stat.S_IMODE(path.lstat().st_mode)
        if mode & 0o077 and not path.is_symlink():
            try:
                path.chmod(mode & 0o700)
            except OSError as cause:
                warnings.warn(f"{path} may be read by others, and that could not be changed: {cause}", stacklevel=2)


def _save_blocks(directory: pathlib.Path, branch: Branch, generation: int, fingerprint: str, commit: bytes) -> None:
    """Commits in the store file of the directory. Raises StaleCache where the branch is not at that generation, or
    leaves it meanwhile."""
    path = directory / BLOCKS
    if _is_in_place(directory, branch):
        branch.save(commit, generation)  # type: ignore[attr-defined]
        return
    fresh = directory / f"{_new_name()}.kv"  # a stray like any other if we are killed
    with contextlib.ExitStack() as stack:
        if path.exists():  # replacing it under somebody who writes to it would lose what he saves
            stack.callback(open_file(str(path), SystemIO(), direct=False, read_only=False)[0].close)
        stack.callback(fresh.unlink, missing_ok=True)
        with contextlib.closing(_copied(branch, generation, fresh, fingerprint)) as copy:
            copy.save(commit)
        os.replace(fresh, path)
        _files.sync_directory(directory)


def _is_in_place(directory: pathlib.Path, branch: Branch | None) -> bool:
    """Whether a branch is one of the directory's own store file."""
    path = directory / BLOCKS
    ours = isinstance(branch, FlashBranch) and branch.writable and path.exists()
    return ours and os.path.samefile(branch.path, path)  # type: ignore[union-attr]


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
    """`_names_on_device`, without reading the store file of a branch that knows what is saved in it."""
    if _is_in_place(directory, branch) and (saves := branch.saves()):  # type: ignore[union-attr]
        return _named([one.metadata for one in saves], directory / BLOCKS)
    return _names_on_device(directory)


def _names_on_device(directory: pathlib.Path) -> set[str] | None:
    """States that a directory's manifests name; None where that cannot be told, as something is damaged."""
    try:
        if not _is_of_store(directory):
            return _named([_read_manifest(directory)], directory / MANIFEST)
        file, header = open_file(str(directory / BLOCKS), SystemIO(), direct=False, read_only=True)
        with contextlib.closing(file):
            found, problems = recover(file, make_codec(header.codec, header.geometry))
        return None if problems else _named([one.metadata for one in found], directory / BLOCKS)
    except NothingSaved:
        return set()
    except StoreError:
        return None


def _named(manifests: Sequence[bytes], path: pathlib.Path) -> set[str] | None:
    try:
        return {Manifest.unpack(one, path).state for one in manifests if not manifest.names_none(one)}
    except StoreError:
        return None


def _strays(directory: pathlib.Path, named: set[str]) -> list[pathlib.Path]:
    """What saves left behind, given the states that are named."""
    kept = {_state_path(directory, name).name for name in named}
    return [path for path in directory.iterdir() if _OURS.fullmatch(path.name) and path.name not in kept]


def _remove_strays(directory: pathlib.Path, named: set[str] | None) -> None:
    """Removes what saves left behind, unless it is not known what is named. The directory is locked."""
    for path in [] if named is None else _strays(directory, named):
        try:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        except OSError as cause:  # what was to be saved is, and what is left over takes space and nothing else
            warnings.warn(f"{path} is not needed any more, and could not be removed: {cause}", stacklevel=2)


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
    path: pathlib.Path  # where it was found
    branch: FlashBranch | None


def restore(
    directory, config: ModelConfig, fingerprint: str, *, method: Method | None = None, slots: Slots | None = None,
    read_only: bool = False, store_settings: dict[str, Any] | None = None,
) -> Restored:
    """Returns the cache that `save` put into a directory.

    Of a store the save before the newest is returned, with a warning, where the newest one is damaged.

    Args:
      config, fingerprint: of the model; must be those of the saved cache.
      method: needed where the saved one is not in `METHODS`; must be equal to it in any case, as it fitted itself to
        the prompts if it did (`cache.plan.method`).
      slots: how a store's blocks are kept in memory; None = as when it was saved, but for `offload` and `backend`,
      which
        are not saved.
      read_only: see `FlashStore.open`.
      store_settings: arguments of `FlashStore`.

    Raises NothingSaved, FormatMismatch for another model or method, StoreLocked when somebody else has it, and other
    StoreErrors when something is damaged or cannot be read.
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
        raise ConfigError(f"{directory} was saved from memory; leave out slots, which are for blocks on a store, and "
                          f"settings of a store ({', '.join(store_settings or ('none',))})")
    restored, named = _newest(lambda: [_Saved(_read_manifest(directory), directory / MANIFEST, None)], load)
    if not read_only:
        with contextlib.suppress(StoreError), _saving(directory):  # somebody who saves tidies up by himself
            _tidy(directory, named)
    return restored


def _tidy(directory: pathlib.Path, named: set[str] | None) -> None:
    """Removes what killed saves left, given the states that were found to be named. The directory is locked, and looked
    through once more if there is anything: a superblock may be damaged, or somebody may have saved meanwhile."""
    with contextlib.suppress(OSError):
        if named is not None and _strays(directory, named):
            _remove_strays(directory, _names_on_device(directory))


def _absolute(directory) -> pathlib.Path:
    return pathlib.Path(_validate.path("path", directory)).absolute()


def _store(path: pathlib.Path, settings: dict[str, Any]) -> FlashStore:
    known = sorted(inspect.signature(FlashStore).parameters.keys() - {"path"})
    unknown = sorted(settings.keys() - set(known))
    if unknown:
        raise ConfigError(f"{', '.join(unknown)}: no setting of a store; use {', '.join(known)}")
    return FlashStore(path, **settings)


def _in_store(store: FlashStore, fingerprint: str, read_only: bool) -> list[_Saved]:
    """The saves in a store file, newest first, each with a branch of its own."""
    with contextlib.closing(store.open(fingerprint=fingerprint, read_only=read_only)) as branch:
        return [_Saved(one.metadata, pathlib.Path(store.path), branch.at(one)) for one in branch.saves()]


def _newest(
    find: Callable[[], list[_Saved]], load: Callable[[_Saved], Restored]
) -> tuple[Restored, set[str] | None]:
    """Loads the newest save that is whole; returns it, and the states that are named, None where something is damaged.

    Looks once more if somebody saved meanwhile, and so removed what was being read.
    """
    before: list[bytes] = []
    while True:
        saves = find()
        restored, damage = _first_whole(saves, load)
        if restored is not None:
            if damage:
                warnings.warn(f"{damage[0]}; going on with the save before it", stacklevel=4)
            return restored, None if damage else _named([saved.manifest for saved in saves], saves[0].path)
        manifests = [saved.manifest for saved in saves]
        if manifests == before:
            raise damage[0]
        before = manifests


def _first_whole(saves: list[_Saved], load: Callable[[_Saved], Restored]) -> tuple[Restored | None, list[StoreError]]:
    """The first save that can be loaded, and what is wrong with those before it; branches of the others are closed."""
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
    """What a save left there. Raises NothingSaved or ReadFailed."""
    path = directory / MANIFEST
    try:
        return _files.read_regular(path, _files.MOST_JSON_BYTES)
    except FileNotFoundError as cause:
        raise NothingSaved(f"{directory} holds no saved cache; give the directory of an earlier save") from cause
    except ValueError as cause:
        raise FormatMismatch(f"{path} is no manifest of a cache: {cause}; choose another directory") from cause
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
        raise FormatMismatch(f"{path} has blocks of {branch.geometry}, and its manifest is of {geometry}; prefill "
                             "again")
    state, logits = state_file.load(_state_path(path.parent, found.state), found.checksum, plan, slots, branch)
    if slots.offload is not None:
        offloaded = layer_offload.offload_all(slots.offload, layer_offload.everything(state.layers))
        state = dataclasses.replace(state, layers=offloaded)
    return Restored(plan, state, logits, tuple(map(tuple, found.pending)), branch)


def _as_saved(
    path: pathlib.Path, found: Manifest, config: ModelConfig, method: Method, branch: Branch | None
) -> tuple[Plan, Slots]:
    """Plan and slots of a manifest. Raises FormatMismatch where they are impossible, with a model of these sizes."""
    try:
        plan = make_plan(config, method, found.batch, found.capacity, found.dtype)
        slots = Slots(**found.slots)
    except (ConfigError, TypeError) as cause:
        raise FormatMismatch(f"{path} holds a cache that cannot be made: {cause}; prefill again") from cause
    most = _most_slots(plan)
    if max(slots.count or 0, slots.host or 0) > most or (branch is None and found.slots):
        raise FormatMismatch(f"{path} holds slots={found.slots!r:.200}, and {most} is the most that is saved; prefill "
                             "again")
    if any(not 0 <= one < config.vocab_size for row in found.pending for one in row):
        raise FormatMismatch(f"{path} holds pending tokens that the model does not have; prefill again")
    return plan, slots


# ---- methods and slots as JSON


def _describe(method: Method) -> tuple[str, dict[str, Any]]:
    """Name and settings of a method."""
    kind = type(method)
    settings = json.loads(json.dumps(dataclasses.asdict(method), default=_plain))
    for name in kind.files:  # which are to be found from any directory
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
    """The method of a manifest."""
    if saved.method not in METHODS:
        raise ConfigError(f"{path} was saved with the method {saved.method}; give restore that method")
    for name, value in saved.settings.items():
        if isinstance(value, dict) and _NOT_SAVED in value:
            raise ConfigError(f"{path} was saved with {saved.method}({name}={value[_NOT_SAVED]}), which no file holds; "
                              "give restore that method")
    try:
        return METHODS[saved.method](**saved.settings)
    except (ConfigError, TypeError) as cause:
        raise FormatMismatch(f"{path} was saved with settings that {saved.method} does not have: {cause}; prefill "
                             "again") from cause


def _most_slots(plan: Plan) -> int:
    """Slots of which none can be of use are not saved: there are not as many blocks."""
    return max(one.spec.num_blocks + one.spec.max_blocks + 1 for one in plan.layers)


def _slots(plan: Plan, state: State) -> dict[str, Any]:
    pools = [one.pool for one in state.layers if isinstance(one.pool, SlotPool)]
    if not pools:
        return {}
    pool, most = pools[-1], _most_slots(plan)
    host = min(pool.host_rows.shape[2], most) if isinstance(pool, TieredPool) else None
    return {"count": min(pool.slots, most), "host": host, "policy": pool.policy, "prefetch": pool.prefetch,
            "keep": pool.keep, "even": pool.even}
