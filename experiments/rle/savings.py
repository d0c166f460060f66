"""Bytes that codecs of keys save, and their cost in likelihood, on three kinds of text.

Runs are searched after rotation, as the source of the run-length cache implies, and before it, per layer and head, for
each tolerance. Beside them: runs of sorted keys and of keys in few bits, dictionaries of equal keys and values,
segments of their index, and a learned codec. Reads and writes of the flash store's codec are measured by
`experiments.rle.flash`. The table at the end has the source's figures beside ours.
"""

import functools
import itertools
import pathlib
from collections.abc import Collection, Iterator

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from matplotlib.figure import Figure

import kvjax
from experiments import common, plots
from experiments.results import Run
from experiments.rle import autoencoder, flash, likelihood, model, sizes, table
from experiments.rle.texts import KINDS, draw
from experiments.texts import Texts
from kvjax.errors import ConfigError

_PLACES = {"rle_after": "after RoPE", "rle_before": "before RoPE", "rle_sorted": "before RoPE, sorted"}


def train_codec(llm: kvjax.LLM, texts: Texts, config) -> autoencoder.Autoencoder:
    """Trains an autoencoder for every layer and head, [L, K, ...], on texts that are not measured."""
    how, length = autoencoder.Training(**config.autoencoder), max(config.lengths)
    keys = [model.run(llm, draw(texts, kind, config.texts, length)).key for kind in config.kinds]
    keys = np.concatenate(keys, axis=1)
    seeds = jax.random.split(jax.random.key(config.seed), keys.shape[0] * keys.shape[2]).reshape(keys.shape[0], -1)
    train = jax.vmap(jax.vmap(lambda key, seed: autoencoder.train(key, how, seed)))
    return train(jnp.asarray(np.moveaxis(keys, 2, 1)), seeds)


def size_rows(llm: kvjax.LLM, kind: str, token: np.ndarray, models, config) -> Iterator[dict]:
    """Yields the savings of each codec on token[texts, T], at every length."""
    read = [model.run(llm, row) for row in token]
    key, value = (np.stack([getattr(text_pass, name) for text_pass in read]) for name in ("key", "value"))
    turn = jax.vmap(jax.vmap(functools.partial(model.rotated, llm.config)))
    after, before, value = (np.moveaxis(rows, 3, 2) for rows in (np.asarray(turn(jnp.asarray(key))), key, value))
    yield sizes.distance_row(kind, "after", after)
    yield sizes.distance_row(kind, "before", before)
    for length in config.lengths:
        first = [rows[:, :, :, :length] for rows in (after, before, value)]
        for case in sizes.cases(first[0], first[1], config):
            yield sizes.runs_row(kind, case, length, before.shape[-1], config)
        yield from sizes.dictionary_rows(kind, *first[1:], token[:, :length], config)
        yield sizes.learned_row(kind, models, length, config)


def measure(llm: kvjax.LLM, texts: Texts, kind: str, models, path: pathlib.Path, config) -> Iterator[dict]:
    """Yields all rows of one kind of text; store files are made in `path`."""
    token = np.asarray([draw(texts, kind, number, max(config.lengths)) for number in range(config.texts)])
    yield from size_rows(llm, kind, token, models, config)
    yield from flash.rows(llm, kind, token[0, : config.flash.length], path, config)
    yield from likelihood.rows_by_part(llm, kind, token, config)
    yield from likelihood.rows(llm, kind, token, models, config)


def check(config) -> None:
    """Raises ConfigError for kinds or lengths that make no experiment."""
    if not config.kinds or set(config.kinds) - set(KINDS):
        raise ConfigError(f"kinds={tuple(config.kinds)} must be some of {', '.join(KINDS)}")
    if any(length % config.span or length < 2 * config.span for length in config.lengths):
        raise ConfigError(f"lengths={tuple(config.lengths)} must be whole segments of span={config.span}, at least two")


def run(config: ml_collections.ConfigDict, workdir: str) -> None:
    """Measures every kind of text that the workdir does not have yet."""
    check(config)
    llm, run = common.load_model(config.model), Run(config, workdir)
    rows = run.logged()
    missing = [kind for kind in config.kinds if f"likelihood/{kind}" not in {row["task"] for row in rows}]
    texts = Texts(llm, config.seed)
    models = train_codec(llm, texts, config) if missing else None
    for kind in missing:
        for row in list(measure(llm, texts, kind, models, run.path, config)):  # a kind is logged as a whole, or not
            rows.append({"store": "memory", "budget": None, "seed": config.seed, **row})
            run.log(**rows[-1])
    run.summary(rows)
    plots.save(plot(rows, config.kinds), run.path / "savings.png")
    table.print_table(rows, config.histogram)


def plot(rows: list[dict], kinds: Collection[str]) -> Figure:
    """Plots, for each kind of text, the bytes that runs of keys save and their cost in likelihood with its 95 %
    interval, against the tolerance. A tolerance of zero is absolute and relative."""
    longest = max(row["context"] for row in rows)
    figure, panels = plots.panels(2 * len(kinds), columns=len(kinds))
    colors = plots.styles(_PLACES.values())
    looks = {f"{place}, {measure}": {**look, "linestyle": line}
             for place, look in colors.items() for measure, line in (("absolute", "-"), ("relative", "--"))}
    for axes, (task, kind) in zip(panels, itertools.product(("runs", "likelihood"), kinds), strict=True):
        mine = [row for row in rows if row["task"] == f"{task}/{kind}" and row["context"] == longest]
        runs = [row | {"tolerance": value, "codec": f"{_PLACES[row['method']]}, {measure}"}
                for row in mine if row["method"] in _PLACES for measure in ("absolute", "relative")
                if (value := row.get(measure, 0.0 if row.get("absolute") == 0 else None)) is not None]
        y, interval = ("saved", None) if task == "runs" else ("relative_delta_nll", _interval)
        plots.curves(axes, runs, "tolerance", y, "codec", interval, looks)
        values = sorted({row["tolerance"] for row in runs})
        axes.set_xscale("symlog", linthresh=min((value for value in values if value), default=1.0))
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.set_xticks([], minor=True)
        axes.set(title=f"{kind}, {longest:,} tokens", xlabel="tolerance",
                 ylabel="share of the keys' bytes saved" if task == "runs" else "increase of the loss, relative")
    return figure


def _interval(row: dict) -> tuple[float, float]:
    half = 1.96 * row["relative_error"]
    return row["relative_delta_nll"] - half, row["relative_delta_nll"] + half
