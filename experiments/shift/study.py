"""Shift of the distribution of keys during decoding (DynaKV, section 2.3), and what it does to all that was fitted.

Adapters, codebooks, clusters and pages are made from a prompt, or beforehand, and serve many decoded tokens later. A
prompt is followed by at least eight times as many decoded tokens: those of the text (`teacher`), those that the model
samples with its full cache, the same for every strategy (`sampled`), or those that it samples with the strategy's own
cache (`free`), so that texts differ. At checkpoints along the way, a window of steps is measured alike for every
strategy, a cache method of `config.structures`: recall of the true top keys, attention mass, error of the output,
divergence. With `refit`, everything is fitted anew to the whole cache every prompt length, and before each window: an
offline reference. `no_cluster`, the exact top-k tokens, is the upper bound.

One (mode, strategy) is decoded at a time, `batch` texts at once; those that the workdir has are skipped. A line of
metrics.jsonl is one text at one checkpoint; summary.json has means over texts with their 95 % intervals, and changes
since checkpoint 0 with those of the paired bootstrap. The data of the plots is kept in `windows/`.
"""

import functools
import itertools
import pathlib
from collections.abc import Callable, Iterator, Sequence

import ml_collections
import numpy as np
from absl import logging
from tqdm import tqdm

import kvjax
from experiments import common, plots
from experiments.results import Run
from experiments.shift import pictures
from experiments.shift.decoding import (
    FITTED,
    Decoding,
    Window,
    check_shared,
    continued,
    has_clusters,
    in_token_order,
    settings_of,
    window_starts,
)
from experiments.shift.measures import against_dense, co_retrieval, dense_outputs, measure_window, partitions
from experiments.texts import KINDS, Texts
from experiments.training import train_svd
from kvjax import _validate
from kvjax.calibration import collect_moments, fit_adapters
from kvjax.errors import ConfigError
from kvjax.eval import intervals
from kvjax.inference.plan import Plan
from kvjax.models.config import ModelConfig

MODES = ("teacher", "sampled", "free")
CHANGES = ("recall", "attention_mass", "output_error")  # figures whose change since checkpoint 0 is told
Text = tuple[str, int]  # kind and number
Keep = Callable[[Window, Plan], None]


def run_strategy(
    llm: kvjax.LLM, strategy: str, mode: str, texts: Sequence[Text], tokens: np.ndarray, config, keep: Keep,
    adapters: str = "", dense: np.ndarray | None = None,
) -> list[dict]:
    """Returns the rows of one strategy, one per text and checkpoint.

    Args:
      llm: the model.
      strategy: a key of `config.structures`.
      mode: one of MODES.
      texts: kind and number of each text.
      tokens: int[B, T], the texts.
      config: the study's.
      keep: called with each window and the plan.
      adapters: file of fitted adapters.
      dense: outputs of dense attention over the same tokens (`dense_outputs`); None = computed from what was decoded.
    """
    decoding, starts = Decoding(llm, strategy, tokens, mode, config, adapters), window_starts(config)
    initial, measured, logits = partitions(decoding.plan, decoding.state), [], []
    for window in decoding.windows(starts):
        measured.append(measure_window(decoding.plan, window, initial, config))
        logits.append((window.start, window.logits))
        keep(window, decoding.plan)
    dense = dense_outputs(llm, decoding.tokens, starts, config) if dense is None else dense
    losses = against_dense(llm, decoding, logits, dense)
    return [
        {"method": strategy, "task": f"{mode}/{kind}", "text": number, "decoded": checkpoint * config.prompt,
         "context": config.prompt + starts[i] + config.steps, "store": "memory", "budget": config.method.budget,
         "seed": config.seed, **measured[i][b], **losses[i][b]}
        for b, (kind, number) in enumerate(texts) for i, checkpoint in enumerate(config.checkpoints)
    ]


def summarised(rows: list[dict]) -> list[dict]:
    """Returns a row for each mode, kind of text ("all", too), strategy and checkpoint: means over texts, their 95 %
    intervals where there are several, and changes since checkpoint 0."""
    groups: dict[tuple[str, str, int], dict[Text, dict]] = {}
    for row in rows:
        mode, kind = row["task"].split("/")
        for task in (row["task"], f"{mode}/all"):
            groups.setdefault((task, row["method"], row["decoded"]), {})[kind, row["text"]] = row
    return [_summary(*head, texts, groups[(*head[:2], 0)]) for head, texts in groups.items()]


def _summary(task: str, method: str, decoded: int, texts: dict[Text, dict], first: dict[Text, dict]) -> dict:
    rows = list(texts.values())
    head = {name: rows[0][name] for name in ("context", "store", "budget", "seed")}
    summary = {"task": task, "method": method, "decoded": decoded, **head, "texts": len(rows)}
    for name in rows[0].keys() - {*summary, "text"}:
        values = [row[name] for row in rows if np.isfinite(row.get(name, np.nan))]
        if values:
            summary[name] = float(np.mean(values))
            summary |= {f"{name}_interval": plots.student(values)} if len(values) > 1 else {}
    for name in CHANGES if decoded else ():
        pairs = [(row[name], first[text][name]) for text, row in texts.items()]
        summary[f"{name}_change"] = float(np.mean([now - before for now, before in pairs]))
        summary[f"{name}_change_interval"] = intervals.paired_bootstrap(*zip(*pairs, strict=True))
    return dict(sorted(summary.items()))


