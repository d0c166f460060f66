"""The write-behind thread of a volume: takes staged blocks, completes them, and writes them to extents."""

import queue
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from kvjax.errors import NoSpace
from kvjax.store.flash.lineage import Lineage, Staged
from kvjax.store.flash.volume import Volume
from kvjax.store.io.file import WRITE_BYTES
from kvjax.store.transaction import as_store_error, forget_frames


class Written(NamedTuple):
    """A run of blocks that were written to the file and may not be on the device yet.

    Attributes:
      offset: position in the file, bytes.
      size: bytes.
      blocks: the blocks of the run.
    """

    offset: int
    size: int
    blocks: list["WrittenBlock"]


class WrittenBlock(NamedTuple):
    """A block of a run.

    Attributes:
      lineage: the branch it belongs to.
      block_id: its flat id.
      staged: its contents in memory.
      old: the extent that it had, -1 = none.
      target: the extent that it was written to.
      right: its checksum.
      size: bytes written.
    """

    lineage: Lineage
    block_id: int
    staged: Staged
    old: int
    target: int
    right: int
    size: int


class Writer:
    """The body of the writer thread. It writes several blocks at a time, neighbours at once, and waits for the device
    once for many.

    Until a block is on the device it is read from memory: O_DIRECT reads of dirty pages wait for their write-back, and
    asynchronous ones are refused.

    An extent with one owner is overwritten in place, so that the layout of a file stays as it was made. A reader that
    resolved the block earlier may then see old and new bytes mixed; the checksum detects it, and the reader resolves
    the block again. By that time `Staged.complete` is set, and the block is taken from memory.
    """

    MOST_UNFINISHED = 64

    def __init__(self, volume: Volume):
        self._volume = volume
        self._unfinished: list[Written] = []

    def serve(self, wake: queue.SimpleQueue) -> None:
        """Runs the thread: True in the queue means that there may be work, False that the file is to be closed."""
        while wake.get():
            while self._commit_saves() or self._write_some() or self._finish_all():
                pass
        self._volume.file.close()
        self._volume.reader.close()

    def _commit_saves(self) -> bool:
        volume = self._volume
        with volume.lock:
            requests = volume.take_saves()
        if not requests:
            return False
        try:
            volume.log.commit(requests)
        except Exception as cause:
            for request in requests:
                request.error = as_store_error(cause)
        with volume.changed:
            for request in requests:
                request.table.release()
                request.done = True
            volume.changed.notify_all()
        return True

    def _write_some(self) -> bool:
        volume = self._volume
        room = self.MOST_UNFINISHED - sum(len(run.blocks) for run in self._unfinished)
        most = min(room, max(1, WRITE_BYTES // volume.geometry.extent_bytes))
        with volume.lock:
            work = volume.next_to_write(most) if room else None
        if work is None or not work[1]:
            return False
        lineage, left = work
        try:
            for block_id, staged in left.items():
                self._complete(lineage, block_id, staged)
            while left:
                try:
                    self._put(lineage, left)
                except NoSpace:
                    if not self._finish_all():  # frees the old extents of finished blocks
                        raise
        except Exception as cause:
            self._give_up([(lineage, block_id) for block_id in left], cause)
        return True

    def _complete(self, lineage: Lineage, block_id: int, staged: Staged) -> None:
        """Fills the rows that were not put from the block's extent, or with zeros if it has none."""
        if staged.complete:
            return
        extent = lineage.table.extent(block_id)
        base = np.zeros_like(staged.image)
        if extent >= 0 and not staged.mask.all():
            self._read(lineage, extent, base)
        with self._volume.lock:
            lineage.complete(block_id, base[:staged.rows.size].reshape(staged.rows.shape))

    def _read(self, lineage: Lineage, extent: int, base: np.ndarray) -> None:
        volume = self._volume
        offset, where, codec = volume.extents.offset(extent), volume.where(lineage), volume.codec
        sums = volume.extents.checksums[extent:extent + 1]
        size = int(codec.sizes(sums)[0])
        volume.file.read([(base.data[:size], offset)], where, direct=False)
        if not codec.decode([base.data[:volume.geometry.block_bytes]], sums)[0]:
            raise volume.damaged(f"{where(offset)} at offset {offset}, to which rows are to be added,")

    def _put(self, lineage: Lineage, left: dict[int, Staged]) -> None:
        """Writes complete blocks, as many as there is space for; removes the written ones from `left`."""
        volume = self._volume
        with volume.lock:
            places = self._places(lineage, left)
        try:
            for run in self._write(lineage, left, *np.array(sorted(places, key=lambda place: place[-1])).T):
                self._unfinished.append(run)
                for block in run.blocks:
                    del left[block.block_id]
                self._tell_of_progress()
        except BaseException:
            for block_id, old, target in places:
                if block_id in left:
                    self._release(old, target)
            raise

    def _places(self, lineage: Lineage, ids: Iterable[int]) -> list[tuple[int, int, int]]:
        """Returns (id, old extent, target extent) for the first of these blocks, as many as there is space for.

        The target is the old extent, or a new one where there is none or it has other owners. Raises NoSpace if there
        is space for none. The lock is held.
        """
        volume, table = self._volume, lineage.table
        places: list[tuple[int, int, int]] = []
        for block_id in ids:
            table.unshare(block_id)
            old = target = table.extent(block_id)
            if old < 0 or volume.extents.is_shared(old):
                try:
                    target = volume.place(block_id)
                except NoSpace:
                    if not places:
                        raise
                    break
            places.append((block_id, old, target))
        return places

    def _write(self, lineage: Lineage, staged: dict[int, Staged], ids, old, targets) -> Iterator[Written]:
        """Writes complete blocks ids[n] to targets[n], ascending; yields each run once its write-back has begun."""
        volume = self._volume
        images, sums = volume.codec.encode(np.stack([staged[block_id].image for block_id in ids.tolist()]))
        sizes = volume.codec.sizes(sums)
        blocks = [WrittenBlock(lineage, block_id, staged[block_id], *rest) for block_id, *rest in zip(
            *(each.tolist() for each in (ids, old, targets, sums, sizes)), strict=True)]
        for run in volume.write_runs(images, targets, sizes, ids):
            volume.file.write_back_range(run.offset, run.size, wait=False)
            yield Written(run.offset, run.size, blocks[run.blocks])

    def _finish_all(self) -> bool:
        """Waits until everything written is on the device; from then on the blocks are read from there. If the device
        reports an error, no block counts as written: it does not say which one failed."""
        if not self._unfinished:
            return False
        volume, done, self._unfinished = self._volume, self._unfinished, []
        blocks = [block for run in done for block in run.blocks]
        try:
            for run in done:
                volume.file.write_back_range(run.offset, run.size, wait=True)
                self._tell_of_progress()
            with volume.changed:
                for block in blocks:
                    self._finish(block)
                volume.changed.notify_all()
        except Exception as cause:
            left = [block for block in blocks if block.block_id in block.lineage.flight]
            for block in left:
                self._release(block.old, block.target)
            self._give_up([(block.lineage, block.block_id) for block in left], cause)
        return True

    def _tell_of_progress(self) -> None:
        with self._volume.changed:
            self._volume.changed.notify_all()

    def _finish(self, block: WrittenBlock) -> None:
        volume, lineage = self._volume, block.lineage
        volume.extents.checksums[block.target] = block.right
        if block.target != block.old:
            lineage.table.put(block.block_id, block.target)
        lineage.written(block.block_id)
        lineage.tally.add(rows_written=block.staged.appended, blocks_written=1, bytes_written=block.size,
                          blocks_short=int(block.size < volume.geometry.extent_bytes))

    def _release(self, old: int, target: int) -> None:
        """Releases the new extent of a block that was not written."""
        if target != old:
            with self._volume.lock:
                self._volume.extents.release(np.array([target]))

    def _give_up(self, blocks: list[tuple[Lineage, int]], cause: Exception) -> None:
        """Requeues failed blocks at the head, coldest first; reports the error once per branch."""
        volume, error = self._volume, as_store_error(cause)
        forget_frames(error)
        with volume.changed:
            for lineage, block_id in reversed(blocks):
                lineage.put_back(block_id, error)
            volume.changed.notify_all()
