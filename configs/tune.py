"""KVSwap's parameters for a model, a device and a memory budget.

    python -m experiments.main --config=configs/tune.py --workdir=runs/tune

The result is WORKDIR/tuning.json, for `kvjax.calibration.tuner.load`. Another run solves what is missing. For the pairs
in `checked`, the output and summary.json compare expected with measured time and memory, for the choice and for the
middle of the grid (`time_off`, `memory_off`: 0.1 = a tenth more was expected). Preset `:smoke` finishes within a
minute.
"""

import ml_collections


def get_config(preset: str = "default") -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.experiment = "kvswap.tune"
    config.seed = 0
    config.model = "llama-1b-4l"  # a shape of experiments/speed/made_up.py, "reference", or a directory
    config.store = "flash:nvme"
    config.max_mib = 512  # for the caches of the largest batch, the store's own included
    config.staging_mib = 4  # in the compared decodes: a quarter of it waits to be written, and counts as memory
    config.batches = (1, 2, 4, 8)
    config.contexts = (4096, 8192, 16384, 32768)
    config.knots = (3, 2)  # most batch sizes and contexts that are measured; others are interpolated
    config.selected = 400  # MG
    config.relax = 0.1  # alpha, the share by which reading may prolong a layer
    config.groups = (1, 2, 4, 8, 16)
    config.sigmas = (4, 8, 16, 32)
    config.bits = 32  # of each compressed number; 4 goes well with per_head and sigmas (2, 4, 8)
    config.per_head = False  # whether each head's keys are compressed on their own, without adapters
    config.dtype = "float32"  # of weights
    config.kv_dtype = "float32"  # of keys and values
    config.aggregation = "softmax_mean"  # how scores of heads are combined; "mean" is the paper's
    config.reuses = (0, 400, 600, 800, 1200, 1600)
    config.text = 8192  # tokens on which reuse is measured; with few, longer contexts leave few groups to tell apart
    config.checked = ((1, 32768), (8, 8192))  # pairs of batch and context for which both are decoded
    config.steps = 6  # tokens of a round
    config.rounds = 12  # rounds of either
    config.adapters = ""  # WORKDIR/adapters of configs/train_svd.py; empty: those beside the model
    config.adapted = "code_joint"  # which of its adapters
    if preset == "smoke":
        config.update(model="reference", store="host", max_mib=8, batches=(1,), contexts=(1024,), selected=32,
                      groups=(2, 4), sigmas=(4, 8), reuses=(32, 64), text=128, checked=((1, 1024),), rounds=2)
    elif preset != "default":
        raise ValueError(f"unknown preset {preset!r}; use default or smoke")
    return config
