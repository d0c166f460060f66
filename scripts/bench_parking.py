"""Cost of offloading layers to flash, and the memory it saves (`kvjax/inference/layer_offload.py`).

    python scripts/bench_parking.py [--dir=DIR] [--layers=16] [--context=8192] [--steps=20]

One model with random weights and made-up keys, its blocks on flash, decodes with the caches of all layers in memory and
then with offloaded ones. Figures are medians over tokens after a warm-up. "limit" is the time in which the device alone
would move the bytes that a token reads, at the rate of reading all offloaded layers in the same run.
"""

import pathlib
import sys
import tempfile
import time

import numpy as np
from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import kvjax
from experiments.kvswap import overlap
from experiments.speed import made_up, timing
from kvjax.inference import layer_offload
from kvjax.inference.plan import Slots, bytes_of

DIR = flags.DEFINE_string("dir", None, "directory on the device to measure; default: the temporary directory")
LAYERS = flags.DEFINE_integer("layers", 16, "layers of hidden size 1,024", lower_bound=2)
CONTEXT = flags.DEFINE_integer("context", 8192, "tokens in the cache", lower_bound=512)
STEPS = flags.DEFINE_integer("steps", 20, "timed tokens", lower_bound=1)
METHODS = {
    "quest": kvjax.Quest(budget=512), "dynakv": kvjax.DynaKV(budget=512, cluster=16, iterations=2),
    "kvswap": kvjax.KVSwap(budget=512),
}
WARM_UP = 3


def decode(llm, method, slots: Slots, directory: str) -> dict:
    """Returns the median time of a token, the most bytes in memory between tokens, and the bytes that offloading moved
    per token."""
    store = kvjax.FlashStore(directory=directory)
    plan, state, branch, _ = made_up.filled_cache(llm, method, CONTEXT.value, STEPS.value + 8, store, slots)
    resident, tokens = bytes_of(state.layers), np.arange(WARM_UP + STEPS.value) % 7
    _, state = timing.time_tokens(llm, plan, state, tokens[:WARM_UP], "staged")
    before = layer_offload.stats(state.layers)
    times, state = timing.time_tokens(llm, plan, state, tokens[WARM_UP:], "staged")
    row = {"ms": 1e3 * float(np.median(times)), "resident": resident}
    if before is not None:
        after = layer_offload.stats(state.layers)
        row |= {"read": (after.bytes_read - before.bytes_read) / STEPS.value,
                "written": (after.bytes_written - before.bytes_written) / STEPS.value,
                "wait": 1e3 * (after.wait_seconds - before.wait_seconds) / STEPS.value,
                "limit": 1e3 * read_seconds(state) / len(state.layers)}
        row["limit"] *= (after.blocks_read - before.blocks_read) / STEPS.value / len(state.layers[0].sums)
    layer_offload.close(state.layers)
    branch.close()
    return row


def read_seconds(state) -> float:
    """Returns the seconds to read all offloaded layers once, with no other work."""
    started = time.perf_counter()
    for layer in state.layers:
        pages = np.empty((1, 1, len(layer.sums), 1, layer_offload.PAGE_BYTES), np.int8)
        where = np.arange(len(layer.sums), dtype=np.int32)[None, None]
        if not layer.branch.read_into(layer.number, layer.generation, where, where, pages):
            raise layer.branch.failure(f"layer {layer.number}")
    return time.perf_counter() - started


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    config = overlap.shape(LAYERS.value, 1024)
    llm, directory = kvjax.LLM(config, made_up.random_params(config)), DIR.value or tempfile.gettempdir()
    whole = timing.kv_bytes(config, CONTEXT.value) / 2**20
    print(f"{LAYERS.value} layers, {CONTEXT.value} tokens, KV cache {whole:.0f} MiB")
    print(f"{'method':>8} {'in memory MiB':>14} {'offloaded MiB':>11} {'ratio':>6} {'ms':>8} {'offloaded ms':>10} "
          f"{'limit ms':>9} {'waited ms':>10} {'read MiB':>9} {'written MiB':>12}")
    for name, method in METHODS.items():
        plain = decode(llm, method, Slots(), directory)
        offloaded = decode(llm, method, Slots(offload=kvjax.FlashStore(directory=directory)), directory)
        print(f"{name:>8} {plain['resident'] / 2**20:14.1f} {offloaded['resident'] / 2**20:11.1f} "
              f"{plain['resident'] / offloaded['resident']:6.2f} {plain['ms']:8.1f} {offloaded['ms']:10.1f} "
              f"{offloaded['limit']:9.1f} {offloaded['wait']:10.1f} {offloaded['read'] / 2**20:9.1f} "
              f"{offloaded['written'] / 2**20:12.2f}", flush=True)


if __name__ == "__main__":
    app.run(main)
