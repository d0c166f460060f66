"""Loading of what pip compiles where it finds a compiler."""

import importlib
import logging
from typing import Any


def load(name: str) -> Any:
    """Returns a compiled module by its full name; None where it was left out, or cannot be loaded, which is logged."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None
    except ImportError as cause:
        logging.warning("programs do without %s, which cannot be loaded: %s; install kvjax again", name, cause)
        return None
