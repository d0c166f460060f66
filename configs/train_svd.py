"""Low-rank adapters for KVSwap: fitted by SVD, refined on real queries, tried on text of the same and of other kinds.

    python -m experiments.main --config=configs/train_svd.py --workdir=runs/train_svd

Writes adapters to WORKDIR/adapters/KIND_joint_RATIO (and `_refined`), for `kvjax.KVSwap(adapters=DIR)`. For text of
your own give files as kinds, `--config.kinds="('FILE.txt',)"`; KIND is then FILE_HASH. Preset `:smoke` finishes within
a minute.
"""

import ml_collections


def get_config(preset: str = "default") -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.experiment = "training.train_svd"
    config.seed = 0
    config.model = ""  # empty: the reference model
    config.kinds = ("code", "prose")  # also "needles": code with repeated facts, which retrieval needs
    config.ratios = (4, 8, 16, 32)  # sigma = H_k d / r; those of configs/tune.py
    config.forms = ("joint", "per_head")
    config.length = 1024  # tokens of a row; rotated keys depend on it, so it should be the context to come
    config.batch = 2
    config.train_batches = 40
    config.refine_batches = 200  # one step of Adam each; 0 = no refinement
    config.learning_rate = 3e-3
    config.test_batches = 8
    config.documents = 120  # of each split
    config.top = 16  # k of recall@k
    config.kept = 64  # tokens whose attention mass is measured
    if preset == "smoke":
        config.update(kinds=("code", "prose"), ratios=(8,), forms=("joint",), length=128, train_batches=3,
                      refine_batches=3, test_batches=1, documents=4, kept=16)
    elif preset != "default":
        raise ValueError(f"unknown preset {preset!r}; use default or smoke")
    return config
