"""Typed errors of the library; each message names the cause and the remedy."""

import errno


class KvjaxError(Exception):
    """Base of all errors that kvjax raises deliberately."""


class ConfigError(KvjaxError, ValueError):
    """Setting that is impossible by itself or together with another."""


class BudgetTooSmall(ConfigError):
    """Budget of fewer tokens than a method needs."""


class MethodError(ConfigError):
    """A method breaks the contract of methods (`kvjax.cache.method`)."""


class PromptError(KvjaxError, ValueError):
    """Prompt that is empty, longer than the cache allows, or refused by the model's chat template."""


class TaskFileError(KvjaxError, ValueError):
    """Benchmark file that cannot be used; the message names file and line."""


class CheckpointError(KvjaxError, ValueError):
    """Model that cannot be loaded; the message names file and tensor."""


class NotFinite(KvjaxError, ArithmeticError):
    """NaN or infinity computed by the model; the message names model, types and place."""


class StoreError(KvjaxError, OSError):
    """Base of the errors of a block store; the message names file, block, offset and cause.

    Attributes:
      state: after a failed read, the cache as it was before the token, ready for a retry; None if something else
        failed, such as writing decoded tokens.
    """

    state: object | None = None


def to_raise(error: BaseException) -> BaseException:
    """Returns the error, or the KeyboardInterrupt that a callback, which may not raise it, attached as its cause."""
    cause = error.__cause__
    return error if cause is None or isinstance(cause, Exception) else cause


class ShortRead(StoreError):
    """File that ends before the block does."""


class ReadFailed(StoreError):
    """Read refused by the operating system."""


class WriteFailed(StoreError):
    """Write refused by the operating system."""


class NoSpace(StoreError):
    """Full device or quota."""


class ChecksumMismatch(StoreError):
    """Block whose bytes are not those that were written."""


class FormatMismatch(StoreError):
    """File of another format, version, geometry or model."""


class NothingSaved(StoreError):
    """File or directory without a complete saved cache."""


class StaleCache(StoreError):
    """Cache value used after the store moved past its generation."""


class StoreLocked(StoreError):
    """File held by another writer."""


class StoreClosed(StoreError):
    """Store that was closed, or whose file is gone."""


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
      what: failed step with its path, such as "reading /x/y failed".
      cause: error of the operating system, not one of the library's own.
      kind: type to return, unless the device or the quota is full: that is NoSpace.
      remedy: advice for error numbers that have none of their own here.
    """
    code = cause.errno or 0
    error = (NoSpace if code in _NO_SPACE else kind)(
        f"{what}: {cause}; {_NO_SPACE.get(code) or _REMEDIES.get(code) or remedy}")
    error.__cause__ = cause
    return error
