"""Peak memory of each worker and the seconds of a run, printed at its end; memory is held to its limit if asked."""

import pathlib
import resource
import sys
import time

import pytest

PEAK_MIB, SECONDS = 2048, 15 * 60  # a worker's, and a run's on two cores


def pytest_addoption(parser):
    parser.addoption("--limits", metavar="FILE", type=pathlib.Path, help=(
        f"fail if a worker takes more than {PEAK_MIB:,} MiB; the file says how much, and how long the run took"
    ))


def pytest_configure(config):
    config.pluginmanager.register(_Worker() if hasattr(config, "workerinput") else _Run(config), "kvjax-usage")


def _peak_mib() -> float:
    """Returns the most memory that this process has occupied."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


class _Worker:
    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session):
        session.config.workeroutput["peak_mib"] = _peak_mib()


class _Run:
    """Collects what workers tell at their end; without workers the tests' process is this one."""

    def __init__(self, config):
        self._limits = config.getoption("--limits")
        self._began = time.monotonic()
        self._peaks: dict[str, float] = {}
        self._lines: list[str] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error):
        if error is None:
            self._peaks[node.gateway.id] = node.workeroutput["peak_mib"]

    def pytest_sessionfinish(self, session):
        seconds, peaks = time.monotonic() - self._began, self._peaks or {"the run": _peak_mib()}
        used = [(f"{name}, MiB at peak", peak, PEAK_MIB) for name, peak in sorted(peaks.items())]
        used.append(("seconds", seconds, SECONDS))
        self._lines = [f"{name}: {value:,.0f}, {'OVER' if value > limit else 'within'} the limit of {limit:,}"
                       for name, value, limit in used]
        if self._limits is not None:
            self._limits.write_text("\n".join(["suite", *self._lines]) + "\n")
            # The seconds are those of the machine, too: a busy one is no fault of the suite's.
            if any(peak > PEAK_MIB for peak in peaks.values()) and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.section("memory and time")
        for line in self._lines:
            terminalreporter.line(line)
