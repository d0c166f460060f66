"""KV-cache distribution shift (DynaKV, section 2.3): clusters of a prompt's keys, many decoded tokens later.

A prompt is followed by at least eight times as many decoded tokens: those of the text (`teacher`), those that the model
samples with its full cache, the same for every strategy (`sampled`), or those that it samples with the strategy's own
cache (`free`), so that texts differ. At checkpoints along the way, a window of steps is measured for every strategy:
`static`, `local` and `adaptive` updates of the clusters; `global`, which is static with k-means over the whole cache
every prompt length (an offline reference); and `no_cluster`, the exact top-k tokens.

One (mode, strategy) is decoded at a time, with all texts as one batch; those that the workdir has are skipped. The data
of the plots is kept in `windows/`.
"""

import functools
import itertools

import ml_collections
import numpy as np
from tqdm import tqdm

import kvjax
from experiments import common
from experiments.results import Run
from experiments.shift import pictures
from experiments.shift.decoding import Decoding, Window, continued, in_token_order, settings_of, window_starts
from experiments.shift.measures import against_dense, co_retrieval, measure_window, partitions
from experiments.texts import KINDS, Texts
from kvjax import _validate
from kvjax.errors import ConfigError
from kvjax.inference.plan import Plan
from kvjax.models.config import ModelConfig

STRATEGIES = ("adaptive", "static", "local", "global", "no_cluster")
MODES = ("teacher", "sampled", "free")


def run_strategy(llm: kvjax.LLM, strategy: str, mode: str, tokens: np.ndarray, config, keep) -> list[dict]:
    """Returns the rows of one strategy, one per kind of text and checkpoint; calls `keep(window, plan)` for each
    window."""
    decoding = Decoding(llm, strategy, tokens, mode, config)
    initial, measured, logits = partitions(decoding.plan, decoding.state), [], []
    for window in decoding.windows(window_starts(config)):
        measured.append(measure_window(decoding.plan, window, initial, config))
        logits.append((window.start, window.logits))
        keep(window, decoding.plan)
    dense = against_dense(llm, decoding, logits)
    rows = []
    for i, checkpoint in enumerate(config.checkpoints):
        texts = [{**figures, **loss} for figures, loss in zip(measured[i], dense[i], strict=True)]
        for n, kind in enumerate(config.kinds):
            mine = texts[n * config.texts : (n + 1) * config.texts]
            rows.append({
                "method": strategy, "task": f"{mode}/{kind}", "decoded": checkpoint * config.prompt,
                "context": config.prompt + logits[i][0] + config.steps, "store": "memory",
                "budget": config.method.budget, "seed": config.seed,
                **{name: float(np.mean([figures[name] for figures in mine])) for name in mine[0]},
            })
    return rows


def check(config) -> None:
    """Raises ConfigError for names or sizes that make no experiment."""
    for name, known in (("strategies", STRATEGIES), ("modes", MODES), ("kinds", KINDS)):
        if not config[name] or set(config[name]) - set(known):
            raise ConfigError(f"{name}={tuple(config[name])} must be some of {', '.join(known)}")
    common.check_counts(config, texts=1, prompt=1, steps=2, recall_k=1, checkpoints=0)
    if config.pca.kind not in config.kinds:
        raise ConfigError(f"pca.kind={config.pca.kind} is not among kinds; use one of {', '.join(config.kinds)}")
    starts = window_starts(config)
    if starts[0] != 0 or len(starts) == 1 or any(b - a < config.steps for a, b in itertools.pairwise(starts)):
        raise ConfigError(
            f"checkpoints={config.checkpoints} must start with 0, be at least two, and have windows of "
            f"steps={config.steps} tokens that do not overlap"
        )


def check_fit(model: ModelConfig, config) -> None:
    """Raises ConfigError or PromptError if a strategy or a plot does not fit the model or the prompts."""
    prompts, capacity = [config.prompt] * config.texts, config.prompt * (1 + max(config.checkpoints))
    for strategy in config.strategies:
        settings = settings_of(strategy, config.method)
        common.check_fit(model, settings, prompts, capacity)
        method = common.make_method(settings)
        if config.prompt < method.sinks + method.window:
            raise ConfigError(f"prompt={config.prompt} leaves nothing for clusters beside {method.sinks} sinks and the "
                              f"{method.window - 1} tokens before the newest; raise it")
    for name, most in (("layer", model.num_layers), ("head", model.num_kv_heads)):
        if not _validate.whole(config.pca[name], 0) or config.pca[name] >= most:
            raise ConfigError(f"pca.{name}={config.pca[name]!r} must be one of the model's, 0 to {most - 1}")


def run(config: ml_collections.ConfigDict, workdir: str) -> None:
    """Decodes and measures every mode and strategy, then plots."""
    check(config)
    llm, run = common.load_model(config.model), Run(config, workdir, ("modes", "strategies"))
    check_fit(llm.config, config)
    length = config.prompt * (1 + max(config.checkpoints))
    texts = Texts(llm, config.seed)
    tokens = np.asarray([
        texts.draw(kind, number, config.prompt, length) for kind in config.kinds for number in range(config.texts)
    ], np.int32)
    directory = run.path / "windows"
    directory.mkdir(exist_ok=True)
    rows = run.logged()
    done = {(row["task"], row["decoded"], row["method"]) for row in rows}

    @functools.cache
    def tokens_of(mode: str) -> np.ndarray:
        return continued(llm, tokens, config) if mode == "sampled" else tokens

    for mode, strategy in tqdm(list(itertools.product(config.modes, config.strategies)), disable=None):
        wanted = {
            (f"{mode}/{kind}", c * config.prompt, strategy) for kind in config.kinds for c in config.checkpoints
        }
        if wanted <= done:
            continue
        keep = functools.partial(keep_window, directory, f"{mode}_{strategy}", config)
        for row in run_strategy(llm, strategy, mode, tokens_of(mode), config, keep):
            if (row["task"], row["decoded"], row["method"]) not in done:
                rows.append(row)
                run.log(**row)
    run.summary(rows)
    pictures.plot_all(rows, run.path, config)


def keep_window(directory, name: str, config, window: Window, plan: Plan) -> None:
    """Writes the data of one window's plots: keys, clusters and co-retrieval of one head of one text."""
    i, head, b = config.pca.layer, config.pca.head, config.kinds.index(config.pca.kind) * config.texts
    key, _, cluster = in_token_order(plan.layers[i], window.state.layers[i], plan.capacity)
    stored = config.prompt + window.start + config.steps
    pairs = {
        f"pairs_{kind}": co_retrieval(
            window.retrieved[i][:, n * config.texts, head], plan.layers[i].spec.num_blocks
        ) for n, kind in enumerate(config.kinds)
    }
    np.savez_compressed(
        directory / f"{name}_{window.start}.npz", key=key[b, :stored, head], cluster=cluster[b, :stored, head],
        none=plan.layers[i].spec.num_blocks, **pairs,
    )
