"""Programs are dropped when they fill memory, between groups of tests before within one."""

import gc
import types

import jax
import pytest

from tests.plugins import compiled

HERE, BESIDE, ELSEWHERE = (types.SimpleNamespace(nodeid=f"tests/{test}") for test in ("a.py::b", "a.py::c", "d.py::e"))


@pytest.mark.parametrize("nextitem, mib, dropped", [
    (BESIDE, compiled.WITHIN_A_GROUP_MIB - 1, False), (BESIDE, compiled.WITHIN_A_GROUP_MIB + 1, True),
    (ELSEWHERE, compiled.BETWEEN_GROUPS_MIB - 1, False), (ELSEWHERE, compiled.BETWEEN_GROUPS_MIB + 1, True),
    (None, 1, True),
], ids=["within_few", "within_many", "between_few", "between_many", "last"])
def test_programs_are_dropped_when_they_fill_memory(monkeypatch, nextitem, mib, dropped):
    monkeypatch.setattr(compiled, "_resident_mib", lambda: mib)
    program = jax.jit(lambda x: x + 1)
    program(1)
    compiled.pytest_runtest_teardown(HERE, nextitem)
    assert program._cache_size() == (not dropped)


def test_what_was_imported_is_not_searched_for_garbage():
    assert gc.get_freeze_count() > 100_000


def test_memory_is_that_of_this_process():
    held = bytearray(range(256)) * (1 << 18)  # 64 MiB that are written
    before = compiled._resident_mib()
    assert before > 64
    del held
    assert compiled._resident_mib() < before - 32
