"""The main job: a document with needles in it, its KV cache on flash, and questions answered by every method.

    python -m experiments.main --config=configs/demo.py --workdir=runs/demo
    python -m experiments.main --config=configs/demo.py --workdir=runs/mine \
        --config.model=DIR --config.prompt_file=FILE --config.question="..." \
        --config.dtype=bfloat16 --config.chat=True --config.chunk=512

The last three suit most current models: weights in 16 bits, the chat template of an instruction-tuned model, and a text
that is read 512 tokens at a time. Runtime: under three minutes on two cores. Preset `:smoke` is shorter.
"""

import ml_collections


def get_config(preset: str = "default") -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.experiment = "demo"
    config.seed = 0
    config.model = ""  # empty: the reference model
    config.dtype = "float32"  # of the weights
    config.store = "flash"
    config.context = 2048
    config.digits = 5
    config.needles = (
        "The pass key is", "The number of {key} is", "The special magic number for {key} is:",
    )
    config.prompt_file = ""
    config.question = ""
    config.chat = False  # whether text and question go into the model's chat template
    config.chunk = 0  # tokens read at a time through the cache (`kvjax.inference.chunked_prefill`); 0: densely
    config.max_new_tokens = 0  # most tokens of an answer; 0: 8 for needles, 64 for a text of your own
    config.recall_k = 16
    config.methods = (
        {"name": "full"},
        {"name": "quest", "budget": 64, "window": 16, "page": 8},
        {"name": "dynakv", "budget": 64, "window": 16, "cluster": 8, "buffer": 4},
        {"name": "quest", "budget": 256},
        {"name": "dynakv", "budget": 256},
        {"name": "streaming_llm", "budget": 256},
    )
    if preset == "smoke":
        config.context = 400
        config.methods = config.methods[:3]
    elif preset != "default":
        raise ValueError(f"unknown preset {preset!r}; use default or smoke")
    return config
