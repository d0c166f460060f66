"""Times of tokens and calls, counts of the store's work for them, and limits of the machine to compare with."""

import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.inference import decode
from kvjax.inference.plan import Plan, store_geometry
from kvjax.models.config import ModelConfig
from kvjax.ops import quantize
from kvjax.ops.weights import apply_rows
from kvjax.store.geometry import DTYPES
from kvjax.store.stats import Stats


def time_tokens(llm, plan, state, tokens, driver: str, observe: Callable[[decode.Step], None] | None = None):
    """Decodes tokens one by one and times each.

    Args:
      llm: the model.
      plan: the cache's.
      state: the cache; it is donated.
      tokens: token ids; each goes to all sequences.
      driver: "staged" or "fused".
      observe: called after each token, outside the timed part.

    Returns:
      Seconds of each token (the first may include compiling), and the state after the last.
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
    """Blocks of one token, over all layers and sequences: needed from the store, read of those, and the valid rows in
    the read ones."""

    needed: int
    read: int
    rows: int


def moved(done: decode.Step) -> Moved:
    """Returns the blocks and rows that a step moved."""
    stats = jax.device_get([report.stats for report in done.reports])
    return Moved(*(sum(int(getattr(layer, name).sum()) for layer in stats) for name in ("requested", "missed", "rows")))


def came_back(stats: list[Moved]) -> float:
    """Returns the share of the needed blocks that were not read."""
    return 1.0 - sum(step.read for step in stats) / max(1, sum(step.needed for step in stats))


def traffic_row(before: Stats, after: Stats, stats: list[Moved], plan: Plan) -> dict:
    """Returns the store's work per step (a token in each sequence) or per token of one sequence.

    A step waits for `wait_ms_per_step` of the device's `io_ms_per_step`: the rest is hidden behind computing.
    `store_ms_per_step` is the time inside the store's reads; without the waiting, it is finding, verifying and
    copying. Useful bytes are those of tokens in the blocks: neither empty rows nor gaps between blocks that are read
    at once.

    Args:
      before: statistics of the branch before the steps.
      after: statistics after them.
      stats: blocks moved in each step.
      plan: the cache's.

    Returns:
      Figures by name: bytes, reads, milliseconds, and bytes per second.
    """
    steps, tokens = len(stats), len(stats) * plan.batch
    reads, seconds = after.reads - before.reads, after.io_seconds - before.io_seconds
    spec = plan.layers[-1].spec
    useful = store_geometry(plan).row_bytes // (spec.kv_heads // spec.block_heads) * sum(step.rows for step in stats)
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
    """Returns the milliseconds of each of `repeats` calls of a compiled function, after a call that warms it up."""
    jax.block_until_ready(function(*args))
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(1e3 * (time.perf_counter() - started))
    return np.asarray(times)


def median_ms(function, *args, repeats: int = 25) -> float:
    """Returns the median milliseconds of a compiled function, warm."""
    return float(np.median(call_ms(function, *args, repeats=repeats)))


def memory_bandwidth() -> float:
    """Returns the bytes per second of a product of 256 MiB of f32 with one vector, row by row: the limit of decoding.

    The fastest of several calls counts, as other work on the machine must not lower the limit.
    """
    matrix, vector = jnp.ones((8192, 8192)), jnp.ones((1, 8192))
    return matrix.nbytes / (1e-3 * float(np.min(call_ms(jax.jit(apply_rows), matrix, vector, repeats=31))))


def weight_bytes(llm) -> int:
    """Returns the bytes of weights that one token reads: all but the embedding rows it does not use."""
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.params))
    return total if llm.config.tie_embeddings else total - llm.params["embedding"]["embedding"].nbytes


def kv_bytes(config: ModelConfig, tokens: float, dtype: str = "float32") -> float:
    """Returns the bytes of keys and values of `tokens` tokens in all layers."""
    vector = quantize.width(dtype, config.head_dim) * DTYPES[quantize.stored_type(dtype)].itemsize
    return 2.0 * config.num_layers * config.num_kv_heads * vector * tokens
