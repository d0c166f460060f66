"""Pages with right checksums and wrong numbers: right blocks or a typed error, nothing large, and nothing slow."""

import contextlib
import dataclasses
import random
import resource
import struct

import numpy as np
import pytest

from kvjax.errors import ChecksumMismatch, ConfigError, FormatMismatch, KvjaxError, NothingSaved, WriteFailed
from kvjax.store.flash.layout import LAYOUTS
from kvjax.store.flash.store import FlashStore
from kvjax.store.format.pages import HEADER_BYTES, MAX_SEQUENCE, SUPERBLOCKS, Header, checksum
from kvjax.store.geometry import MAX_GENERATION
from kvjax.store.tools import inspect
from kvjax.store.tools.mapped import open_saved
from tests.store.conftest import GEOMETRY, WIDE, Driver
from tests.store.hostile import Field, StoreFile, everything

EXTENT = GEOMETRY.extent_bytes
ROOM = 1 << 30  # bytes of memory that opening a small file may add


@pytest.fixture(scope="module", params=["raw", "rle"])
def file(request, tmp_path_factory) -> StoreFile:
    geometry = GEOMETRY if request.param == "raw" else WIDE
    return StoreFile(tmp_path_factory.mktemp("file") / "cache.kv", geometry, codec=request.param)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> StoreFile:
    return StoreFile(tmp_path_factory.mktemp("plain") / "cache.kv", GEOMETRY)


