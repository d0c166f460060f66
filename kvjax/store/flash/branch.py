"""A branch of a store file: prefill writes its blocks, decoding appends behind the tokens, and each layer reads."""

import itertools
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvjax.errors import ConfigError, StaleCache, WriteFailed
from kvjax.store.flash.lineage import Lineage, Sources
from kvjax.store.flash.table import Table
from kvjax.store.flash.volume import Volume
from kvjax.store.io.aio import NONE, Guess, Landed, Ring, RingStack, native
from kvjax.store.io.fetch import Fetch, hung
from kvjax.store.io.file import WRITE_BYTES
from kvjax.store.io.prefetch import Reads
from kvjax.store.prompt import Gathered
from kvjax.store.transaction import TransactionalBranch

Take = Callable[[np.ndarray], np.ndarray]  # block numbers [n] of a layer -> blocks [n, C, width]


class Anchor:
    """An object held only by the branches of a volume: when the last one goes, file and threads are shut down."""

    def __init__(self, volume: Volume):
        self.shut_down = weakref.finalize(self, volume.shut_down)


class Save(NamedTuple):
    """A saved cache in a store file.

    Attributes:
      sequence: number of the save.
      generation: generation of the saved branch.
      metadata: bytes given by the caller of `FlashBranch.save`.
    """

    sequence: int
    generation: int
    metadata: bytes


