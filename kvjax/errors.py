"""Every typed error of the library: each message names the cause and the remedy."""


class KvjaxError(Exception):
    """Base of all errors that kvjax raises on purpose."""


class ConfigError(KvjaxError, ValueError):
    """A setting is impossible by itself or together with another."""


class BudgetTooSmall(ConfigError):
    """A method cannot work within so few tokens."""


class PromptError(KvjaxError, ValueError):
    """The prompt is empty, longer than the cache was made for, or refused by the model's chat template."""


class TaskFileError(KvjaxError, ValueError):
    """A benchmark's file cannot be used; names file and line."""


class CheckpointError(KvjaxError, ValueError):
    """A model directory cannot be loaded; names file and tensor."""


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
