"""A run tells what it takes, and fails beyond its memory when it is asked to keep to it."""

import types

import pytest

from tests.plugins import usage


def finish(monkeypatch, path, peaks, seconds, exitstatus=pytest.ExitCode.OK):
    """Ends a run of workers with these peaks after so many seconds; returns its exit code and what it told."""
    clock = iter([0.0, seconds])
    monkeypatch.setattr(usage.time, "monotonic", lambda: next(clock))
    run = usage._Run(types.SimpleNamespace(getoption=lambda name: path))
    for name, peak in peaks.items():
        node = types.SimpleNamespace(gateway=types.SimpleNamespace(id=name), workeroutput={"peak_mib": peak})
        run.pytest_testnodedown(node, None)
    session = types.SimpleNamespace(exitstatus=exitstatus)
    run.pytest_sessionfinish(session)
    return session.exitstatus, run._lines


@pytest.mark.parametrize("peak, seconds, code", [
    (usage.PEAK_MIB, usage.SECONDS, 0), (usage.PEAK_MIB + 1, 1, 1), (1, usage.SECONDS + 1, 0),
], ids=["within", "memory", "time"])
def test_a_run_beyond_its_memory_fails(monkeypatch, tmp_path, peak, seconds, code):
    path = tmp_path / "usage"
    exitstatus, lines = finish(monkeypatch, path, {"gw1": peak, "gw0": 1}, seconds)
    assert exitstatus == code
    assert path.read_text().splitlines() == ["suite", *lines]
    assert [line.split(",")[0] for line in lines[:-1]] == ["gw0", "gw1"]
    assert any("OVER" in line for line in lines) == (peak > usage.PEAK_MIB or seconds > usage.SECONDS)


def test_a_run_without_limits_only_tells(monkeypatch):
    assert finish(monkeypatch, None, {"gw0": usage.PEAK_MIB + 1}, usage.SECONDS + 1)[0] == pytest.ExitCode.OK


def test_a_run_that_failed_fails_as_it_did(monkeypatch, tmp_path):
    interrupted = pytest.ExitCode.INTERRUPTED
    assert finish(monkeypatch, tmp_path / "usage", {"gw0": usage.PEAK_MIB + 1}, 1, interrupted)[0] == interrupted