def fitted_adapters(llm: kvjax.LLM, config, path: pathlib.Path) -> str:
    """Returns the file of the adapters for strategies that take fitted ones; fits them to texts of training if
    there are none."""
    if all(config.structures[strategy].get("adapters") != FITTED for strategy in config.strategies):
        return ""
    if not path.exists():
        rows = (
            batch for i, kind in enumerate(config.fit.kinds)
            for batch in train_svd.batches(train_svd.rows_of(llm, kind, False, config.fit), config.fit.batches,
                                           config.fit, i)
        )
        logging.info("fitting adapters to %s", ", ".join(config.fit.kinds))
        fit_adapters.svd(collect_moments.key_moments(llm, rows), config.fit.ratio).save(path)
    return str(path)


def check(config) -> None:
    """Raises ConfigError for names or sizes that make no experiment."""
    known = {"strategies": tuple(config.structures), "modes": MODES, "kinds": KINDS}
    for name, names in known.items():
        if not config[name] or set(config[name]) - set(names):
            raise ConfigError(f"{name}={tuple(config[name])} must be some of {', '.join(names)}")
    common.check_counts(config, texts=1, batch=1, prompt=1, steps=2, recall_k=1, checkpoints=0)
    common.check_counts(config.fit, ratio=1, batches=1, batch=1, length=2, documents=1, seed=0)
    if not config.fit.kinds or set(config.fit.kinds) - set(train_svd.KINDS):
        raise ConfigError(f"fit.kinds={tuple(config.fit.kinds)} must be some of {', '.join(train_svd.KINDS)}")
    check_shared(config)
    for strategy in config.strategies:
        common.make_method(settings_of(strategy, config))
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
        settings = settings_of(strategy, config)
        common.check_fit(model, settings, prompts, capacity)
        method = common.make_method(settings)
        if config.prompt < method.sinks + method.window:
            raise ConfigError(f"prompt={config.prompt} leaves nothing to fit to beside {method.sinks} sinks and the "
                              f"{method.window - 1} tokens before the newest; raise it")
    for name, most in (("layer", model.num_layers), ("head", model.num_kv_heads)):
        if not _validate.whole(config.pca[name], 0) or config.pca[name] >= most:
            raise ConfigError(f"pca.{name}={config.pca[name]!r} must be one of the model's, 0 to {most - 1}")


def run(config: ml_collections.ConfigDict, workdir: str) -> None:
    """Decodes and measures every mode and strategy, then plots."""
    check(config)
    llm, run = common.load_model(config.model, config.dtype), Run(config, workdir, ("modes", "strategies"))
    check_fit(llm.config, config)
    adapters, texts = fitted_adapters(llm, config, run.path / "adapters.safetensors"), Texts(llm, config.seed)
    directory = run.path / "windows"
    directory.mkdir(exist_ok=True)
    rows = run.logged()
    done = {_head(row) for row in rows}
    for mode, some in itertools.product(config.modes, _batches(config)):
        wanted = [(f"{mode}/{kind}", number, at * config.prompt) for kind, number in some for at in config.checkpoints]
        waiting = [name for name in config.strategies if any((*head, name) not in done for head in wanted)]
        if not waiting:
            continue
        tokens, dense = _read(llm, texts, mode, some, config)
        for strategy in tqdm(waiting, desc=f"{mode}, {some[0][0]} {some[0][1]}", disable=None):
            keep = functools.partial(keep_window, directory, f"{mode}_{strategy}", some, config)
            found = run_strategy(llm, strategy, mode, some, tokens, config, keep, adapters, dense)
            for row in found:
                if _head(row) not in done:
                    rows.append(row)
                    run.keep(**row)
            _log(mode, strategy, found, config)
    run.summary(summarised(rows))
    pictures.plot_all(rows, run.path, config)


def _head(row: dict) -> tuple[str, int, int, str]:
    """Returns what tells a row from all others."""
    return row["task"], row["text"], row["decoded"], row["method"]


def _log(mode: str, strategy: str, rows: list[dict], config) -> None:
    """Logs the recall of one batch at each checkpoint."""
    for checkpoint in config.checkpoints:
        decoded = checkpoint * config.prompt
        recall = np.mean([row["recall"] for row in rows if row["decoded"] == decoded])
        logging.info("%s, %s: recall %.3f after %d tokens", mode, strategy, recall, decoded)


def _batches(config) -> Iterator[list[Text]]:
    """Yields the texts that are decoded together."""
    texts = list(itertools.product(config.kinds, range(config.texts)))
    return (texts[start : start + config.batch] for start in range(0, len(texts), config.batch))


def _read(llm: kvjax.LLM, texts: Texts, mode: str, some: list[Text], config) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the tokens of texts, and the outputs of dense attention over them where every strategy has the same."""
    length = config.prompt * (1 + max(config.checkpoints))
    tokens = np.asarray([texts.draw(*text, config.prompt, length) for text in some], np.int32)
    if mode == "free":
        return tokens, None
    tokens = continued(llm, tokens, config) if mode == "sampled" else tokens
    return tokens, dense_outputs(llm, tokens, window_starts(config), config)


def keep_window(directory: pathlib.Path, name: str, texts: list[Text], config, window: Window, plan: Plan) -> None:
    """Writes the data of one window's plots, for the first text of each kind: which clusters of one head are retrieved
    together, and of `pca.kind` its keys and their clusters."""
    if not has_clusters(window.state):
        return
    i, head, blocks = config.pca.layer, config.pca.head, plan.layers[config.pca.layer].spec.num_blocks
    stored = config.prompt + window.start + config.steps
    for b, (kind, number) in enumerate(texts):
        if number:
            continue
        kept = {"pairs": co_retrieval(window.retrieved[i][:, b, head], blocks)}
        if kind == config.pca.kind:
            key, _, cluster = in_token_order(plan.layers[i], window.state.layers[i], plan.capacity)
            kept |= {"key": key[b, :stored, head], "cluster": cluster[b, :stored, head], "none": blocks}
        np.savez_compressed(directory / f"{name}_{kind}_{window.start}.npz", **kept)
