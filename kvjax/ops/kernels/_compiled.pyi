"""The compiled part of `kvjax.ops.kernels` (module.c)."""

JAXLIB: str
"""Version that it was compiled for."""

def handlers() -> dict[str, object]:
    """XLA's handler of each kernel, as a capsule."""
