"""The interface of block stores: branches, the registry of their handles, and stores.

A *branch* is one writable line of history of one cache. Compiled programs never hold a branch: they carry its `handle`
as an int32 operand, and the host callback finds the branch with `lookup(handle)`.

Axes are those of `kvjax.typing`: B sequences, K KV heads, NB blocks, C rows of a block, NS slots. In addition: N blocks
of one read, E blocks rewritten in one call, and width, the numbers in a row: 2 * D where a row is a head's key and
value (`kvjax.cache.pool.row_width`).
"""

import abc
import contextlib
import itertools
import weakref
from typing import Protocol, SupportsInt, TypeVar, runtime_checkable

import numpy as np

from kvjax.errors import ReadFailed, StoreError, to_raise
from kvjax.store.geometry import Geometry
from kvjax.store.prompt import Gathered, Prompt
from kvjax.store.stats import Event, Stats


class Branch(abc.ABC):
    """One writable line of history of one store.

    The callback entry points (`submit`, `read_into`, `put_rows`, `put_blocks`) run inside XLA: they never raise and
    never touch JAX. On failure they save the first exception and return False. All but `submit`, which is only a hint,
    keep returning False until the exception is taken by `take_error` or raised by `commit` or `flush`.

    In all callbacks `layer` is the index of a layer, and `generation` must be the branch's committed generation.

    Attributes:
      handle: key of this branch in the registry, a small int.
      geometry: shape of the cache.
      generation: committed generation; starts at 0, in a fork at the parent's.
      events: list to which events of reads are appended in order; None (the default) records nothing.
      samples: number Q of the prompt's queries that `Prompt.retrieved` should have.
      on_flash: whether blocks are stored in a file, not in host memory.
      codec: name of the encoding of blocks in the file, see `kvjax.store.format.codec`.
    """

    events: list[Event] | None = None
    reads_in_c: bool = False  # compiled programs may call `kvjax.store.native` with this branch
    samples: int = 0
    on_flash: bool = False
    codec: str = "raw"
    family: "weakref.WeakSet[Branch] | None" = None  # open branches of the same store, which `OpenBranches` closes

    def __init__(self, geometry: Geometry, generation: int = 0):
        self.geometry = geometry
        self.generation = generation
        self.handle = next(_HANDLES)
        _BRANCHES[self.handle] = self

    def _akin(self, branch: "BranchT") -> "BranchT":
        """Returns another branch of the same store, which `OpenBranches.close` closes with this one."""
        branch.family = self.family
        if self.family is not None:
            self.family.add(branch)
        return branch

    @abc.abstractmethod
    def write_layer(
        self, layer: int, blocks: np.ndarray | Gathered, counts: np.ndarray, prompt: Prompt | None = None
    ) -> None:
        """Replaces a whole layer after prefill.

        Args:
          layer: index of the layer.
          blocks: [B, K, NB, C, width] in the store's dtype.
          counts: int32[B, K, NB] valid rows of each block. Blocks with a count of 0 take no space; rows beyond the
            count read as zero.
          prompt: guides where blocks are placed; it changes no result.

        Raises:
          StoreError: the layer could not be written, and is as it was before.
        """

    @abc.abstractmethod
    def read_into(self, layer, generation, block, slot, slots) -> bool:
        """Copies blocks of a layer into slots (callback).

        Every block of the committed state can be read, and nothing else. A block that was never written reads as zeros.

        Args:
          layer: index of the layer.
          generation: the caller's generation.
          block: int32[B, K, N] block numbers; nothing is read for numbers outside 0..NB-1.
          slot: int32[B, K, N] the slot that each block is copied to.
          slots: [B, K, NS, C, width] memory of the slots, C-contiguous and writable.

        Returns:
          Whether all blocks were copied; if not, the exception is saved.
        """

    @abc.abstractmethod
    def submit(self, layer, generation, block) -> bool:
        """Begins to read blocks that the layer's next `read_into` will probably request, and returns at once
        (callback).

        It replaces the layer's earlier hint. A hint that comes too late, or that the device fails, costs time but
        changes no result.

        Args:
          layer: index of the layer.
          generation: the caller's generation.
          block: int32[B, K, N] block numbers; those outside 0..NB-1 are ignored.

        Returns:
          True, also where there was nothing to do; False if an exception was saved.
        """

    @abc.abstractmethod
    def put_rows(self, layer, generation, block, row, rows) -> bool:
        """Enqueues one row per stream for generation + 1 (callback). Keeps no reference to its arguments.

        Args:
          layer: index of the layer.
          generation: the caller's generation.
          block: int32[B, K] block of each row.
          row: int32[B, K] position in the block; a row is skipped where this or the block is out of range.
          rows: [B, K, width] contents.

        Returns:
          Whether the rows were enqueued; if not, the exception is saved.
        """

    @abc.abstractmethod
    def put_blocks(self, layer, generation, block, rows) -> bool:
        """Enqueues whole blocks for generation + 1 (callback). Keeps no reference to its arguments.

        Args:
          layer: index of the layer.
          generation: the caller's generation.
          block: int32[B, K, E] block numbers; those out of range are skipped.
          rows: [B, K, E, C, width] their whole contents.

        Returns:
          Whether the blocks were enqueued; if not, the exception is saved.
        """

    @property
    @abc.abstractmethod
    def stored_bytes(self) -> int:
        """Bytes that blocks take where they are stored; forks may share them."""

    @property
    @abc.abstractmethod
    def held_bytes(self) -> int:
        """Bytes of host memory that serving blocks takes now: tables, blocks waiting to be written, and read buffers.
        Blocks stored in host memory are not counted."""

    @abc.abstractmethod
    def keep(self, cause: BaseException) -> None:
        """Saves an exception that occurred in a callback, unless one is saved already."""

    @abc.abstractmethod
    def take_error(self) -> StoreError | None:
        """Returns the saved exception, or None, and clears it."""

    def failure(self, what: str) -> BaseException:
        """Returns what to raise after a failed callback: the saved exception, KeyboardInterrupt itself, or ReadFailed.

        Args:
          what: what was being read, for the message of ReadFailed.
        """
        unknown = ReadFailed(f"{what} could not be read, and the store kept no reason; retry")
        return to_raise(self.take_error() or unknown)

    @abc.abstractmethod
    def commit(self, generation: int) -> None:
        """Makes everything enqueued visible to reads; `self.generation` becomes generation + 1.

        Waits only while more bytes than the staging limit are not on the device yet.

        Args:
          generation: the caller's generation.

        Raises:
          StoreError: nothing was committed, and the call may be repeated; StaleCache if the branch is at another
            generation.
        """

    @abc.abstractmethod
    def abort(self, generation: int) -> None:
        """Drops everything enqueued since the last commit. Does nothing for a past generation; never raises."""

    @abc.abstractmethod
    def fork(self) -> "Branch":
        """Returns an independent branch with the same committed contents; blocks are copied when either side writes
        them.

        Raises:
          StoreError: the committed state could not be written.
        """

    @abc.abstractmethod
    def flush(self) -> None:
        """Writes everything committed to the file.

        Raises:
          StoreError: what failed; another call tries again.
        """

    def settle(self) -> None:
        """Flushes, then waits until the device, if there is one, has all of it; for benchmarks of reads."""
        self.flush()

    @abc.abstractmethod
    def close(self) -> None:
        """Flushes and releases all resources, then raises what failed, if anything. Closing twice is allowed."""

    @abc.abstractmethod
    def discard(self) -> None:
        """Closes without flushing, for caches that are no longer wanted. Never raises."""

    @abc.abstractmethod
    def stats(self) -> Stats:
        """Returns the totals since the branch was made."""