class FlashBranch(TransactionalBranch):
    """One line of history in a store file; made by `FlashStore.create`, `FlashStore.open` and `fork`.

    Attributes:
      path: the store file, or the path it will have once it is saved (`FlashStore.create`).
      direct: whether reads bypass the page cache.
      engine: how blocks are read: "aio", "threads" or "mmap".
      codec: how blocks are encoded in the file: "raw" or "rle".
    """

    on_flash = True

    def __init__(self, volume: Volume, anchor: Anchor, table: Table, generation: int = 0):
        super().__init__(volume.geometry, generation)
        self._volume = volume
        self.samples = volume.samples
        self._anchor: Anchor | None = anchor
        self._lineage = Lineage(volume.geometry, table, self._tally)
        volume.adopt(self._lineage)
        self._retire = weakref.finalize(self, volume.retire, self._lineage)
        self._reads = Reads(volume.reader, self._tally)
        lineage, geometry = self._lineage, volume.geometry
        self._always = (  # the constant part of every window
            volume.lock, volume.streams, volume.extents, lineage.table.shift, lineage.pending, self._tally.fetched,
            lineage.flight, lineage.queue, geometry.batch, geometry.kv_heads, geometry.num_blocks,
            geometry.block_rows, geometry.width, self._element, volume.timeout)

    @property
    def path(self) -> str:
        return self._volume.file.place

    @property
    def direct(self) -> bool:
        return self._volume.file.direct

    @property
    def engine(self) -> str:
        return self._volume.reader.engine

    @property
    def codec(self) -> str:  # type: ignore[override]
        return self._volume.codec.name

    @property
    def stored_bytes(self):
        """The size of the file, which branches share."""
        with self._volume.lock:
            return self._volume.extents.offset(self._volume.extents.end)

    @property
    def held_bytes(self):
        """Bytes as `Branch.held_bytes`; the volume's part is included in full in every fork."""
        with self._volume.lock:
            return self._volume.held_bytes + self._lineage.held_bytes

    @property
    def writable(self) -> bool:
        """True if the store file can be written; otherwise additions go to a private file."""
        return not self._volume.file.read_only

    def fork(self) -> "FlashBranch":
        """Returns a branch that shares table and extents, once everything committed is in the file. The cost depends on
        how much is staged, not on how much the cache holds."""
        with self._mutex:
            fork = FlashBranch(self._volume, self._anchor, self._settled(), self.generation)  # type: ignore[arg-type]
            return self._akin(fork)

    def at(self, save: Save) -> "FlashBranch":
        """Returns a new branch at a save that `saves` returned.

        Args:
          save: the save to return to.

        Raises:
          StaleCache: the save is no longer in the file.
        """
        with self._mutex, self._volume.lock:
            tables = [saved.table.share() for saved in self._volume.log.saves() if saved.sequence == save.sequence]
        if not tables:
            raise StaleCache(f"{self.path} no longer holds save {save.sequence}; call saves() again")
        return self._akin(FlashBranch(self._volume, self._anchor, tables[0], save.generation))  # type: ignore[arg-type]

    def _settled(self) -> Table:
        """Returns the table, with one more owner, once everything committed is in the file."""
        self._raise_saved()
        self._check(self.generation)
        self._drain()
        with self._volume.lock:
            return self._lineage.table.share()

    def save(self, metadata: bytes = b"", generation: int | None = None) -> int:
        """Makes the committed state the newest saved cache of the file.

        Costs as much as has changed since the last save. If several branches save at the same moment, the last one's
        cache is kept, under the newest of their numbers. The file keeps this save and the previous one; blocks that
        only older saves need are reused.

        Args:
          metadata: bytes to store with the save.
          generation: the generation that the branch must be at; None = any.

        Returns:
          The number of the save, once it is on the device.

        Raises:
          StaleCache: the branch is not at `generation`.
          ConfigError: the file is temporary.
          WriteFailed: the file was opened read-only, or a write failed.
          StoreError: as `flush`. After an error the previous save is still the newest, unless the device failed in the
            last step: then only opening the file tells. After a failed sync nothing more can be saved, as the kernel
            may have dropped data.
        """
        file = self._volume.file
        if not self.writable:
            raise WriteFailed(f"{file.path} was opened read-only; open it for writing to save")
        if file.temporary:
            raise ConfigError(f"{file.path} is temporary; to save it, use FlashStore(file=...)")
        with self._mutex:
            self._check(self.generation if generation is None else generation)
            self.flush()
            table, generation = self._settled(), self.generation
        return self._volume.save(table, generation, metadata)  # without the mutex: tokens may be committed meanwhile

    def saves(self) -> list[Save]:
        """Returns the saved caches in the file, newest first: at most two."""
        with self._volume.lock:
            return [Save(saved.sequence, saved.generation, saved.metadata) for saved in self._volume.log.saves()]

    def flush(self) -> None:
        """Writes everything committed and waits until the device has taken it. This is no sync: only `save` makes it
        recoverable.

        Raises:
          StoreError: what failed; StoreClosed when a named file is no longer at its path.
        """
        with self._mutex:
            super().flush()
            if not self._volume.file.temporary:
                self._volume.file.check_present()

    def settle(self) -> None:
        self.flush()
        self._volume.file.settle()

    # ---- prefill

    def write_layer(self, layer, blocks, counts, prompt=None):
        retrieved = None if prompt is None else prompt.retrieved
        geometry = self.geometry
        with self._mutex:
            counts = self._prefill_counts(blocks, counts).reshape(-1)
            start = self._layer_start(layer)
            self._drain()
            flat = None if isinstance(blocks, Gathered) else blocks.reshape(-1, geometry.block_rows, geometry.width)
            self._replace(start, blocks.take if flat is None else flat.__getitem__, counts, retrieved)

    def _replace(self, start: int, take: Take, counts: np.ndarray, retrieved: np.ndarray | None) -> None:
        """Writes the blocks n with counts[n] > 0 to new extents, then assigns these to ids start..start+n-1."""
        volume = self._volume
        filled = np.flatnonzero(counts > 0)
        with volume.lock:
            end = volume.extents.end
            extents = volume.place_prompt(start + filled, retrieved)
        order = extents.argsort()
        filled, extents = filled[order], extents[order]
        try:
            volume.file.check_room(int(np.count_nonzero(extents >= end)) * self.geometry.extent_bytes)
            sums = self._write_blocks(start, take, counts, filled, extents)
        except BaseException:
            with volume.lock:
                volume.extents.release(extents)
            raise
        with volume.lock:
            volume.extents.checksums[extents] = sums
            layer = np.full(counts.size, -1, np.int32)
            layer[filled] = extents
            self._lineage.table.replace_layer(start, layer)
        volume.file.write_back()

    def _write_blocks(self, start, take: Take, counts, filled, extents) -> np.ndarray:
        """Writes the blocks numbered filled[n] to extents[n], a piece at a time; returns uint64 checksums[n]."""
        geometry, codec = self.geometry, self._volume.codec
        step = max(1, WRITE_BYTES // geometry.extent_bytes)
        buffer = np.zeros((min(step, filled.size), geometry.extent_bytes), np.uint8)
        sums, written = np.empty(filled.size, np.uint64), 0
        for first in range(0, filled.size, step):
            piece = filled[first:first + step]
            payload = buffer[:piece.size, :geometry.block_bytes]
            payload[:] = _kept(take(piece), counts[piece])
            images, sums[first:first + step] = codec.encode(buffer[:piece.size])
            runs = self._volume.write_runs(images, extents[first:first + step], codec.sizes(sums[first:first + step]),
                                           start + piece, padded=codec.joins)
            written += sum(run.size for run in runs)
        rows = int(np.minimum(counts[filled], geometry.block_rows).sum())
        self._tally.add(blocks_written=filled.size, bytes_put=rows * geometry.row_bytes, bytes_written=written,
                        blocks_short=int(np.count_nonzero(codec.sizes(sums) < geometry.extent_bytes)))
        return sums

    # ---- decode

    def _begin(self, layer, ids):
        sources = self._resolve(ids)
        where = _ascending(sources)
        self._reads.begin(layer, sources.extents[where], sources.sums[where], self._names())

    def _names(self):
        return self._volume.where(self._lineage)

    reads_in_c = native is not None

    def _read_at_once(self, layer, generation, block, slot, slots):
        return native is not None and native.fetch(self, int(layer), int(generation), block, slot, slots)

    def _begin_at_once(self, layer, generation, block):
        return native is not None and native.guess(self, int(layer), int(generation), block)

    def _guess_window(self, layer: int, generation: int) -> tuple | None:
        """Returns the window of `native.guess`, dropping the layer's earlier guess; None if the Python path has to
        handle the call."""
        self._reads.drop(layer)
        rings = self._volume.reader.rings
        return None if rings is None else self._reads_with(rings.guess_rings, rings.descriptor, layer, generation, None)

    def _window(self, layer: int, generation: int) -> tuple | None:
        """Returns the window of `native.fetch`; None if the Python path has to handle the call: there is an error, or
        the layer was prefetched in another way."""
        rings, guesses = self._volume.reader.rings, self._reads.guesses
        if rings is None or isinstance(guesses.get(layer), Fetch):
            return None
        guess = guesses.pop(layer, None)  # still no Fetch: a layer's `submit` and its read never run at the same time
        return self._reads_with(rings.rings, rings.descriptor, layer, generation, guess)  # type: ignore[arg-type]

    def _reads_with(self, rings: RingStack, descriptor: int, layer, generation, guess: Guess | None) -> tuple | None:
        """Returns a window with one of these rings. It is built for every layer of every token with cold caches, where
        each Python function call costs microseconds."""
        if self._errors.first is not None or self._closed or generation != self.generation:
            return None
        try:
            ring = rings.take()
        except OSError:  # no contexts left: the Python path reads with threads, and logs a warning
            return None
        ring.lent = True
        return (ring, ring.layout, self._always, layer, descriptor, self.events is not None,
                guess and guess.window())

    def _give_back(self, ring: Ring, extents: int) -> None:
        """Returns a window's ring, whose arena held up to `extents` extents, unless a guess has it."""
        if ring.lent:
            ring.lent = False
            ring.used = max(ring.used, extents)
            ring.home.give(ring)  # type: ignore[union-attr]

    def _guessed(self, ring: Ring, layer: int, blocks: int, reads: int, sent: int, began: float) -> None:
        """Keeps the guess that `native.guess` began."""
        ring.lent = False  # first: if interrupted, the guess returns its ring in its finalizer
        guess = Guess(ring, blocks, reads, sent, began)
        self._reads.keep(layer, guess, blocks)

    def _landed(self, layer: int, started: float, landed: tuple[tuple, ...], block, slot, slots) -> None:
        """Handles the results of `native.fetch` (`Landed`) when events are recorded or some blocks did not arrive:
        loads these again as `_load` does, which finds the cause."""
        began = time.perf_counter()
        self._note("read", layer, started)
        results = [result for result in itertools.starmap(Landed, landed) if result.asked]
        for result in results:
            self._note("request", layer, result.began)
            self._note("landed", layer, result.ended)
        try:
            if any(result.ring.in_flight for result in results):
                raise hung(self._volume.file.path, self._volume.timeout)
            missed = np.concatenate([NONE, *(result.ring.missed(result.asked) for result in results)])
            if missed.size:
                self._load_missed(layer, block, slot, slots, missed)
        finally:
            self._answered(layer, began)

    def _load_missed(self, layer, block, slot, slots, missed: np.ndarray) -> None:
        """Loads the blocks of flat slots missed[n], which were being written or whose reads failed."""
        ids, targets, out = self._locate(layer, block, slot, slots)
        late = np.isin(targets, missed)
        self._load(layer, ids[late], targets[late], out)

    def _load(self, layer, ids, targets, out):
        volume = self._volume
        sources = self._resolve(ids)
        while True:
            suspects = self._copy(layer, sources, targets, out)
            if not suspects.size:
                return
            before, ids, targets = sources, ids[suspects], targets[suspects]
            sources = self._resolve(ids)
            torn = (sources.extents != before.extents[suspects]) | (sources.sums != before.sums[suspects])
            for i in np.flatnonzero(~torn & sources.on_flash).tolist():
                offset = volume.extents.offset(sources.extents[i])
                raise volume.damaged(f"{self.geometry.describe(ids[i])} at offset {offset}")

    def _resolve(self, ids: np.ndarray) -> Sources:
        with self._volume.lock:
            return self._lineage.resolve(ids, self._volume.extents.checksums)

    def _copy(self, layer, sources: Sources, targets, out) -> np.ndarray:
        """Copies blocks whose checksums match; returns positions of the others, which were being written meanwhile or
        are damaged."""
        suspects = np.zeros(0, np.int64)
        where = _ascending(sources)
        if where.size < targets.size:
            out[targets[~sources.on_flash]] = 0
        if where.size:
            fetch = self._reads.fetch(layer, sources.extents[where], sources.sums[where], self._names(), self._note)
            suspects = where[fetch(targets[where], out)]
        for i, layers in sources.staged:
            for staged in layers:
                staged.copy_to(out[targets[i]])
        return suspects

    # ---- hooks of TransactionalBranch

    def _prepare(self, records):
        self._volume.make_room(self._lineage)
        return records

    def _publish(self, records):
        self._volume.stage(self._lineage, records)

    def _drain(self):
        self._volume.drain(self._lineage)

    def _release(self):
        self._reads.forget()
        anchor, self._anchor = self._anchor, None
        self._retire()
        shut_down = anchor.shut_down
        del anchor
        if not shut_down.alive:
            self._volume.join()


def _ascending(sources: Sources) -> np.ndarray:
    """Returns the positions of the blocks on flash, in the order of their extents."""
    if sources.on_flash.all():
        return sources.extents.argsort()
    where = sources.on_flash.nonzero()[0]
    return where[sources.extents[where].argsort()]


def _kept(blocks: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns blocks[n, C, width] as bytes[n, block_bytes] with zeros beyond counts[n]; may modify `blocks`."""
    for i in np.flatnonzero(counts < blocks.shape[1]).tolist():
        blocks[i, counts[i]:] = 0
    return np.ascontiguousarray(blocks).reshape(len(blocks), -1).view(np.uint8)
