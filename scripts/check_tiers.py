"""Comparison of decoding over memory, over two tiers and over three, on any device that JAX has.

    python scripts/check_tiers.py [--methods=quest,dynakv] [--drivers=fused,staged] [--host=192]

The reference model reads kvjax's own source and then 40 random tokens, at a budget of 256. For each way of keeping
blocks the script prints the largest difference of logits from those of blocks in memory, the blocks read from the
store, the kind of memory of the host's slots before and after, and the milliseconds of a token.
JAX_DEFAULT_MATMUL_PRECISION=highest keeps a GPU from rounding products differently in each program.
"""

import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import numpy as np
from absl import app, flags

import kvjax
from experiments import common
from experiments.speed import timing
from kvjax.cache.tiers import TieredPool
from kvjax.inference import decode
from kvjax.inference.plan import Slots, State

METHODS = flags.DEFINE_list("methods", ["quest", "dynakv"], "methods, at a budget of 256")
DRIVERS = flags.DEFINE_list("drivers", ["fused", "staged"], "drivers")
HOST = flags.DEFINE_integer("host", 192, "slots per KV head in host memory")

_TOKENS, _WARM_UP = 40, 4


def kinds(state: State) -> str:
    """Returns the memory of the host's slots, "-" without any."""
    pools = [layer.pool for layer in state.layers if isinstance(layer.pool, TieredPool)]
    return ", ".join({pool.host_rows.sharding.memory_kind for pool in pools}) or "-"


def decoded(llm: kvjax.LLM, context: str, name: str, driver: str, **where: Any):
    """Returns the logits of every token, blocks read, memory before and after, and the median milliseconds of a
    token."""
    cache = llm.prefill(context, method=kvjax.METHODS[name](budget=256, window=32), **where)
    tokens, logits, before = np.random.default_rng(0).integers(10, 2000, _TOKENS), [], kinds(cache.state)
    times, state = timing.time_tokens(
        llm, cache.plan, cache.state, tokens, driver, lambda done: logits.append(np.asarray(done.logits))
    )
    reads = cache.branch.stats().blocks_read if cache.branch is not None else 0
    cache.close()
    return np.stack(logits), reads, before, kinds(state), 1e3 * np.median(times[_WARM_UP:])


def main(argv):
    kvjax.keep_programs()
    del argv
    llm = common.load_model("")
    context = (pathlib.Path(decode.__file__).read_text() * 3)[:6000]
    ways = {"memory": {}, "two tiers": {"store": kvjax.HostStore()},
            "three tiers": {"store": kvjax.HostStore(), "slots": Slots(host=HOST.value)}}
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, matrix products "
          f"{jax.config.jax_default_matmul_precision or 'of default precision'}")
    for name in METHODS.value:
        for driver in DRIVERS.value:
            expected = None
            for label, where in ways.items():
                logits, reads, before, after, took = decoded(llm, context, name, driver, **where)
                expected = logits if expected is None else expected
                print(f"{name:>8} {driver:>7} {label:>12}: {np.abs(logits - expected).max():.1e} apart, {reads:6,} "
                      f"blocks read, host's slots {before} -> {after}, {took:.2f} ms", flush=True)


if __name__ == "__main__":
    app.run(main)
