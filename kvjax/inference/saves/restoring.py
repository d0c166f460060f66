"""Restoring the newest undamaged save of a directory."""

import contextlib
import dataclasses
import inspect
import pathlib
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from kvjax.cache.method import Method
from kvjax.errors import ChecksumMismatch, ConfigError, FormatMismatch, NothingSaved, ReadFailed, StoreError
from kvjax.inference import layer_offload
from kvjax.inference.plan import Plan, Slots, State, make_plan, store_geometry
from kvjax.inference.saves import as_json, place, state_file, strays
from kvjax.inference.saves.manifest import Manifest, Pending
from kvjax.models.config import ModelConfig
from kvjax.store.flash.branch import FlashBranch
from kvjax.store.flash.store import FlashStore
from kvjax.store.interface import Branch
from kvjax.typing import Array


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
    directory = place.absolute(directory)
    if not place.exists(directory):
        raise NothingSaved(f"{directory} does not exist; give the directory of an earlier save")

    def load(saved: _Saved) -> Restored:
        return _restored(saved, config, fingerprint, method, slots)

    if place.is_of_store(directory):
        store = _store(directory / place.BLOCKS, store_settings or {})
        with contextlib.nullcontext() if read_only else place.locked(directory):
            restored, named = _newest(lambda: _in_store(store, fingerprint, read_only), load)
            if not read_only:
                strays.tidy(directory, named)
        return restored
    if store_settings or (slots is not None and not slots.for_memory):
        raise ConfigError(f"{directory} was saved from memory; leave out `slots`, which are for blocks in a store, and "
                          f"store settings (given: {', '.join(store_settings or ('none',))})")
    restored, named = _newest(lambda: [_Saved(place.read_manifest(directory), directory / place.MANIFEST, None)], load)
    if not read_only:
        with contextlib.suppress(StoreError), place.locked(directory):  # a process that is saving removes strays itself
            strays.tidy(directory, named)
    return restored


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
            return restored, None if damage else strays.named([saved.manifest for saved in saves], saves[0].path)
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


def _restored(saved: _Saved, config, fingerprint, method, slots) -> Restored:
    found, path, branch = Manifest.unpack(saved.manifest, saved.path), saved.path, saved.branch
    if found.fingerprint != fingerprint:
        raise FormatMismatch(f"{path} was saved with the model {found.fingerprint!r}, not with {fingerprint!r}; use "
                             "that model and tokenizer")
    method = as_json.same_method(path, found, method)
    plan, saved_slots = _as_saved(path, found, config, method, branch)
    slots = slots or saved_slots
    if branch is not None and (geometry := store_geometry(plan)) != branch.geometry:
        raise FormatMismatch(f"{path} has blocks of {branch.geometry}, but its manifest describes {geometry}; prefill "
                             "again")
    state, logits = state_file.load(place.state_path(path.parent, found.state), found.checksum, plan, slots, branch)
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
    most = as_json.most_slots(plan)
    if max(slots.count or 0, slots.host or 0) > most or (branch is None and found.slots):
        raise FormatMismatch(f"{path} holds slots={found.slots!r:.200}, but at most {most} are ever saved, and none "
                             "for a cache in memory; prefill again")
    if any(not 0 <= token < config.vocab_size for row in found.pending for token in row):
        raise FormatMismatch(f"{path} holds pending tokens that are not in the model's vocabulary; prefill again")
    return plan, slots