@runtime_checkable
class Store(Protocol):
    """A factory of branches."""

    def create(self, geometry: Geometry, fingerprint: str, least_blocks: int = 1) -> Branch:
        """Returns a new branch in which every block is zero.

        Args:
          geometry: shape of the cache.
          fingerprint: identifies model and tokenizer.
          least_blocks: blocks that the caller is sure to write.

        Raises:
          NoSpace: not even `least_blocks` blocks would fit.
        """


BranchT = TypeVar("BranchT", bound=Branch)


class OpenBranches:
    """Base of stores that can be closed: it knows the branches that are in use.

    A store is a context manager. It holds nothing itself: after `close` it can create or open others.
    """

    def __init__(self):
        self._branches: weakref.WeakSet[Branch] = weakref.WeakSet()

    def _opened(self, branch: BranchT) -> BranchT:
        """Returns a branch that `close` will close, with its forks."""
        branch.family = self._branches
        self._branches.add(branch)
        return branch

    def close(self) -> None:
        """Closes every branch of the store that is open, those of caches and their forks, as `Branch.close` does.

        Closing twice is allowed.

        Raises:
          StoreError: what failed first, after all are closed.
        """
        with contextlib.ExitStack() as stack:
            for branch in list(self._branches):
                stack.callback(branch.close)

    def __enter__(self):
        return self

    def __exit__(self, *raised) -> None:
        self.close()


def is_store(given) -> bool:
    """Returns whether a value is a store; the class of a store is not one."""
    return isinstance(given, Store) and not isinstance(given, type)


_HANDLES = itertools.count(1)
_BRANCHES: "weakref.WeakValueDictionary[int, Branch]" = weakref.WeakValueDictionary()


def by_handle() -> "dict[int, weakref.ref[Branch]]":
    """Returns the weak references behind `lookup`, for the compiled part."""
    return _BRANCHES.data  # type: ignore[attr-defined]


def lookup(handle: SupportsInt) -> Branch | None:
    """Returns the live branch with this handle, or None if it was garbage-collected or never existed."""
    return _BRANCHES.get(int(handle))
