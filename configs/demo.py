"""The main job: questions to a document whose KV cache does not fit the memory that it is given.

    python -m experiments.main --config=configs/demo.py --workdir=runs/demo
    python -m experiments.main --config=configs/demo.py --workdir=runs/mine \
        --config.model=DIR --config.prompt_file=FILE --config.question="..." \
        --config.dtype=bfloat16 --config.chat=True --config.chunk=512

The last three suit most current models: weights in 16 bits, the chat template of an instruction-tuned model, and a text
that is read 512 tokens at a time. Runtime: under two minutes on two cores. Preset `:smoke` is shorter.
"""

import ml_collections


def get_config(preset: str = "default") -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.experiment = "demo.main_job"
    config.seed = 0
    config.model = ""  # empty: the reference model for 8,192 tokens
    config.dtype = "float32"  # of the weights
    config.store = "flash"
    config.memory = -1.0  # MiB that a method's cache may take; 0: no limit; -1: 20, none for a text of your own
    config.context = 7936
    config.digits = 5
    config.needles = (
        "The pass key is", "The number of {key} is", "The special magic number for {key} is:", "The number of {key} is",
        "The special magic number for {key} is:", "The number of {key} is",
    )
    config.prompt_file = ""
    config.question = ""
    config.chat = False  # whether text and question go into the model's chat template
    config.chunk = 0  # tokens read at a time through the cache (`kvjax.inference.chunked_prefill`); 0: densely
    config.max_new_tokens = 0  # most tokens of an answer; 0: 8 for needles, 64 for a text of your own
    config.driver = "fused"  # or "staged", which compiles less
    kvswap = {"name": "kvswap", "budget": 256, "sigma": 2, "bits": 4, "per_head": True}
    config.methods = (
        {"name": "full"},
        {"name": "quest", "budget": 256},
        {"name": "dynakv", "budget": 256},
        kvswap,
        {**kvswap, "label": "kvswap@256, fewest slots", "slots": {}},
        {"name": "streaming_llm", "budget": 256},
    )
    if preset == "smoke":
        config.context, config.needles, config.memory = 400, config.needles[:3], 6.0
        config.methods = (
            {"name": "full"},
            {"name": "quest", "budget": 64, "window": 16, "page": 8},
            {"name": "dynakv", "budget": 64, "window": 16, "cluster": 8, "buffer": 4},
        )
    elif preset != "default":
        raise ValueError(f"unknown preset {preset!r}; use default or smoke")
    return config
