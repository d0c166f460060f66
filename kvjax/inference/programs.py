"""Compiled programs kept on disk, by JAX's persistent compilation cache."""

import os

import jax

from kvjax import _validate

DIRECTORY = "~/.cache/kvjax/programs"


def keep_programs(directory: str | os.PathLike | None = None) -> None:
    """Keeps every program that this process compiles on disk, for this process and later ones.

    On CPU all of kvjax's programs can be kept, those that call a store included, if the C part was compiled; elsewhere
    those that call a store cannot. Remove the directory to free its space.

    Args:
      directory: where; None = what JAX_COMPILATION_CACHE_DIR names, or `DIRECTORY`.

    Raises:
      ConfigError: `directory` is no path.
    """
    known = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if directory is not None or not known:
        jax.config.update("jax_compilation_cache_dir", _validate.path("directory", directory or DIRECTORY))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # decoding is many small programs
