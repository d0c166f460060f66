"""Entry point of every experiment.

    python -m experiments.main --config=configs/NAME.py[:PRESET] --workdir=DIR [--config.field=value ...]

Exit code 2 and one line on standard error mean that the input was bad.
"""

import errno
import importlib
import logging as standard_logging
import sys
from collections.abc import Callable
from typing import NoReturn

import ml_collections
from absl import app, flags, logging
from ml_collections import config_flags

from kvjax.errors import ConfigError, KvjaxError
from kvjax.inference.programs import keep_programs

_CONFIG = config_flags.DEFINE_config_file("config", None, "Configuration file, with an optional :preset.")
_QUOTES = "'\""
# Errors of disks and permissions, which the user can mend. Others, as of a closed file, are bugs.
_REFUSALS = (
    errno.EACCES, errno.EDQUOT, errno.EEXIST, errno.EFBIG, errno.EIO, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG,
    errno.ENOSPC, errno.ENOTDIR, errno.EPERM, errno.EROFS,
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory for results; running it again resumes.")


def run(argv: list[str]) -> None:
    """Runs the experiment of the configuration; bad input ends the program with one line."""
    if len(argv) > 1:
        stop(f"unexpected argument {argv[1]!r}; give --config.FIELD=VALUE, a value with spaces in quotes")
    logging.set_verbosity(logging.INFO)
    keep_programs()
    try:
        config = _CONFIG.value
        _experiment(config.experiment)(config, _WORKDIR.value)
    except KvjaxError as error:
        stop(error)
    except OSError as error:
        if "Configuration is not available" in str(error):
            stop("no configuration file at the given path; see configs/")
        if error.errno not in _REFUSALS:
            raise
        stop(f"{error}; make room or correct the path, or give another --workdir")


def _experiment(name: str) -> Callable[[ml_collections.ConfigDict, str], None]:
    """Returns `run` of a module of experiments; raises ConfigError if there is none."""
    try:
        module = importlib.import_module(f"experiments.{name}")
    except ModuleNotFoundError as error:
        if not f"experiments.{name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(f"no experiment {name!r}; see configs/ for the available ones") from error
    if not hasattr(module, "run"):
        raise ConfigError(f"experiments/{name.replace('.', '/')}.py is not an experiment; see configs/ for the others")
    return module.run


def stop(reason: object) -> NoReturn:
    """Ends the program with one line on standard error and exit code 2."""
    print(f"error: {' '.join(str(reason).split())}", file=sys.stderr)
    sys.exit(2)


def parse(argv: list[str]) -> list[str]:
    """Parses the flags; a field that the configuration does not have ends the program with one line."""
    try:
        return flags.FLAGS(argv)
    except AttributeError as error:  # the ConfigDict's message is the name of the field
        stop(f"unknown field {str(error).strip(_QUOTES)!r}; see the file given as --config for the available ones")
    except Exception as error:  # any error of a configuration file or a field is bad input
        reason = " ".join(str(error).split()).rpartition("Error: ")[2]
        stop(f"{reason} (see the docstring of the configuration file)" if "--config" in str(error) else reason)


def main() -> None:
    """Parses the flags and runs the experiment."""
    # JAX reports each accelerator that a machine lacks, which looks like a failure.
    standard_logging.getLogger("jax._src.xla_bridge").setLevel(standard_logging.WARNING)
    flags.mark_flags_as_required(["config", "workdir"])
    app.run(run, flags_parser=parse)


if __name__ == "__main__":
    main()
