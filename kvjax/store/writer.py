"""The write-behind thread of a volume: takes staged blocks, completes them, and puts them into extents."""

import queue
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvjax.errors import NoSpace
from kvjax.store.lineage import Lineage, Staged
from kvjax.store.transaction import as_store_error

if TYPE_CHECKING:
    from kvjax.store.volume import Volume


class Written(NamedTuple):
    """A block that is in the file, and may not be on the device yet.

    old, target: the extent that it had, -1 = none, and the one that it is in; of `size` bytes, which hash to `right`.
    """

    lineage: Lineage
    block_id: int
    staged: Staged
    old: int
    target: int
    right: int
    size: int


class Writer:
    """Writes one block at a time, and waits for the device for many.

    Until a block is on the device it is read from memory: O_DIRECT reads of dirty pages wait for it, and asynchronous
    ones are refused.

    An extent of one owner is overwritten in place, so that the layout of a file stays as it was made. A reader that
    looked the block up before may then see old and new bytes mixed; the checksum tells it, and it looks again. By that
    time `Staged.complete` has been set, and the block is taken from memory.
    """

    MOST_UNFINISHED = 64

    def __init__(self, volume: "Volume"):
        self._volume = volume
        self._unfinished: list[Written] = []

    def serve(self, wake: queue.SimpleQueue) -> None:
        """Body of the thread: True in the queue means there may be work, False that the file is to be closed."""
        while wake.get():
            while self._commit_saves() or self._write_one() or self._finish_all():
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

    def _write_one(self) -> bool:
        volume = self._volume
        if len(self._unfinished) == self.MOST_UNFINISHED:
            return False
        with volume.lock:
            lineage = volume.next_to_write()
            taken = None if lineage is None else lineage.take_coldest()
        if lineage is None or taken is None:
            return False
        block_id, staged = taken
        try:
            self._complete(lineage, block_id, staged)
            try:
                self._put(lineage, block_id, staged)
            except NoSpace:
                if not self._finish_all():  # which frees what finished blocks no longer need
                    raise
                self._put(lineage, block_id, staged)
        except Exception as cause:
            self._give_up(lineage, block_id, cause)
        return True

    def _complete(self, lineage: Lineage, block_id: int, staged: Staged) -> None:
        """Fills the rows that were not appended from the block's extent; zeros if it has none."""
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

    def _put(self, lineage: Lineage, block_id: int, staged: Staged) -> None:
        """Writes a complete block to its extent, or to a new one if others own that too."""
        volume = self._volume
        images, sums = volume.codec.encode(staged.image[None])
        size = int(volume.codec.sizes(sums)[0])
        with volume.lock:
            lineage.table.unshare(block_id)
            old = lineage.table.extent(block_id)
            shared = old < 0 or volume.extents.is_shared(old)
            target = volume.place(block_id) if shared else old
        offset, where = volume.extents.offset(target), lambda _: volume.geometry.describe(block_id)
        try:
            volume.file.write(images[0, :size], offset, where)
            volume.file.write_back_range(offset, size, wait=False)
        except BaseException:
            self._release(old, target)
            raise
        self._unfinished.append(Written(lineage, block_id, staged, old, target, int(sums[0]), size))
        self._tell_of_progress()

    def _finish_all(self) -> bool:
        """Waits until what was written is on the device; the blocks are there from now on. If the device refuses one,
        none is: it does not say which."""
        if not self._unfinished:
            return False
        volume, done, self._unfinished = self._volume, self._unfinished, []
        try:
            for one in done:
                volume.file.write_back_range(volume.extents.offset(one.target), one.size, wait=True)
                self._tell_of_progress()
            with volume.changed:
                for one in done:
                    self._finish(one)
                volume.changed.notify_all()
        except Exception as cause:
            self._give_all_up(done, cause)
        return True

    def _tell_of_progress(self) -> None:
        with self._volume.changed:
            self._volume.changed.notify_all()

    def _finish(self, one: Written) -> None:
        volume, lineage = self._volume, one.lineage
        volume.extents.checksums[one.target] = one.right
        if one.target != one.old:
            lineage.table.put(one.block_id, one.target)
        lineage.written(one.block_id)
        lineage.tally.add(rows_written=one.staged.appended, blocks_written=1, bytes_written=one.size,
                          blocks_short=int(one.size < volume.geometry.extent_bytes))

    def _release(self, old: int, target: int) -> None:
        """Gives back an extent that a block got, and will not have."""
        if target != old:
            with self._volume.lock:
                self._volume.extents.release(np.array([target]))

    def _give_all_up(self, done: list[Written], cause: Exception) -> None:
        for one in reversed(done):  # the first one will be first in line again
            if one.block_id not in one.lineage.flight:
                continue
            self._release(one.old, one.target)
            self._give_up(one.lineage, one.block_id, cause)

    def _give_up(self, lineage: Lineage, block_id: int, cause: Exception) -> None:
        volume = self._volume
        error = as_store_error(cause)
        with volume.changed:
            lineage.put_back(block_id, error)
            lineage.errors.save(error)
            volume.changed.notify_all()
