"""Where a store file can be made, and what happens when it cannot, or when it goes away."""

import errno
import gc
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest

from kvjax.errors import ConfigError, FormatMismatch, NoSpace, ReadFailed, StoreClosed, StoreLocked, WriteFailed
from kvjax.store.flash.store import FlashStore
from kvjax.store.format.pages import HEADER_BYTES
from kvjax.store.io.system import SystemIO
from kvjax.store.tools.inspect import inspect
from kvjax.store.tools.mapped import open_saved
from tests.store.conftest import GEOMETRY, Driver, still_works, wait_until


def test_removed_file(fragile):
    path = fragile.branch.path
    os.rename(path, path + ".away")
    np.testing.assert_array_equal(fragile.read(), fragile.full())
    with pytest.raises(StoreClosed, match="removed"):
        fragile.branch.flush()
    os.rename(path + ".away", path)
    still_works(fragile)


def test_locked_file(fragile):
    store = FlashStore(file=fragile.branch.path)
    with pytest.raises(StoreLocked, match=r"cache\.kv is in use"):
        store.create(GEOMETRY, "")
    still_works(fragile)
    fragile.branch.close()
    store.create(GEOMETRY, "").close()


def test_foreign_file(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("precious")
    with pytest.raises(FormatMismatch, match=r"notes\.txt"):
        FlashStore(file=path).create(GEOMETRY, "")
    assert path.read_text() == "precious"


USES = {
    "create": lambda path: FlashStore(file=path).create(GEOMETRY, ""),
    "open": lambda path: FlashStore(file=path).open(),
    "read": lambda path: FlashStore(file=path).open(read_only=True),
    "map": open_saved,
    "inspect": lambda path: inspect(str(path)),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "directory"])
def test_what_is_no_file_is_refused_unopened(tmp_path, use, kind, monkeypatch):
    path = tmp_path / "odd"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        listener = socket.socket(socket.AF_UNIX)
        monkeypatch.chdir(tmp_path)  # a socket's name has at most 107 bytes
        listener.bind(path.name)
        listener.close()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    opened = []
    monkeypatch.setattr(SystemIO, "open", lambda self, path, flags, *mode: (
        opened.append((path, flags)), os.open(path, flags, *mode))[1])
    with pytest.raises(FormatMismatch, match=rf"odd is a {kind}"):
        USES[use](path)
    assert all(flags & os.O_EXCL for _, flags in opened), "which fails where something is"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("path", ["a\0b.kv", "\ud800.kv", ""])
def test_what_cannot_be_a_path_is_refused(use, path):
    with pytest.raises(ConfigError, match=r"(file|path)="):
        USES[use](path)


@pytest.mark.parametrize("kind", ["file", "directory"])
@pytest.mark.parametrize("path", [b"bytes.kv", 3])
def test_what_is_no_path_is_refused(kind, path):
    with pytest.raises(ConfigError, match=f"{kind}=.* must be a path"):
        FlashStore(**{kind: path})


def test_a_store_has_one_place(tmp_path):
    for places in ({}, {"directory": tmp_path, "file": tmp_path / "cache.kv"}):
        with pytest.raises(ConfigError, match=r"either directory=.* or file="):
            FlashStore(**places)


def test_scratch_that_cannot_be_a_path_is_refused():
    with pytest.raises(ConfigError, match=r"scratch=.*NUL"):
        FlashStore(file="a.kv", scratch="a\0b")


def test_a_path_relative_to_a_directory_that_is_gone(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConfigError, match="absolute path"):
        FlashStore(file="cache.kv")


@pytest.mark.parametrize("use", ["create", "open"])
def test_without_a_thread_nothing_is_made(saved, path, tmp_path, monkeypatch, reopen, use):
    """Given a system that has no thread left for the writer."""
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(WriteFailed, match="ulimit -u"):
        FlashStore(directory=tmp_path).create(GEOMETRY, "") if use == "create" else FlashStore(file=path).open()
    monkeypatch.undo()
    assert os.listdir("/proc/self/fd") == before
    still_works(reopen(), saved)


