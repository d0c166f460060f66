"""IceCache's tables and figures with this library's models, beside exact attention and Quest.

    python -m experiments.main --config=configs/icecache_paper.py --workdir=runs/icecache

Parts:

    passkey    length x depth at three budgets (Figure 6)
    suite      the leaderboard's retrieval tasks: share of the full cache's score with its 95 % interval
    dci        recall, share visited and evaluations of the tree alone, from 1K to 128K points; built at once and by
               inserts; with the default settings, a narrower beam, and P-DCI
    pages      hit rate of pages against Quest's at one budget, on the same keys
    tt2t       time to the second token (Figure 7 a), layers indexed and written one after the other, or while the next
               one is read
    breakdown  one layer's query, loading of its pages from flash, and attention (Figure 7 c)
    tpot       decode time against context with its parts, a token's commit included (Figure 8); growth over a long
               decode with the index updated and frozen

`summary.json` also has the growth of times between two contexts. The timed parts need a quiet machine. Preset `:smoke`
runs every part.
"""

import ml_collections

from configs import leaderboard

_BASELINES = ("oracle", "quest", "arkvale", "pqcache", "dynakv", "infinigen", "streaming_llm")


def get_config(preset: str = "default") -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.experiment = "icecache.paper"
    config.seed = 0
    config.model = ""  # empty: the reference model
    config.parts = ("passkey", "suite", "dci", "pages", "tt2t", "breakdown", "tpot")
    config.budgets = (256, 128, 64)
    config.window = 16
    config.lengths = (512, 1024, 2048)
    config.samples = 20  # one per depth: 0, 5, ..., 95 %
    config.batch = 10
    board = leaderboard.get_config()
    config.suite = board.copy_and_resolve_references()
    config.suite.update(
        store="memory", tasks=("passkey", "needle", "needle_of_4"), budgets=(64, 256), samples=100, seeds=(0, 1, 2, 3),
    )
    for of_the_board in ("experiment", "model", "dtype", "shard"):  # the model is `config.model`; all cells are run
        del config.suite[of_the_board]
    config.suite.methods = (
        {"name": "full", "whole": True}, {"name": "icecache", "window": 16, "dense_layers": 0},
        {"name": "icecache", "label": "icecache, 2 dense", "window": 16},
    )
    config.suite_once = {"seeds": (0,), "methods": (  # fewer samples: no claim depends on them
        {"name": "icecache", "label": "icecache, 1 dense, reuse 3", "window": 16, "dense_layers": 1, "reuse": 3},
        *(method for method in board.methods if method["name"] in _BASELINES),
    )}
    config.points = (1024, 4096, 16_384, 65_536, 131_072)
    config.trees = ("shipped", "narrow", "pdci48")  # of `experiments.icecache.tree.SETTINGS`
    config.grown = (0.5, 0.125, 0.0)  # share of the points that are built at once; the others are inserted
    config.grown_points = 4096
    config.queries = 64
    config.beam = 192  # the default
    config.key_tokens = 2048  # real keys: prompt tokens of held-out text
    config.key_steps = 32  # and decoded tokens, whose queries are used
    config.model_shape = "cache-path"
    config.prompts = (4096, 8192)  # of `tt2t`
    config.repeats = 3
    config.contexts = (16_384, 32_768, 65_536, 131_072, 262_144)  # 256K: four minutes for an index, 12 GiB
    config.timed = ("full", "icecache", "icecache_frozen", "icecache_reuse3")
    config.growth = (("select_ms", 16_384, 131_072), ("token_ms", 32_768, 262_144))
    config.steps = 48
    config.long_context = 16_384  # of `breakdown`, and of the long decode
    config.long_steps = 768
    if preset == "smoke":
        config.update(budgets=(64,), lengths=(256,), samples=2, batch=2, points=(256,), queries=8, key_tokens=256)
        config.update(key_steps=4, model_shape="reference", contexts=(512,), steps=6, prompts=(256,), repeats=1)
        config.update(grown=(0.5,), grown_points=256, trees=("pdci48",), long_context=512, long_steps=8)
        config.timed = ("icecache",)
        config.suite.update(lengths=(256,), samples=2, batch=2, seeds=(0,), budgets=(64,), tasks=("passkey",))
        config.suite_once = {"seeds": (0,), "methods": ({"name": "quest", "window": 16},)}
    elif preset != "default":
        raise ValueError(f"unknown preset {preset!r}; use default or smoke")
    return config
