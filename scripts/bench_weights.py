"""Speed of products of weights with few vectors, and of many, beside the memory's.

    python scripts/bench_weights.py [--rows=4864] [--columns=896] [--mib=256] [--repeats=9]

Each round times every case once, so that all of them meet the same noise; the first round is not counted. A case goes
through as many different matrices of rows x columns as fill --mib in f32, as a token goes through a model's layers, so
that caches hold none of them. "limit" reads as many bytes as the f32 matrices have, with as many threads as there are
processors, by the C library's search for a byte that is not there. "XLA" is the product without the kernel, of weights
that are widened first. With --many=N a second table has products with N vectors, in f32 and bfloat16, and NumPy's.
"""

import concurrent.futures
import ctypes
import functools
import os
import pathlib
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from kvjax.ops import kernels, weights

ROWS = flags.DEFINE_integer("rows", 4864, "rows of a matrix")
COLUMNS = flags.DEFINE_integer("columns", 896, "columns of a matrix")
MIB = flags.DEFINE_integer("mib", 256, "MiB of all matrices in f32")
REPEATS = flags.DEFINE_integer("repeats", 9, "rounds that are counted", lower_bound=5)
VECTORS = flags.DEFINE_multi_integer("vectors", [1, 2, 4, 8], "vectors of a product")
XLA = flags.DEFINE_bool("xla", True, "time XLA's products, too")
MANY = flags.DEFINE_integer("many", 0, "vectors of products in the second table; 0 = none")

KINDS = ("float32", "bfloat16", "int8", "int4")


def matrices(kind: str) -> list[weights.Matrix]:
    """Returns different weights of a type."""
    count = max(2, (MIB.value << 20) // (4 * ROWS.value * COLUMNS.value))
    numbers = np.random.default_rng(0).normal(size=(ROWS.value, COLUMNS.value)).astype(np.float32)
    if kind not in weights.KINDS:
        return [jnp.asarray(np.roll(numbers, i), kind) for i in range(count)]
    codes, scale = weights.codes_and_scale(numbers, kind)
    return [weights.QuantisedMatrix(jnp.asarray(np.roll(codes, i)), jnp.asarray(scale), numbers.shape,
                                    jnp.dtype("float32")) for i in range(count)]


def apply_all(every, x):
    """Returns the products with each matrix, one after another as in a model."""
    done = []
    for weight in every:
        done.append(weights.apply_rows(weight, x))
        x = x + (1e-30 * done[-1][..., :1]).astype(x.dtype)
    return done


def without_kernel(every, x):
    """Returns the same products by XLA alone; compiled while the kernel is switched off."""
    there, kernels.COMPILED = kernels.COMPILED, False
    try:
        return apply_all(every, x)
    finally:
        kernels.COMPILED = there


def plain_read(mib: int) -> tuple[Callable[[], None], int]:
    """Returns a function that reads some memory once, by a thread for each processor, and the bytes that it reads."""
    search = ctypes.CDLL(None).memchr
    search.restype, search.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    threads = len(os.sched_getaffinity(0))
    memory = [np.zeros((mib << 20) // threads, np.uint8) for _ in range(threads)]
    for part in memory:
        part.fill(0)  # pages of their own
    pool = concurrent.futures.ThreadPoolExecutor(threads)

    def read() -> None:
        assert not any(pool.map(lambda part: search(part.ctypes.data, 255, part.nbytes), memory))

    return read, sum(part.nbytes for part in memory)


def cases() -> dict[str, tuple]:
    """Returns, by name, a function to time and the bytes that it reads."""
    made: dict[str, tuple] = {"limit": plain_read(MIB.value)}
    for kind in KINDS:
        every = matrices(kind)
        size = sum(weight.nbytes for weight in every)
        for count in VECTORS.value:
            x = jnp.asarray(np.random.default_rng(1).normal(size=(count, COLUMNS.value)),
                            "bfloat16" if kind == "bfloat16" else "float32")
            made[f"{kind} x {count}"] = (functools.partial(jax.jit(apply_all), every, x), size)
            if XLA.value:
                made[f"{kind} x {count}, XLA"] = (functools.partial(jax.jit(without_kernel), every, x), size)
    return made


def many() -> dict[str, tuple]:
    """Returns products with many vectors, and the floating-point operations in each."""
    numbers = np.random.default_rng(0).normal(size=(ROWS.value, COLUMNS.value)).astype(np.float32)
    x = np.random.default_rng(1).normal(size=(MANY.value, COLUMNS.value)).astype(np.float32)
    work = 2 * numbers.size * len(x)
    made = {"NumPy float32": (lambda: x @ numbers.T, work)}
    for kind in KINDS:
        weight = matrices(kind)[0]
        some = jnp.asarray(x, "bfloat16" if kind == "bfloat16" else "float32")
        made[kind] = (functools.partial(jax.jit(weights.apply_rows), weight, some), work)
    return made


def timed(made: dict[str, tuple]) -> dict[str, np.ndarray]:
    """Returns the seconds of each case in each round but the first."""
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(REPEATS.value + 1):
        for name, (function, _) in made.items():
            started = time.perf_counter()
            jax.block_until_ready(function())
            seconds[name].append(time.perf_counter() - started)
    return {name: np.asarray(times[1:]) for name, times in seconds.items()}


def table(made: dict[str, tuple], unit: str) -> None:
    """Prints the fastest and the quartiles of each case, and its share of the first one's fastest."""
    seconds = timed(made)
    best = {name: work / seconds[name].min() for name, (_, work) in made.items()}
    first = next(iter(best.values()))
    print(f"{'':20} {'ms':>8} {'quartiles':>17} {unit:>8} {'share':>6}")
    for name, times in seconds.items():
        low, high = np.percentile(1e3 * times, [25, 75])
        print(f"{name:20} {1e3 * times.min():8.2f} {low:8.2f} {high:8.2f} {best[name] / 1e9:8.2f} "
              f"{best[name] / first:6.0%}", flush=True)


def main(_) -> None:
    table(cases(), "GB/s")
    if MANY.value:
        table(many(), "GFLOP/s")


if __name__ == "__main__":
    app.run(main)
