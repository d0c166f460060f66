"""Options of the suite, and fixtures that many tests use. How tests are run is in `tests/plugins`, one idea a file."""

import hypothesis
import pytest

pytest_plugins = [
    "tests.plugins.groups",
    "tests.plugins.compiled",  # sets what JAX reads when it is imported
    "tests.plugins.typechecks",
    "tests.plugins.usage",
]

# An example that compiles, on a busy machine, takes what it takes.
hypothesis.settings.register_profile("kvjax", deadline=None)
hypothesis.settings.load_profile("kvjax")


def pytest_addoption(parser):
    parser.addoption("--oracles", action="store_true", help="run the live comparisons with other libraries")
    parser.addoption("--slow", action="store_true", help="run the slow extras too")


def _has_backend(item) -> bool:
    """False for a test of what only programs on CPU have, elsewhere."""
    from kvjax.cache.callbacks import default_backend  # imports JAX, which is to see what is set above

    asked = item.callspec.params.get("backend") if hasattr(item, "callspec") else None
    return asked != "buffer" or default_backend() == "buffer"


def pytest_collection_modifyitems(config, items):
    wanted = {"oracles": config.getoption("--oracles"), "slow": config.getoption("--slow")}
    chosen = [item for item in items if all(wanted[m] or item.get_closest_marker(m) is None for m in wanted)]
    chosen = list(filter(_has_backend, chosen))
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


@pytest.fixture
def small_pages(monkeypatch):
    """Pages of 16 bytes, so that small blocks have several; for files that are read without O_DIRECT."""
    for module in ("geometry", "format.codec", "io.workers"):
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
