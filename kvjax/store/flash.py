"""The block store on flash: `FlashStore` makes a file, `FlashBranch` reads and writes it."""

import itertools
import os
import weakref

import numpy as np

from kvjax.errors import ChecksumMismatch, ConfigError
from kvjax.store import profiles
from kvjax.store.base import Geometry
from kvjax.store.extents import ExtentPool
from kvjax.store.file import create_file
from kvjax.store.format import checksum
from kvjax.store.lineage import Lineage, Sources
from kvjax.store.reader import ExtentPlan
from kvjax.store.transaction import TransactionalBranch
from kvjax.store.volume import Volume

WRITE_BYTES = 4 << 20  # prefill is gathered and written in pieces of this size


class FlashStore:
    """Where and how blocks are kept on flash; touches no disk before `create`.

    Args:
      path: a file to create (a kvjax file nobody uses is replaced), or an existing directory, in which a temporary
        file is made that goes away when its last branch is closed or collected, and at exit.
      threads: how many reads run at once.
      direct: read past the page cache with O_DIRECT; where the filesystem refuses, a warning is logged and the
        branch's `direct` becomes False.
      max_bytes: how large the file may become; None for as large as the device allows.
      staging_bytes: committed but unwritten blocks kept in memory, at most, plus those of one token.
      timeout: seconds after which a read or write that makes no progress becomes an error.
      profile: device to emulate, see `kvjax.store.profiles`; all files of one store share it.

    Attributes:
      system: its system calls; tests replace it.
    """

    def __init__(self, path, *, threads: int = 4, direct: bool = True, max_bytes: int | None = None,
                 staging_bytes: int = 64 << 20, timeout: float = 60.0, profile: str = profiles.NATIVE):
        if threads < 1 or staging_bytes < 0 or timeout <= 0 or (max_bytes is not None and max_bytes < 1):
            raise ConfigError(f"threads={threads}, max_bytes={max_bytes} and timeout={timeout} must be positive, "
                              f"staging_bytes={staging_bytes} not negative")
        self.path = os.fspath(path)
        self.threads = threads
        self.direct = direct
        self.max_bytes = max_bytes
        self.staging_bytes = staging_bytes
        self.timeout = timeout
        self.profile = profile
        self.system = profiles.system_of(profile)

    def create(self, geometry: Geometry, fingerprint: str) -> "FlashBranch":
        """Makes the file and its first branch, in which every block is zero. Raises StoreError as `create_file`."""
        file = create_file(self.path, geometry, fingerprint, self.system, direct=self.direct, max_bytes=self.max_bytes)
        extents = ExtentPool(file.path, geometry.extent_bytes, self.max_bytes)
        volume = Volume(file, geometry, extents, threads=self.threads, staging_bytes=self.staging_bytes,
                        timeout=self.timeout)
        return FlashBranch(volume, _Anchor(volume), np.full(geometry.total_blocks, -1, np.int32))


class _Anchor:
    """Held by every branch of a volume and by nothing else: when it goes, so do file and threads."""

    def __init__(self, volume: Volume):
        self.shut_down = weakref.finalize(self, volume.shut_down)


