"""The compiled parts; everything else about the package is in setup.cfg. What cannot be compiled is left out: threads
make reads then (kvjax/store/reader.py), JAX calls back (kvjax/store/callbacks.py), and XLA does what kernels would
(kvjax/kernels.py)."""

import importlib.metadata
import importlib.util
import pathlib

from setuptools import Extension, setup


def extensions() -> list[Extension]:
    """None without jaxlib, which has the headers."""
    jaxlib = importlib.util.find_spec("jaxlib")
    if jaxlib is None or jaxlib.origin is None:
        return []
    include = pathlib.Path(jaxlib.origin).parent / "include"

    def extension(name: str, *sources: str, **options) -> Extension:
        return Extension(
            name, list(sources), include_dirs=[str(include)], optional=True,
            define_macros=[("JAXLIB", f'"{importlib.metadata.version("jaxlib")}"')],
            depends=[str(include / "xla/ffi/api/c_api.h"), "kvjax/ffi.h",
                     *(f"kvjax/store/{name}.h" for name in ("arguments", "callback", "reads", "rows"))], **options,
        )

    native = (f"kvjax/store/{name}.c" for name in ("native", "reads", "rows", "callback"))
    return [extension("kvjax.store.native", *native, extra_compile_args=["-fvisibility=hidden"]),
            extension("kvjax._kernels", "kvjax/kernels.c", extra_compile_args=["-O3"])]


setup(ext_modules=extensions())
