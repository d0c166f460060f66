"""What run-length encoded keys cost: encoding a prompt, and one layer's token, beside the same cache without runs.

    python scripts/bench_rle.py [--tokens 1024,8192,32768] [--repeats 30]

One layer of 8 KV and 32 query heads of 64 numbers; made-up keys stand in runs of 1, 2, 4 and 8 equal ones. A token is
appended and attends all others, in `kvjax.codecs.run_cache` with its codec on and off; "before RoPE" with runs of keys
that are kept before rotation and turned as they are used. "Append" is its key's part alone: one comparison with the
open run, whatever the length. "Of a step" is what a token takes longer in a layer than without the codec, over one
layer's share of a decode step of `llama-1b-4l` with its full cache in memory at that context; the source has 2.8 %. The
limit is what has to be read of keys and values over the memory's bandwidth.
"""

import argparse
import dataclasses
import functools
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import kvjax
from experiments import throughput
from kvjax.codecs import run_cache
from kvjax.codecs.rle import Plain
from kvjax.models import rope
from kvjax.models.config import RopeConfig
from kvjax.planning import Slots

HEADS, GROUP, SIZE = 8, 4, 64


def made_up(tokens: int, run: int):
    """Keys [1, T, K, D] in runs, and values."""
    rng = np.random.default_rng(0)
    key = np.repeat(rng.standard_normal((1, -(-tokens // run), HEADS, SIZE), np.float32), run, axis=1)[:, :tokens]
    return jnp.asarray(key), jnp.asarray(rng.standard_normal(key.shape, np.float32))


def milliseconds(attend, cache, repeats: int) -> float:
    """Median of a compiled layer's token; the cache is handed on."""
    rng, times = np.random.default_rng(1), []
    q = jnp.asarray(rng.standard_normal((1, HEADS * GROUP, SIZE)), jnp.float32)
    key = jnp.asarray(rng.standard_normal((1, HEADS, SIZE)), jnp.float32)
    step = jax.jit(attend, donate_argnums=0)
    for _ in range(repeats + 2):
        start = time.perf_counter()
        _, cache = jax.block_until_ready(step(cache, q, key, key))
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[2:])


def append(cache, q, key, value):
    """The part of a token that encodes its key."""
    return (), dataclasses.replace(cache, keys=run_cache.append(cache, key))


def without_runs(key, value, repeats: int) -> float:
    """Milliseconds of a token in the same cache with its codec off, which the keys are to make it."""
    cache = run_cache.prefill(key, value, jnp.asarray([key.shape[1]]), capacity=key.shape[1] + repeats + 2)
    assert isinstance(cache.keys, Plain)
    return milliseconds(run_cache.attend, cache, repeats)


def with_runs(key, value, run: int, repeats: int) -> tuple[float, ...]:
    """Microseconds per prompt token of encoding one layer, and of appending a key; milliseconds of a token with keys
    after and before rotation."""
    more, length = repeats + 2, jnp.asarray([key.shape[1]])
    prefill = functools.partial(run_cache.prefill, capacity=key.shape[1] + more, slots=-(-key.shape[1] // run) + more)
    times = []
    for _ in range(6):
        start = time.perf_counter()
        jax.block_until_ready(prefill(key, value, length))
        times.append(1e6 * (time.perf_counter() - start) / key.shape[1])
    freqs = rope.inverse_frequencies(SIZE, RopeConfig())
    after, before = (milliseconds(run_cache.attend, prefill(key, value, length, freqs=one), repeats)
                     for one in (None, freqs))
    return statistics.median(times[1:]), 1e3 * milliseconds(append, prefill(key, value, length), repeats), after, before


def step_ms(llm, tokens: int, repeats: int) -> float:
    """One layer's share of a decode step."""
    plan, state, _, _ = throughput.filled_cache(llm, kvjax.full(), tokens, repeats + 4, None, Slots())
    times, _ = throughput.time_tokens(llm, plan, state, [0] * (repeats + 3), "fused")
    return 1e3 * float(np.median(times[3:])) / llm.config.num_layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default="1024,8192,32768")
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    llm, bandwidth = throughput.make_model("llama-1b-4l"), throughput.memory_bandwidth()
    print(f"memory bandwidth of a matrix-vector product: {bandwidth / 1e9:.1f} GB/s")
    print(f"{'tokens':>7}{'run':>5}{'encode us/token':>17}{'append us':>11}{'token ms':>10}{'without':>9}{'limit':>7}"
          f"{'of a step':>11}{'before RoPE':>13}{'of a step':>11}")
    for tokens in map(int, options.tokens.split(",")):
        plain, step = None, step_ms(llm, tokens, options.repeats)
        for run in (1, 2, 4, 8):
            key, value = made_up(tokens, run)
            plain = plain or without_runs(key, value, options.repeats)
            encode, one, after, before = with_runs(key, value, run, options.repeats)
            limit = 1e3 * value.nbytes * (1 + 1 / run) / bandwidth
            shares = [(token - plain) / step for token in (after, before)]
            print(f"{tokens:7,}{run:5}{encode:17.2f}{one:11.0f}{after:10.2f}{plain:9.2f}{limit:7.2f}{shares[0]:11.1%}"
                  f"{before:13.2f}{shares[1]:11.1%}")


if __name__ == "__main__":
    main()
