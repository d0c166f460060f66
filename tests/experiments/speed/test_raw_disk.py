"""The raw reader reads what it is told to, all of it, through the given system."""

import numpy as np
import pytest

from experiments.speed import raw_disk
from kvjax.store.io.system import SystemIO


class Noting(SystemIO):
    """Notes where and how much is read."""

    def __init__(self):
        self.reads = []

    def preadv(self, descriptor, views, offset):
        self.reads.append((offset, len(views[0])))
        return SystemIO.preadv(descriptor, views, offset)


@pytest.mark.parametrize("direct", [True, False])
def test_every_offset_is_read_once(tmp_path, direct):
    system = Noting()
    with raw_disk.random_file(tmp_path, 1 << 20) as path:
        raw = raw_disk.RawFile(path, 3, direct, system)
        offsets = raw_disk.random_offsets(np.random.default_rng(0), 1 << 20, 8192, 20)
        assert len(set(offsets)) == 20 and raw.seconds(offsets, 8192) > 0
        raw.forget_pages()
        raw.close()
    assert sorted(system.reads) == [(offset, 8192) for offset in offsets]


@pytest.mark.parametrize("make, words", [(lambda path: raw_disk.RawFile(path, 2), "short read at offset 1048576"),
                                         (raw_disk.RawRing, r"2 reads were submitted, and these landed: .*\b0\b")])
def test_reading_beyond_the_end_is_an_error(tmp_path, make, words):
    with raw_disk.random_file(tmp_path, 1 << 20) as path:
        raw = make(path)
        assert raw.seconds([8192, 4096], 4096) > 0
        with pytest.raises(OSError, match=words):
            raw.seconds([0, 1 << 20], 4096)
        raw.close()
