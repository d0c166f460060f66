"""The header page, and the geometry it carries."""

import dataclasses

import pytest

from kvjax.errors import ChecksumMismatch, ConfigError, FormatMismatch
from kvjax.store.format.pages import Header
from kvjax.store.geometry import PAGE_BYTES, Geometry
from tests.store.conftest import GEOMETRY, inspect_header

HEADER = Header(Geometry(3, 1, 8, 100, 64, 256, "bfloat16"), "llama/ünïcode")


def test_sizes():
    geometry = HEADER.geometry
    assert (geometry.row_bytes, geometry.block_bytes, geometry.extent_bytes) == (512, 32768, 32768)
    assert (GEOMETRY.block_bytes, GEOMETRY.extent_bytes) == (96, 4096)
    assert GEOMETRY.describe(GEOMETRY.total_blocks - 1) == "layer 1, sequence 1, head 1, block 5"


@pytest.mark.parametrize("change", [{"layers": 0}, {"width": -2}, {"dtype": "float64"}])
def test_impossible_geometry(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        dataclasses.replace(GEOMETRY, **change)


def test_header_survives_the_file(tmp_path):
    path = tmp_path / "cache.kv"
    path.write_bytes(HEADER.pack() + b"extents")
    assert inspect_header(path) == HEADER
    assert len(HEADER.pack()) == PAGE_BYTES


def test_fingerprint_must_fit():
    with pytest.raises(ConfigError, match="fingerprint"):
        Header(GEOMETRY, "x" * 300).pack()


@pytest.mark.parametrize("page, cause", [
    (b"", "not a kvjax"),
    (b"#!/bin/sh\n" * 1000, "not a kvjax"),
    (HEADER.pack()[:100], "not a kvjax"),
    (HEADER.pack()[:4000], "damaged"),
    (HEADER.pack().replace(b"bfloat16", b"bfloat61"), "damaged"),
    (HEADER.pack()[:8] + b"\x09" + HEADER.pack()[9:], "version 9"),
])
def test_other_pages_are_refused_by_name(tmp_path, page, cause):
    path = tmp_path / "other.kv"
    path.write_bytes(page)
    with pytest.raises((FormatMismatch, ChecksumMismatch), match=rf"other\.kv.*{cause}"):
        inspect_header(path)
