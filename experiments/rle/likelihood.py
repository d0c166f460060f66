"""Cost of codecs of keys in likelihood: of all layers at once, and of one layer or one head at a time.

Errors are standard errors of the mean difference per token between the same texts with and without the codec.
"""

import itertools
from collections.abc import Iterator

import numpy as np
from tqdm import tqdm

import kvjax
from experiments.rle import model, sizes
from kvjax.ops import lowbit
from kvjax.ops.runs import Tolerance


def change(nats: np.ndarray, plain: np.ndarray) -> dict[str, float]:
    """Returns figures of nats[texts, T - 1] relative to those without a codec."""
    apart, nll = nats - plain, float(plain.mean())
    delta, error = float(apart.mean()), float(apart.std(ddof=1) / np.sqrt(apart.size))
    return {
        "nll": float(nats.mean()), "perplexity": float(np.exp(nats.mean())), "delta_nll": delta,
        "delta_nll_error": error, "relative_delta_nll": delta / nll, "relative_error": error / nll,
    }


def recodings(models, config) -> Iterator[tuple[str, dict, object]]:
    """Yields every codec of all layers: its name, its settings, and the recoding."""
    clusters = max(config.lengths) // config.cluster
    for measure, value in sizes.tolerances(config):
        tolerance = Tolerance(**{"absolute": 0.0, "relative": 0.0, measure: value})
        yield "rle_after", {measure: value}, model.RunsAfter(tolerance)
        yield "rle_before", {measure: value}, model.RunsBefore(tolerance)
        yield "rle_sorted", {measure: value}, model.RunsSorted(tolerance, clusters)
    for bits, steps in itertools.product(config.bits, (0.0, 1.0)):
        yield f"int{bits}_rle", {"steps": steps}, model.LowbitRuns(Tolerance(steps * lowbit.APART[bits]), bits)
    yield f"autoencoder_{config.autoencoder.width}", {}, model.Learned(models)


def nats(llm: kvjax.LLM, token: np.ndarray, recoding=model.PLAIN) -> np.ndarray:
    """Returns the nats per token [texts, T - 1] of token[texts, T]."""
    return np.stack([model.run(llm, row, recoding).nats for row in token])


def rows(llm: kvjax.LLM, kind: str, token: np.ndarray, models, config) -> Iterator[dict]:
    """Yields the likelihood with keys of all layers through each codec, beside that without."""
    plain = nats(llm, token)
    yield {"task": f"likelihood/{kind}", "method": "none", "context": token.shape[1], **change(plain, plain)}
    for name, setting, recoding in tqdm(list(recodings(models, config)), desc=kind, disable=None):
        figures = change(nats(llm, token, recoding), plain)
        yield {"task": f"likelihood/{kind}", "method": name, "context": token.shape[1], **setting, **figures}


def masks(layers: int, heads: int) -> Iterator[tuple[dict, np.ndarray]]:
    """Yields each layer alone, and each head alone, as masks [L, K]."""
    for layer in range(layers):
        on = np.arange(layers)[:, None] == np.full((1, heads), layer)
        yield {"layer": layer}, on
        for head in range(heads):
            yield {"layer": layer, "head": head}, on & (np.arange(heads) == head)


def rows_by_part(llm: kvjax.LLM, kind: str, token: np.ndarray, config) -> Iterator[dict]:
    """Yields the likelihood with runs before rotation in one layer, or one head, at a time; on the first tokens of each
    text."""
    token = token[:, : config.parts.length]
    plain = nats(llm, token)
    settings = [*sizes.tolerances(config), ("absolute", config.parts.wide)]
    every = itertools.product(settings, masks(llm.config.num_layers, llm.config.num_kv_heads))
    for (measure, value), (place, on) in tqdm(list(every), desc=f"{kind}, part by part", disable=None):
        tolerance = Tolerance(**{"absolute": 0.0, "relative": 0.0, measure: value})
        recoding = model.Only(model.RunsBefore(tolerance), on)
        yield {
            "task": f"likelihood_of_part/{kind}", "method": "rle_before", "context": token.shape[1], measure: value,
            **place, **change(nats(llm, token, recoding), plain),
        }
