"""Saved caches that were damaged, cut, left behind or made up, and who may read them."""

import contextlib
import errno
import json
import os
import pathlib
import shutil
import stat
import subprocess
import sys
import threading

import numpy as np
import pytest

import kvjax
from kvjax.errors import ChecksumMismatch, FormatMismatch, KvjaxError, NoSpace, NothingSaved, ReadFailed, WriteFailed
from kvjax.inference.saves import manifest, state_file
from kvjax.inference.saves.manifest import Manifest
from tests import test_llm
from tests.inference.saves.test_saves import answers, content, same
from tests.test_llm import CONTEXT, METHOD

llm = test_llm.llm  # a fixture
ROOT = pathlib.Path(__file__).resolve().parents[3]


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "saved"


@pytest.fixture
def cache(llm, directory):
    """A cache in memory, saved."""
    cache = llm.prefill(CONTEXT, method=METHOD)
    cache.save(directory)
    return cache


@pytest.fixture
def twice(llm, directory):
    """Two saves in one store file; gives the lengths of both."""
    directory.mkdir()
    first = llm.prefill(CONTEXT, method=METHOD, store=kvjax.FlashStore(file=directory / "blocks.kv"))
    first.save(directory)
    second = llm.generate("abc", first, max_new_tokens=4).cache
    second.save(directory)
    lengths = first.length, second.length
    for one in (first, second):
        one.close()
    return lengths


def state_of(directory) -> pathlib.Path:
    """The only state of a directory."""
    (state,) = directory.glob("state-*")
    return state


def newest_state(llm, directory) -> pathlib.Path:
    with contextlib.closing(kvjax.FlashStore(file=directory / "blocks.kv").open(read_only=True)) as branch:
        return directory / f"{Manifest.unpack(branch.saves()[0].metadata, directory).state}.safetensors"


def resealed(path: pathlib.Path, **changes) -> None:
    """Changes a manifest, and its seal with it."""
    found = json.loads(path.read_bytes())["manifest"] | changes
    sealed = {"version": manifest.VERSION, "manifest": found, "seal": manifest._seal(found)}
    path.write_text(json.dumps(sealed))


# ---- cache.json


def test_no_flipped_bit_of_a_manifest_is_believed(directory, cache):
    path = directory / "cache.json"
    good = path.read_bytes()
    expected = Manifest.unpack(good, path)
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        try:
            found = Manifest.unpack(bytes(bad), path)
        except (ReadFailed, ChecksumMismatch, FormatMismatch):
            continue
        assert found == expected


BAD = {
    "batch": [0, -1, 2**30, 2**70, 1.5, "1", True, None], "capacity": [0, 1, 2**31, 2**70, "9", None],
    "dtype": ["float65", "", 5, None], "state": ["state-../../../etc", "/etc/passwd", "state-0123456789AB", "", 3],
    "method": ["", "none such", 3, None], "settings": [{"budget": -3}, {"nonsense": 1}, {"budget": "x"}, [], None],
    "slots": [{"count": 5}, [], None], "pending": [[[10**6]], [[-1]], [[], []], [3], "ab", [[1.5]], None],
    "checksum": ["", 5, None], "fingerprint": ["other", 7, None],
}


@pytest.mark.parametrize("field", BAD)
def test_impossible_values_under_a_right_seal_are_typed(unchecked, llm, directory, cache, field):
    for value in BAD[field]:
        resealed(directory / "cache.json", **{field: value})
        with pytest.raises(KvjaxError):
            llm.restore(directory)
    resealed(directory / "cache.json", unknown=1)
    with pytest.raises(FormatMismatch, match="unknown"):
        llm.restore(directory)


@pytest.mark.parametrize("slots", [
    {"count": 2**40}, {"count": 2**31, "host": 2**33}, {"policy": "none such"}, {"x": 1},
])
def test_impossible_slots_are_typed(llm, directory, twice, slots, monkeypatch):
    unpack = Manifest.unpack

    def hostile(data, path):
        found = unpack(data, path)
        object.__setattr__(found, "slots", slots)
        return found

    monkeypatch.setattr(Manifest, "unpack", hostile)
    with pytest.raises(FormatMismatch, match=r"slots|cannot be made"):
        llm.restore(directory)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '{"version": 6, "manifest": ' + "[" * 50_000, ""])
def test_deep_or_empty_json_is_typed(llm, directory, cache, text):
    (directory / "cache.json").write_text(text)
    with pytest.raises((ReadFailed, FormatMismatch)):
        llm.restore(directory)


def fifo(path):
    os.mkfifo(path)


def device(path):
    path.symlink_to("/dev/zero")


def huge(path):
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize("kind", [fifo, device, huge, pathlib.Path.mkdir])
@pytest.mark.parametrize("which", ["manifest", "state"])
def test_what_is_no_file_of_ours_is_refused_at_once(llm, directory, cache, kind, which):
    path = directory / "cache.json" if which == "manifest" else state_of(directory)
    path.unlink()
    kind(path)
    with pytest.raises((ReadFailed, FormatMismatch), match=path.name):
        llm.restore(directory)


