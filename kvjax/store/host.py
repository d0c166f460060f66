"""The store that keeps every block in host memory: the reference in tests, and a tier of its own."""

import numpy as np

from kvjax.store.geometry import Geometry
from kvjax.store.interface import OpenBranches
from kvjax.store.prompt import whole
from kvjax.store.transaction import StagedRows, TransactionalBranch


class HostStore(OpenBranches):
    """A store of branches over plain NumPy arrays; branches share nothing."""

    def create(self, geometry: Geometry, fingerprint: str, least_blocks: int = 1) -> "HostBranch":
        """Returns a branch in which every block is zero; `fingerprint` and `least_blocks` are ignored."""
        del fingerprint, least_blocks
        return self._opened(HostBranch(geometry, np.zeros((geometry.total_blocks, geometry.block_bytes), np.uint8)))

    def __repr__(self) -> str:
        return "HostStore()"


class HostBranch(TransactionalBranch):
    """A branch with all blocks in one array data[layers * B * K * NB, block_bytes]; a fork copies it."""

    def __init__(self, geometry: Geometry, data: np.ndarray, generation: int = 0):
        super().__init__(geometry, generation)
        self._data = data

    def write_layer(self, layer, blocks, counts, prompt=None):
        del prompt
        geometry = self.geometry
        with self._mutex:
            blocks = whole(blocks)
            valid = np.arange(geometry.block_rows) < self._prefill_counts(blocks, counts)[..., None]
            start = self._layer_start(layer)
            kept = np.where(valid[..., None], blocks, np.zeros((), blocks.dtype))
            count = geometry.streams * geometry.num_blocks
            self._data[start:start + count] = kept.reshape(count, -1).view(np.uint8)
            written = int(valid.any(-1).sum())
        self._tally.add(blocks_written=written, bytes_put=int(valid.sum()) * geometry.row_bytes,
                        bytes_written=written * geometry.block_bytes)

    @property
    def stored_bytes(self):
        return self._data.nbytes

    @property
    def held_bytes(self):
        return 0

    def fork(self) -> "HostBranch":
        with self._mutex:
            self._raise_saved()
            self._check(self.generation)
            return self._akin(HostBranch(self.geometry, self._data.copy(), self.generation))

    def _load(self, layer, ids, targets, out):
        out[targets] = self._data[ids]
        moved = ids.size * self.geometry.block_bytes
        self._tally.add(reads=1, blocks_read=ids.size, bytes_read=moved)

    def _publish(self, records):
        rows = self._data.reshape(self.geometry.total_blocks, self.geometry.block_rows, -1)
        for record in records:
            if isinstance(record, StagedRows):
                rows[record.ids, record.row] = record.data
                self._tally.add(rows_written=record.ids.size, bytes_written=record.data.nbytes)
            else:
                self._data[record.ids] = record.data
                self._tally.add(blocks_written=record.ids.size, bytes_written=record.data.nbytes)

    def _drain(self):
        pass

    def _release(self):
        self._data = np.zeros((0, self.geometry.block_bytes), np.uint8)
