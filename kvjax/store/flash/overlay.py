"""A store file that is only read, with a private temporary file for what this process adds."""

from kvjax.store.io.file import BlockFile


class OverlayFile(BlockFile):
    """A shared store file that is only read, with a private file for additions.

    Offsets below `split` are those of the shared file; the others are in the private file, in the same format. No
    request spans both: `ExtentPool.leave_shared` leaves an extent between them unused.
    """

    read_only = True
    temporary = True

    def __init__(self, shared: BlockFile, private: BlockFile, split: int, first: int):
        """Joins the first `split` bytes of the shared file and the private one, whose extents begin at byte `first`."""
        self.path = shared.path
        self.shared = shared
        self._private = private
        self._split = split
        self._shift = split - first

    @property
    def direct(self) -> bool:  # type: ignore[override]
        return self.shared.direct and self._private.direct

    def map_blocks(self):
        self.shared.map_blocks()
        self._private.map_blocks()

    def read(self, requests, where, direct=True):
        requests = list(requests)
        ours = [(view, offset - self._shift) for view, offset in requests if offset >= self._split]
        if len(ours) < len(requests):
            self.shared.read([request for request in requests if request[1] < self._split], where, direct)
        if ours:
            self._private.read(ours, lambda offset: where(offset + self._shift), direct)

    def read_error(self, cause, offset, where):
        if offset < self._split:
            return self.shared.read_error(cause, offset, where)
        return self._private.read_error(cause, offset - self._shift, lambda offset: where(offset + self._shift))

    @property
    def direct_descriptor(self) -> int:
        return self.shared.direct_descriptor

    def redirect(self, reads):
        ours = reads["offset"] >= self._split
        reads["descriptor"][ours] = self._private.direct_descriptor
        reads["offset"][ours] -= self._shift

    def write(self, data, offset, where):
        self._private.write(data, offset - self._shift, lambda offset: where(offset + self._shift))

    def write_back(self):
        self._private.write_back()

    def write_back_range(self, offset, size, wait):
        self._private.write_back_range(offset - self._shift, size, wait)

    def settle(self):
        self._private.settle()

    def check_room(self, needed):
        self._private.check_room(needed)

    def close(self):
        for file in (self.shared, self._private):
            file.close()

    def remove_if_temporary(self):
        self._private.remove_if_temporary()
