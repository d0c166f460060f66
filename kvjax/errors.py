"""Every typed error of the library: each message names the cause and the remedy."""

import errno


class KvjaxError(Exception):
    """Base of all errors that kvjax raises on purpose."""


class ConfigError(KvjaxError, ValueError):
    """A setting is impossible by itself or together with another."""


class BudgetTooSmall(ConfigError):
    """A method cannot work within so few tokens."""


class MethodError(ConfigError):
    """A method breaks the contract of methods (`kvjax.cache.method`)."""


class PromptError(KvjaxError, ValueError):
    """The prompt is empty, longer than the cache was made for, or refused by the model's chat template."""


class TaskFileError(KvjaxError, ValueError):
    """A benchmark's file cannot be used; names file and line."""


class CheckpointError(KvjaxError, ValueError):
    """A model directory cannot be loaded; names file and tensor."""


class NotFinite(KvjaxError, ArithmeticError):
    """The model computed NaN or infinity; names model, types and where."""


class StoreError(KvjaxError, OSError):
    """Base of what a block store can report; names file, block, offset and cause.

    Attributes:
      state: after a failed read, the cache as it was before the token, ready for a retry; None where something else
        failed, as writing what was decoded.
    """

    state: object | None = None


def to_raise(error: BaseException) -> BaseException:
    """The error, or what a callback had to keep in it because it may not raise: Ctrl-C."""
    cause = error.__cause__
    return error if cause is None or isinstance(cause, Exception) else cause


class ShortRead(StoreError):
    """The file ended before the block did."""


class ReadFailed(StoreError):
    """The operating system refused a read."""


class WriteFailed(StoreError):
    """The operating system refused a write."""


class NoSpace(StoreError):
    """The device or the quota is full."""


class ChecksumMismatch(StoreError):
    """A block's bytes are not the bytes that were written."""


class FormatMismatch(StoreError):
    """The file is of another format, version, geometry or model."""


class NothingSaved(StoreError):
    """The file or directory holds no saved cache that is whole."""


class StaleCache(StoreError):
    """A cache value was used after the store had moved past its generation."""


class StoreLocked(StoreError):
    """Another writer holds the file."""


class StoreClosed(StoreError):
    """The store was closed, or its file is gone."""


_NO_SPACE = {
    errno.ENOSPC: "free some space, then retry",
    errno.EDQUOT: "free some of your quota, then retry",
}
_REMEDIES = {
    errno.EMFILE: "close some files, or let this process open more with `ulimit -n`, then retry",
    errno.ENFILE: "close some files, or let the system open more with `sysctl fs.file-max`, then retry",
    errno.EROFS: "the file system is read-only: choose a path in a writable directory",
    errno.EACCES: "change the permissions, or choose a path in a writable directory",
    errno.EPERM: "change the permissions, or choose a path in a writable directory",
    errno.EFBIG: "let this process write larger files with `ulimit -f`, or choose another file system",
    errno.ENOMEM: "free some memory, then retry",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.ELOOP: "choose a path without circular links",
}


def typed(
    what: str, cause: OSError, kind: type[StoreError] = WriteFailed, remedy: str = "check the device, then retry"
) -> StoreError:
    """Returns the library's own error for one of the operating system.

    Args:
      what: the step that failed and its path, as in "reading /x/y failed".
      cause: the error, which is none of the library's own.
      kind: the type to return, unless the device or the quota is full, which is NoSpace.
      remedy: the advice where the error number has none of its own.
    """
    code = cause.errno or 0
    error = (NoSpace if code in _NO_SPACE else kind)(
        f"{what}: {cause}; {_NO_SPACE.get(code) or _REMEDIES.get(code) or remedy}")
    error.__cause__ = cause
    return error
