"""The directory of a save: what lies there, who may read it, and who may change it now."""

import contextlib
import fcntl
import os
import pathlib
import re
import stat
import uuid
import warnings
from collections.abc import Iterator

from kvjax import _files, _validate
from kvjax.errors import ChecksumMismatch, ConfigError, FormatMismatch, NothingSaved, ReadFailed, StoreLocked, typed
from kvjax.inference.saves import manifest
from kvjax.inference.saves.manifest import Manifest
from kvjax.store.flash.branch import FlashBranch
from kvjax.store.interface import Branch

BLOCKS, MANIFEST = "blocks.kv", "cache.json"
# Names from `new_name`, with the suffixes of this and earlier versions. Any other file belongs to the user.
OURS = re.compile(r"state-[0-9a-f]{12}(\.safetensors|\.kv|\.json|\.orbax-checkpoint-tmp.*)?")


def absolute(directory) -> pathlib.Path:
    """Returns a directory as an absolute path; raises ConfigError if it is no path."""
    return pathlib.Path(_validate.path("path", directory)).absolute()


def state_path(directory: pathlib.Path, name: str) -> pathlib.Path:
    """Returns the path of a state file."""
    return directory / f"{name}.safetensors"


def new_name() -> str:
    """Returns a name that no state has."""
    return f"state-{uuid.uuid4().hex[:12]}"


def exists(path: pathlib.Path) -> bool:
    """Returns whether a file exists; raises ReadFailed if the system does not tell."""
    try:
        return path.exists()
    except OSError as cause:
        raise ReadFailed(f"cannot tell whether {path} exists: {cause}; choose another directory") from cause


def is_of_store(directory: pathlib.Path) -> bool:
    """Returns True if the saved blocks are in a store file.

    A store file beside `cache.json` was never saved there, because `save` refuses to mix the two kinds.
    """
    return exists(directory / BLOCKS) and not exists(directory / MANIFEST)


def is_in_place(directory: pathlib.Path, branch: Branch | None) -> bool:
    """Returns True if the branch belongs to the directory's own store file."""
    path = directory / BLOCKS
    ours = isinstance(branch, FlashBranch) and branch.writable and path.exists()
    return ours and os.path.samefile(branch.path, path)  # type: ignore[union-attr]


def check_kind(directory: pathlib.Path, store: bool) -> None:
    """Raises ConfigError if the directory holds a cache of the other kind, in a store or in memory."""
    if exists(directory / MANIFEST) if store else is_of_store(directory):
        kinds = ("a store", "memory") if store else ("memory", "a store")
        raise ConfigError(f"{directory} holds a cache in {kinds[1]}, but this cache is in {kinds[0]}; choose another "
                          "directory")


def check_manifest(directory: pathlib.Path) -> None:
    """Raises FormatMismatch or ReadFailed for a file that is not ours; a damaged manifest may be replaced."""
    with contextlib.suppress(NothingSaved, ChecksumMismatch):
        data = read_manifest(directory)
        if manifest.names_none(data):
            Manifest.unpack(data, directory / MANIFEST)


def read_manifest(directory: pathlib.Path) -> bytes:
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


@contextlib.contextmanager
def locked(directory: pathlib.Path) -> Iterator[None]:
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


def make_private(directory: pathlib.Path) -> None:
    """Revokes other users' access to the saved files, and to the directory if it holds nothing else.

    Prompts can be reconstructed from a cache.
    """
    content = list(directory.iterdir())
    ours = [path for path in content if OURS.fullmatch(path.name) or path.name in (BLOCKS, MANIFEST)]
    for path in (*ours, directory) if len(ours) == len(content) else ours:
        mode = stat.S_IMODE(path.lstat().st_mode)
        if mode & 0o077 and not path.is_symlink():
            try:
                path.chmod(mode & 0o700)
            except OSError as cause:
                warnings.warn(f"{path} may be read by other users, because its permissions could not be changed: "
                              f"{cause}", stacklevel=2)


def replace(path: pathlib.Path, data: bytes) -> None:
    """Replaces a file's contents atomically; the old contents stay if anything fails."""
    fresh = path.with_name(f"{new_name()}.json")
    try:
        _files.write_private(fresh, data)
        os.replace(fresh, path)
    except BaseException:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise
    _files.sync_directory(path.parent)
