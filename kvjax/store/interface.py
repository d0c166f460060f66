"""What every block store has in common: geometry, the branch interface, and the registry of handles.

A *branch* is one writable line of history of one cache. The jitted machinery never holds a branch: it carries the
branch's `handle` as an int32 operand, and the host callback finds the branch again with `lookup(handle)`.

Axes as in `kvjax.typing`: B sequences, K KV heads, NB blocks, C rows of a block, NS slots, and here
N blocks asked for in one read, E blocks rewritten in one call, and width, the numbers of a row: 2 * D where it is a
head's key and value (`kvjax.cache.pool.row_width`).
"""

import abc
import dataclasses
import itertools
import threading
import weakref
from typing import Any, NamedTuple, Protocol, SupportsInt, runtime_checkable

import ml_dtypes
import numpy as np

from kvjax.errors import ConfigError, ReadFailed, StoreError, to_raise

PAGE_BYTES = 4096
MAX_GENERATION = 2**31 - 1  # programs have it as an int32
DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "int8": np.dtype(np.int8),
}


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Shape of one cache; all a store has to know about a model."""

    layers: int
    batch: int
    kv_heads: int
    num_blocks: int  # per KV head
    block_rows: int
    width: int  # elements of a row
    dtype: str
    keys: bool = dataclasses.field(default=True, compare=False)  # a row is key beside value; else a value alone

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
        """Pairs of sequence and KV head."""
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
        """`block_bytes` rounded up to whole pages, which O_DIRECT asks for."""
        return -(-self.block_bytes // PAGE_BYTES) * PAGE_BYTES

    def describe(self, block_id: SupportsInt) -> str:
        """`"layer 0, sequence 1, head 2, block 3"` of a flat id over [layers, B, K, NB]."""
        shape = (self.layers, self.batch, self.kv_heads, self.num_blocks)
        layer, sequence, head, block = np.unravel_index(int(block_id), shape)
        return f"layer {layer}, sequence {sequence}, head {head}, block {block}"


@dataclasses.dataclass(frozen=True)
class Prompt:
    """What prefill knows about a layer beside its payload, for layouts that want it.

    pos: int32[B, KB, NB, C] position of the token in each row, -1 = empty.
    retrieved: int32[B, Q, KB, M1] blocks that a sample of the prompt's queries would fetch, NB = nothing.
    """

    pos: np.ndarray
    retrieved: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Gathered:
    """Blocks of a prompt that are put together when they are asked for, so that all of them are never in memory.

    rows: [B, K, T, width] what blocks hold of each token.
    pos: int32[B, K, NB, C] token in each row, -1 = a row of zeros.
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
        """Blocks `[n, C, width]` by flat number over [B, K, NB]."""
        pos = self.pos.reshape(-1, self.pos.shape[-1])[ids]
        streams = self.rows.reshape(-1, *self.rows.shape[2:])
        found = streams[ids[:, None] // self.pos.shape[2], pos]
        found[pos < 0] = 0
        return found

    def all(self) -> np.ndarray:
        """Blocks `[B, K, NB, C, width]`."""
        return self.take(np.arange(self.pos[..., 0].size)).reshape(self.shape)


def whole(blocks: np.ndarray | Gathered) -> np.ndarray:
    """Blocks `[B, K, NB, C, width]` in memory."""
    return blocks.all() if isinstance(blocks, Gathered) else blocks


def as_stored(rows: np.ndarray) -> np.ndarray:
    """Returns the same memory as a store sees it: numbers have their own type, which in programs is uint16 for
    bfloat16.
    """
    return rows.view(ml_dtypes.bfloat16) if rows.dtype == np.uint16 else rows


@dataclasses.dataclass(frozen=True)
class Stats:
    """What a branch has moved since it was made; a fork starts at zero."""

    reads: int = 0  # I/O requests made by read_into
    blocks_read: int = 0  # blocks that came from the device
    bytes_read: int = 0  # bytes asked of the device, padding included
    rows_written: int = 0  # appended rows that reached the device
    blocks_written: int = 0  # blocks written, whatever the reason
    blocks_short: int = 0  # of these, blocks that take fewer pages than they might (`kvjax.store.format.codec`)
    bytes_put: int = 0  # bytes of committed rows and blocks, and of a prompt's
    bytes_written: int = 0  # bytes given to the device, padding included
    read_seconds: float = 0.0  # wall time inside read_into
    # Of every read that was used: from the first request to the last answer of the device. With asynchronous reads an
    # answer is seen when somebody waits for it: at most that long for what landed before it was wanted.
    io_seconds: float = 0.0
    wait_seconds: float = 0.0  # in which read_into was blocked until the device answered
    prefetched: int = 0  # blocks asked for ahead
    prefetch_used: int = 0  # of these, blocks that read_into then wanted
    mispredicted: int = 0  # blocks that read_into wanted of a prefetched layer and had to read itself

    @property
    def write_amplification(self) -> float:
        """Bytes that reached the device for every byte that was put; flush first, or what is staged is missing."""
        return self.bytes_written / self.bytes_put if self.bytes_put else 0.0


class Event(NamedTuple):
    """Something that happened to a layer's blocks: `submit` (asked for ahead), `read` (read_into began), `request` (the
    device was asked), `landed` (it answered), `answer` (read_into returned)."""

    seconds: float  # time.perf_counter
    kind: str
    layer: int


# Totals that `native.fetch` adds to with Python's lock held: Totals of fetch.c.
FETCHED = np.dtype([
    ("reads", np.int64), ("blocks_read", np.int64), ("bytes_read", np.int64), ("prefetch_used", np.int64),
    ("mispredicted", np.int64), ("read_seconds", np.float64), ("io_seconds", np.float64), ("wait_seconds", np.float64),
])


class Tally:
    """Running totals behind `Stats`, added to from several threads.

    Attributes:
      fetched: those of FETCHED, as bytes.
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
        fetched = self._fetched.tolist()[0]  # at once, so that no fetch is half in it
        for name, amount in zip(FETCHED.names, fetched, strict=True):  # type: ignore[arg-type]
            totals[name] = totals.get(name, 0) + amount
        return Stats(**totals)


class Branch(abc.ABC):
    """One writable line of history of one store.

    The callback entry points (`submit`, `read_into`, `put_rows`, `put_blocks`) run inside XLA: they never raise and
    never touch JAX. On failure they save the first typed exception and return False, and all but `submit`, a hint, keep
    returning False until the exception was fetched by `take_error`, or raised by `commit` or `flush`.

    Attributes:
      handle: key of this branch in the registry, a small int.
      geometry: shape of the cache.
      generation: committed generation, starts at 0 (a fork starts at its parent's).
      events: what happened to reads, in order, once it is set to a list; None records nothing.
      samples: how many of the prompt's queries `Prompt.retrieved` should have.
      codec: how its blocks are put into a file, see `kvjax.store.format.codec`.
    """

    events: list[Event] | None = None
    samples: int = 0
    codec: str = "raw"

    def __init__(self, geometry: Geometry, generation: int = 0):
        self.geometry = geometry
        self.generation = generation
        self.handle = next(_HANDLES)
        _BRANCHES[self.handle] = self

    @abc.abstractmethod
    def write_layer(
        self, layer: int, blocks: np.ndarray | Gathered, counts: np.ndarray, prompt: Prompt | None = None
    ) -> None:
        """Replaces a whole layer after prefill: blocks[B, K, NB, C, width] in the store's dtype, counts[B, K, NB] valid
        rows. Blocks with a count of 0 take no space; rows beyond the count read as zero; `prompt` matters for where
        bytes lie and for nothing else. Raises StoreError, and then the layer is as it was."""

    @abc.abstractmethod
    def read_into(self, layer, generation, block, slot, slots) -> bool:
        """Callback. Copies block[B, K, N] int32 (outside 0..NB-1: nothing to read) of a layer to
        slots[b, k, slot[b, k, n]], where slots[B, K, NS, C, width] is contiguous and writable. A block that was never
        written reads as zeros. Sees everything committed, and nothing else."""

    @abc.abstractmethod
    def submit(self, layer, generation, block) -> bool:
        """Callback. A hint that block[B, K, N] of a layer will be wanted by its next `read_into`: begins to read them
        and returns at once. It replaces the layer's earlier hint. True, also where there is nothing to do; a hint that
        comes too late, or that the device fails, costs time and nothing else."""

    @abc.abstractmethod
    def put_rows(self, layer, generation, block, row, rows) -> bool:
        """Callback. Enqueues rows[B, K, width] as row[B, K] of block[B, K] for generation + 1; nothing where the block
        or the row is out of range. Keeps no reference to its arguments."""

    @abc.abstractmethod
    def put_blocks(self, layer, generation, block, rows) -> bool:
        """Callback. Enqueues rows[B, K, E, C, width] as the whole contents of block[B, K, E] for generation + 1."""

    @property
    @abc.abstractmethod
    def held_bytes(self) -> int:
        """Host memory that serving blocks takes at this moment, and not the blocks that are stored there: tables, what
        waits to be written, and what reads have landed in."""

    @abc.abstractmethod
    def keep(self, cause: BaseException) -> None:
        """Saves an exception, if none is saved yet, as one that came up in a callback."""

    @abc.abstractmethod
    def take_error(self) -> StoreError | None:
        """Pops the saved exception."""

    def failure(self, what: str) -> BaseException:
        """What to raise where a callback was not done: the saved exception, Ctrl-C as itself, or ReadFailed."""
        unknown = ReadFailed(f"{what} could not be read, and the store kept no reason; retry")
        return to_raise(self.take_error() or unknown)

    @abc.abstractmethod
    def commit(self, generation: int) -> None:
        """Makes what was enqueued visible to reads; `self.generation` becomes generation + 1. Waits only while more
        than the staging limit is not on the device. Raises StoreError, and then nothing was committed and the call
        may be repeated."""

    @abc.abstractmethod
    def abort(self, generation: int) -> None:
        """Drops what was enqueued since the last commit. Does nothing for a generation that is past; never raises."""

    @abc.abstractmethod
    def fork(self) -> "Branch":
        """An independent branch with the same committed contents; blocks are copied when either side writes them."""

    @abc.abstractmethod
    def flush(self) -> None:
        """Writes all that is committed; raises what failed, and tries it again when called again."""

    def settle(self) -> None:
        """Flushes, and returns when all of it is on the device, if there is one; for whoever times reads."""
        self.flush()

    @abc.abstractmethod
    def close(self) -> None:
        """Flushes, gives everything back, then raises what failed. Closing twice is allowed."""

    @abc.abstractmethod
    def discard(self) -> None:
        """Closes without flushing: nobody wants what is not in the file yet. Never raises."""

    @abc.abstractmethod
    def stats(self) -> Stats:
        """Totals since the branch was made."""


@runtime_checkable
class Store(Protocol):
    """Makes branches."""

    def create(self, geometry: Geometry, fingerprint: str, least_blocks: int = 1) -> Branch:
        """A branch in which every block is zero. Raises NoSpace where not even `least_blocks` blocks would fit."""


def is_store(given) -> bool:
    """Whether it is one, and not the class of some."""
    return isinstance(given, Store) and not isinstance(given, type)


_HANDLES = itertools.count(1)
_BRANCHES: "weakref.WeakValueDictionary[int, Branch]" = weakref.WeakValueDictionary()


def lookup(handle: SupportsInt) -> Branch | None:
    """The live branch with this handle; None when it was garbage-collected or never existed."""
    return _BRANCHES.get(int(handle))
