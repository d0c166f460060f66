"""Strays: state files of failed or killed saves, which no manifest names; what may be removed, and when."""

import contextlib
import pathlib
import shutil
import warnings
from collections.abc import Sequence

from kvjax.errors import NothingSaved, StoreError
from kvjax.inference.saves import manifest, place
from kvjax.inference.saves.manifest import Manifest
from kvjax.store.flash.creation import open_file
from kvjax.store.flash.recovery import recover
from kvjax.store.format.codec import make_codec
from kvjax.store.interface import Branch
from kvjax.store.io.system import SystemIO


def names(directory: pathlib.Path, branch: Branch | None) -> set[str] | None:
    """Returns `names_on_device`, without reading the store file if the branch knows what is saved in it."""
    if place.is_in_place(directory, branch) and (saves := branch.saves()):  # type: ignore[union-attr]
        return named([saved.metadata for saved in saves], directory / place.BLOCKS)
    return names_on_device(directory)


def names_on_device(directory: pathlib.Path) -> set[str] | None:
    """Returns the names of states in a directory's manifests; None if damage makes that impossible to tell."""
    try:
        if not place.is_of_store(directory):
            return named([place.read_manifest(directory)], directory / place.MANIFEST)
        file, header = open_file(str(directory / place.BLOCKS), SystemIO(), direct=False, read_only=True)
        with contextlib.closing(file):
            saves, problems = recover(file, make_codec(header.codec, header.geometry))
        return None if problems else named([saved.metadata for saved in saves], directory / place.BLOCKS)
    except NothingSaved:
        return set()
    except StoreError:
        return None


def named(manifests: Sequence[bytes], path: pathlib.Path) -> set[str] | None:
    """Returns the names of states in manifests; None if one of them is damaged."""
    try:
        return {Manifest.unpack(data, path).state for data in manifests if not manifest.names_none(data)}
    except StoreError:
        return None


def found(directory: pathlib.Path, named: set[str]) -> list[pathlib.Path]:
    """Lists the files that failed saves left behind, given the states that manifests name."""
    kept = {place.state_path(directory, name).name for name in named}
    return [path for path in directory.iterdir() if place.OURS.fullmatch(path.name) and path.name not in kept]


def remove(directory: pathlib.Path, named: set[str] | None) -> None:
    """Removes strays, unless `named` is unknown (None). The directory must be locked."""
    for path in [] if named is None else found(directory, named):
        try:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        except OSError as cause:  # the save itself has succeeded, and a stray only takes space
            warnings.warn(f"{path} is no longer needed, but could not be removed: {cause}", stacklevel=2)


def tidy(directory: pathlib.Path, named: set[str] | None) -> None:
    """Removes the strays of killed saves, given the states that manifests named. The directory must be locked.

    If there are any, the manifests are read again first: a superblock may be damaged, or another process may have saved
    in the meantime.
    """
    with contextlib.suppress(OSError):
        if named is not None and found(directory, named):
            remove(directory, names_on_device(directory))
