"""Run-time type checks of every jaxtyping signature in the library, which is not to be imported before this."""

import jaxtyping
import pytest

_HOOK = jaxtyping.install_import_hook("kvjax", "beartype.beartype")


@pytest.fixture
def unchecked():
    """Without run-time type checks, as users run it: they would come before the library's own errors."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
