"""Time that each C kernel saves of a token: every kernel is left out once, and XLA's operations replace it.

    python scripts/bench_kernels.py [--methods=quest,dynakv,kvswap] [--context=32768] [--rounds=9]

The model is `cache-path` (`experiments.speed.made_up`) in memory, so that `assign`, which finds slots of a store, is
not called. All variants of a method decode the same tokens alternately, so that they meet the same noise; a row is the
median over the rounds of the ratio to the token with all kernels, with its quartiles. The limit is the time to read the
weights and the attended rows at the memory's bandwidth.
"""

import contextlib
import json
import pathlib
import sys
import time

import jax
import numpy as np
from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import kvjax
from experiments import results
from experiments.speed import made_up, timing
from kvjax.inference import decode
from kvjax.inference.plan import Slots
from kvjax.ops import kernels

METHODS = flags.DEFINE_list("methods", ["quest", "dynakv", "kvswap"], "methods to decode with")
CONTEXT = flags.DEFINE_integer("context", 32768, "tokens of the prompt")
ROUNDS = flags.DEFINE_integer("rounds", 9, "rounds of each variant", lower_bound=5)
WORKDIR = flags.DEFINE_string("workdir", "runs/kernels", "where summary.json goes")

TOKENS, WARM_UP = 5, 1  # tokens of a round, of which the first meets cold caches and is left out; rounds left out
SETTINGS = {
    "quest": {"budget": 512}, "dynakv": {"budget": 512, "cluster": 32, "iterations": 2},
    "kvswap": {"budget": 436, "sigma": 2, "bits": 4, "per_head": True}, "full": {}, "icecache": {"budget": 512},
}


@contextlib.contextmanager
def without(name: str | None):
    """Makes programs that are traced in this context work without one kernel."""
    on_cpu = kernels.on_cpu

    def chosen(kernel, result, otherwise, *operands):
        if kernel != name:
            return on_cpu(kernel, result, otherwise, *operands)
        return jax.tree.map(lambda like, array: array.astype(like.dtype), result, otherwise(*operands))

    kernels.on_cpu = chosen
    jax.clear_caches()
    try:
        yield
    finally:
        kernels.on_cpu = on_cpu
        jax.clear_caches()


def called(plan, llm, state) -> list[str]:
    """Returns the kernels that a token calls, except attention over rows, which has another form without its kernel."""
    program = jax.jit(decode.fused_token, static_argnums=0).lower(plan, llm.params, state, *_operands(plan)).as_text()
    return [name for name in kernels.NAMES if f"kvjax_{name}" in program and name != "row_attention"]


def _operands(plan):
    return np.full(plan.batch, 5, np.int32), np.ones(plan.batch, bool)


def rows_of(llm, name: str) -> list[dict]:
    """Returns a row for each kernel that a method's token calls."""
    method = kvjax.METHODS[name](**SETTINGS.get(name, {"budget": 512}))
    steps = (ROUNDS.value + WARM_UP) * TOKENS
    plan, state, *_ = made_up.filled_cache(llm, method, CONTEXT.value, steps, None, Slots())
    programs, states = {}, {}
    for left_out in (None, *called(plan, llm, state)):
        with without(left_out):
            jitted = jax.jit(decode.fused_token, static_argnums=0, donate_argnums=2)
            programs[left_out] = jitted.lower(plan, llm.params, state, *_operands(plan)).compile()
        states[left_out] = jax.tree.map(jax.numpy.copy, state)
    seconds: dict = {left_out: [] for left_out in programs}
    for turn in range(ROUNDS.value + WARM_UP):
        for left_out, program in programs.items():
            times = []
            for _ in range(TOKENS):
                began = time.perf_counter()
                done = jax.block_until_ready(program(llm.params, states[left_out], *_operands(plan)))
                times.append(time.perf_counter() - began)
                states[left_out] = done.state
            if turn >= WARM_UP:
                seconds[left_out].append(float(np.median(times[1:])))
    whole = np.asarray(seconds[None])
    rows = []
    for left_out, spent in seconds.items():
        if left_out is not None:
            low, median, high = np.percentile(np.asarray(spent) / whole, (25, 50, 75))
            rows.append({"method": name, "kernel": left_out, "token_ms": 1e3 * float(np.median(whole)),
                         "without": float(median), "p25": float(low), "p75": float(high)})
    return rows


def main(_):
    kvjax.keep_programs()
    llm = made_up.make_model("cache-path")
    rows = [row for name in METHODS.value for row in rows_of(llm, name)]
    bandwidth = timing.memory_bandwidth()
    limit = 1e3 * (timing.weight_bytes(llm) + timing.kv_bytes(llm.config, 512)) / bandwidth
    print(f"limit {limit:.2f} ms/token at {1e-9 * bandwidth:.1f} GB/s")
    print("| method | token, ms | without | times as long (quartiles) |\n|---|---|---|---|")
    for row in rows:
        ratio = f"{row['without']:.3f} ({row['p25']:.3f}, {row['p75']:.3f})"
        print(f"| {row['method']} | {row['token_ms']:.2f} | `{row['kernel']}` | {ratio} |")
    path = pathlib.Path(WORKDIR.value)
    path.mkdir(parents=True, exist_ok=True)
    config = {"context": CONTEXT.value, "rounds": ROUNDS.value, "limit_ms": limit}
    summary = {"experiment": "kernels", "config": config, **results.machine(), "rows": rows}
    (path / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    app.run(main)