@pytest.fixture
def little_memory():
    """Lets the process have at most `ROOM` more than it has."""
    with open("/proc/self/statm") as numbers:
        have = int(numbers.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (have + ROOM, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def attack(file: StoreFile, path, data: bytes, capsys, exact: bool) -> None:
    """Opens a file in every way, reads all, writes a token, saves and opens again. Raises what is no KvjaxError."""
    path.write_bytes(data)
    assert inspect.main([str(path)]) in (0, 1, 2)
    capsys.readouterr()
    with contextlib.suppress(KvjaxError):
        mapped = open_saved(path)
        if mapped.codec.geometry == file.geometry:
            mapped.block(1, 1, 1, 5)
            mapped.block(0, 0, 0, 0)
    store = FlashStore(file=path, direct=False, threads=1, timeout=30.0)
    with contextlib.suppress(KvjaxError):  # of whatever geometry
        store.open(read_only=True).close()
    for read_only in (True, False):
        with contextlib.suppress(KvjaxError):
            use(file, store, read_only, exact)
    path.unlink()


def use(file: StoreFile, store: FlashStore, read_only: bool, exact: bool) -> None:
    driver = Driver(store.open(file.geometry, "fingerprint", read_only=read_only))
    try:
        check(file, everything(driver), exact)
        driver.append(1, 2, 9.0)
        driver.branch.flush()
        after = everything(driver)
        if not read_only:
            driver.branch.save(b"after")
    finally:
        driver.branch.discard()
    if not read_only:
        with contextlib.closing(store.open(file.geometry, "fingerprint")) as branch:
            assert branch.saves()[0].metadata == b"after"
            np.testing.assert_array_equal(everything(Driver(branch)), after)


def check(file: StoreFile, found: np.ndarray, exact: bool) -> None:
    if exact:
        assert any(np.array_equal(found, one) for one in file.contents[:2])
    assert not file.wrong(found)


def exact(field: Field) -> bool:
    """Whether a change of the field is told from a record that was made so: which block is which is the record's word.
    """
    return not field.name.startswith("record") or not any(word in field.name for word in ("id", "extent", "count"))


def test_what_is_not_changed_is_sound(file, tmp_path, capsys):
    path = tmp_path / "cache.kv"
    path.write_bytes(file.changed())
    assert path.read_bytes() == file.data and inspect.main([str(path)]) == 0
    use(file, FlashStore(file=path, direct=False, threads=1), False, True)


def test_each_number_of_each_page(file, tmp_path, capsys, little_memory):
    """One value of each, in turns."""
    chance = random.Random(1)
    for number, field in enumerate(file.fields):
        values = field.values(file.data, chance)
        changed = file.changed((field, values[number % len(values)]))
        attack(file, tmp_path / "cache.kv", changed, capsys, exact(field))


@pytest.mark.slow
def test_each_value_of_each_number(file, tmp_path, capsys, little_memory):
    chance = random.Random(2)
    for field in file.fields:
        for value in field.values(file.data, chance):
            attack(file, tmp_path / "cache.kv", file.changed((field, value)), capsys, exact(field))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_many_numbers_at_once(file, tmp_path, capsys, little_memory, seed):
    """Given 250 files with two to four other numbers, half of which belong to something else in the file."""
    chance = random.Random(seed)
    for _ in range(250):
        changes = []
        for field in chance.sample(file.fields, chance.randint(2, 4)):
            alike = [other for other in file.fields if other.kind == field.kind]
            value = chance.choice(alike).of(file.data) if chance.random() < 0.5 else chance.choice(
                field.values(file.data, chance))
            changes.append((field, value))
        attack(file, tmp_path / "cache.kv", file.changed(*changes), capsys, all(exact(field) for field, _ in changes))


# ---- what in particular is told

def opened(path, data: bytes, **settings) -> Driver:
    path.write_bytes(data)
    return Driver(FlashStore(file=path, direct=False, threads=1, **settings).open(GEOMETRY, "fingerprint"))


def newest(file: StoreFile) -> tuple[int, list[tuple[int, int]]]:
    """Slot of the newest save, and the places of its records."""
    slot = max((0, 1), key=lambda slot: file.field(f"superblock {slot} sequence").of(file.data))
    return slot, file.places(file.data, SUPERBLOCKS[slot])


def last(file: StoreFile, name: str) -> Field:
    """A field of the newest save's newest record."""
    return file.field(f"record {newest(file)[1][-1][0]} {name}")


@pytest.mark.parametrize("name, value, words", [
    ("sequence", 7, "have the sequence numbers"),
    ("generation", MAX_GENERATION + 1, "generation 2147483648"),
    ("count", 3, "claims 3 blocks"),
    ("count", 1 << 60, "claims"),
    ("metadata", 9, "9 bytes of metadata"),
    ("id 0", 47, "out of order"),
    ("id 3", 48, "beyond the cache"),
    ("extent 0", -2, "below -1"),
    ("extent 0", 1 << 20, "the file ends"),
    ("extent 0", (1 << 31) - 1, "the file ends"),
    ("extent 0", 1, "has another owner"),
])
def test_a_save_that_contradicts_itself_gives_way_to_the_one_before(plain, path, value, name, words, caplog):
    driver = opened(path, plain.changed((last(plain, name), value)))
    assert driver.branch.saves()[0].sequence == 2 and words in caplog.text
    np.testing.assert_array_equal(everything(driver), plain.contents[1])
    driver.append(1, 2, 9.0)
    expected = everything(driver)
    assert driver.branch.save() == 4, "a number that was seen is not used again"
    driver.branch.close()
    again = FlashStore(file=path).open()
    np.testing.assert_array_equal(everything(Driver(again)), expected)
    again.close()


@pytest.mark.parametrize("name, value, words", [
    ("sequence", 0, "of save 0"), ("sequence", MAX_SEQUENCE + 1, "of save 9223372036854775808"),
    ("count", 0, "names 0 log records"), ("count", 171, "names 171"), ("count", 1 << 63, "log records of save"),
    ("extent of record 0", 1 << 62, "reach to extent"), ("extent of record 0", 1 << 20, "the file ends"),
    ("bytes of record 0", 1 << 62, "overlap"), ("bytes of record 2", 1 << 20, "the file ends"),
    ("bytes of record 0", 30, "has 30 bytes"), ("bytes of record 1", 6 * EXTENT, "overlap"),
])
def test_a_superblock_that_makes_no_sense_is_passed_over(plain, path, name, value, words, caplog):
    slot, _ = newest(plain)
    driver = opened(path, plain.changed((plain.field(f"superblock {slot} {name}"), value)))
    assert driver.branch.saves()[0].sequence == 2 and words in caplog.text
    np.testing.assert_array_equal(everything(driver), plain.contents[1])
    driver.branch.close()


def test_saves_that_claim_the_same_extent_for_two_blocks(plain, path, caplog):
    """Given a save whose record lies where the other save has a block, and both are whole by themselves."""
    slot, places = newest(plain)
    extent, size = places[-1]
    start = HEADER_BYTES + extent * EXTENT
    count = struct.unpack_from("<Q", plain.data, start + 24)[0]
    lost = struct.unpack_from("<i", plain.data, start + 40 + 12 * count)[0]  # once that of the save before is
    taken = set(struct.unpack_from(f"<{24}i", plain.data, HEADER_BYTES + places[0][0] * EXTENT + 40 + 12 * 24))
    old = struct.unpack_from("<I", plain.data, start + 40 + 8 * count)[0]
    base = struct.unpack_from("<i", plain.data, HEADER_BYTES + places[0][0] * EXTENT + 40 + 12 * 24 + 4 * old)[0]
    assert base in taken and lost not in taken
    data = bytearray(plain.data)
    data[HEADER_BYTES + base * EXTENT:HEADER_BYTES + base * EXTENT + size] = plain.data[start:start + size]
    struct.pack_into("<Q", data, SUPERBLOCKS[slot] + 24 + 24 * (len(places) - 1), base)
    driver = opened(path, plain.sealed(data))
    assert [save.sequence for save in driver.branch.saves()] == [3] and "has another owner" in caplog.text
    np.testing.assert_array_equal(everything(driver), plain.contents[0])
    driver.branch.close()


def test_a_complete_record_that_names_a_block_without_a_place(plain, path):
    """Given a base that both saves have."""
    field = plain.field(f"record {newest(plain)[1][0][0]} extent 1")
    with pytest.raises(NothingSaved, match="lists blocks without extents"):
        opened(path, plain.changed((field, -1)))


def test_two_saves_of_one_number(plain, path, caplog):
    slot, _ = newest(plain)
    fields = [plain.field(f"superblock {1 - slot} sequence"), plain.field(
        f"record {plain.places(plain.data, SUPERBLOCKS[1 - slot])[-1][0]} sequence")]
    driver = opened(path, plain.changed(*((field, 3) for field in fields)))
    assert len(driver.branch.saves()) == 1 and caplog.text
    driver.branch.close()


def test_a_file_without_a_number_for_another_save(plain, path):
    slot, _ = newest(plain)
    changes = [(plain.field(f"superblock {slot} sequence"), MAX_SEQUENCE), (last(plain, "sequence"), MAX_SEQUENCE)]
    driver = opened(path, plain.changed(*changes))
    assert driver.branch.saves()[0].sequence == MAX_SEQUENCE
    with pytest.raises(WriteFailed, match="no number left"):
        driver.branch.save()
    np.testing.assert_array_equal(everything(driver), plain.contents[0])
    driver.branch.close()


def test_a_cache_that_has_had_as_many_tokens_as_can_be_counted(plain, path):
    driver = opened(path, plain.changed((last(plain, "generation"), MAX_GENERATION)))
    np.testing.assert_array_equal(everything(driver), plain.contents[0])
    assert driver.put_row(1, 2, 9.0)
    with pytest.raises(KvjaxError, match="committed tokens, the maximum"):
        driver.commit()
    driver.branch.abort(driver.branch.generation)
    np.testing.assert_array_equal(everything(driver), plain.contents[0])
    driver.branch.close()


@pytest.mark.parametrize("name, value", [
    ("begin", 4096), ("layers", 0), ("layers", 1 << 31), ("num_blocks", 1 << 25), ("kv_heads", 1 << 20),
    ("block_rows", (1 << 32) - 1), ("extent", 8192), ("extent", 0), ("dtype", b"\xff"), ("codec", b"zip"),
    ("length", 257), ("length", (1 << 32) - 1), ("fingerprint", b"\xff\xfe"),
])
def test_a_header_that_makes_no_sense(plain, path, name, value, capsys):
    path.write_bytes(plain.changed((plain.field(f"header {name}"), value)))
    for read_only in (False, True):
        with pytest.raises(FormatMismatch, match=r"cache\.kv"):
            FlashStore(file=path).open(read_only=read_only)
    assert inspect.main([str(path)]) == 2 and "error: " in capsys.readouterr().err


@pytest.mark.parametrize("change, words", [
    ({"num_blocks": (1 << 24) + 1}, "16777217 blocks per KV head"), ({"batch": 1 << 19}, "layers x batch x kv_heads"),
    ({"batch": 1 << 8, "num_blocks": 1 << 20}, "1073741824 blocks"), ({"width": 1 << 26}, "bytes per block"),
])
def test_what_no_file_may_ask_for_is_not_made(tmp_path, change, words):
    geometry = dataclasses.replace(GEOMETRY, **change)
    with pytest.raises(ConfigError, match=words):
        Header(geometry, "").pack()
    with pytest.raises(ConfigError, match=words):
        FlashStore(file=tmp_path / "cache.kv").create(geometry, "")
    assert not list(tmp_path.iterdir())


def test_a_file_with_a_hole_as_large_as_a_file_can_be_takes_no_memory(plain, path, little_memory):
    """Given one block that lies, all zeros, at the far end of a file of 60 GB that has nothing there."""
    far = 60 << 30
    path.write_bytes(plain.changed((last(plain, "extent 3"), (far - HEADER_BYTES) // EXTENT - 1)))
    with open(path, "r+b") as file:
        file.truncate(far)
    for layout in LAYOUTS:
        for read_only in (True, False):
            driver = Driver(FlashStore(file=path, direct=False, layout=layout).open(read_only=read_only))
            with pytest.raises(ChecksumMismatch):
                everything(driver)
            driver.append(4, 0, 1.0, layer=1)
            driver.branch.flush()
            driver.branch.discard()


def test_coded_blocks_that_are_none(tmp_path):
    """Given blocks in runs whose bytes hash to what they should, and whose first row begins no run, or all do."""
    file = StoreFile(tmp_path / "made.kv", WIDE, codec="rle")
    path = tmp_path / "cache.kv"
    codes = [(field, field.of(file.data)) for field in file.fields if " sum " in field.name]
    sums, value = next((field, value) for field, value in codes if value & 0x8000)
    where = file.field(sums.name.replace("sum", "extent")).of(file.data)
    start, size = HEADER_BYTES + where * WIDE.extent_bytes, (value & 0x7FFF) * 4096
    for bits in (0x00, 0xF0):
        data = bytearray(file.data)
        data[start] = bits
        told = value & 0xFFFF
        struct.pack_into("<Q", data, sums.offset, checksum(data[start:start + size]) & ~0xFFFF | told)
        path.write_bytes(file.sealed(data))
        driver = Driver(FlashStore(file=path, direct=False).open())
        with pytest.raises(ChecksumMismatch):
            everything(driver)
        driver.branch.discard()


def test_nothing_whole_is_left(plain, path):
    changes = [(plain.field(f"superblock {slot} count"), 0) for slot in range(2)]
    with pytest.raises(NothingSaved, match="names 0 log records"):
        opened(path, plain.changed(*changes))
