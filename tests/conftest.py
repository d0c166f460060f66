"""Test-wide settings: runtime type checks of every jaxtyping signature, small thread pools."""

import pytest
from jaxtyping import install_import_hook

_HOOK = install_import_hook("kvjax", "beartype.beartype")


def pytest_addoption(parser):
    parser.addoption("--oracles", action="store_true", help="run the live comparisons with other libraries")
    parser.addoption("--slow", action="store_true", help="run the slow extras too")


def pytest_collection_modifyitems(config, items):
    wanted = {"oracles": config.getoption("--oracles"), "slow": config.getoption("--slow")}
    chosen = [item for item in items if all(wanted[m] or item.get_closest_marker(m) is None for m in wanted)]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


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


@pytest.fixture(scope="module", autouse=True)
def _drop_compiled_programs():
    """Every compiled program holds memory maps, of which Linux gives a process 65,530: beyond, XLA crashes."""
    yield
    import jax

    jax.clear_caches()