def test_closing_that_fails_loses_nothing(saved, path, reopen):
    """Given a system that closes what it is told to, and calls it a failure."""
    class Refusing(SystemIO):
        def close(self, descriptor):
            os.close(descriptor)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    driver = reopen(system=Refusing())
    driver.append(1, 1, 3.0)
    assert driver.branch.save() == 3
    driver.branch.close()
    with pytest.raises(FormatMismatch, match="'other'"):
        store = FlashStore(file=path)
        store.system = Refusing()
        store.open(fingerprint="other")
    saved[:, :, 1, 1] = 3.0
    np.testing.assert_array_equal(reopen(read_only=True).read(), saved)
    store.create(GEOMETRY, "").close()
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("umask", [0, 0o022, 0o777])
def test_files_are_their_owners_alone(path, reopen, tmp_path, umask):
    scratch, places = tmp_path / "scratch", [{"file": path}, {"directory": tmp_path}]
    scratch.mkdir()
    old = os.umask(umask)
    try:
        branches = [FlashStore(**place).create(GEOMETRY, "fingerprint") for place in places]
        branches[0].save()
        branches.append(reopen(read_only=True, scratch=scratch).branch)
    finally:
        os.umask(old)
    made = [pathlib.Path(branch.path) for branch in branches[:2]] + list(scratch.iterdir())
    assert [file.stat().st_mode & 0o777 for file in made] == [0o600] * 3
    for branch in branches:
        branch.close()


