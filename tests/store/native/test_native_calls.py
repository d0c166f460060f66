"""Functions of the compiled part of asynchronous reads, called as a branch calls them."""

import errno
import os
import threading
import types

import numpy as np
import pytest

from kvjax.store.flash.lineage import Staged
from kvjax.store.format.pages import HEADER_BYTES, checksum
from kvjax.store.geometry import Geometry
from kvjax.store.io import aio
from kvjax.store.io.libaio import EVENT, IOCB
from kvjax.store.io.system import SystemIO
from kvjax.store.stats import FETCHED
from tests.store.conftest import skip_without

native = pytest.importorskip("kvjax.store.native._compiled")


@pytest.fixture(autouse=True)
def _needs_aio(tmp_path):
    skip_without("aio", tmp_path)


PAGE = 64
GEOMETRY = Geometry(1, 1, 2, 3, 4, 1024, "int8")


def sealed(payload: np.ndarray, pages: int = 0) -> np.uint64:
    """The checksum of a block that takes so many pages, 0 = all."""
    return np.uint64(checksum(payload[: pages * PAGE or None]) & ~0xFFFF | pages)


def landed(payloads: np.ndarray, sums: np.ndarray, targets: list[int], results: list[int]):
    """`native.land` of one read per payload[n, block_bytes], and what it left in out, done and results."""
    count, size = payloads.shape
    control, events = np.zeros(count, IOCB), np.zeros(count, EVENT)
    pages = (sums & np.uint64(0xFFFF)).astype(int)
    control["nbytes"] = np.where(pages, pages * PAGE, size)
    events["data"], events["result"] = np.arange(count), results
    out, done, seen = np.full((count, size), 77, np.uint8), np.zeros(count, np.uint8), np.zeros(count, np.int64)
    copied = native.land(events.view(np.uint8), control.view(np.uint8), np.arange(count), sums, np.array(targets), seen,
                         done, out, count, count, payloads.ctypes.data, count, size, size, PAGE, aio.XXH3)
    return copied, out, done, seen


@pytest.mark.parametrize("size", [1, 100, 240, 241, 1024, 5000, 16_384])
def test_checksums_are_those_of_the_package(size):
    payloads = np.random.default_rng(size).integers(0, 256, (3, size), np.uint8)
    sums = np.array([sealed(payload) for payload in payloads])
    copied, out, done, _ = landed(payloads, sums, [2, 0, 1], [size] * 3)
    assert copied == 3 and done.all()
    np.testing.assert_array_equal(out[[2, 0, 1]], payloads)


def test_land_copies_whole_sound_wanted_blocks_only():
    payloads = np.random.default_rng(0).integers(0, 256, (5, 512), np.uint8)
    sums = np.array([sealed(payload) for payload in payloads])
    sums[1] += np.uint64(1 << 16)
    results = [512, 512, -errno.EIO, 511, 512]
    copied, out, done, seen = landed(payloads, sums, [0, 1, 2, 3, -1], results)
    assert copied == 1 and done.tolist() == [1, 0, 0, 0, 0] and seen.tolist() == results
    np.testing.assert_array_equal(out[0], payloads[0])
    assert (out[1:] == 77).all()


def test_land_puts_zeros_after_the_pages_that_were_read():
    """Given blocks of 8 pages of which 3, all, and as many as no block has are said to be there."""
    payloads = np.random.default_rng(0).integers(0, 256, (3, 8 * PAGE), np.uint8)
    sums = np.array([sealed(payloads[0], 3), sealed(payloads[1]), sealed(payloads[2], 9)])
    copied, out, done, _ = landed(payloads, sums, [1, 0, 2], [3 * PAGE, 8 * PAGE, 9 * PAGE])
    assert copied == 2 and done.tolist() == [1, 1, 0]
    np.testing.assert_array_equal(out[0], payloads[1])
    np.testing.assert_array_equal(out[1], np.where(np.arange(8 * PAGE) < 3 * PAGE, payloads[0], 0))
    assert (out[2] == 77).all()


