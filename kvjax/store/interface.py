"""The interface of block stores: geometry, branches, statistics, and the registry of branch handles.

A *branch* is one writable line of history of one cache. Compiled programs never hold a branch: they carry its `handle`
as an int32 operand, and the host callback finds the branch with `lookup(handle)`.

Axes are those of `kvjax.typing`: B sequences, K KV heads, NB blocks, C rows of a block, NS slots. In addition: N blocks
of one read, E blocks rewritten in one call, and width, the numbers in a row: 2 * D where a row is a head's key and
value (`kvjax.cache.pool.row_width`).
"""

import abc
import contextlib
import dataclasses
import itertools
import threading
import weakref
from typing import Any, NamedTuple, Protocol, SupportsInt, TypeVar, runtime_checkable

import ml_dtypes
import numpy as np

from kvjax.errors import ConfigError, ReadFailed, StoreError, to_raise

PAGE_BYTES = 4096
MAX_GENERATION = 2**31 - 1  # an int32 in compiled programs
DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "int8": np.dtype(np.int8),
}


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The shape of one cache: all that a store knows about the model.

    Attributes:
      layers: number of layers.
      batch: sequences in the batch.
      kv_heads: KV heads with blocks of their own.
      num_blocks: blocks per KV head.
      block_rows: rows (tokens) per block.
      width: elements per row.
      dtype: one of `DTYPES`.
      keys: True if a row is a key and its value, False if it is a value alone.
    """

    layers: int
    batch: int
    kv_heads: int
    num_blocks: int
    block_rows: int
    width: int
    dtype: str
    keys: bool = dataclasses.field(default=True, compare=False)

    def __post_init__(self):
        for name in ("layers", "batch", "kv_heads", "num_blocks", "block_rows", "width"):
            if getattr(self, name) < 1:
                raise ConfigError(f"geometry: {name}={getattr(self, name)} must be at least 1")
        if self.dtype not in DTYPES:
            raise ConfigError(f"geometry: dtype {self.dtype!r} is unknown; use one of {', '.join(DTYPES)}")

    @property
    def numpy_dtype(self) -> np.dtype:
        return DTYPES[self.dtype]

    @property
    def streams(self) -> int:
        """Number of streams: pairs of sequence and KV head."""
        return self.batch * self.kv_heads

    @property
    def total_blocks(self) -> int:
        return self.layers * self.streams * self.num_blocks

    @property
    def row_bytes(self) -> int:
        return self.width * self.numpy_dtype.itemsize

    @property
    def block_bytes(self) -> int:
        return self.block_rows * self.row_bytes

    @property
    def extent_bytes(self) -> int:
        """`block_bytes` rounded up to whole pages, as O_DIRECT requires."""
        return -(-self.block_bytes // PAGE_BYTES) * PAGE_BYTES

    def describe(self, block_id: SupportsInt) -> str:
        """Returns text such as `"layer 0, sequence 1, head 2, block 3"` for a flat id over [layers, B, K, NB]."""
        shape = (self.layers, self.batch, self.kv_heads, self.num_blocks)
        layer, sequence, head, block = np.unravel_index(int(block_id), shape)
        return f"layer {layer}, sequence {sequence}, head {head}, block {block}"


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Information about a prefilled layer, beside its blocks, for layouts that use it.

    Attributes:
      pos: int32[B, KB, NB, C] position of the token in each row, -1 = empty.
      retrieved: int32[B, Q, KB, M1] blocks that Q sampled queries of the prompt would fetch, NB = none; None if
        unknown.
    """

    pos: np.ndarray
    retrieved: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Gathered:
    """Blocks of a prompt that are gathered on demand, so that they are never all in memory.

    Attributes:
      rows: [B, K, T, width] the row of each token.
      pos: int32[B, K, NB, C] token in each row of each block, -1 = a row of zeros.
    """

    rows: np.ndarray
    pos: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.pos.shape, self.rows.shape[-1])

    @property
    def dtype(self) -> np.dtype:
        return self.rows.dtype

    def take(self, ids: np.ndarray) -> np.ndarray:
        """Returns blocks `[n, C, width]`; ids[n] are flat numbers over [B, K, NB]."""
        pos = self.pos.reshape(-1, self.pos.shape[-1])[ids]
        streams = self.rows.reshape(-1, *self.rows.shape[2:])
        blocks = streams[ids[:, None] // self.pos.shape[2], pos]
        blocks[pos < 0] = 0
        return blocks

    def all(self) -> np.ndarray:
        """Returns all blocks, `[B, K, NB, C, width]`."""
        return self.take(np.arange(self.pos[..., 0].size)).reshape(self.shape)


def whole(blocks: np.ndarray | Gathered) -> np.ndarray:
    """Returns blocks `[B, K, NB, C, width]` as an array in memory."""
    return blocks.all() if isinstance(blocks, Gathered) else blocks


def as_stored(rows: np.ndarray) -> np.ndarray:
    """Returns the same memory with the element type of the store: uint16, which stands for bfloat16 in programs,
    becomes bfloat16."""
    return rows.view(ml_dtypes.bfloat16) if rows.dtype == np.uint16 else rows


@dataclasses.dataclass(frozen=True)
class Stats:
    """Totals of a branch since it was made; a fork starts at zero."""

    reads: int = 0  # I/O requests made by read_into
    blocks_read: int = 0  # blocks that came from the device
    bytes_read: int = 0  # bytes requested from the device, including padding
    rows_written: int = 0  # appended rows that reached the device
    blocks_written: int = 0  # blocks written, for any reason
    blocks_short: int = 0  # of these, blocks stored in fewer pages than an extent has (`kvjax.store.format.codec`)
    bytes_put: int = 0  # bytes of committed rows and blocks and of prompts
    bytes_written: int = 0  # bytes given to the device, including padding
    read_seconds: float = 0.0  # wall time inside read_into
    # Summed over all reads whose blocks were used: from the first request to the last answer of the device. An
    # asynchronous answer is noticed only while a caller waits for it, so this is an upper bound for reads that
    # completed before they were needed.
    io_seconds: float = 0.0
    wait_seconds: float = 0.0  # time that read_into was blocked waiting for the device
    prefetched: int = 0  # blocks whose read began before they were requested
    prefetch_used: int = 0  # of these, blocks that read_into then requested
    mispredicted: int = 0  # blocks of a prefetched layer that were not prefetched and had to be read

    @property
    def write_amplification(self) -> float:
        """Bytes that reached the device per byte put. Flush first: blocks still staged are not counted."""
        return self.bytes_written / self.bytes_put if self.bytes_put else 0.0


class Event(NamedTuple):
    """A timestamped event of a layer's reads.

    `submit`: a prefetch was requested; `read`: read_into began; `request`: the first request went to the device;
    `landed`: the device answered; `answer`: read_into returned.
    """

    seconds: float  # time.perf_counter
    kind: str
    layer: int


# Totals that `native.fetch` adds to while it holds the GIL; the struct Totals of fetch.c.
FETCHED = np.dtype([
    ("reads", np.int64), ("blocks_read", np.int64), ("bytes_read", np.int64), ("prefetch_used", np.int64),
    ("mispredicted", np.int64), ("read_seconds", np.float64), ("io_seconds", np.float64), ("wait_seconds", np.float64),
])


class Tally:
    """The running totals behind `Stats`; several threads add to them.

    Attributes:
      fetched: the fields of FETCHED, as bytes.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._totals: dict[str, Any] = {}
        self._fetched = np.zeros(1, FETCHED)
        self.fetched = self._fetched.view(np.uint8)

    def add(self, **amounts) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._totals[name] = self._totals.get(name, 0) + amount

    def stats(self) -> Stats:
        with self._lock:
            totals = dict(self._totals)
        fetched = self._fetched.tolist()[0]  # one call under the GIL, so that no fetch is half counted
        for name, amount in zip(FETCHED.names, fetched, strict=True):  # type: ignore[arg-type]
            totals[name] = totals.get(name, 0) + amount
        return Stats(**totals)


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
