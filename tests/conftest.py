"""Test-wide settings: run-time type checks of every jaxtyping signature, one cache of compiled programs, and no
deadline for an example."""

import gc
import importlib.metadata
import os
import pathlib

import hypothesis
import jaxtyping
import pytest
from jaxtyping import install_import_hook
from xdist.scheduler import LoadScopeScheduling

# Most of the suite's time is compilation. Workers, modules and the processes that tests start share what they compile.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parents[1] / ".pytest_cache" / "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# The same operations in the same order, in machine code that takes half the time to make. It has no fused
# multiply-adds, with which this way of making it would round alike programs differently. Users' machine code is that of
# `XLA_FLAGS= scripts/test.sh`, with which `.ci/run` tries what is said about equal bits.
QUICK_TO_MAKE = (
    "--xla_backend_optimization_level=0", "--xla_cpu_max_isa=AVX", "--xla_cpu_parallel_codegen_split_count=1",
)
if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones do not know it, and end the process
    QUICK_TO_MAKE += ("--xla_cpu_use_fusion_emitters=false",)
os.environ.setdefault("XLA_FLAGS", " ".join(QUICK_TO_MAKE))

# Tracing makes objects by the million, few of them garbage: looking for it took 6 % of the laws' time.
gc.set_threshold(100_000)

# An example that compiles, on a busy machine, takes what it takes.
hypothesis.settings.register_profile("kvjax", deadline=None)
hypothesis.settings.load_profile("kvjax")
_HOOK = install_import_hook("kvjax", "beartype.beartype")
_TEARDOWNS: list[str] = []  # tests that this worker has run
_QUICK = ("tests/models/", "tests/store/", "tests/tasks/", "tests/tuner/")
# Files that use the programs of another one, among them some with callbacks, which are not cached on disk.
_SHARING = {
    "tests/test_parking.py": "tests/test_decode.py", "tests/test_prefetch.py": "tests/test_decode.py",
    "tests/test_tiers.py": "tests/test_decode.py", "tests/test_persistence.py": "tests/test_llm.py",
}


def pytest_addoption(parser):
    parser.addoption("--oracles", action="store_true", help="run the live comparisons with other libraries")
    parser.addoption("--slow", action="store_true", help="run the slow extras too")


def _has_backend(item) -> bool:
    """False for a test of what only programs on CPU have, elsewhere."""
    from kvjax.store.callbacks import default_backend  # imports JAX, which is to see what is set above

    asked = item.callspec.params.get("backend") if hasattr(item, "callspec") else None
    return asked != "buffer" or default_backend() == "buffer"


def pytest_collection_modifyitems(config, items):
    wanted = {"oracles": config.getoption("--oracles"), "slow": config.getoption("--slow")}
    chosen = [item for item in items if all(wanted[m] or item.get_closest_marker(m) is None for m in wanted)]
    chosen = list(filter(_has_backend, chosen))
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    # What hardly compiles goes last: its groups are short, so that the workers end at about the same time.
    items[:] = sorted(chosen, key=lambda item: item.nodeid.startswith(_QUICK))


def _programs(nodeid: str) -> str:
    """Tests of which this is the same compile the same programs: a file's, or in the laws one method's, named last."""
    file, _, test = nodeid.partition("::")
    file = _SHARING.get(file, file)
    return f"{file} {test.rstrip(']').split('[')[-1].split('-')[-1]}" if file.endswith("test_laws.py") else file


class _ByPrograms(LoadScopeScheduling):
    def _split_scope(self, nodeid):
        return _programs(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    config.option.loadscopereorder = False  # else groups of many tests came first
    return _ByPrograms(config, log)


@pytest.fixture
def unchecked():
    """Without run-time type checks, as users run it: they would come before the library's own errors."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Drops compiled programs: each holds memory maps, of which Linux gives a process 65,530. Beyond, XLA crashes.

    Not before it is time, and rather between tests that share none: other files may use the same programs.
    """
    _TEARDOWNS.append(item.nodeid)
    apart = nextitem is None or _programs(item.nodeid) != _programs(nextitem.nodeid)
    if nextitem is None or (apart and _maps() > 20_000) or (len(_TEARDOWNS) % 8 == 0 and _maps() > 40_000):
        import jax

        jax.clear_caches()


def _maps() -> int:
    """How many memory maps this process has, where the system tells."""
    maps = pathlib.Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 1 << 20


@pytest.fixture
def small_pages(monkeypatch):
    """Pages of 16 bytes, so that small blocks have several; for files that are read without O_DIRECT."""
    for module in ("base", "codec", "workers"):
        monkeypatch.setattr(f"kvjax.store.{module}.PAGE_BYTES", 16)


@pytest.fixture(scope="session")
def params():
    """Parameters of the model in `tiny`."""
    from tiny import make_params  # kvjax must not be imported before the hook is there

    return make_params()


@pytest.fixture(scope="session")
def tokens():
    """Two token sequences for the model in `tiny`."""
    from tiny import make_tokens

    return make_tokens()
