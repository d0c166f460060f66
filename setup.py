"""The compiled parts; everything else about the package is in setup.cfg. What cannot be compiled is left out: threads
make reads then (kvjax/store/reader.py), and XLA does what kernels would (kvjax/kernels.py)."""

import importlib.metadata
import importlib.util
import pathlib

from setuptools import Extension, setup


def kernels() -> list[Extension]:
    """None without jaxlib, which has the headers."""
    jaxlib = importlib.util.find_spec("jaxlib")
    if jaxlib is None or jaxlib.origin is None:
        return []
    include = pathlib.Path(jaxlib.origin).parent / "include"
    return [Extension(
        "kvjax._kernels", ["kvjax/kernels.c"], include_dirs=[str(include)], extra_compile_args=["-O3"], optional=True,
        define_macros=[("JAXLIB", f'"{importlib.metadata.version("jaxlib")}"')],
        depends=[str(include / "xla/ffi/api/c_api.h")],
    )]


setup(ext_modules=[Extension("kvjax.store.native", ["kvjax/store/native.c"], optional=True), *kernels()])
