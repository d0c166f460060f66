"""Compiled programs: in what machine code tests make them, where they are shared, and when a process drops them.

To be loaded before JAX, which reads the environment once.
"""

import ctypes
import gc
import importlib.metadata
import os
import pathlib

import pytest

from tests.plugins.groups import group_of

# Most of the suite's time is compilation. Workers, modules and the processes that tests start share what they compile.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parents[2] / ".pytest_cache" / "xla"))
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

# A program takes a megabyte or two, and four of the 65,530 memory maps that Linux gives a process.
BETWEEN_GROUPS_MIB, WITHIN_A_GROUP_MIB = 1200, 1400


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    """Leaves what was imported out of every later search for garbage, which took a second each time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Drops compiled programs when they fill memory, and rather between groups, as tests of one group share them."""
    last = nextitem is None
    limit = BETWEEN_GROUPS_MIB if last or group_of(item.nodeid) != group_of(nextitem.nodeid) else WITHIN_A_GROUP_MIB
    if last or _resident_mib() > limit:
        drop_programs()


def drop_programs() -> None:
    """Frees every compiled program, and gives the memory back to the system where the C library can."""
    import jax

    jax.clear_caches()
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _resident_mib() -> float:
    """Returns how much memory this process occupies; infinite where the system does not tell."""
    statm = pathlib.Path("/proc/self/statm")
    if not statm.exists():
        return float("inf")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