def test_control_joins_neighbours_up_to_a_piece():
    """Reads of the last of them only the pages that it takes; what lies between is read with them."""
    extents = np.array([3, 4, 5, 6, 9, 11, 12], np.int32)
    sums = np.array([0, 2, 1, 0, 3, 0xF0000, 2], np.uint64)
    control, starts = np.zeros(7, IOCB), np.zeros(7, np.int64)
    reads = native.control(extents, sums, control.view(np.uint8), starts, 3, 6, 1 << 20, 4096, 1024, 512, 9)
    assert starts[:reads].tolist() == [0, 3, 4, 5, 6]
    assert control["nbytes"][:reads].tolist() == [2 * 4096 + 1024, 4096, 3 * 1024, 4096, 2 * 1024]
    assert control["offset"][:reads].tolist() == [512 + 4096 * extent for extent in (3, 6, 9, 11, 12)]
    assert control["buffer"][:reads].tolist() == [(1 << 20) + 4096 * place for place in (0, 3, 4, 5, 0)]
    assert (control["descriptor"][:reads] == 9).all() and (control["data"][:reads] == np.arange(reads)).all()


class Watched(Staged):
    """Notes whether a lock is held whenever it is asked for an attribute of interest to C."""

    lock, held = threading.Lock(), ()

    def __getattribute__(self, name):
        if name == "complete":
            type(self).held += (self.lock.locked(),)
        return super().__getattribute__(name)


class Asked:
    """Holds what `native.fetch` asks a branch, and is told: two streams of three blocks, a file of eight extents."""

    def __init__(self, path, places: int = 8, **changes):
        rng = np.random.default_rng(0)
        self.payloads = rng.integers(0, 256, (8, 4096), np.uint8)
        path.write_bytes(bytes(HEADER_BYTES) + self.payloads.tobytes())
        self.arrays = {
            "rows": np.array([7, 5, 6, 2, 4, 1], np.int32), "shift": np.zeros(2, np.int64),
            "pending": np.zeros(6, np.uint8),
            "checksums": np.array([checksum(payload) & ~0xFFFF for payload in self.payloads], np.uint64),
            "block": np.array([[[0, 3, 2], [1, -1, 0]]], np.int32),
            "slot": np.array([[[1, 9, 0], [3, 9, 2]]], np.int32),
            "slots": np.full((1, 2, 4, 4, 1024), 77, np.uint8)} | changes
        self.ring, self.lock = aio.Ring(SystemIO(), places, 4096, 4096, piece=2), threading.Lock()
        self.descriptor = os.open(path, os.O_RDONLY)
        self.told, self.returned, self.watched = None, None, False
        self.fetched, self.flight, self.queue = np.zeros(1, FETCHED), {}, {}

    def stage(self, to: dict, block_id: int, value: int, *rows: int) -> None:
        """Rows of a block are staged, all of it where none is named."""
        staged = to[block_id] = Staged(GEOMETRY)
        for row in rows:
            staged.put_row(row, np.full(1024, value, np.uint8))
        if not rows:
            staged.put_block(np.full(4096, value, np.uint8))
        self.arrays["pending"][block_id] = 1 + staged.complete

    def fetch(self) -> bool:
        arrays = self.arrays
        try:
            return native.fetch(self, 0, 0, arrays["block"], arrays["slot"], arrays["slots"])
        finally:
            assert self.lock.acquire(blocking=False), "whatever happens, the lock is given back"
            self.ring.close(1.0)
            os.close(self.descriptor)

    def guess(self) -> bool:
        try:
            return native.guess(self, 0, 0, self.arrays["block"])
        finally:
            self.ring.close(1.0)
            os.close(self.descriptor)

    def _guess_window(self, layer, generation):
        return self._window(layer, generation)

    def _guessed(self, ring, layer, *numbers):
        self.told = numbers[:3]

    def _window(self, layer, generation):
        arrays = self.arrays
        streams, extents = (types.SimpleNamespace(**{name: arrays[name]}) for name in ("rows", "checksums"))
        always = (self.lock, streams, extents, arrays["shift"], arrays["pending"], self.fetched.view(np.uint8),
                  self.flight, self.queue, 1, 2, 3, 4, 1024, "B", 5.0)
        return self.ring, self.ring.layout, always, 0, self.descriptor, self.watched, None

    def _landed(self, layer, started, landed, block, slot, slots):
        assert block is self.arrays["block"] and slot is self.arrays["slot"] and slots is self.arrays["slots"]
        self.told = landed

    def _give_back(self, ring, extents):
        assert ring is self.ring
        self.returned = extents

    def check(self, *extents_by_slot: int | None) -> None:
        """Each flat slot has the payload of an extent, None = what it had."""
        for found, extent in zip(self.arrays["slots"].reshape(-1, 4096), extents_by_slot, strict=True):
            np.testing.assert_array_equal(found, 77 if extent is None else self.payloads[extent])


