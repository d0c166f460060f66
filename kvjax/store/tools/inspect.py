"""A command that shows what is in a store file, and whether all of it is still what was written.

    python -m kvjax.store.tools.inspect FILE

Exit code 0: everything that any whole save needs is intact; 1: something is damaged, and the last lines say what; 2:
FILE is no store file. If a live store writes the file, changes made meanwhile may appear as damage.
"""

import sys

import numpy as np

from kvjax.errors import ChecksumMismatch, KvjaxError, ReadFailed, ShortRead, StoreError, StoreLocked
from kvjax.store.flash.creation import open_file
from kvjax.store.flash.recovery import Recovered, recover
from kvjax.store.format.codec import Codec, make_codec
from kvjax.store.format.pages import HEADER_BYTES, VERSION, Header
from kvjax.store.geometry import Geometry
from kvjax.store.io.file import BlockFile
from kvjax.store.io.system import SystemIO


def inspect(path: str) -> tuple[list[str], list[str]]:
    """Examines a store file.

    Args:
      path: the file.

    Returns:
      Lines that describe the file, and lines that name what is damaged.

    Raises:
      KvjaxError: the file is no store file, or cannot be read.
    """
    file, header = open_file(path, SystemIO(), direct=False, read_only=True)
    try:
        codec = make_codec(header.codec, header.geometry)
        lines = _describe_header(file, header)
        try:
            file.lock()
            file.unlock()  # at once: others may want to write before everything is read
        except StoreLocked:
            lines.append("in use        a live store holds the file and may change it while it is read")
        except StoreError as cause:
            lines.append(f"in use        unknown, as the file cannot be locked here: {cause}")
        saves, problems = recover(file, codec)
        lines += [_describe_save(save, header.geometry) for save in saves] or ["saves         none"]
        lines += _describe_space(file, header.geometry, saves)
        lines += _describe_pages(codec, saves[:1])
        checked, damaged = _verify(file, codec, saves)
        lines.append(f"checksums     {checked} blocks verified, {len(damaged)} damaged")
        return lines, problems + damaged
    finally:
        file.close()


def _describe_header(file: BlockFile, header: Header) -> list[str]:
    geometry = header.geometry
    return [
        f"file          {file.path}, {file.size} bytes, format version {VERSION}",
        f"model         {header.fingerprint}",
        f"geometry      {geometry.layers} layers, {geometry.batch} sequences, {geometry.kv_heads} KV heads, "
        f"{geometry.num_blocks} blocks of {geometry.block_rows} rows of {geometry.width} {geometry.dtype}, "
        f"codec {header.codec}",
        f"extents       {geometry.extent_bytes} bytes for blocks of {geometry.block_bytes}",
    ]


def _describe_save(save: Recovered, geometry: Geometry) -> str:
    written, log = save.blocks[0].size, sum(place.bytes for place in save.superblock.records)
    return (f"save {save.sequence:<8} generation {save.generation}, {written} of {geometry.total_blocks} blocks, "
            f"{len(save.records)} log records of {log} bytes together, metadata {_brief(save.metadata)}")


def _brief(metadata: bytes) -> str:
    text = metadata.decode(errors="replace")
    return repr(text) if len(text) <= 60 else f"{text[:60]!r}... of {len(metadata)} bytes"


def _describe_space(file: BlockFile, geometry: Geometry, saves: list[Recovered]) -> list[str]:
    """Describes who uses the extents, and how scattered the blocks of the newest save are."""
    size = -(-max(0, file.size - HEADER_BYTES) // geometry.extent_bytes)  # the last extent may be incomplete
    if not saves:
        return [f"occupancy     {size} extents, no save uses them"]
    newest = saves[0].blocks[1]
    older = np.setdiff1d(np.concatenate([save.blocks[1] for save in saves]), newest)
    log = np.unique(np.concatenate([place.extents(geometry.extent_bytes) for save in saves
                                    for place in save.superblock.records]))
    rest = size - newest.size - older.size - log.size
    scattered = _fragmentation(saves[0].blocks[0] // geometry.num_blocks, newest)
    return [f"occupancy     {size} extents: {newest.size} of the newest save, {older.size} of the one before, "
            f"{log.size} of the log, {rest} free",
            f"fragmentation {scattered:.3f} of the neighbouring blocks of a head do not lie side by side"]


def _describe_pages(codec: Codec, newest: list[Recovered]) -> list[str]:
    """Describes what the newest save saves by blocks that take fewer pages."""
    if not newest:
        return []
    sizes, whole = codec.sizes(newest[0].blocks[2]), codec.geometry.extent_bytes
    return [f"pages         {np.count_nonzero(sizes < whole)} of {sizes.size} blocks of the newest save take fewer, "
            f"{sizes.sum()} bytes instead of {sizes.size * whole}"]


def _fragmentation(streams: np.ndarray, extents: np.ndarray) -> float:
    """Returns the share of steps from one written block of a stream to the next that do not lead to the next extent."""
    steps = np.diff(extents)[np.diff(streams) == 0]
    return float(np.mean(steps != 1)) if steps.size else 0.0


def _verify(file: BlockFile, codec: Codec, saves: list[Recovered]) -> tuple[int, list[str]]:
    """Reads every block of every whole save; returns their number, and a line for each that is not what was written."""
    geometry = codec.geometry
    expected: dict[tuple[int, int], str] = {}  # (extent, checksum) -> name of the block
    for save in saves:
        for block_id, extent, right in zip(*(column.tolist() for column in save.blocks), strict=True):
            expected.setdefault((extent, right), f"{geometry.describe(block_id)} of save {save.sequence}")
    damaged, payload = [], memoryview(bytearray(geometry.block_bytes))
    for (extent, right), name in sorted(expected.items()):
        offset, sums = HEADER_BYTES + extent * geometry.extent_bytes, np.array([right], np.uint64)
        try:
            part = payload[:int(codec.sizes(sums)[0])]
            file.read([(part, offset)], lambda _, name=name: name, direct=False)
        except (ReadFailed, ShortRead) as cause:
            damaged.append(str(cause))
            continue
        if not codec.decode([payload], sums)[0]:
            damaged.append(f"{file.path}: {name} at offset {offset} is not what was written")
    return len(expected), damaged


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m kvjax.store.tools.inspect FILE", file=sys.stderr)
        return 2
    try:
        lines, damage = inspect(arguments[0])
    except ChecksumMismatch as cause:
        lines, damage = [], [str(cause)]
    except KvjaxError as cause:
        print(f"error: {cause}", file=sys.stderr)
        return 2
    print("\n".join([*lines, *(f"damaged       {line}" for line in damage)]))
    return 1 if damage else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
