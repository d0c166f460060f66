"""Loading of the extension modules that pip builds if it finds a C compiler."""

import importlib
import logging
from typing import Any


def load(name: str) -> Any:
    """Imports an extension module by its full name.

    Returns None if it was not built or cannot be loaded; the latter is logged.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None
    except ImportError as cause:
        logging.warning("%s cannot be loaded and is not used: %s; install kvjax again", name, cause)
        return None
