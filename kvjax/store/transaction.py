"""The part of a branch that does not depend on where blocks are stored: one token is one transaction.

Callbacks check their arguments, turn (layer, b, k, block) into flat ids over [layers, B, K, NB], copy data out of XLA's
buffers and collect it in a list. `commit` hands the list to the store; `abort` drops it.
"""

import abc
import dataclasses
import functools
import threading
import time
from typing import Any

import numpy as np

from kvjax.errors import FormatMismatch, StaleCache, StoreClosed, StoreError, typed
from kvjax.store.geometry import MAX_GENERATION, Geometry, as_stored
from kvjax.store.interface import Branch
from kvjax.store.native import native
from kvjax.store.prompt import Gathered
from kvjax.store.stats import Event, Stats, Tally


@dataclasses.dataclass(frozen=True)
class StagedRows:
    """Enqueued single rows.

    Attributes:
      ids: int64[n] flat ids of their blocks.
      row: int32[n] positions in the blocks.
      data: uint8[n, row_bytes] contents.
    """

    ids: np.ndarray
    row: np.ndarray
    data: np.ndarray


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Enqueued whole blocks.

    Attributes:
      ids: int64[n] flat ids.
      data: uint8[n, block_bytes] contents.
    """

    ids: np.ndarray
    data: np.ndarray


class RowBuffer:
    """Consecutive rows of one transaction, in arrays with room for the rows of all layers.

    Attributes:
      count: rows so far.
      arrays: int64 ids[n], int32 row[n] and uint8 data[n, row_bytes].
    """

    def __init__(self, geometry: Geometry):
        room, self.count = geometry.layers * geometry.streams, 0
        self.arrays = (np.empty(room, np.int64), np.empty(room, np.int32),
                       np.empty((room, geometry.row_bytes), np.uint8))

    def has_room(self, more: int) -> bool:
        """Returns whether `more` further rows fit."""
        return self.count + more <= len(self.arrays[0])

    def add(self, *rows: np.ndarray) -> None:
        """Appends int64 ids[n], int32 row[n] and uint8 data[n, row_bytes]; n is at most the number of streams."""
        stop = self.count + len(rows[0])
        for array, new in zip(self.arrays, rows, strict=True):
            array[self.count:stop] = new  # type: ignore[index]
        self.count = stop

    def record(self) -> StagedRows:
        """Returns the rows so far, as views."""
        return StagedRows(*(array[:self.count] for array in self.arrays))


class ErrorSlot:
    """A slot that keeps the first exception until it is taken.

    Attributes:
      first: the exception, or None; reading it does not take it.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self.first: StoreError | None = None

    def save(self, cause: BaseException) -> None:
        error = as_store_error(cause)
        forget_frames(error)
        with self._lock:
            self.first = self.first or error

    def take(self) -> StoreError | None:
        with self._lock:
            error, self.first = self.first, None
            return error


def as_store_error(cause: BaseException) -> StoreError:
    """Returns `cause` itself if it is a StoreError, else a StoreError that names it."""
    if isinstance(cause, StoreError):
        return cause
    if isinstance(cause, OSError):
        return typed("the block store failed", cause, StoreError)
    error = StoreError(f"unexpected {type(cause).__name__} in the block store: {cause}")
    error.__cause__ = cause
    return error


def forget_frames(error: BaseException) -> None:
    """Drops the tracebacks of an exception and of all that led to it: their frames hold blocks, and views of XLA's
    buffers, which are invalid after the callback."""
    links: list[BaseException | None] = [error]
    seen: set[int] = set()  # an exception that is raised again may be among its own causes
    while links:
        link = links.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            link.__traceback__ = None
            links += [link.__cause__, link.__context__]


def callback(method):
    """Turns a method that may raise into a callback entry point that saves the exception and returns False."""

    @functools.wraps(method)
    def entry(self, *args, **kwargs) -> bool:
        try:
            method(self, *args, **kwargs)
        except BaseException as cause:  # even KeyboardInterrupt would cost the caller its donated buffers
            self._errors.save(cause)
            return False
        return True

    return entry


