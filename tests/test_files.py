"""Reading files that others made."""

import os
import socket
import subprocess
import sys

import pytest

from kvjax import _files


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file"


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


# ---------------------------------------------------------------- read_regular


@pytest.mark.parametrize("content", [b"", b"a", bytes(range(256)) * 300])
def test_content_of_a_regular_file(path, content):
    path.write_bytes(content)
    assert _files.read_regular(path, len(content)) == content


def test_link_to_a_regular_file(path):
    path.with_name("there").write_bytes(b"content")
    path.symlink_to("there")
    assert _files.read_regular(path, 100) == b"content"


def test_file_of_a_byte_too_many(path):
    path.write_bytes(b"12345")
    with pytest.raises(ValueError, match="5 bytes; at most 4 are read"):
        _files.read_regular(path, 4)


def test_no_memory_is_taken_for_a_huge_file(path):
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match=f"{1 << 40} bytes; at most"):
        _files.read_regular(path, 1 << 20)


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


# A FIFO that is opened as a file waits for a writer, and a device may give bytes for ever.
SPECIAL = {
    "fifo": (os.mkfifo, "it is a FIFO"),
    "directory": (os.mkdir, "it is a directory"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "it is a character device"),
    "socket": (make_socket, "No such device or address"),
}


@pytest.mark.parametrize("make, words", SPECIAL.values(), ids=SPECIAL)
def test_what_is_no_regular_file_is_refused_without_waiting(path, make, words):
    make(path)
    before = open_descriptors()
    with pytest.raises((ValueError, OSError), match=words):
        _files.read_regular(path, 100)
    assert open_descriptors() == before


def test_terminal_in_place_of_a_file_is_refused(path):
    ours, theirs = os.openpty()
    try:
        path.symlink_to(os.ttyname(theirs))
        with pytest.raises(ValueError, match="character device"):
            _files.read_regular(path, 100)
    finally:
        os.close(ours)
        os.close(theirs)


def test_missing_file(path):
    with pytest.raises(FileNotFoundError):
        _files.read_regular(path, 100)


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_name_that_no_file_has(tmp_path, name):
    with pytest.raises(ValueError, match=r"embedded null (byte|character)|surrogates"):
        _files.read_regular(tmp_path / name, 100)


def test_file_that_is_being_read_is_closed_in_programs_that_are_started(path):
    path.touch()
    with _files.open_regular(path) as file:
        look = f"import os; print(os.path.exists('/proc/self/fd/{file.fileno()}'))"
        seen = subprocess.run([sys.executable, "-c", look], close_fds=False, capture_output=True, text=True, check=True)
    assert seen.stdout == "False\n"


# ---------------------------------------------------------------- parse_json


@pytest.mark.parametrize("text, value", [("[1, 2.5, null]", [1, 2.5, None]), ('{"a": "ü"}', {"a": "ü"}), ("3", 3)])
def test_json(text, value):
    assert _files.parse_json(text.encode()) == value


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000, b"1" * 5000, b"[1] 2"],
    ids=["empty", "cut", "no_utf8", "deep_list", "deep_object", "huge_integer", "two_values"],
)
def test_what_is_no_json_is_one_kind_of_error(content):
    with pytest.raises(ValueError):
        _files.parse_json(content)