# ---- the state


def test_a_damaged_state_is_never_decoded(llm, directory, cache):
    path = state_of(directory)
    good, rng = path.read_bytes(), np.random.default_rng(0)
    header = int.from_bytes(good[:8], "little") + 8
    for place in [*range(0, 40), *rng.integers(header, size=60), *rng.integers(header, len(good), 60)]:
        bad = bytearray(good)
        bad[place] ^= 1 << rng.integers(8)
        path.write_bytes(bad)
        with pytest.raises((ReadFailed, ChecksumMismatch, FormatMismatch), match="state-"):
            llm.restore(directory)
    for cut in (0, 7, 8, header - 1, header, len(good) - 1):
        path.write_bytes(good[:cut])
        with pytest.raises(ReadFailed, match="state-"):
            llm.restore(directory)
    path.write_bytes(good)
    same(llm.restore(directory).state, cache.state)
    path.unlink()
    with pytest.raises(ReadFailed, match="state-"):
        llm.restore(directory)


def test_a_broken_newest_save_gives_the_one_before(llm, directory, twice):
    before, _ = twice
    newest_state(llm, directory).write_bytes(b"broken")
    files = content(directory)
    for read_only in (True, False):
        with pytest.warns(UserWarning, match="save before"):
            again = llm.restore(directory, read_only=read_only)
        assert again.length == before and content(directory) == files, "nothing is removed"
        answers(llm, again)
        again.close()
    with pytest.warns(UserWarning, match="save before"):
        again = llm.restore(directory)
    later = llm.generate("abc", again, max_new_tokens=4).cache
    later.save(directory)
    again.close()
    later.close()
    again = llm.restore(directory)
    assert again.length == later.length
    again.close()


def test_nothing_is_removed_where_a_superblock_reads_badly(llm, directory, twice):
    path = directory / "blocks.kv"
    before, after = twice
    stray = directory / f"state-{'0' * 12}.safetensors"
    stray.write_bytes(b"")
    good, files = path.read_bytes(), content(directory)
    bad = bytearray(good)
    bad[2 * 4096 + 20] ^= 1  # the newest superblock
    path.write_bytes(bad)
    again = llm.restore(directory)
    assert again.length == before and content(directory) == files
    again.close()
    path.write_bytes(good)
    again = llm.restore(directory)
    assert again.length == after and content(directory) == [name for name in files if name != stray.name]
    again.close()


def test_both_saves_broken_is_typed(llm, directory, twice):
    for state in directory.glob("state-*"):
        state.write_bytes(b"broken")
    with pytest.raises(ReadFailed, match="state-"):
        llm.restore(directory)


# ---- strays


def _plant(directory) -> None:
    name = f"state-{'0123456789ab'}"
    for stray in (name, f"{name}.orbax-checkpoint-tmp", f"{name}.orbax-checkpoint-tmp-17"):
        (directory / stray).mkdir()
        (directory / stray / "file").write_bytes(b"left over")
    for stray in (f"{name}.safetensors", f"{name}.kv", f"{name}.json"):
        (directory / stray).write_bytes(b"left over")


@pytest.mark.parametrize("kind", ["memory", "flash"])
@pytest.mark.parametrize("how", ["save", "restore", "failed save"])
def test_strays_of_killed_saves_are_removed(llm, directory, kind, how, monkeypatch):
    store = None if kind == "memory" else kvjax.FlashStore(file=directory / "blocks.kv")
    directory.mkdir()
    cache = llm.prefill(CONTEXT, method=METHOD, store=store)
    cache.save(directory)
    files = len(content(directory))
    _plant(directory)
    if how == "restore":
        cache.close()
        llm.restore(directory, read_only=True).close()
        assert len(content(directory)) == files + 6, "who only reads removes nothing"
        llm.restore(directory).close()
    elif how == "save":
        cache.save(directory)
    else:
        monkeypatch.setattr(state_file, "save", lambda *args: (_ for _ in ()).throw(NoSpace("full")))
        with pytest.raises(NoSpace, match="full"):
            cache.save(directory)
    assert not [name for name in content(directory) if "0123456789ab" in name]
    assert len(content(directory)) <= files + (how == "save" and kind == "flash")
    cache.close()


def test_a_stray_beside_a_single_save_is_removed(llm, directory):
    """Of a store that holds one save, and may hold two."""
    directory.mkdir()
    cache = llm.prefill(CONTEXT, method=METHOD, store=kvjax.FlashStore(file=directory / "blocks.kv"))
    cache.save(directory)
    cache.close()
    files = content(directory)
    (directory / f"state-{'0' * 12}.safetensors").write_bytes(b"left over")
    llm.restore(directory).close()
    assert content(directory) == files


