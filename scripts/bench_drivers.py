"""Times of a whole answer by each driver, in memory and over flash, as ratios to the driver that runs token by token.

    python scripts/bench_drivers.py [--model=kvjax/reference] [--methods=quest,dynakv] [--context=2048] [--tokens=64]

In each repeat every driver answers the same question on the same cache, one after the other, beginning with another one
each time; the answers must be equal. The first answer of each compiles, and is left out. Times are those of
`LLM.generate` as a caller meets it, without compiling; a ratio is of the same repeat, so that both meet the same noise.
"""

import pathlib
import sys
import tempfile
import time

import numpy as np
from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import kvjax

MODEL = flags.DEFINE_string("model", "kvjax/reference", "directory or GGUF file of the model")
METHODS = flags.DEFINE_list("methods", ["quest", "dynakv", "kvswap"], "methods, with a budget of 256 tokens")
CONTEXT = flags.DEFINE_integer("context", 2048, "tokens of the context")
TOKENS = flags.DEFINE_integer("tokens", 64, "tokens of an answer", lower_bound=1)
REPEATS = flags.DEFINE_integer("repeats", 5, "timed answers of each driver", lower_bound=1)
DIR = flags.DEFINE_string("dir", None, "directory on the device to measure; default: the temporary directory")
DRIVERS = ("staged", "fused", "loop")


def answer(llm, cache, driver: str) -> tuple[float, list[list[int]]]:
    """Returns the seconds of an answer and its token ids."""
    started = time.perf_counter()
    done = llm.generate([5, 6, 7], cache, max_new_tokens=TOKENS.value, driver=driver, eos=())
    seconds = time.perf_counter() - started
    done.cache.discard()
    return seconds, done.tokens


def measure(llm, cache) -> dict[str, np.ndarray]:
    """Returns the seconds of each driver in each repeat."""
    expected, taken = answer(llm, cache, "fused")[1], {driver: [] for driver in DRIVERS}
    for turn in range(-1, REPEATS.value):
        for i in range(len(DRIVERS)):
            driver = DRIVERS[(turn + i) % len(DRIVERS)]
            seconds, tokens = answer(llm, cache, driver)
            if tokens != expected:
                raise AssertionError(f"{driver} answers {tokens}, and fused {expected}")
            if turn >= 0:
                taken[driver].append(seconds)
    return {driver: np.array(seconds) for driver, seconds in taken.items()}


def main(argv):
    del argv
    kvjax.keep_programs()
    llm, context = kvjax.load(MODEL.value), np.arange(CONTEXT.value) * 7919 % 997 + 3
    print(f"{'method':>12} {'blocks in':>9} {'driver':>7} {'ms/token':>9} {'times fused (least, most)':>26}")
    for name in METHODS.value:
        for where in ("memory", "flash"):
            store = kvjax.FlashStore(directory=DIR.value or tempfile.gettempdir()) if where == "flash" else None
            method = kvjax.METHODS[name](budget=256)
            with llm.prefill(context, method=method, store=store, capacity=CONTEXT.value + TOKENS.value + 8) as cache:
                found = measure(llm, cache)
            for driver, seconds in found.items():
                ratio = seconds / found["fused"]
                print(f"{name:>12} {where:>9} {driver:>7} {1e3 * np.median(seconds) / TOKENS.value:9.2f} "
                      f"{np.median(ratio):10.2f} ({ratio.min():.2f}, {ratio.max():.2f})", flush=True)


if __name__ == "__main__":
    app.run(main)