@pytest.mark.parametrize("place", ["missing/cache.kv", "file/cache.kv"])
def test_places_without_a_directory(tmp_path, place):
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteFailed, match="existing, writable directory"):
        FlashStore(file=tmp_path / place).create(GEOMETRY, "")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_directory(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(WriteFailed, match="writable directory"):
        FlashStore(directory=tmp_path).create(GEOMETRY, "")


@pytest.mark.parametrize("operation, code, kind", [
    ("open", errno.EROFS, WriteFailed),
    ("open", errno.ENOSPC, NoSpace),
    ("lock", errno.ENOLCK, WriteFailed),
    ("free_bytes", 0, NoSpace),
    ("pwrite", errno.ENOSPC, NoSpace),
    ("preadv", errno.EIO, ReadFailed),
    ("sync", errno.EIO, WriteFailed),
    ("sync_directory", errno.EIO, WriteFailed),
])
def test_failed_creation_leaves_nothing(tmp_path, system, operation, code, kind):
    store = FlashStore(file=tmp_path / "cache.kv")
    store.system = system
    system.fail(operation, code)
    with pytest.raises(kind, match=r"cache\.kv"):
        store.create(GEOMETRY, "")
    assert not list(tmp_path.iterdir())
    system.heal()
    store.create(GEOMETRY, "").close()


@pytest.mark.parametrize("code, remedy", [(errno.EROFS, "writable directory"), (errno.EMFILE, "ulimit -n")])
@pytest.mark.parametrize("use", [
    lambda store: store.create(GEOMETRY, ""), FlashStore.open, lambda store: store.open(read_only=True)])
def test_the_remedy_is_of_the_cause(saved, path, system, use, code, remedy):
    store = FlashStore(file=path)
    store.system = system
    system.fail("open", code)
    with pytest.raises((ReadFailed, WriteFailed), match=remedy) as error:
        use(store)
    assert "free some" not in str(error.value)


@pytest.mark.parametrize("operation, code, skip", [
    ("open", errno.EMFILE, 1), ("open_direct", errno.EMFILE, 0), ("open_direct", errno.ENFILE, 0),
    ("lock", errno.ENOLCK, 1), ("pwrite", errno.ENOSPC, 0),
])
def test_a_failed_replacement_loses_nothing(saved, path, reopen, system, operation, code, skip):
    store = FlashStore(file=path)
    store.system = system
    system.fail(operation, code, skip=skip)
    before = os.listdir("/proc/self/fd")
    with pytest.raises((WriteFailed, ReadFailed, NoSpace)):
        store.create(GEOMETRY, "")
    assert os.listdir("/proc/self/fd") == before
    assert list(path.parent.iterdir()) == [path]
    still_works(reopen(), saved)


def _bytes_of(path):
    return path.read_bytes(), os.stat(path).st_ino


@pytest.mark.parametrize("end", ["close", "no space", "collected"])
def test_a_saved_file_stays_until_its_successor_is_saved(saved, path, reopen, system, end):
    """A new file that ends without a save, however it ends, leaves the old one as it was, and nothing beside it."""
    before, store = _bytes_of(path), FlashStore(file=path)
    store.system = system
    branch = store.create(GEOMETRY, "other")
    assert branch.path == str(path) and len(list(path.parent.iterdir())) == 2
    driver = Driver(branch)
    if end == "no space":
        system.fail("pwrite", errno.ENOSPC)
        with pytest.raises(NoSpace):
            driver.prefill(seed=1)
        system.heal()
        branch.discard()
    else:
        driver.prefill(seed=1)
        still_works(reopen(read_only=True), saved)
        branch.close() if end == "close" else None
    del driver, branch
    gc.collect()
    wait_until(lambda: list(path.parent.iterdir()) == [path])
    assert _bytes_of(path) == before
    wait_until(lambda: _is_free(path))
    still_works(reopen(), saved)


def _is_free(path) -> bool:
    try:
        FlashStore(file=path).open().close()
    except StoreLocked:
        return False
    return True


def test_a_saved_file_is_locked_until_its_successor_is_saved(saved, path, open_branch, reopen):
    new = open_branch(FlashStore(file=path))
    with pytest.raises(StoreLocked):
        FlashStore(file=path).open()
    with pytest.raises(StoreLocked):
        FlashStore(file=path).create(GEOMETRY, "")
    expected = new.prefill(seed=1)
    assert new.branch.save() == 1
    assert list(path.parent.iterdir()) == [path]
    with pytest.raises(StoreLocked):
        FlashStore(file=path).open()
    new.branch.close()
    still_works(reopen(), expected)


def test_a_file_that_was_never_saved_is_replaced_at_once(path):
    for _ in range(2):
        FlashStore(file=path).create(GEOMETRY, "").close()
        assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("operation", ["replace", "sync_directory"])
def test_a_successor_that_cannot_take_its_place_tries_again(saved, path, open_branch, reopen, system, operation):
    store = FlashStore(file=path)
    store.system = system
    new = open_branch(store)
    expected = new.prefill(seed=1)
    system.fail(operation, errno.EIO)
    with pytest.raises(WriteFailed, match=r"cache\.kv"):
        new.branch.save()
    system.heal()
    assert new.branch.save() == 2
    new.branch.close()
    assert list(path.parent.iterdir()) == [path]
    still_works(reopen(), expected)


def test_a_successor_does_not_replace_what_somebody_else_has_put_there(saved, path, open_branch):
    new = open_branch(FlashStore(file=path))
    new.prefill(seed=1)
    path.unlink()
    other = FlashStore(file=path).create(GEOMETRY, "other")
    with pytest.raises(StoreClosed, match="replaced while its successor"):
        new.branch.save()
    other.save()
    other.close()
    new.branch.close()
    FlashStore(file=path).open(fingerprint="other").close()


def test_what_a_killed_successor_left_is_removed_by_the_next(saved, path):
    program = f"""
import os
from kvjax.store.flash.store import FlashStore
from tests.store.conftest import GEOMETRY
branch = FlashStore(file={str(path)!r}).create(GEOMETRY, "")
os._exit(1)
"""
    root = pathlib.Path(__file__).resolve().parents[3]
    subprocess.run([sys.executable, "-c", program], cwd=root, check=False)
    assert len(list(path.parent.iterdir())) == 2
    FlashStore(file=path).create(GEOMETRY, "").close()
    assert list(path.parent.iterdir()) == [path]


def test_who_reads_a_file_that_is_replaced_reads_on(saved, path, reopen, open_branch):
    link = path.with_name("link.kv")
    link.symlink_to(path)
    path.chmod(0o640)
    mapped, reader = open_saved(path), reopen(read_only=True)
    new = open_branch(FlashStore(file=link))
    other = new.prefill(seed=1)
    new.branch.save()
    still_works(reader, saved)
    np.testing.assert_array_equal(mapped.block(0, 1, 1, 5), saved[1, 1, 5])
    np.testing.assert_array_equal(open_saved(path).block(0, 1, 1, 5), other[1, 1, 5])
    assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o600, "whatever the old one's was"
    with pytest.raises(StoreLocked):
        FlashStore(file=path).create(GEOMETRY, "")
    reader.branch.close()
    assert set(path.parent.iterdir()) == {path, link}


def test_more_than_the_device_holds_is_refused(tmp_path):
    with pytest.raises(NoSpace, match="lower max_bytes"):
        FlashStore(directory=tmp_path, max_bytes=1 << 60).create(GEOMETRY, "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("limit", [None, HEADER_BYTES + 5 * GEOMETRY.extent_bytes])
def test_a_prefill_that_cannot_fit_is_refused_before(tmp_path, limit):
    blocks = 6 if limit else 1 << 50
    with pytest.raises(NoSpace, match="needed"):
        FlashStore(directory=tmp_path, max_bytes=limit).create(GEOMETRY, "", least_blocks=blocks)
    assert not list(tmp_path.iterdir())


def test_a_layer_that_does_not_fit_writes_nothing(fragile, system):
    before = system.calls.count("pwrite")
    system.fail("free_bytes", 0)
    with pytest.raises(NoSpace, match="98304 bytes are needed and 0 are free"):
        fragile.prefill(seed=1)
    assert system.calls.count("pwrite") == before
    system.heal()
    still_works(fragile, fragile.prefill(seed=1))


def test_files_left_by_a_crash_are_removed(tmp_path):
    """Those of our naming that nobody holds, even without a header; not those in use, of other names or makers,
    or made just now."""
    program = f"""
import os
from kvjax.store.geometry import Geometry
from kvjax.store.flash.store import FlashStore
branch = FlashStore(directory={str(tmp_path)!r}).create(Geometry(1, 1, 1, 1, 1, 2, "int8"), "")
print(branch.path, flush=True)
os._exit(1)
"""
    root = pathlib.Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, text=True, capture_output=True, check=False)
    orphan = pathlib.Path(done.stdout.strip())
    assert orphan.exists()
    foreign, named, fresh, stillborn = (tmp_path / name for name in (
        "kvjax-1-abcdefabcdef.kv", "mine.kv", "kvjax-2-abcdefabcdef.kv", "kvjax-3-abcdefabcdef.kv"))
    foreign.write_text("precious" * 1000)
    named.write_bytes(orphan.read_bytes())
    fresh.touch()
    stillborn.touch()
    os.utime(stillborn, (0, 0))
    first = FlashStore(directory=tmp_path).create(GEOMETRY, "")
    assert not orphan.exists() and not stillborn.exists()
    second = FlashStore(directory=tmp_path).create(GEOMETRY, "")
    kept = {foreign, named, fresh}
    assert set(tmp_path.iterdir()) == {*kept, pathlib.Path(first.path), pathlib.Path(second.path)}
    first.close()
    second.close()
    assert set(tmp_path.iterdir()) == kept


def test_replaced_file(fragile, tmp_path):
    """Another file at our path is neither written nor mistaken for ours."""
    path = fragile.branch.path
    os.rename(path, path + ".away")
    other = FlashStore(file=path).create(GEOMETRY, "other")
    np.testing.assert_array_equal(fragile.read(), fragile.full())
    for call in (fragile.branch.flush, fragile.branch.save):
        with pytest.raises(StoreClosed, match="replaced"):
            call()
    other.close()
    os.rename(path + ".away", path)
    still_works(fragile)


def test_who_is_quicker_to_lock_a_new_file_keeps_it(tmp_path, open_branch):
    """Given two stores that create the same path at once."""
    path, quicker = tmp_path / "cache.kv", []

    class Slow(SystemIO):
        def lock(self, descriptor):
            if not quicker:
                quicker.append(open_branch(FlashStore(file=path)))
            super().lock(descriptor)

    slower = FlashStore(file=path)
    slower.system = Slow()
    with pytest.raises(StoreClosed, match="replaced"):
        slower.create(GEOMETRY, "")
    quicker[0].prefill()
    assert quicker[0].branch.save() == 1


def test_a_file_that_its_maker_removes_before_we_lock_it_is_not_used(tmp_path):
    path = tmp_path / "cache.kv"
    path.touch()

    class Late(SystemIO):
        def lock(self, descriptor):
            path.unlink()
            super().lock(descriptor)

    store = FlashStore(file=path)
    store.system = Late()
    with pytest.raises(StoreClosed, match="removed"):
        store.create(GEOMETRY, "")


def test_a_forked_process_does_not_keep_the_lock(tmp_path):
    path = tmp_path / "cache.kv"
    branch = FlashStore(file=path).create(GEOMETRY, "")
    child = os.fork()
    if not child:
        signal.pause()
    try:
        branch.close()
        FlashStore(file=path).create(GEOMETRY, "").close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
