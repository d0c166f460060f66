"""Training of the reference model.

    python -m experiments.main --config=configs/train_lm.py --workdir=runs/lm
    python -m experiments.main --config=configs/train_lm.py:long --workdir=runs/lm_long

Presets: the default recipe, for two CPU cores; `:long` continues from the reference model with rows of 8,192 tokens, on
an NVIDIA GPU; `:smoke`. Runtime and result: see the model cards.
"""

import pathlib

import ml_collections

_REFERENCE = pathlib.Path(__file__).parents[1] / "kvjax" / "reference"


def get_config(preset: str = "cpu") -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.experiment = "training.train_lm"
    config.seed = 0
    config.tokenizer = str(_REFERENCE / "tokenizer.json")
    config.start = ""  # a checkpoint to continue from; empty: random weights
    config.model = ml_collections.ConfigDict({
        "hidden_size": 128, "intermediate_size": 384, "num_layers": 4,
        "num_heads": 4, "num_kv_heads": 2, "head_dim": 64,
        "max_position": 4096, "rope_theta": 100_000.0,
    })
    config.dtype = "float32"  # of products; bfloat16 with cuDNN's attention, on NVIDIA's GPUs
    config.drawers = 1  # processes that draw batches
    config.batch_tokens = 4096
    # Stages of (row lengths, steps): each step draws its length, so that no length is forgotten.
    config.stages = (
        ((128,), 2700), ((256,), 600), ((512,), 450), ((1024,), 120), ((2048,), 50),
        ((128, 256, 256, 512, 512, 1024, 2048), 680), ((128, 256, 512, 1024, 1024, 2048, 2048), 420),
    )
    config.mixture = ml_collections.ConfigDict({
        "recall": 0.1, "needles": 0.6, "passkey": 0.12,
        "max_needles": 4, "made_needles": 0.0, "answer_weight": 5.0, "text_weight": 0.3,
        "noise_weight": 0.0,
    })
    config.learning_rate = 3e-3
    config.warmup_steps = 200
    config.decay_steps = 400
    config.weight_decay = 0.01
    config.log_every = 50
    config.eval_every = 200
    config.checkpoint_every = 100
    if preset == "long":
        config.start = str(_REFERENCE)
        config.model.max_position = 16_384
        config.stages = (((512, 2048, 8192, 8192), 20_000),)
        # Made-up words and templates cannot be learnt by heart. Answers are few in long rows, and weigh more.
        config.mixture.update(max_needles=16, made_needles=0.9, answer_weight=50.0, text_weight=0.03)
        config.update(dtype="bfloat16", drawers=12, batch_tokens=32_768, learning_rate=1e-3, warmup_steps=200)
        config.update(decay_steps=6000, eval_every=3000, checkpoint_every=3000, log_every=100)
    elif preset == "smoke":
        config.model.update(hidden_size=32, intermediate_size=64, num_layers=2, head_dim=16)
        config.stages = (((128,), 4), ((128, 256), 2))
        config.update(batch_tokens=512, warmup_steps=2, decay_steps=2, log_every=2, eval_every=3, checkpoint_every=3)
    elif preset != "cpu":
        raise ValueError(f"unknown preset {preset!r}; use cpu, long or smoke")
    return config
