"""Run-length and other codecs of keys: their savings, and their cost in likelihood.

    python -m experiments.main --config=configs/rle.py --workdir=runs/rle

Preset `:overhead` times encoding and attention, on a quiet machine; `:smoke` finishes within a minute.
"""

import ml_collections


def get_config(preset: str = "default") -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.experiment = "rle.savings"
    config.seed = 0
    config.model = ""  # empty: the reference model
    config.kinds = ("chat", "documentation", "code")
    config.texts = 2  # of each kind
    config.lengths = (512, 1024, 2048)  # the longest is also that of the likelihoods, and of the model's training
    config.tolerances = (0.0, 0.001, 0.01, 0.05)
    config.itemsize = 2  # bytes of a key's element in the sizes: the source keeps half precision
    config.span = 32  # tokens of a segment in the hierarchical encoding
    config.cluster = 8  # tokens per cluster where keys are sorted by cluster
    config.bits = (8, 4, 2)  # of keys in few bits
    config.parts = {"length": 1024, "wide": 1.0}  # likelihood with runs in one layer or head; also at a wide tolerance
    config.histogram = (1, 2, 3, 5, 9, 17)  # shortest run of each bin
    config.autoencoder = {"width": 12, "hidden": 64, "steps": 400, "batch": 256, "rate": 3e-3}
    config.flash = {  # decodes the last `steps` of the first `length` tokens of a text from a flash store in each codec
        "methods": ({"name": "quest", "budget": 128, "page": 32}, {"name": "dynakv", "budget": 128}),
        "dtypes": ("float32", "int8"),
        "planted": (1, 8),  # tokens in a row that share a key; 1: the text's own keys; more: a control
        "length": 1024, "steps": 64,
    }
    if preset == "smoke":
        config.update(texts=1, lengths=(128,), tolerances=(0.0, 0.05))
        config.autoencoder.update(steps=20)
        config.bits, config.parts.length = (2,), 128
        config.flash.update(methods=({"name": "quest", "budget": 128, "page": 32},), dtypes=("float32",), steps=8)
    elif preset == "overhead":
        return ml_collections.ConfigDict({
            "experiment": "rle.overhead", "model": "llama-1b-4l", "tokens": (1024, 8192, 32768), "runs": (1, 2, 4, 8),
            "repeats": 30,
        })
    elif preset != "default":
        raise ValueError(f"unknown preset {preset!r}; use default, overhead or smoke")
    return config
