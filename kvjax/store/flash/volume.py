"""An open store file with everything its branches share: lock, extents, staging, reader and writer."""

import collections
import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvjax.errors import ChecksumMismatch, StaleCache, StoreError, WriteFailed
from kvjax.store.flash.layout import Layout
from kvjax.store.flash.lineage import Lineage, Staged
from kvjax.store.flash.log import CommitLog, SaveRequest
from kvjax.store.flash.overlay import OverlayFile
from kvjax.store.flash.recovery import Recovered, read_superblocks
from kvjax.store.flash.table import StreamPool, Table
from kvjax.store.format.codec import Codec
from kvjax.store.format.extents import run_starts
from kvjax.store.io.file import BlockFile
from kvjax.store.io.reader import Reader


class Run(NamedTuple):
    """Neighbouring blocks that were written at once.

    Attributes:
      blocks: which of the given blocks.
      offset: position in the file, bytes.
      size: bytes written.
    """

    blocks: slice
    offset: int
    size: int


class Volume:
    """The shared state of the branches of one file.

    No thread refers to a branch, so that a branch without references is collected. Its finalizer may run anywhere, also
    while its thread holds the lock; hence `retire` and `shut_down` take no lock and only leave a message.

    Attributes:
      lock: guards extents and lineages; held for bookkeeping, never for I/O.
      changed: notified when the writer has finished or failed a block. Code that KeyboardInterrupt may hit enters
        `lock` instead: a Condition is entered in Python code, where an interrupt would leave the lock held.
    """

    def __init__(self, file: BlockFile, codec: Codec, streams: StreamPool, layout: Layout, *, reader: Reader,
                 staging_bytes: int, timeout: float):
        self.file = file
        self.codec = codec
        self.geometry = codec.geometry
        self.extents = streams.extents
        self.streams = streams
        self._layout = layout
        self.timeout = timeout
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.samples = layout.samples
        self.log = CommitLog(file, codec.geometry, streams.extents, self.lock)
        self._saves: list[SaveRequest] = []
        self._staging_limit = staging_bytes
        # Rows stay in memory until a quarter of the staging limit is used, so that rows of one block become one write:
        # a token touches a block of every layer and head, and each costs reading and writing the whole block.
        self._linger_bytes = staging_bytes // 4
        self._lineages: list[Lineage] = []
        self._retired: collections.deque[Lineage] = collections.deque()
        self._wake: queue.SimpleQueue = queue.SimpleQueue()
        self.reader = reader
        self._thread: threading.Thread | None = None

    def start(self, serve: Callable[[queue.SimpleQueue], None]) -> None:
        """Starts the writer thread.

        Args:
          serve: body of the thread (`Writer.serve`).

        Raises:
          WriteFailed: the system has no threads left.
        """
        self._thread = threading.Thread(target=serve, args=(self._wake,), name="kvjax-write", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as cause:
            self.reader.stop()
            self.reader.close()
            raise WriteFailed(f"{self.file.path}: the writer thread cannot be started ({cause}); end some threads, or "
                              "allow more with `ulimit -u`") from cause

    @property
    def held_bytes(self) -> int:
        """Bytes of tables, staged blocks and read buffers. The lock is held."""
        return self.streams.held_bytes + self.extents.held_bytes + self.staged_bytes + self.reader.held_bytes

    # ---- registering branches

    def adopt(self, lineage: Lineage) -> None:
        """Registers a new branch, whose table already owns its extents."""
        with self.lock:
            self._lineages.append(lineage)

    def retire(self, lineage: Lineage) -> None:
        """Requests that a dropped branch's staged blocks are discarded and its extents released. Takes no lock."""
        self._retired.append(lineage)
        self._wake.put(True)

    def reap(self) -> None:
        """Carries out what `retire` requested, except for a branch with a block that is being written. The lock is
        held."""
        for _ in range(len(self._retired)):
            lineage = self._retired.popleft()
            if lineage.flight:
                self._retired.append(lineage)
                continue
            self._lineages.remove(lineage)
            lineage.table.release()
            self.changed.notify_all()

    def shut_down(self) -> None:
        """Deletes a temporary file and ends the threads, after the last branch is gone. Takes no lock and returns at
        once."""
        try:
            self.file.remove_if_temporary()
            self.reader.stop()
        finally:  # the writer thread closes and unlocks the file as it ends
            self._wake.put(False)

    def join(self) -> None:
        """Waits, after `shut_down`, until the file is closed and unlocked."""
        if self._thread is not None:
            self._thread.join(self.timeout)

    # ---- staging

    @property
    def staged_bytes(self) -> int:
        """Bytes of all staged blocks; counted rather than kept, so that KeyboardInterrupt cannot make it wrong."""
        blocks = sum(len(lineage.queue) + len(lineage.flight) for lineage in self._lineages)
        return blocks * self.geometry.extent_bytes

    def make_room(self, lineage: Lineage) -> None:
        """Waits until a branch's next commit may be staged; raises what failed. A failure that was not reported yet may
        be over by now, so the writer tries again first."""
        with self.lock:
            if lineage.untold:
                self._finish(lineage)
            self._retry(lineage)
            if self.staged_bytes > self._staging_limit:
                for other in self._lineages:  # their blocks fill the staging, and their failures may be over by now
                    self._retry(other)
            self._wait(lineage, lambda: self.staged_bytes <= self._staging_limit)

    def stage(self, lineage: Lineage, records) -> None:
        """Makes committed records visible, in order. Staging the same records again changes nothing."""
        with self.lock:
            for record in records:
                lineage.stage(record)
            if self.staged_bytes > self._linger_bytes:
                self._wake.put(True)

    def drain(self, lineage: Lineage) -> None:
        """Waits until everything that a branch committed is in the file; raises what failed."""
        with self.lock:
            self._finish(lineage)

    def _finish(self, lineage: Lineage) -> None:
        """Does the work of `drain`. The lock is held."""
        lineage.urgent = True
        try:
            self._retry(lineage)
            self._wait(lineage, lambda: lineage.idle)
            lineage.untold = False  # everything is written, so the failure is over
        finally:
            lineage.urgent = False

    def _retry(self, lineage: Lineage) -> None:
        lineage.failed = None
        if not lineage.idle:
            self._wake.put(True)

    def _wait(self, lineage: Lineage, done: Callable[[], bool]) -> None:
        """Waits for the writer, as long as it makes progress."""
        self.reap()
        while not done():
            failed = self._failure(lineage)
            if failed is not None:
                lineage.untold = lineage.untold and failed is not lineage.failed
                raise failed
            if not self.changed.wait(self.timeout):
                raise WriteFailed(f"{self.file.path}: no block was written for {self.timeout} s; check the device, or "
                                  "increase timeout")

    def _failure(self, lineage: Lineage) -> StoreError | None:
        """Returns the error because of which nothing more of a branch will be written until it, or another one,
        retries; None if there is none. While the writer has blocks of the branch, the same failure may reach more of
        them."""
        if lineage.flight:
            return None
        if lineage.failed is not None:
            return lineage.failed
        if any(other.flight or (other.queue and not other.failed) for other in self._lineages):
            return None
        return next((other.failed for other in self._lineages if other.failed), None)

    def next_to_write(self, most: int) -> tuple[Lineage, dict[int, Staged]] | None:
        """Returns a branch that the writer should serve now, and at most `most` blocks taken from its queue; None if
        there is nothing to do. Blocks that the writer already has do not count. The lock is held."""
        self.reap()
        waiting = sum(len(lineage.queue) for lineage in self._lineages)
        excess = waiting - self._linger_bytes // self.geometry.extent_bytes
        ready = [lineage for lineage in self._lineages
                 if lineage.queue and not lineage.failed and lineage not in self._retired
                 and (lineage.urgent or excess > 0)]
        if not ready:
            return None
        lineage = max(ready, key=lambda lineage: lineage.urgent)
        return lineage, lineage.take_coldest(most if lineage.urgent else min(most, excess))

    def write_runs(
        self, images: np.ndarray, extents: np.ndarray, sizes: np.ndarray, ids: np.ndarray, padded: bool = False
    ) -> Iterator[Run]:
        """Writes encoded blocks, neighbours in one call.

        Args:
          images: uint8[n, extent_bytes] encoded blocks.
          extents: int32[n] where to write them, ascending.
          sizes: int64[n] how many bytes of each matter.
          ids: int64[n] flat ids, for messages.
          padded: whether to join neighbours also where that writes the unused rest of an extent.

        Yields:
          Each run once it is written.

        Raises:
          NoSpace, WriteFailed: a write failed.
        """
        whole = None if padded else sizes == self.geometry.extent_bytes
        for begin, end in itertools.pairwise([*run_starts(extents, whole).tolist(), extents.size]):
            offset = self.extents.offset(extents[begin])
            size = (end - begin - 1) * self.geometry.extent_bytes + int(sizes[end - 1])
            self.file.write(images[begin:end].reshape(-1)[:size], offset, self._first_of(ids[begin:end]))
            yield Run(slice(begin, end), offset, size)

    def _first_of(self, ids: np.ndarray) -> Callable[[int], str]:
        """Returns a function that names the first of the blocks that are written at once."""
        return lambda _: self.geometry.describe(ids[0])

    # ---- saving

    def save(self, table: Table, generation: int, metadata: bytes) -> int:
        """Saves a table, which it takes over; requests that wait at the same time share one commit.

        Args:
          table: blocks of the branch.
          generation: generation of the branch.
          metadata: bytes to store with the save.

        Returns:
          The number of the save, once it is on the device.

        Raises:
          StoreError: the save failed; WriteFailed also when the device does not confirm it within the timeout.
        """
        request = SaveRequest(table, generation, metadata)
        with self.lock:
            self._saves.append(request)
            self._wake.put(True)
            if not self.changed.wait_for(lambda: request.done, self.timeout):
                if request in self._saves:
                    self._saves.remove(request)
                    table.release()
                raise WriteFailed(f"{self.file.path}: the device did not confirm a save within {self.timeout} s, so "
                                  "the save may be lost; check the device, or increase timeout")
        if request.error is not None:
            raise request.error
        return request.sequence

    def take_saves(self) -> list[SaveRequest]:
        """Returns the waiting requests to the writer, and empties the list. The lock is held."""
        taken, self._saves = self._saves, []
        return taken

    def damaged(self, what: str) -> StoreError:
        """Returns the error for a block that does not match its table: StaleCache if newer saves overwrote it, else
        ChecksumMismatch."""
        if isinstance(self.file, OverlayFile):
            with self.lock:
                ours = max((saved.sequence for saved in self.log.saves()), default=0)
            superblocks, _ = read_superblocks(self.file.shared)
            if max((superblock.sequence for superblock in superblocks.values()), default=0) > ours:
                return StaleCache(f"{self.file.path}: {what} was overwritten, as the file was saved again since it was "
                                  "opened; open it again")
        return ChecksumMismatch(f"{self.file.path}: {what} is not what was written; the device or another program "
                                "damaged it: prefill again")

    # ---- extents

    def restore(self, found: Sequence[Recovered], tables: Sequence[Table]) -> None:
        """Takes over the saves of an opened file, newest first; a read-only file gets no layout. The lock is held."""
        self.log.restore(found, tables)
        if not isinstance(self.file, OverlayFile):
            ids, extents, _ = found[0].blocks
            self._layout.restore(ids, extents)

    def place_prompt(self, ids: np.ndarray, retrieved: np.ndarray | None) -> np.ndarray:
        """Calls `Layout.place_prompt` after `reap`. The lock is held."""
        self.reap()
        return self._layout.place_prompt(ids, retrieved)

    def place(self, block_id: int) -> int:
        """Calls `Layout.place` after `reap`. The lock is held."""
        self.reap()
        return self._layout.place(block_id)

    def where(self, lineage: Lineage) -> Callable[[int], str]:
        """Returns a function that names the block of `lineage` at a file offset (bytes), for messages."""
        def describe(offset: int) -> str:
            extent = (offset - self.extents.offset(0)) // self.geometry.extent_bytes
            with self.lock:
                ids, extents = lineage.table.blocks()
            block_ids = ids[extents == extent]
            return self.geometry.describe(block_ids[0]) if block_ids.size else f"extent {extent}"
        return describe
