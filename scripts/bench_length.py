"""Ratio of DynaKV's time per token after a long prompt to that after a short one, at one budget, in memory.

    python scripts/bench_length.py [--contexts=4096,65536] [--rounds=24]

The model is `cache-path` (`experiments.speed.made_up`) with the clusters of `configs/dynakv_paper.py:length`. The
contexts alternate, a few tokens each, so that both meet the same noise: on a shared machine consecutive runs differ by
more than the measured effect. The limit is the time to read the weights and the attended rows at the memory's
bandwidth.
"""

import pathlib
import sys

import numpy as np
from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import kvjax
from experiments.speed import made_up, timing
from kvjax.inference.plan import Slots

CONTEXTS = flags.DEFINE_list("contexts", ["4096", "65536"], "tokens of the prompts")
ROUNDS = flags.DEFINE_integer("rounds", 24, "rounds of each context")
TOKENS = 6  # of a round; the first one meets cold caches, and is left out


def main(argv):
    kvjax.keep_programs()
    del argv
    llm, method = made_up.make_model("cache-path"), kvjax.DynaKV(budget=512, cluster=32, iterations=2)
    rounds, contexts = ROUNDS.value + 2, [int(context) for context in CONTEXTS.value]
    plans, states = {}, {}
    for context in contexts:
        plans[context], states[context], *_ = made_up.filled_cache(
            llm, method, context, rounds * TOKENS, None, Slots()
        )
    seconds = {context: [] for context in contexts}
    for turn in range(rounds):
        for context in contexts:
            times, states[context] = timing.time_tokens(
                llm, plans[context], states[context], [5] * TOKENS, "fused"
            )
            seconds[context].extend(times[1:] if turn > 1 else ())
    bandwidth = timing.memory_bandwidth()
    limit = 1e3 * (timing.weight_bytes(llm) + timing.kv_bytes(llm.config, method.budget)) / bandwidth
    print(f"memory bandwidth of a matrix-vector product: {1e-9 * bandwidth:.1f} GB/s; limit {limit:.2f} ms/token")
    print(f"{'context':>8} {'ms/token':>9} {'p25':>7} {'p75':>7} {'times first':>12}")
    first = np.median(seconds[contexts[0]])
    for context in contexts:
        p25, median, p75 = 1e3 * np.percentile(seconds[context], (25, 50, 75))
        print(f"{context:8,} {median:9.2f} {p25:7.2f} {p75:7.2f} {1e-3 * median / first:12.3f}")


if __name__ == "__main__":
    app.run(main)
