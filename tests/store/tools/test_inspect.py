"""The command that prints what a store file holds and verifies it."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest

from kvjax.store.flash.store import FlashStore
from kvjax.store.format.pages import HEADER_BYTES
from kvjax.store.tools import inspect
from tests.store.conftest import GEOMETRY

EXTENT = GEOMETRY.extent_bytes


@pytest.fixture
def path(tmp_path, open_branch):
    """A file with two saves: 24 blocks in order, then 4 of them elsewhere; each save has a log record."""
    path = tmp_path / "cache.kv"
    driver = open_branch(FlashStore(file=path))
    driver.prefill()
    driver.branch.save(b"first")
    driver.append(2, 0, 1.0)
    driver.branch.save(b"second")
    driver.branch.close()
    return path


def spoil(path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_a_sound_file(path, capsys):
    assert inspect.main([str(path)]) == 0
    out = capsys.readouterr().out
    for part in ("fingerprint", "2 layers, 2 sequences, 2 KV heads, 6 blocks of 4 rows of 6 float32, codec raw",
                 "save 2        generation 1, 24 of 48 blocks, 2 log records", "'second'", "save 1        generation 0",
                 "30 extents: 24 of the newest save, 4 of the one before, 2 of the log, 0 free",
                 "28 blocks verified, 0 damaged", "0.400 of the neighbouring"):
        assert part in out


def test_as_a_command(path):
    root = pathlib.Path(__file__).resolve().parents[3]
    spoil(path, HEADER_BYTES)
    done = subprocess.run([sys.executable, "-m", "kvjax.store.tools.inspect", str(path)], cwd=root, text=True,
    check=False,
                          capture_output=True)
    assert done.returncode == 1 and "layer 0, sequence 0, head 0, block 0 of save 2" in done.stdout


@pytest.mark.parametrize("offset, words", [
    (HEADER_BYTES + 7 * EXTENT + 5, "head 1, block 1 of save 2"),
    (HEADER_BYTES + 2 * EXTENT + 5, "head 0, block 2 of save 1"),
    (200, "damaged header"), (4096 + 9, "superblock 0"), (2 * 4096 + 9, "superblock 1"),
    (2 * 4096 + 2000, "superblock 1"),
    (HEADER_BYTES + 24 * EXTENT + 3, "a log record of save 1"),
    (HEADER_BYTES + 29 * EXTENT + 50, "a log record of save 2"),
])
def test_damage_is_named(path, capsys, offset, words):
    spoil(path, offset)
    assert inspect.main([str(path)]) == 1
    assert words in capsys.readouterr().out.split("damaged    ", 1)[1]


def test_a_truncated_file(path, capsys):
    path.write_bytes(path.read_bytes()[:HEADER_BYTES + 26 * EXTENT])
    assert inspect.main([str(path)]) == 1
    assert "the file ends" in capsys.readouterr().out


def test_padding_does_not_count(path):
    spoil(path, HEADER_BYTES + GEOMETRY.block_bytes)
    assert inspect.main([str(path)]) == 0


def test_what_is_not_a_store(tmp_path, capsys):
    (tmp_path / "text").write_text("hello")
    for arguments in ([], ["a", "b"], [str(tmp_path / "text")], [str(tmp_path / "missing")], [str(tmp_path)], ["a\0b"],
                      ["/dev/zero"]):
        assert inspect.main(arguments) == 2
        captured = capsys.readouterr()
        assert not captured.out and captured.err.count("\n") == 1


def test_a_file_in_use_and_never_saved(tmp_path, open_branch, capsys):
    driver = open_branch(FlashStore(file=tmp_path / "cache.kv"))
    driver.prefill()
    assert inspect.main([driver.branch.path]) == 0
    out = capsys.readouterr().out
    assert "in use" in out and "saves         none" in out and "24 extents, no save uses them" in out
    np.testing.assert_array_equal(driver.read(), driver.full())


def test_a_file_may_be_written_while_it_is_inspected(path, monkeypatch):
    verify = inspect._verify

    def write_meanwhile(*arguments):
        FlashStore(file=path).open().close()
        return verify(*arguments)

    monkeypatch.setattr(inspect, "_verify", write_meanwhile)
    assert inspect.main([str(path)]) == 0