def test_fetch_puts_what_is_wanted_into_its_slots(tmp_path):
    asked = Asked(tmp_path / "file")
    assert asked.fetch() and asked.told is None and asked.returned == 4
    asked.check(6, 7, None, None, None, None, 2, 4)
    booked = dict(zip(FETCHED.names, asked.fetched[0].item(), strict=True))
    assert 0 < booked.pop("wait_seconds") <= booked.pop("io_seconds") < booked.pop("read_seconds")
    assert booked == {"reads": 3, "blocks_read": 4, "bytes_read": 4 * 4096, "prefetch_used": 0,
                      "mispredicted": 0}, "extents 6 and 7 are one read"


@pytest.mark.parametrize("places", [3, 4])
def test_what_is_read_has_to_fit_the_ring_and_not_what_is_asked(tmp_path, places):
    """Reads four of six that are asked for, as one stands for none and one is beyond the table."""
    asked = Asked(tmp_path / "file", places=places)
    assert asked.fetch() == (places == 4)
    asked.check(*((6, 7, None, None, None, None, 2, 4) if places == 4 else [None] * 8))


def test_fetch_tells_who_watches(tmp_path):
    asked = Asked(tmp_path / "file")
    asked.watched = True
    assert asked.fetch() and asked.returned == 4
    guess, (ring, blocks, began, ended) = asked.told
    assert guess[:2] == (None, 0) and (ring, blocks) == (asked.ring, 4) and began < ended


def test_fetch_lays_over_what_is_staged(tmp_path):
    """Rows of blocks 1 and 2 of the first stream and 0 of the second are staged, of the last also older ones, which the
    writer has; the first of them is not asked for."""
    asked = Asked(tmp_path / "file")
    asked.stage(asked.queue, 1, 44)
    asked.stage(asked.queue, 2, 55, 1, 3)
    asked.stage(asked.flight, 3, 66, 0, 1)
    asked.stage(asked.queue, 3, 77, 1, 2)
    assert asked.fetch()
    slots = asked.arrays["slots"].reshape(8, 4, 1024)
    (first, second), others = slots[[0, 6]], slots.reshape(8, 4096)[[1, 2, 3, 4, 5, 7]]
    np.testing.assert_array_equal(others, [asked.payloads[7], *np.full((4, 4096), 77), asked.payloads[4]])
    assert (first[[1, 3]] == 55).all() and (second[0] == 66).all() and (second[1:3] == 77).all()
    np.testing.assert_array_equal(first[[0, 2]], asked.payloads[6].reshape(4, 1024)[[0, 2]])
    np.testing.assert_array_equal(second[3], asked.payloads[2].reshape(4, 1024)[3])


def test_what_is_staged_is_found_with_the_lock_held(tmp_path, monkeypatch):
    asked = Asked(tmp_path / "file")
    asked.queue[3], asked.arrays["pending"][3] = Watched(GEOMETRY), 1
    monkeypatch.setattr(Watched, "lock", asked.lock)
    monkeypatch.setattr(Watched, "held", ())
    assert asked.fetch() and Watched.held == (True, False), "found with it, and laid over without"


