"""Which tests run in one worker, in which order, and what becomes of a run in which a worker dies."""

import contextlib

import pytest
from xdist.scheduler import LoadScopeScheduling

# Files that use the programs of another one, among them some with callbacks, which are not cached on disk.
_SHARING = {
    "tests/inference/test_layer_offload.py": "tests/inference/test_decode.py",
    "tests/inference/test_prefetch.py": "tests/inference/test_decode.py",
    "tests/cache/test_tiers.py": "tests/inference/test_decode.py",
    "tests/inference/saves/test_saves.py": "tests/test_llm.py",
    "tests/inference/saves/test_damaged_saves.py": "tests/test_llm.py",
}
# What hardly compiles goes last: its groups are short, so that the workers end at about the same time.
_QUICK = ("tests/models/", "tests/store/", "tests/eval/tasks/", "tests/calibration/tuner/")
_LOST = pytest.StashKey[bool]()


def group_of(nodeid: str) -> str:
    """Returns the name of the test's group, whose tests share compiled programs and run in one worker.

    That is the test's file, or in the laws the method, which their names end with.
    """
    file, _, test = nodeid.partition("::")
    file = _SHARING.get(file, file)
    return f"{file} {test.rstrip(']').split('[')[-1].split('-')[-1]}" if file.endswith("test_laws.py") else file


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.nodeid.startswith(_QUICK))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Shares out groups in the order of collection.

    xdist's `loadgroup` does not: it appends groups to ids of tests in a way that pytest 9.2 ignores.
    """
    config.option.loadscopereorder = False  # else groups of many tests came first
    return GroupScheduling(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    node.config.stash[_LOST] = node.config.stash.get(_LOST, False) or error is not None


def pytest_sessionfinish(session):
    """Fails a run in which a worker died between tests or after them, too: xdist only reports the others."""
    if session.config.stash.get(_LOST, False) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


class GroupScheduling(LoadScopeScheduling):
    """Shares out whole groups, and what a dead worker has not run.

    `LoadScopeScheduling` puts groups of a dead worker back that are complete, too, and gives a worker one group at a
    time. A worker begins a test when it knows the next one, so that it waits for ever after an empty group, or with a
    single test.
    """

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

    def remove_node(self, node) -> str | None:
        """Puts back what the worker has not run but the test that it ran when it died, which is returned."""
        groups = self.assigned_work.pop(node)
        if self.collection is None:  # what a worker collects counts for the first distribution
            self.registered_collections.pop(node, None)
        pending = [nodeid for group in groups.values() for nodeid, done in group.items() if not done]
        for name, group in groups.items():
            rest = {nodeid: False for nodeid, done in group.items() if not done and nodeid != pending[0]}
            if rest:
                self.workqueue[name] = rest
        for other in self.nodes:
            self._reschedule(other)
        return pending[0] if pending else None

    def _assign_work_unit(self, node) -> None:
        with contextlib.suppress(OSError):  # of a worker that has just died, whose tests `remove_node` puts back
            super()._assign_work_unit(node)

    def _reschedule(self, node) -> None:
        """Gives a worker groups until it has enough to begin, or ends it when there are none left."""
        if node not in self.registered_collections or node.shutting_down:
            return
        while self.workqueue and self._pending_of(self.assigned_work[node]) <= 2:
            self._assign_work_unit(node)
        if not self.workqueue:
            node.shutdown()
