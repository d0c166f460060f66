"""Compiled module of `kvjax.ops.kernels` (module.c)."""

XLA_FFI_API_MAJOR: int
XLA_FFI_API_MINOR: int
"""Version of XLA's foreign function interface that the module was compiled for."""

def handlers() -> dict[str, object]:
    """Returns the XLA handler of each kernel by name, as a capsule."""