def test_fetch_does_not_read_what_is_wholly_staged(tmp_path):
    """Given all of block 2 of the first stream, which was never written, and rows of block 0 of the second."""
    asked = Asked(tmp_path / "file", rows=np.array([7, 5, -1, 2, 4, 1], np.int32))
    asked.stage(asked.flight, 2, 44, 0)  # nothing of it is left
    asked.stage(asked.queue, 2, 55)
    asked.stage(asked.queue, 3, 66, 2)
    assert asked.fetch() and asked.returned == 3
    slots = asked.arrays["slots"].reshape(8, 4, 1024)
    assert (slots[0] == 55).all() and (slots[6, 2] == 66).all()
    slots[0], slots[6, 2] = 77, asked.payloads[2].reshape(4, 1024)[2]  # what was there before
    asked.check(None, 7, None, None, None, None, 2, 4)


def test_fetch_leaves_out_what_is_damaged(tmp_path):
    sums = Asked(tmp_path / "file").arrays["checksums"]
    sums[6] += 1 << 16
    asked = Asked(tmp_path / "file", checksums=sums)
    assert asked.fetch() and asked.told[1][:2] == (asked.ring, 4) and asked.ring.missed(4).tolist() == [0]
    assert asked.fetched["blocks_read"] == 3
    asked.check(None, 7, None, None, None, None, 2, 4)


@pytest.mark.parametrize("changes", [
    {"rows": np.array([7, 5, 6, 2], np.int32)}, {"checksums": np.zeros(7, np.uint64)},
    {"slot": np.array([[[4, 9, 0], [3, 9, 2]]], np.int32)}, {"slot": np.array([[[-1, 9, 0], [3, 9, 2]]], np.int32)},
    {"slot": np.zeros((1, 2, 2), np.int32)}, {"slot": np.zeros((2, 1, 3), np.int32)},
    {"block": np.zeros((1, 2, 3), np.int64)}, {"shift": np.zeros(1, np.int64)}, {"pending": np.zeros(5, np.uint8)},
    {"slots": np.zeros((1, 2, 4, 4, 1023), np.uint8)}, {"slots": np.zeros((1, 2, 4, 4096), np.uint8)},
    {"slots": np.zeros((1, 2, 4, 4, 512), np.float16)},
    {"slots": np.zeros((1, 2, 4, 4, 1024), np.int8)}, {"slot": np.zeros((1, 2, 3), np.float32)},
    {"slots": np.zeros((2, 1, 4, 4, 1024), np.uint8)}, {"slots": np.zeros((1, 2, 8, 4, 1024), np.uint8)[:, :, ::2]},
    {"slots": np.broadcast_to(np.zeros(1024, np.uint8), (1, 2, 4, 4, 1024))},
], ids=["beyond the table", "beyond the file", "slot too large", "negative slot", "fewer slots", "shape", "type",
        "streams", "pending", "size", "rank", "item", "kind", "index", "batch", "strided", "read-only"])
def test_fetch_leaves_the_unusual_to_others(tmp_path, changes):
    asked = Asked(tmp_path / "file", **changes)
    assert not asked.fetch() and asked.returned == 0 and asked.told is None and not asked.fetched["reads"][0]


@pytest.mark.parametrize("method", ["_window", "_landed"])
def test_what_a_branch_raises_comes_out_of_fetch(tmp_path, method):
    asked = Asked(tmp_path / "file")
    asked.watched = True

    def broken(*_):
        raise ZeroDivisionError(method)

    setattr(asked, method, broken)
    with pytest.raises(ZeroDivisionError, match=method):
        asked.fetch()
    assert (asked.returned is not None) == (method != "_window"), "the ring comes back"


@pytest.mark.parametrize("missing", ["complete", "address", "mask"])
def test_what_is_staged_in_another_way_is_an_error(tmp_path, missing):
    asked = Asked(tmp_path / "file")
    asked.stage(asked.queue, 3, 66, 2)
    delattr(asked.queue[3], missing)
    with pytest.raises(AttributeError, match=missing):
        asked.fetch()
    assert asked.returned is not None, "the ring comes back"


