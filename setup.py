"""The compiled parts; everything else about the package is in setup.cfg. Without a C compiler they are left out: then
threads make reads (kvjax/store/reader.py), and XLA does what kernels would (kvjax/kernels.py)."""

import importlib.util
import pathlib

from setuptools import Extension, setup

jaxlib = importlib.util.find_spec("jaxlib")
include = [str(pathlib.Path(jaxlib.origin).parent / "include")] if jaxlib and jaxlib.origin else []

setup(ext_modules=[
    Extension("kvjax.store.native", ["kvjax/store/native.c"], optional=True),
    Extension("kvjax._kernels", ["kvjax/kernels.c"], include_dirs=include, extra_compile_args=["-O3"], optional=True),
])
