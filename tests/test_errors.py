"""An error of the operating system becomes one of the library's, with the remedy that its number calls for."""

import errno
import os

import pytest

from kvjax.errors import NoSpace, ReadFailed, WriteFailed, typed


@pytest.mark.parametrize("code, kind, remedy", [
    (errno.ENOSPC, NoSpace, "free some space"),
    (errno.EDQUOT, NoSpace, "quota"),
    (errno.EMFILE, WriteFailed, "ulimit -n"),
    (errno.ENFILE, WriteFailed, "fs.file-max"),
    (errno.EROFS, WriteFailed, "writable directory"),
    (errno.EACCES, WriteFailed, "writable directory"),
    (errno.EFBIG, WriteFailed, "ulimit -f"),
    (errno.ENAMETOOLONG, WriteFailed, "shorter path"),
    (errno.EIO, WriteFailed, "check the device"),
])
def test_the_remedy_follows_from_the_error_number(code, kind, remedy):
    cause = OSError(code, os.strerror(code))
    error = typed("writing /x/y failed", cause)
    assert type(error) is kind and error.__cause__ is cause
    assert str(error).startswith("writing /x/y failed: ") and os.strerror(code) in str(error) and remedy in str(error)
    assert ("free some space" in str(error)) == (code == errno.ENOSPC)


def test_kind_and_remedy_are_the_callers_where_the_number_says_nothing():
    error = typed("reading /x/y failed", OSError(errno.EIO, "bad"), ReadFailed, "prefill again")
    assert type(error) is ReadFailed and str(error) == "reading /x/y failed: [Errno 5] bad; prefill again"
    assert type(typed("mapping failed", OSError("no number"), ReadFailed)) is ReadFailed
    assert type(typed("reading failed", OSError(errno.ENOSPC, "full"), ReadFailed)) is NoSpace
