"""Low-rank adapters: what a method projects keys onto to predict attention from a fraction of their bytes.

    rows = [...]                                       # batches of token ids
    moments = collect.key_moments(llm, rows)           # one pass over texts, keys are never kept
    fitted = fit.svd(moments, ratio=8)                 # KVSwap, section 3.2
    fitted = refinement.refine(llm, fitted, rows)      # beyond the paper: fitted to the attention of real queries
    fitted.save(directory)

Only the value is imported here: methods need it, and the rest needs a model.
"""

from kvjax.adapters.value import Adapters, load

__all__ = ["Adapters", "load"]
