"""A worker that dies costs the test that it ran and no other, and the run ends."""

import os
import pathlib
import re
import subprocess
import sys
import types

import pytest

from tests.plugins.groups import GroupScheduling, group_of

ROOT = pathlib.Path(__file__).parents[2]
DIES = "def test_dies():\n    os.kill(os.getpid(), signal.SIGKILL)\n"


def run_pytest(directory, files: dict[str, str]) -> tuple[int, str]:
    """Runs pytest with two workers and the plugin on files of these texts; returns its exit code and its output."""
    for name, text in files.items():
        (directory / f"{name}.py").write_text(f"import os, pathlib, signal, time\nimport pytest\n\n{text}")
    command = [sys.executable, "-m", "pytest", "-v", "-n", "2", "-p", "xdist", "-p", "tests.plugins.groups",
               "--rootdir", str(directory), "--import-mode=importlib", str(directory)]
    # Neither this run's settings nor plugins that take long to import.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    variables |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        command, cwd=directory, env=variables, text=True, capture_output=True, check=False, timeout=180,
    )
    return done.returncode, done.stdout + done.stderr


def passing(*names: str) -> str:
    return "\n".join(f"def test_{name}():\n    pass\n\n" for name in names)


def outcomes(output: str) -> dict[str, list[str]]:
    """Returns the tests that have each outcome, sorted."""
    found = re.findall(r"^\[gw\d+\].* (PASSED|FAILED) (\S+)", output, re.MULTILINE)
    return {outcome: sorted(test for kind, test in found if kind == outcome) for outcome in ("PASSED", "FAILED")}


@pytest.mark.parametrize("last", [False, True], ids=["in_the_middle", "in_the_last_group"])
def test_a_worker_that_dies_fails_its_test_and_the_others_run(tmp_path, last):
    files = {f"test_{i}": passing("a", "b", "c") for i in range(5)}
    files["test_5" if last else "test_2"] = passing("a") + DIES + passing("c")
    code, output = run_pytest(tmp_path, files)
    lost = "test_5.py::test_dies" if last else "test_2.py::test_dies"
    assert code == pytest.ExitCode.TESTS_FAILED, output
    assert f"crashed while running '{lost}'" in output
    assert outcomes(output) == {"FAILED": [lost], "PASSED": sorted(
        f"{file}.py::test_{test}" for file in files for test in "abc" if (file, test) != (lost[:6], "b")
    )}


def test_a_worker_that_is_left_alone_runs_groups_of_one_test(tmp_path):
    """The new worker begins when the other one has ended, so that nothing else will give it a second group."""
    ended = """def pytest_unconfigure(config):
    if hasattr(config, "workerinput"):
        pathlib.Path(__file__).with_name("ended").touch()
"""
    dies = """def test_dies():
    while not pathlib.Path(__file__).with_name("ended").exists():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)

"""
    files = {"test_0": dies + passing("a")} | {f"test_{i}": passing("a") for i in (1, 2, 3)}
    code, output = run_pytest(tmp_path, files | {"conftest": ended})
    assert code == pytest.ExitCode.TESTS_FAILED, output
    assert outcomes(output) == {"FAILED": ["test_0.py::test_dies"], "PASSED": [f"{file}.py::test_a" for file in files]}


def test_workers_that_die_together_fail_a_test_each(tmp_path):
    """The worker that replaces the first is not ready when the second one's tests are put back."""
    together = """def test_dies():
    pathlib.Path(__file__).with_suffix(".there").touch()
    while len(list(pathlib.Path(__file__).parent.glob("*.there"))) < 2:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)

"""
    files = {"test_0": together + passing("a"), "test_1": together + passing("a"), "test_2": passing("a"),
             "test_3": passing("a")}
    code, output = run_pytest(tmp_path, files)
    assert code == pytest.ExitCode.TESTS_FAILED, output
    assert outcomes(output) == {
        "FAILED": [f"test_{i}.py::test_dies" for i in range(2)], "PASSED": [f"test_{i}.py::test_a" for i in range(4)],
    }


class Worker:
    """A worker as the scheduler knows it, which runs nothing."""

    shutting_down = False

    def __init__(self, name: str, alive: bool = True):
        self.gateway, self.alive, self.sent = types.SimpleNamespace(id=name), alive, []

    def send_runtest_some(self, indices) -> None:
        if not self.alive:
            raise OSError("cannot send")
        self.sent += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def make_scheduler() -> GroupScheduling:
    """Returns a scheduler of two workers."""
    option = types.SimpleNamespace(loadscopereorder=False)
    return GroupScheduling(types.SimpleNamespace(getvalue=lambda name: ["popen"] * 2, option=option))


def test_tests_are_shared_out_when_the_worker_is_there_that_replaces_one_that_died_early():
    scheduler = make_scheduler()
    for name in ("gw0", "gw1", "gw2"):
        assert not scheduler.collection_is_completed
        worker = Worker(name)
        scheduler.add_node(worker)
        scheduler.add_node_collection(worker, ["test_0.py::test_0"])
        if name == "gw0":
            assert scheduler.remove_node(worker) is None
    assert scheduler.collection_is_completed


def test_a_worker_that_cannot_be_reached_loses_no_test():
    """Its tests are put back when xdist tells of its end, but for the one that it may have run."""
    tests = [f"test_{i}.py::test_{j}" for i in range(8) for j in range(2)]
    scheduler = make_scheduler()
    living, dead, new = Worker("gw0"), Worker("gw1", alive=False), Worker("gw2")
    for worker in (living, dead):
        scheduler.add_node(worker)
        scheduler.add_node_collection(worker, tests)
    scheduler.schedule()
    scheduler.add_node(new)
    lost = scheduler.remove_node(dead)  # before the new one has collected its tests
    scheduler.add_node_collection(new, tests)
    scheduler.schedule()
    for worker in (living, new):
        for index in worker.sent:  # to which completed tests add
            scheduler.mark_test_complete(worker, index)
    assert sorted([lost, *(tests[index] for worker in (living, new) for index in worker.sent)]) == tests


def test_a_worker_that_dies_after_its_tests_fails_the_run(tmp_path):
    dies = "def pytest_sessionfinish(session):\n    if hasattr(session.config, 'workerinput'):\n" + 8 * " "
    dies += "os.kill(os.getpid(), signal.SIGKILL)\n"
    code, output = run_pytest(tmp_path, {"conftest": dies, "test_0": passing("a", "b"), "test_1": passing("a", "b")})
    assert code == pytest.ExitCode.TESTS_FAILED, output
    assert "node down: Not properly terminated" in output and len(outcomes(output)["PASSED"]) == 4


def test_groups_are_files_and_in_the_laws_methods():
    laws = "tests/test_laws.py::test_a_law"
    assert group_of(f"{laws}[full-host-quest]") == group_of(f"{laws}s[quest]") != group_of(f"{laws}[full]")
    assert group_of("tests/test_new.py::test_one") == group_of("tests/test_new.py::test_other[host-quest]")
    assert group_of("tests/cache/test_tiers.py::test_one") == group_of("tests/inference/test_decode.py::test_other")
