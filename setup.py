"""The compiled parts; everything else about the package is in setup.cfg. What cannot be compiled is left out: threads
make reads then (kvjax/store/io/reader.py), JAX calls back (kvjax/cache/callbacks.py), and XLA does what kernels would
(kvjax/ops/kernels/)."""

import glob
import importlib.util
import pathlib

from setuptools import Extension, setup


def extensions() -> list[Extension]:
    """None without jaxlib, which has the headers."""
    jaxlib = importlib.util.find_spec("jaxlib")
    if jaxlib is None or jaxlib.origin is None:
        return []
    include = pathlib.Path(jaxlib.origin).parent / "include"

    def extension(package: str, name: str, *flags: str) -> Extension:
        return Extension(
            f"{package.replace('/', '.')}.{name}", sorted(glob.glob(f"{package}/*.c")), include_dirs=[str(include)],
            optional=True,
            depends=[str(include / "xla/ffi/api/c_api.h"), "kvjax/ffi.h", *glob.glob(f"{package}/*.h")],
            extra_compile_args=["-fvisibility=hidden", *flags],
        )

    return [extension("kvjax/store/native", "_compiled"), extension("kvjax/ops/kernels", "_compiled", "-O3")]


setup(ext_modules=extensions())
