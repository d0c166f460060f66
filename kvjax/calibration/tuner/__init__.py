"""KVSwap's offline parameter tuning (section 3.5 and appendix A).

    tuner.tune(llm, store, text, max_bytes=2200 << 20, batches=(1, 8)).save("config.json")
    tuned = tuner.load("config.json")
    cache = llm.prefill(
        context, method=tuned.method(8, 32768), store=store, slots=tuned.slots(8, 32768), dtype=tuned.dtype)
"""

from kvjax.calibration.tuner.search import expect, tune
from kvjax.calibration.tuner.solver import Costs, Limits, Setting, Solution, Space, solve
from kvjax.calibration.tuner.tuning import Family, Tuning, load

__all__ = ["Costs", "Family", "Limits", "Setting", "Solution", "Space", "Tuning", "expect", "load", "solve", "tune"]
