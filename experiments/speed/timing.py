"""What tokens and calls take, what the store did for them, and the limits of the machine beside which that stands."""

import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.inference import decode
from kvjax.inference.plan import Plan, store_geometry
from kvjax.models.config import ModelConfig
from kvjax.models.transformer import apply_rows
from kvjax.ops import quantize
from kvjax.store import interface


def time_tokens(llm, plan, state, tokens, driver: str, observe: Callable[[decode.Step], None] | None = None):
    """Seconds of decoding each of `tokens`, and the state after them; the first one may compile.

    `observe` is called after each token, apart from the time.
    """
    times = []
    for token in tokens:
        started = time.perf_counter()
        fed = np.full(plan.batch, token, np.int32)
        done = decode.step(plan, llm.params, state, fed, driver=driver, donate=True)
        state = jax.block_until_ready((done.state, done.logits))[0]
        times.append(time.perf_counter() - started)
        if observe is not None:
            observe(done)
    return np.asarray(times), state


class Moved(NamedTuple):
    """Of a token, in all layers and sequences: blocks that it needed of a store, those of them that were read, and the
    valid rows in these."""

    needed: int
    read: int
    rows: int


def moved(done: decode.Step) -> Moved:
    stats = jax.device_get([report.stats for report in done.reports])
    return Moved(*(sum(int(getattr(one, name).sum()) for one in stats) for name in ("requested", "missed", "rows")))


def came_back(stats: list[Moved]) -> float:
    """Share of the blocks needed that were not read."""
    return 1.0 - sum(one.read for one in stats) / max(1, sum(one.needed for one in stats))


def traffic_row(before: interface.Stats, after: interface.Stats, stats: list[Moved], plan: Plan) -> dict:
    """What the store did for each of these steps, of a token in each sequence, or of one sequence.

    A step waits for `wait_ms_per_step` of the device's `io_ms_per_step`: the rest is hidden behind computing. Of
    `store_ms_per_step`, inside the store's reads, what is no waiting is finding, verifying and copying. Useful are the
    bytes of tokens that are in the blocks: neither empty rows nor what lies between blocks that are read at once.
    """
    steps, tokens = len(stats), len(stats) * plan.batch
    reads, seconds = after.reads - before.reads, after.io_seconds - before.io_seconds
    spec = plan.layers[-1].spec
    useful = store_geometry(plan).row_bytes // (spec.kv_heads // spec.block_heads) * sum(one.rows for one in stats)
    return {
        "bytes_read_per_token": (after.bytes_read - before.bytes_read) / tokens,
        "useful_bytes_per_read": useful / max(1, reads),
        "bytes_put_per_token": (after.bytes_put - before.bytes_put) / tokens,
        "reads_per_token": reads / tokens,
        "mispredicted_per_token": (after.mispredicted - before.mispredicted) / tokens,
        "store_ms_per_step": 1e3 * (after.read_seconds - before.read_seconds) / steps,
        "io_ms_per_step": 1e3 * seconds / steps,
        "wait_ms_per_step": 1e3 * (after.wait_seconds - before.wait_seconds) / steps,
        "effective_bandwidth": useful / max(seconds, 1e-9),
    }


def call_ms(function, *args, repeats: int = 25) -> np.ndarray:
    """Milliseconds of each call of a compiled function, warm."""
    jax.block_until_ready(function(*args))
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(1e3 * (time.perf_counter() - started))
    return np.asarray(times)


def median_ms(function, *args, repeats: int = 25) -> float:
    """Median milliseconds of a compiled function, warm."""
    return float(np.median(call_ms(function, *args, repeats=repeats)))


def memory_bandwidth() -> float:
    """Bytes per second of a product of 256 MiB of f32 with one vector, row by row: what decoding is bound by.

    The fastest of some: a limit is what can be had, not what was left by whatever else ran.
    """
    matrix, vector = jnp.ones((8192, 8192)), jnp.ones((1, 8192))
    return matrix.nbytes / (1e-3 * float(np.min(call_ms(jax.jit(apply_rows), matrix, vector, repeats=31))))


def weight_bytes(llm) -> int:
    """Bytes of weights that one token reads: all but the embedding rows it does not use."""
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.params))
    return total if llm.config.tie_embeddings else total - llm.params["embedding"]["embedding"].nbytes


def kv_bytes(config: ModelConfig, tokens: float, dtype: str = "float32") -> float:
    """Bytes of keys and values of `tokens` tokens in all layers."""
    vector = quantize.width(dtype, config.head_dim) * interface.DTYPES[quantize.stored_type(dtype)].itemsize
    return 2.0 * config.num_layers * config.num_kv_heads * vector * tokens