def test_a_killed_save_leaves_what_the_next_removes(llm, directory, cache, tmp_path):
    """A process that is killed as the state is on the device, and nothing names it yet."""
    kvjax.save(llm, tmp_path / "model")
    program = f"""
import os, kvjax
from kvjax.inference.saves import place
llm = kvjax.load({str(tmp_path / "model")!r})
cache = llm.restore({str(directory)!r})
place.replace = lambda *args: os._exit(9)
llm.generate("abc", cache, max_new_tokens=4).cache.save({str(directory)!r})
"""
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 9
    assert len(content(directory)) == 3
    assert answers(llm, llm.restore(directory)) == answers(llm, cache)
    assert len(content(directory)) == 2


# ---- what a failed save leaves of the process


def test_a_failed_save_leaves_no_thread_and_no_descriptor(llm, directory, cache, tmp_path):
    """So that the process can end at once."""
    (tmp_path / "file").write_text("")
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for place in (tmp_path / "file", tmp_path / "file" / "below", "/proc/none/such", "/dev/full/x"):
        with pytest.raises(KvjaxError):
            cache.save(place)
    assert threading.active_count() == threads and len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize("number, kind, words", [
    ("EROFS", WriteFailed, "read-only|Read-only"), ("ENOSPC", NoSpace, "free"), ("EMFILE", WriteFailed, "open files"),
])
def test_a_state_that_cannot_be_made_is_typed(llm, directory, cache, monkeypatch, number, kind, words):
    code = getattr(errno, number)
    opened = os.open

    def refuse(path, flags, *args, **kwargs):
        if flags & os.O_CREAT:
            raise OSError(code, os.strerror(code), path)
        return opened(path, flags, *args, **kwargs)

    files = content(directory)
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(kind, match=words) as found:
        cache.save(directory)
    assert (kind is NoSpace) == ("free some" in str(found.value))
    monkeypatch.undo()
    assert content(directory) == files


# ---- privacy


def mode(path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


@pytest.fixture
def open_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.parametrize("kind", ["memory", "flash", "elsewhere"])
@pytest.mark.parametrize("existed", [False, True])
def test_only_the_owner_may_read_what_is_saved(llm, tmp_path, open_umask, kind, existed):
    directory = tmp_path / "a" / "saved"
    if existed or kind == "flash":
        directory.mkdir(parents=True)
    places = {"flash": {"file": directory / "blocks.kv"}, "elsewhere": {"directory": tmp_path}}
    store = kvjax.FlashStore(**places[kind]) if kind in places else None
    cache = llm.prefill(CONTEXT, method=METHOD, store=store)
    cache.save(directory)
    if existed:
        for path in directory.iterdir():
            path.chmod(0o644)
        directory.chmod(0o755)
        cache.save(directory)
    cache.close()
    assert mode(directory) == 0o700
    assert {path.name: mode(path) for path in directory.iterdir() if mode(path) != 0o600} == {}
    llm.restore(directory).close()


def test_a_directory_with_files_of_others_stays_open_to_them(llm, directory, open_umask):
    directory.mkdir()
    mine = directory / "paper.md"
    mine.write_text("mine")
    cache = llm.prefill(CONTEXT, method=METHOD)
    cache.save(directory)
    assert mode(directory) == 0o755 and mode(mine) == 0o644
    assert mode(state_of(directory)) == mode(directory / "cache.json") == 0o600


# ---- small things


def test_a_save_replaces_a_damaged_manifest(llm, directory, cache):
    path = directory / "cache.json"
    bad = bytearray(path.read_bytes())
    bad[bad.index(b'"seal":"') + 10] ^= 1
    path.write_bytes(bad)
    cache.save(directory)
    assert answers(llm, llm.restore(directory)) == answers(llm, cache) and len(content(directory)) == 2


def test_an_empty_directory_holds_nothing(llm, directory):
    directory.mkdir()
    for read_only in (False, True):
        with pytest.raises(NothingSaved):
            llm.restore(directory, read_only=read_only)


def test_a_store_without_its_state_is_typed(llm, directory, twice):
    for state in directory.glob("state-*"):
        state.unlink() if state.is_file() else shutil.rmtree(state)
    with pytest.raises(ReadFailed, match="state-"):
        llm.restore(directory)


def test_prefilling_where_a_cache_is_saved_loses_it_only_once_the_new_one_is_saved(llm, directory, twice):
    _, saved = twice
    files = content(directory)
    store = kvjax.FlashStore(file=directory / "blocks.kv")
    llm.prefill(CONTEXT[:70], method=METHOD, store=store).close()
    assert content(directory) == files
    again = llm.restore(directory)
    assert again.length == saved
    again.close()
    new = llm.prefill(CONTEXT[:70], method=METHOD, store=store)
    new.save(directory)
    expected = answers(llm, new)
    new.close()
    again = llm.restore(directory)
    assert again.length == [70] and answers(llm, again) == expected and len(content(directory)) == 2
    again.close()
