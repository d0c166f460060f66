"""Seconds to compile a token by the number of layers, and what a loop over stacked layers would cost a token.

    python scripts/bench_compile.py [--methods=quest,dynakv] [--layers=2,32] [--repeats=5]

The first table is the first token's time less the second's: tracing and compiling, with nothing kept from before. The
mark is 1.3 times the least number of layers. The second is of matrices alone: a chain of products of a vector with the
weights of L layers, each an array of its own as kvjax has them, or one stacked array that a loop goes through. It is
the least that a loop over layers adds or saves, before any cache is in it. Ratios are of the same repeat.
"""

import functools
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import kvjax
from kvjax.inference import decode, prefill
from kvjax.inference.plan import make_plan
from kvjax.models.config import ModelConfig
from kvjax.models.transformer import Transformer

METHODS = flags.DEFINE_list("methods", ["full", "quest", "dynakv"], "methods, with a budget of 64 tokens")
LAYERS = flags.DEFINE_list("layers", ["2", "32"], "numbers of layers, the least first")
DRIVERS = flags.DEFINE_list("drivers", ["staged", "fused"], "drivers")
REPEATS = flags.DEFINE_integer("repeats", 5, "times that each is compiled, or each chain timed", lower_bound=5)
MARK = 1.3
CHAINS = ((32, 1024), (16, 2048))  # layers, and rows and columns of each matrix


def token_of(layers: int, method: str):
    """Returns a function that takes one token by a driver."""
    config = ModelConfig(family="llama", vocab_size=128, hidden_size=64, intermediate_size=128, num_layers=layers,
                         num_heads=4, num_kv_heads=2, head_dim=16, max_position=512)
    budget = {} if kvjax.METHODS[method].attends_all else {"budget": 64}
    plan = make_plan(config, kvjax.METHODS[method](dense_layers=0, **budget), 1, 512)
    dummy = jnp.zeros((1, 4), jnp.int32)
    params = Transformer(config).init(jax.random.key(0), dummy, dummy)["params"]
    state, _ = prefill.prefill(plan, params, np.zeros((1, 256), np.int32), np.array([256], np.int32))
    last = np.zeros(1, np.int32)

    def token(driver: str) -> float:
        begin = time.perf_counter()
        jax.block_until_ready(decode.step(plan, params, state, last, driver=driver, donate=False).logits)
        return time.perf_counter() - begin

    return token


def compiled_in(token, driver: str) -> float:
    """Returns the seconds to trace and compile a token."""
    jax.clear_caches()
    decode.compiled_token.cache_clear()
    first = token(driver)
    return first - token(driver)


def spread(values: np.ndarray, digits: int) -> str:
    """Returns the median with the least and the most."""
    return f"{np.median(values):.{digits}f} ({values.min():.{digits}f}, {values.max():.{digits}f})"


def compile_times() -> None:
    """Prints the table of compile times."""
    counts = [int(layers) for layers in LAYERS.value]
    print(f"{'method':>8} {'driver':>7} " + " ".join(f"{f'{count} layers, s':>20}" for count in counts)
          + f" {f'times {counts[0]} layers; mark {MARK}':>32}")
    for method in METHODS.value:
        tokens = [token_of(count, method) for count in counts]
        for driver in DRIVERS.value:
            found = np.array([[compiled_in(token, driver) for token in tokens] for _ in range(REPEATS.value)]).T
            ratio = found[-1] / found[0]
            print(f"{method:>8} {driver:>7} " + " ".join(f"{spread(one, 2):>20}" for one in found)
                  + f" {spread(ratio, 2):>24} {'met' if np.median(ratio) <= MARK else 'missed':>7}", flush=True)


@functools.partial(jax.jit, static_argnums=1)
def apart(x, layers, weights):
    """The chain with an array for each layer."""
    for i in range(layers):
        x = jnp.tanh(weights[i] @ x)
    return x


@jax.jit
def stacked(x, weights):
    """The chain as a loop over one array."""
    return jax.lax.scan(lambda x, weight: (jnp.tanh(weight @ x), None), x, weights)[0]


def seconds(run, count: int = 5) -> float:
    """Returns the mean seconds of a call."""
    begin = time.perf_counter()
    for _ in range(count):
        jax.block_until_ready(run())
    return (time.perf_counter() - begin) / count


def chains() -> None:
    """Prints the table of chains."""
    print(f"\n{'layers':>7} {'size':>6} {'apart, ms':>22} {'stacked, ms':>22} {'stacked over apart':>20}")
    for layers, size in CHAINS:
        drawn = np.random.default_rng(0).normal(size=(layers, size, size)).astype(np.float32) / size**0.5
        x, many, one = jnp.ones(size), [jnp.asarray(each) for each in drawn], jnp.asarray(drawn)
        kinds = functools.partial(apart, x, layers, many), functools.partial(stacked, x, one)
        times = [[seconds(kind) for kind in kinds] for _ in range(1 + REPEATS.value)][1:]  # the first compiles
        first, second = 1e3 * np.array(times).T
        print(f"{layers:>7} {size:>6} {spread(first, 1):>22} {spread(second, 1):>22} {spread(second / first, 2):>20}")


def main(argv) -> None:
    del argv
    compile_times()
    chains()


if __name__ == "__main__":
    app.run(main)