class FlashBranch(TransactionalBranch):
    """One line of history in a store file; made by `FlashStore.create` and `fork`.

    Attributes:
      path: the store file.
      direct: whether reads go past the page cache.
    """

    def __init__(self, volume: Volume, anchor: _Anchor, table: np.ndarray, generation: int = 0):
        super().__init__(volume.geometry, generation)
        self._volume = volume
        self._anchor: _Anchor | None = anchor
        self._lineage = Lineage(volume.geometry, table, self._errors, self._tally)
        volume.adopt(self._lineage)
        self._retire = weakref.finalize(self, volume.retire, self._lineage)

    @property
    def path(self) -> str:
        return self._volume.file.path

    @property
    def direct(self) -> bool:
        return self._volume.file.direct

    def fork(self) -> "FlashBranch":
        """Copies the table once everything committed is in the file, and shares all extents; copies no block."""
        with self._mutex:
            self._raise_saved()
            self._check(self.generation)
            self._drain()
            with self._volume.lock:
                table = self._lineage.table.copy()
                self._volume.extents.share(table[table >= 0])
            return FlashBranch(self._volume, self._anchor, table, self.generation)  # type: ignore[arg-type]

    def flush(self) -> None:
        """Hands everything committed to the kernel; StoreClosed when a named file is no longer at its path. Nothing is
        synced to the device: without the table of the branch, which is in memory, the bytes have no meaning."""
        with self._mutex:
            super().flush()
            if not self._volume.file.temporary:
                self._volume.file.check_present()

    # ---- prefill

    def write_layer(self, layer, blocks, counts):
        geometry = self.geometry
        with self._mutex:
            counts = self._prefill_counts(blocks, counts).reshape(-1)
            start = self._layer_start(layer)
            self._drain()
            self._replace(start, blocks.reshape(-1, geometry.block_rows, geometry.width), counts)

    def _replace(self, start: int, blocks: np.ndarray, counts: np.ndarray) -> None:
        """Writes blocks[n, C, width] with counts[n] > 0 to new extents, then lets ids start..start+n-1 be those."""
        volume, table = self._volume, self._lineage.table
        filled = np.flatnonzero(counts > 0)
        with volume.lock:
            extents = volume.allocate(filled.size)
        try:
            sums = self._write_blocks(start, blocks, counts, filled, extents)
        except BaseException:
            with volume.lock:
                volume.extents.release(extents)
            raise
        with volume.lock:
            volume.extents.checksums[extents] = sums
            old = table[start:start + counts.size].copy()
            table[start:start + counts.size] = -1
            table[start + filled] = extents
            volume.extents.release(old[old >= 0])

    def _write_blocks(self, start, blocks, counts, filled, extents) -> np.ndarray:
        """Writes blocks[filled] to extents, a piece at a time; returns uint64 checksums."""
        geometry = self.geometry
        step = max(1, WRITE_BYTES // geometry.extent_bytes)
        buffer = np.zeros((min(step, filled.size), geometry.extent_bytes), np.uint8)
        sums = np.empty(filled.size, np.uint64)
        for first in range(0, filled.size, step):
            piece = filled[first:first + step]
            payload = buffer[:piece.size, :geometry.block_bytes]
            payload[:] = _kept(blocks[piece], counts[piece])
            sums[first:first + step] = [checksum(row) for row in payload]
            self._write_runs(buffer, extents[first:first + step], start + piece)
        written = filled.size * geometry.extent_bytes
        self._tally.add(blocks_written=filled.size, bytes_written=written)
        return sums

    def _write_runs(self, buffer: np.ndarray, extents: np.ndarray, ids: np.ndarray) -> None:
        """Writes the front of the buffer, neighbouring extents at once."""
        volume, geometry = self._volume, self.geometry
        cuts = [0, *(np.flatnonzero(np.diff(extents) != 1) + 1).tolist(), extents.size]
        for begin, end in itertools.pairwise(cuts):
            name = geometry.describe(ids[begin])
            volume.file.write(buffer[begin:end].reshape(-1), volume.extents.offset(extents[begin]), lambda _, n=name: n)

    # ---- decode

    def _load(self, ids, targets, out):
        volume = self._volume
        sources = self._resolve(ids)
        while True:
            suspects = self._copy(sources, ids, targets, out)
            if not suspects.size:
                return
            before, ids, targets = sources, ids[suspects], targets[suspects]
            sources = self._resolve(ids)
            torn = (sources.extents != before.extents[suspects]) | (sources.sums != before.sums[suspects])
            for i in np.flatnonzero(~torn & sources.on_flash).tolist():
                offset = volume.extents.offset(sources.extents[i])
                raise ChecksumMismatch(f"{volume.file.path}: {self.geometry.describe(ids[i])} at offset {offset} is "
                                       "not what was written; the device or another program damaged it, prefill again")

    def _resolve(self, ids: np.ndarray) -> Sources:
        with self._volume.lock:
            return self._lineage.resolve(ids, self._volume.extents.checksums)

    def _copy(self, sources: Sources, ids, targets, out) -> np.ndarray:
        """Copies what can be trusted; returns positions of blocks that were being written meanwhile, or are damaged."""
        suspects = np.zeros(0, np.int64)
        where = sources.on_flash.nonzero()[0]
        if where.size < targets.size:
            out[targets[~sources.on_flash]] = 0
        if where.size:
            where = where[sources.extents[where].argsort()]
            plan = ExtentPlan(sources.extents[where], sources.sums[where], targets[where])
            names = self._volume.where(self._lineage)
            suspects = where[self._volume.reader.fetch(plan, out, names, self._tally)]
        if sources.staged:
            self._overlay(sources.staged, targets, out)
        return suspects

    def _overlay(self, staged, targets, out) -> None:
        """Lays staged blocks and rows over what came from flash; consecutive rows of all blocks in one assignment."""
        capacity = self.geometry.block_rows
        pieces, places = [], []
        for i, layers in staged:
            block = layers[0]
            if len(layers) > 1 or block.complete or block.span is None:
                for block in layers:
                    block.copy_to(out[targets[i]])
            else:
                first, stop = block.span
                pieces.append(block.rows[first:stop])
                places.extend(range(targets[i] * capacity + first, targets[i] * capacity + stop))
        if pieces:
            out.reshape(-1, self.geometry.row_bytes)[places] = np.concatenate(pieces)

    # ---- what TransactionalBranch asks for

    def _publish(self, records):
        self._volume.publish(self._lineage, records)

    def _drain(self):
        self._volume.drain(self._lineage)

    def _release(self):
        anchor, self._anchor = self._anchor, None
        self._retire()
        shut_down = anchor.shut_down
        del anchor
        if not shut_down.alive:
            self._volume.join()


def _kept(blocks: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """blocks[n, C, width] as bytes[n, block_bytes] with zeros beyond counts[n]; may alter `blocks`."""
    for i in np.flatnonzero(counts < blocks.shape[1]).tolist():
        blocks[i, counts[i]:] = 0
    return np.ascontiguousarray(blocks).reshape(len(blocks), -1).view(np.uint8)
