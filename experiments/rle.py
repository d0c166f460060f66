"""What codecs of keys save, and what they cost in likelihood, on three kinds of text.

Runs are looked for after rotation, as the source of the run-length cache implies, and before it; per layer and head,
for each tolerance. Beside them: dictionaries of equal keys, segments of their index, int8 keys, and a learned codec.
Sizes are of keys only, at `itemsize` bytes per element, with index, counts and header. What the flash store's codec
reads and writes is measured by `experiments.rle_flash`.
"""

import functools
import itertools
import pathlib

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from tqdm import tqdm

import kvjax
from experiments import common, rle_flash, rle_model
from experiments.results import Run
from experiments.rle_texts import KINDS, draw
from experiments.shift_texts import Texts
from kvjax.codecs import autoencoder, dictionary, int8, rle
from kvjax.codecs.rle import Tolerance
from kvjax.errors import ConfigError

PLACES = {"after": rle_model.RunsAfter, "before": rle_model.RunsBefore}


@jax.jit
def _begins(key, tolerance):
    """Whether each key of key[N, T, D] begins a run."""
    return jax.vmap(lambda one: rle.begins(one, tolerance))(key)


@functools.partial(jax.jit, static_argnums=1)
def _different(key, span):
    """Different keys of each of key[N, T, D], and different segments of their index."""
    def one(key):
        runs = dictionary.by_content(key, jnp.int32(len(key)), len(key))
        return runs.runs, dictionary.segments(runs.slot, span).count

    return jax.vmap(one)(key)


def tolerances(config) -> list[tuple[str, float]]:
    """Every tolerance of the experiment, absolute and relative; nought once."""
    some = [value for value in config.tolerances if value > 0]
    return [("absolute", 0.0)] * (0.0 in config.tolerances) + list(itertools.product(("absolute", "relative"), some))


def histogram(begins: np.ndarray, edges) -> list[int]:
    """Runs of begins[N, T] by length; bin i has those from edges[i] on that are shorter than edges[i + 1]."""
    lengths = np.concatenate([np.diff([*np.flatnonzero(row), len(row)]) for row in begins])
    return np.histogram(lengths, [*edges, np.inf])[0].tolist()


def runs_row(kind: str, method: str, key: np.ndarray, length: int, tolerance: dict, itemsize: int, config) -> dict:
    """Runs of the first tokens of key[texts, L, T, K, D]."""
    texts, layers, _, heads, size = key.shape
    flat = np.moveaxis(key[:, :, :length], 3, 2).reshape(-1, length, size)
    begins = np.asarray(_begins(flat, Tolerance(**tolerance)))
    share = begins.mean(-1).reshape(texts, layers, heads).mean(0)
    saved = [rle.size(length, int(runs), size, itemsize).saved for runs in begins.sum(-1)]
    return {
        "task": f"runs/{kind}", "method": method, "context": length, **tolerance, "runs_per_token": float(share.mean()),
        "saved": float(np.mean(saved)), "best_saved": float(np.max(saved)),
        "pays_from": rle.fewest_tokens(float(share.mean()), size, itemsize),
        "histogram": histogram(begins, config.histogram), "runs_per_token_by_layer_and_head": share.tolist(),
    }


def runs_rows(kind: str, after: np.ndarray, before: np.ndarray, length: int, config) -> list[dict]:
    """Runs of rotated keys, of keys before rotation, and of these as int8, where the tolerance is in steps."""
    coded = np.asarray(_quantised(jnp.asarray(before[:, :, :length])))
    cases = [(f"rle_{place}", key, {measure: value}, config.itemsize)
             for place, key in (("after", after), ("before", before)) for measure, value in tolerances(config)]
    cases += [("int8_rle", coded, {"absolute": steps}, 1) for steps in (0.0, 1.0)]
    return [runs_row(kind, name, key, length, limit, size, config) for name, key, limit, size in cases]


@jax.jit
def _quantised(key):
    """int8 of key[texts, L, T, K, D], with scales of each head."""
    def one(key):
        return int8.quantise(key, int8.scale_of(key))

    return jax.vmap(jax.vmap(jax.vmap(one, in_axes=1, out_axes=1)))(key)


def distance_row(kind: str, place: str, key: np.ndarray) -> dict:
    """How far neighbours of key[texts, L, T, K, D] are apart: the absolute tolerance at which they would be one run."""
    apart = np.abs(np.diff(key, axis=2)).max(-1)
    quantiles = np.quantile(apart, (0.0, 0.01, 0.5), axis=(0, 2, 3)).T
    return {
        "task": f"distance/{kind}", "method": f"rle_{place}", "context": key.shape[2],
        "root_mean_square": float(np.sqrt(np.mean(key**2))), "least_hundredth_median_by_layer": quantiles.tolist(),
    }


