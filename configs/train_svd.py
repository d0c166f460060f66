"""Low-rank adapters for KVSwap: fitted by SVD, trained on real queries, tried on text of the same and of other kinds.

    python -m experiments.main --config=configs/train_svd.py --workdir=runs/train_svd

Writes adapters to WORKDIR/adapters/KIND_joint_RATIO.safetensors (and `_trained`), for `kvjax.KVSwap(adapters=FILE)`,
and the curves of the training to training.png. It can be stopped, and goes on when it is started again. For text of
your own give files as kinds, `--config.kinds="('FILE.txt',)"`; KIND is then FILE_HASH. Preset `:beside` trains on code,
prose and repeated facts alike, and puts the adapters beside the model, where `kvjax.KVSwap()` finds them:

    python -m experiments.main --config=configs/train_svd.py:beside --config.model=MODEL --workdir=runs/adapters

Preset `:smoke` finishes within a minute.
"""

import ml_collections


def get_config(preset: str = "default") -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.experiment = "training.train_svd"
    config.seed = 0
    config.model = ""  # empty: the reference model
    config.kinds = ("code", "prose")  # also "needles", code with repeated facts, and "mixed", one of these at a time
    config.ratios = (4, 8, 16, 32)  # sigma = H_k d / r; those of configs/tune.py
    config.forms = ("joint", "per_head")
    config.by_layer = False  # True = layers share the dimensions by their singular values
    config.beside = False  # True = write what was trained (or fitted, with steps=0) beside the model
    config.length = 1024  # tokens of a row; rotated keys depend on it, so it should be the context to come
    config.batch = 2
    config.train_batches = 40
    config.steps = 200  # of Adam, a batch each; 0 = no training
    config.learning_rate = 3e-3  # the largest, after the warm-up
    config.warmup_steps = 20
    config.loss = "groups"  # or "scores" (`kvjax.calibration.refine_adapters`)
    config.group = 4  # tokens of a group, for "groups"
    config.sinks, config.window = 4, 32  # first and newest tokens that do not count, likewise
    config.ahead = True  # queries of the previous layer's input, as KVSwap asks; False = of the layer's own
    config.eval_every = 20
    config.held_out_batches = 4  # by which each layer chooses its adapter
    config.test_batches = 8
    config.documents = 120  # of each split
    config.top = 16  # k of recall@k
    config.kept = 64  # tokens whose attention mass is measured
    if preset == "smoke":
        config.update(kinds=("code", "prose"), ratios=(8,), forms=("joint",), length=128, train_batches=3,
                      steps=4, warmup_steps=1, eval_every=2, held_out_batches=1, test_batches=1, documents=4, kept=16)
    elif preset == "beside":
        config.update(kinds=("mixed",), ratios=(2, 4, 8, 16, 32), length=2048, beside=True)
    elif preset != "default":
        raise ValueError(f"unknown preset {preset!r}; use default, beside or smoke")
    return config