def test_guess_begins_to_read_what_is_in_the_file(tmp_path):
    """Extents 6 and 7 are one read; a block that was never written, and one that is wholly staged, are not read."""
    asked = Asked(tmp_path / "file")
    assert asked.guess() and asked.told == (4, 3, 3) and asked.ring.targets[:4].tolist() == [-1] * 4
    rows, pending = np.array([7, 5, -1, 2, 4, 1], np.int32), np.array([2, 0, 0, 1, 0, 0], np.uint8)
    asked = Asked(tmp_path / "file", rows=rows, pending=pending)
    assert asked.guess() and asked.told == (2, 2, 2) and asked.returned is None


def test_a_guess_of_nothing_gives_its_ring_back(tmp_path):
    asked = Asked(tmp_path / "file", block=np.full((1, 2, 3), 3, np.int32))
    assert asked.guess() and asked.told is None and asked.returned == 0


@pytest.mark.parametrize("changes", [
    {"rows": np.array([7, 5, 6, 2], np.int32)}, {"checksums": np.zeros(7, np.uint64)},
    {"block": np.zeros((1, 2, 3), np.int64)}, {"block": np.zeros((1, 2), np.int32)},
    {"block": np.zeros((2, 1, 3), np.int32)}, {"block": np.zeros((1, 2, 5), np.int32)},
], ids=["beyond the table", "beyond the file", "type", "rank", "batch", "too many"])
def test_guess_leaves_the_unusual_to_others(tmp_path, changes):
    asked = Asked(tmp_path / "file", **changes)
    assert not asked.guess() and asked.returned == 0 and asked.told is None


@pytest.mark.parametrize("method", ["_guess_window", "_guessed"])
def test_what_a_branch_raises_comes_out_of_guess(tmp_path, method):
    asked = Asked(tmp_path / "file")

    def broken(*_):
        raise ZeroDivisionError(method)

    setattr(asked, method, broken)
    with pytest.raises(ZeroDivisionError, match=method):
        asked.guess()
    assert (asked.returned is not None) == (method == "_guessed"), "the ring comes back"


class Rows:
    """Arrays of `native.put_rows`: two sequences of two heads with blocks of three rows of five numbers."""

    def __init__(self, room: int = 8, **changes):
        rng = np.random.default_rng(0)
        self.given = {"block": np.array([[1, 6], [0, 5]], np.int32), "row": np.array([[2, 0], [-1, 1]], np.int32),
                      "rows": rng.standard_normal((2, 2, 5), np.float32)} | changes
        self.to = np.zeros(room, np.int64), np.zeros(room, np.int32), np.zeros((room, 20), np.uint8)

    def put(self, count: int = 0, first: int = 100) -> int:
        return native.put_rows(*self.given.values(), self.to, count, first, (2, 2, 6, 3, 5, 4, "f"))


def test_rows_go_where_they_belong_after_those_that_are_there():
    """Block 6 and row -1 are nothing."""
    rows = Rows()
    assert rows.put() == 2 and rows.put(2, first=200) == 4
    ids, at, data = (array[:4] for array in rows.to)
    assert ids.tolist() == [101, 123, 201, 223] and at.tolist() == [2, 1, 2, 1]
    np.testing.assert_array_equal(data.view(np.float32), rows.given["rows"].reshape(4, 5)[[0, 3, 0, 3]])


@pytest.mark.parametrize("changes", [
    {"block": np.zeros((2, 2), np.int64)}, {"block": "block"}, {"row": np.zeros((2, 1), np.int32)},
    {"row": np.zeros((2, 2), np.float32)}, {"rows": np.zeros((2, 2, 5))}, {"rows": np.zeros((2, 2, 4), np.float32)},
    {"rows": np.zeros((2, 10), np.float32)}, {"rows": np.zeros((2, 2, 10), np.float32)[..., ::2]}, {"room": 3},
], ids=["type", "no array", "shape", "index", "item", "width", "rank", "strided", "room"])
def test_unusual_rows_are_left_to_others(changes):
    rows = Rows(**changes)
    assert rows.put() == -1 and not any(array.any() for array in rows.to)


def test_rows_for_arrays_of_other_sizes_are_an_error():
    rows = Rows()
    rows.to = rows.to[0], rows.to[1], np.zeros((8, 16), np.uint8)
    with pytest.raises(ValueError, match="sizes"):
        rows.put()
