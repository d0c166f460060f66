"""Compiled module of `kvjax.ops.kernels` (module.c)."""

JAXLIB: str
"""Version of jaxlib that the module was compiled for."""

def handlers() -> dict[str, object]:
    """Returns the XLA handler of each kernel by name, as a capsule."""
