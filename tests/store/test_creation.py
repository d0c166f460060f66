"""Where a store file can be made, and what happens when it cannot, or when it goes away."""

import errno
import os

import numpy as np
import pytest

from kvjax.errors import FormatMismatch, NoSpace, StoreClosed, StoreLocked, WriteFailed
from kvjax.store.flash import FlashStore
from tests.store.conftest import GEOMETRY, still_works


def test_removed_file(fragile):
    path = fragile.branch.path
    os.rename(path, path + ".away")
    np.testing.assert_array_equal(fragile.read(), fragile.full())
    with pytest.raises(StoreClosed, match="removed"):
        fragile.branch.flush()
    os.rename(path + ".away", path)
    still_works(fragile)


def test_locked_file(fragile):
    store = FlashStore(fragile.branch.path)
    with pytest.raises(StoreLocked, match=r"cache\.kv is in use"):
        store.create(GEOMETRY, "")
    still_works(fragile)
    fragile.branch.close()
    store.create(GEOMETRY, "").close()


@pytest.mark.parametrize("kind", ["text", "pipe"])
def test_foreign_file(tmp_path, kind):
    path = tmp_path / "notes.txt"
    os.mkfifo(path) if kind == "pipe" else path.write_text("precious")
    with pytest.raises(FormatMismatch, match=r"notes\.txt"):
        FlashStore(path).create(GEOMETRY, "")
    assert kind == "pipe" or path.read_text() == "precious"


@pytest.mark.parametrize("place", ["missing/cache.kv", "file/cache.kv"])
def test_places_without_a_directory(tmp_path, place):
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteFailed, match="existing, writable directory"):
        FlashStore(tmp_path / place).create(GEOMETRY, "")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_directory(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(WriteFailed, match="writable directory"):
        FlashStore(tmp_path).create(GEOMETRY, "")


@pytest.mark.parametrize("operation, code, kind", [
    ("open", errno.EROFS, WriteFailed),
    ("open", errno.ENOSPC, NoSpace),
    ("lock", errno.ENOLCK, WriteFailed),
    ("free_bytes", 0, NoSpace),
    ("pwrite", errno.ENOSPC, NoSpace),
])
def test_failed_creation_leaves_nothing(tmp_path, system, operation, code, kind):
    store = FlashStore(tmp_path / "cache.kv")
    store.system = system
    system.fail(operation, code)
    with pytest.raises(kind, match=r"cache\.kv"):
        store.create(GEOMETRY, "")
    assert not list(tmp_path.iterdir())
    system.heal()
    store.create(GEOMETRY, "").close()


def test_more_than_the_device_holds_is_refused(tmp_path):
    with pytest.raises(NoSpace, match="lower max_bytes"):
        FlashStore(tmp_path, max_bytes=1 << 60).create(GEOMETRY, "")
    assert not list(tmp_path.iterdir())
