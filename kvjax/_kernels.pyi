"""The compiled part of `kvjax.kernels` (kernels.c)."""

def handlers() -> dict[str, object]:
    """XLA's handler of each kernel, as a capsule."""