class TransactionalBranch(Branch):
    """A branch that checks arguments and generations, and keeps errors and the open transaction; subclasses move the
    bytes.

    Subclasses implement `_load`, `_publish`, `_drain` and `_release`; `_prepare` if publishing may wait or fail;
    `_begin` if they can prefetch; `_read_at_once` and `_begin_at_once` if they have a compiled fast path. `_prepare`,
    `_publish`, `_drain` and `_release` run under `self._mutex`, which serialises the Python-side calls of one branch.
    """

    def __init__(self, geometry: Geometry, generation: int = 0):
        self._errors = ErrorSlot()
        self._tally = Tally()
        self._mutex = threading.RLock()
        self._open: list[RowBuffer | Blocks] = []
        self._piling = threading.Lock()  # XLA may write several layers at once
        self._closed = False
        # Format character of an element in the buffer protocol; programs have bfloat16 as uint16.
        self._element = {"bfloat16": "H"}.get(geometry.dtype, geometry.numpy_dtype.char)
        self._row_shape = (geometry.batch, geometry.kv_heads, geometry.num_blocks, geometry.block_rows, geometry.width,
                           geometry.numpy_dtype.itemsize, self._element)
        self._stream = np.arange(geometry.streams, dtype=np.int64).reshape(geometry.batch, geometry.kv_heads)
        self._stream_start = self._stream * geometry.num_blocks
        super().__init__(geometry, generation)

    @abc.abstractmethod
    def _load(self, layer: int, ids: np.ndarray, targets: np.ndarray, out: np.ndarray) -> None:
        """Copies blocks ids[n] of a layer to out[targets[n]]; uint8 out[slots, block_bytes]."""

    def _read_at_once(self, layer, generation, block, slot, slots) -> bool:
        """Does all of `read_into` if there is a fast path and nothing is unusual; returns whether it did."""
        return False

    def _begin_at_once(self, layer, generation, block) -> bool:
        """Does all of `submit` if there is a fast path and nothing is unusual; returns whether it did."""
        return False

    def _begin(self, layer: int, ids: np.ndarray) -> None:
        """Begins to read blocks ids[n] of a layer, for the `_load` that follows."""

    def _prepare(self, records: list[StagedRows | Blocks]) -> Any:
        """Does everything that may wait or fail before records become visible; returns the argument of `_publish`."""
        return records

    @abc.abstractmethod
    def _publish(self, prepared: Any) -> None:
        """Makes records visible to `_load`, in order; on an Exception none of them is. If KeyboardInterrupt cuts it
        short, a second call with the same argument completes it."""

    @abc.abstractmethod
    def _drain(self) -> None:
        """Waits until everything published is in its final place; raises what failed."""

    @abc.abstractmethod
    def _release(self) -> None:
        """Releases all resources; never raises."""

    # ---- callback entry points

    @callback
    def read_into(self, layer, generation, block, slot, slots):
        if not self._read_at_once(layer, generation, block, slot, slots):
            self._read(layer, generation, block, slot, slots)

    def _read(self, layer, generation, block, slot, slots) -> None:
        started = time.perf_counter()
        self._enter(generation)
        self._note("read", layer, started)
        try:
            ids, targets, out = self._locate(layer, block, slot, slots)
            if ids.size:
                self._load(int(layer), ids, targets, out)
        finally:
            self._answered(layer, started)

    def _answered(self, layer, started: float) -> None:
        """Records a read that began at `started` and ends now."""
        ended = time.perf_counter()
        self._tally.add(read_seconds=ended - started)
        self._note("answer", layer, ended)

    @callback
    def submit(self, layer, generation, block):
        if self._closed or int(generation) != self.generation:
            return  # the hint is for a past token
        self._note("submit", layer, time.perf_counter())
        if self._begin_at_once(layer, generation, block):
            return
        block = self._index("block", block, (*self._stream_start.shape, np.shape(block)[-1]))
        wanted = _within(block, self.geometry.num_blocks)
        self._begin(int(layer), (block + (self._stream_start + self._layer_start(layer))[..., None])[wanted])

    @callback
    def put_rows(self, layer, generation, block, row, rows):
        self._enter(generation)
        start = self._layer_start(layer)
        with self._piling:
            buffer = self._row_buffer()
            if native is not None:
                count = native.put_rows(block, row, rows, buffer.arrays, buffer.count, start, self._row_shape)
                if count >= 0:
                    buffer.count = count
                    return
            buffer.add(*self._wanted_rows(start, block, row, rows))

    def _wanted_rows(self, start: int, block, row, rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the arrays of `StagedRows` for a layer whose ids begin at `start`. Raises FormatMismatch."""
        shape, rows = self._stream_start.shape, as_stored(np.asarray(rows))
        block, row = self._index("block", block, shape), self._index("row", row, shape)
        self._expect("rows", rows, (*shape, self.geometry.width))
        wanted = _within(block, self.geometry.num_blocks) & _within(row, self.geometry.block_rows)
        ids = (start + self._stream_start + block)[wanted]
        return ids, row[wanted], np.ascontiguousarray(rows[wanted]).view(np.uint8)

    def _row_buffer(self) -> RowBuffer:
        """Returns the buffer that the next layer's rows go to."""
        last = self._open[-1] if self._open else None
        if isinstance(last, RowBuffer) and last.has_room(self.geometry.streams):
            return last
        buffer = RowBuffer(self.geometry)
        self._open.append(buffer)
        return buffer

    @callback
    def put_blocks(self, layer, generation, block, rows):
        self._enter(generation)
        rows = as_stored(np.asarray(rows))
        block = self._index("block", block, (*self._stream_start.shape, np.shape(block)[-1]))
        self._expect("rows", rows, (*block.shape, self.geometry.block_rows, self.geometry.width))
        wanted = _within(block, self.geometry.num_blocks)
        if wanted.any():
            ids = (self._layer_start(layer) + self._stream_start[..., None] + block)[wanted]
            data = np.ascontiguousarray(rows[wanted]).reshape(ids.size, -1).view(np.uint8)
            with self._piling:  # another layer may be reading the list
                self._open.append(Blocks(ids, data))

    # ---- Python side

    def keep(self, cause: BaseException) -> None:
        self._errors.save(cause)

    def take_error(self) -> StoreError | None:
        return self._errors.take()

    def commit(self, generation: int) -> None:
        with self._mutex:
            self._raise_saved()
            self._check(generation)
            records, following = self._records(), self.generation + 1
            if following > MAX_GENERATION:
                raise StoreError(f"branch {self.handle} has {self.generation} committed tokens, the maximum; prefill "
                                 "a new cache")
            prepared = self._prepare(records)
            try:
                self._publish(prepared)
                self._move_on(records, following)
            except Exception:
                raise  # nothing became visible, and the token may be committed again
            except BaseException:  # KeyboardInterrupt: part of a token must not be visible in the old generation
                try:
                    self._publish(prepared)
                finally:
                    self._move_on(records, following)
                raise

    def _records(self) -> list[StagedRows | Blocks]:
        """Returns the records of the open transaction, in order."""
        records = [entry.record() if isinstance(entry, RowBuffer) else entry for entry in self._open]
        return [record for record in records if record.ids.size]

    def _move_on(self, records: list[StagedRows | Blocks], following: int) -> None:
        """Closes the open transaction, which is visible now, and begins the next one."""
        self._tally.add(bytes_put=sum(record.data.nbytes for record in records))
        self._open = []
        self.generation = following

    def abort(self, generation: int) -> None:
        with self._mutex:
            if int(generation) == self.generation:
                self._open = []

    def flush(self) -> None:
        with self._mutex:
            self._raise_saved()
            self._check(self.generation)
            self._drain()

    def close(self) -> None:
        with self._mutex:
            if self._closed:
                return
            try:
                self.flush()
            finally:
                self.discard()

    def discard(self) -> None:
        with self._mutex:
            if not self._closed:
                self._closed = True
                self._open = []
                self._release()

    def stats(self) -> Stats:
        return self._tally.stats()

    def _note(self, kind: str, layer, seconds: float) -> None:
        if self.events is not None:
            self.events.append(Event(seconds, kind, int(layer)))

    # ---- checks

    def _raise_saved(self) -> None:
        error = self._errors.take()
        if error is not None:
            raise error

    def _enter(self, generation) -> None:
        """Raises an error that has not been taken yet, and checks the generation; every callback begins with it."""
        if self._errors.first is not None:
            raise self._errors.first
        self._check(generation)

    def _check(self, generation) -> None:
        if self._closed:
            raise StoreClosed(f"branch {self.handle} was closed; create or fork a new one")
        if int(generation) != self.generation:
            raise StaleCache(f"branch {self.handle} is at generation {self.generation}, but a cache value of "
                             f"generation {int(generation)} was used; use the newest one, or fork() before it")

    def _layer_start(self, layer) -> int:
        layer = int(layer)
        if not 0 <= layer < self.geometry.layers:
            raise FormatMismatch(f"layer {layer} does not exist: the store has {self.geometry.layers} layers")
        return layer * self.geometry.streams * self.geometry.num_blocks

    def _index(self, name: str, array, shape: tuple[int, ...]) -> np.ndarray:
        array = np.ascontiguousarray(array, np.int32)
        if array.shape != shape:
            raise FormatMismatch(f"{name} has shape {array.shape}, but the store expects {shape}")
        return array

    def _expect(self, name: str, array: np.ndarray | Gathered, shape: tuple[int, ...]) -> None:
        if array.shape != shape or array.dtype != self.geometry.numpy_dtype:
            raise FormatMismatch(f"{name} is {array.dtype}{list(array.shape)}, but the store expects "
                                 f"{self.geometry.dtype}{list(shape)}")

    def _prefill_counts(self, blocks: np.ndarray | Gathered, counts: np.ndarray) -> np.ndarray:
        """Checks the arguments of a prefill and returns the valid rows, int32[B, K, NB]; raises a saved error, or
        FormatMismatch for wrong shapes."""
        geometry = self.geometry
        shape = (geometry.batch, geometry.kv_heads, geometry.num_blocks)
        self._raise_saved()
        self._check(self.generation)
        self._expect("blocks", blocks, (*shape, geometry.block_rows, geometry.width))
        counts = self._index("counts", counts, shape)
        if counts.max() > geometry.block_rows:
            raise FormatMismatch(f"counts has a block with {counts.max()} rows; a block has {geometry.block_rows}")
        return counts

    def _locate(self, layer, block, slot, slots) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns flat ids int64[n], flat slots int64[n], and the memory of all slots as uint8 out[B * K * NS,
        block_bytes]."""
        geometry = self.geometry
        asked = np.shape(block)[-1]
        block = self._index("block", block, (geometry.batch, geometry.kv_heads, asked))
        slot, slots = self._index("slot", slot, block.shape), as_stored(np.asarray(slots))
        count = slots.shape[2] if slots.ndim == 5 else 0
        self._expect("slots", slots, (*block.shape[:2], count, geometry.block_rows, geometry.width))
        if not (slots.flags.c_contiguous and slots.flags.writeable):
            raise FormatMismatch("slots must be C-contiguous and writable")
        ids = block + (self._stream_start + self._layer_start(layer))[..., None]
        targets = slot + (self._stream * count)[..., None]
        out = slots.reshape(geometry.streams * count, -1).view(np.uint8)
        wanted, placed = _within(block, geometry.num_blocks), _within(slot, count)
        if (wanted & placed).all():  # the usual case: nothing to gather
            return ids.reshape(-1), targets.reshape(-1), out
        if not placed[wanted].all():
            raise FormatMismatch(f"slot {slot[wanted & ~placed][0]} does not exist: there are {count} slots")
        return ids[wanted], targets[wanted], out


def _within(index: np.ndarray, size: int) -> np.ndarray:
    """Returns 0 <= index < size, elementwise, in one comparison: a negative int32 is a huge uint32."""
    return index.view(np.uint32) < size