def dictionary_rows(kind: str, key: np.ndarray, token: np.ndarray, length: int, config) -> list[dict]:
    """Different keys before rotation in each layer, and different tokens; key is `[texts, L, T, K, D]`."""
    rows = []
    for layer in range(key.shape[1]):
        flat = np.moveaxis(key[:, layer, :length], 2, 1).reshape(-1, length, key.shape[-1])
        runs, segments = (np.asarray(found) for found in _different(flat, config.span))
        saved = [rle.size(length, int(n), key.shape[-1], config.itemsize).saved for n in runs]
        index = dictionary.index_size(length, int(segments.max()), config.span)
        rows.append({
            "task": f"dictionary/{kind}", "method": "dictionary", "context": length, "layer": layer,
            "keys_per_token": float(runs.mean() / length), "saved": float(np.mean(saved)),
            "tokens_per_token": float(np.mean([len(set(row[:length])) for row in token.tolist()]) / length),
            "segments_saved_of_index": 1.0 - index.coded / index.raw,
        })
    return rows


def likelihood_rows(llm: kvjax.LLM, kind: str, token: np.ndarray, models, config) -> list[dict]:
    """Nats per token with the keys of all layers through each codec, beside those without."""
    recodings = [("none", {}, rle_model.PLAIN)]
    for (place, make), (measure, value) in itertools.product(PLACES.items(), tolerances(config)):
        recodings.append((f"rle_{place}", {measure: value}, make(Tolerance(**{measure: value}))))
    recodings += [
        ("int8", {}, rle_model.Int8Runs(Tolerance())), ("int8_rle", {"steps": 1.0}, rle_model.Int8Runs(Tolerance(1.0))),
        (f"autoencoder_{config.autoencoder.width}", {}, rle_model.Learned(models)),
    ]
    rows, plain = [], float("nan")
    for name, tolerance, recoding in tqdm(recodings, desc=kind, disable=None):
        nll = float(np.mean([rle_model.run(llm, row, recoding)[1] for row in token]))
        plain = nll if name == "none" else plain
        rows.append({
            "task": f"likelihood/{kind}", "method": name, "context": token.shape[1], **tolerance, "nll": nll,
            "perplexity": float(np.exp(nll)), "delta_nll": nll - plain, "relative_delta_nll": nll / plain - 1,
        })
    return rows


def train_codec(llm: kvjax.LLM, texts: Texts, config) -> autoencoder.Autoencoder:
    """An autoencoder for every layer and head, `[L, K, ...]`, from texts that are not measured."""
    how, length = autoencoder.Training(**config.autoencoder), max(config.lengths)
    keys = [rle_model.run(llm, draw(texts, kind, config.texts, length))[0] for kind in config.kinds]
    keys = np.concatenate(keys, axis=1)
    seeds = jax.random.split(jax.random.key(config.seed), keys.shape[0] * keys.shape[2]).reshape(keys.shape[0], -1)
    train = jax.vmap(jax.vmap(lambda key, seed: autoencoder.train(key, how, seed)))
    return train(jnp.asarray(np.moveaxis(keys, 2, 1)), seeds)


def measure(llm: kvjax.LLM, texts: Texts, kind: str, models, path: pathlib.Path, config) -> list[dict]:
    """All rows of one kind of text; store files are made in `path`."""
    longest = max(config.lengths)
    token = np.asarray([draw(texts, kind, number, longest) for number in range(config.texts)])
    before = np.stack([rle_model.run(llm, row)[0] for row in token])
    turn = jax.vmap(jax.vmap(functools.partial(rle_model.rotated, llm.config)))
    after = np.asarray(turn(jnp.asarray(before)))
    rows = [distance_row(kind, "after", after), distance_row(kind, "before", before)]
    for length in config.lengths:
        rows += runs_rows(kind, after, before, length, config)
        rows += dictionary_rows(kind, before, token, length, config)
    rows += rle_flash.rows(llm, kind, token[0], path, config)
    rows += likelihood_rows(llm, kind, token, models, config)
    return [{"store": "memory", "budget": None, "seed": config.seed, **row} for row in rows]


def check(config) -> None:
    """Raises ConfigError on kinds or lengths that make no experiment."""
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
        for row in measure(llm, texts, kind, models, run.path, config):
            rows.append(row)
            run.log(**row)
    run.summary(rows)
