"""Rows of savings of codecs of keys on a text: runs, dictionaries, and distances of neighbours.

Keys and values are [texts, L, K, T, D], keys before rotation unless said otherwise. Bytes are those of all layers and
heads of one text, a mean over texts, at `itemsize` bytes per element, with index, counts, header and scales.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.rle import autoencoder, dictionary, sorted_runs
from kvjax.ops import lowbit
from kvjax.ops import runs as rle
from kvjax.ops.runs import Tolerance


class Case(NamedTuple):
    """Runs found by one method at one tolerance."""

    method: str
    tolerance: dict[str, float]
    lengths: np.ndarray  # [texts, L, K] of the lengths of each head's runs
    vector: int  # bytes of a key
    scales: int = 0  # bytes of a head's scales


@jax.jit
def _begins(key, tolerance):
    """Returns whether each key of key[N, T, D] begins a run."""
    return jax.vmap(lambda head: rle.begins(head, tolerance))(key)


@functools.partial(jax.jit, static_argnums=1)
def _quantised(key, bits):
    """Returns codes of key[N, T, D], with scales of each head."""
    return jax.vmap(lambda head: lowbit.quantise(head, lowbit.scale_of(head, bits), bits))(key)


@functools.partial(jax.jit, static_argnums=1)
def _sorted(key, clusters):
    """Returns key[N, T, D] in the order in which sorted runs are searched."""
    def one(key):
        return key[sorted_runs.order(key, jnp.int32(len(key)), clusters, jax.random.key(0))]

    return jax.lax.map(one, key)


@functools.partial(jax.jit, static_argnums=2)
def _different(rows, token, span):
    """Counts the different rows of rows[N, T, X] and the different segments of their index; tells whether token[N, T]
    determines the rows."""
    def one(rows, token):
        runs = dictionary.by_content(rows, jnp.int32(len(rows)), len(rows))
        known = rle.decode(dictionary.by_token(rows, token, jnp.int32(len(rows)), len(rows)))
        return runs.runs, dictionary.segments(runs.slot, span).count, jnp.all(known == rows)

    return jax.vmap(one)(rows, token)


def tolerances(config) -> list[tuple[str, float]]:
    """Returns every tolerance of the experiment, absolute and relative; zero once."""
    some = [value for value in config.tolerances if value > 0]
    return [("absolute", 0.0)] * (0.0 in config.tolerances) + list(itertools.product(("absolute", "relative"), some))


def run_lengths(key: np.ndarray, tolerance: dict[str, float]) -> np.ndarray:
    """Returns the lengths of the runs of key[texts, L, K, T, D], an array of arrays [texts, L, K]."""
    begins = np.asarray(_begins(key.reshape(-1, *key.shape[3:]), Tolerance(**tolerance)))
    lengths = np.empty(len(begins), object)
    lengths[:] = [np.diff([*np.flatnonzero(row), len(row)]) for row in begins]
    return lengths.reshape(key.shape[:3])


def histogram(lengths, edges) -> list[int]:
    """Returns the number of runs per bin; bin i has lengths from edges[i] to below edges[i + 1]."""
    return np.histogram(np.concatenate(list(lengths)), [*edges, np.inf])[0].tolist()


def cases(after: np.ndarray, before: np.ndarray, config) -> Iterator[Case]:
    """Yields runs of rotated keys, and of keys before rotation: as they are, sorted by cluster, and in codes of few
    bits, where the tolerance is in steps."""
    *_, tokens, size = before.shape
    flat = before.reshape(-1, tokens, size)
    ordered = np.asarray(_sorted(flat, tokens // config.cluster)).reshape(before.shape)
    places = {"rle_after": after, "rle_before": before, "rle_sorted": ordered}
    for (method, key), (measure, value) in itertools.product(places.items(), tolerances(config)):
        yield Case(method, {measure: value}, run_lengths(key, {measure: value}), size * config.itemsize)
    for bits in config.bits:
        for prefix, key in (("", before), ("sorted_", ordered)):
            code = np.asarray(_quantised(key.reshape(flat.shape), bits)).reshape(before.shape)
            for steps in (0.0, 1.0):
                lengths = run_lengths(code, {"absolute": steps * lowbit.APART[bits]})
                name, scales = f"int{bits}_{prefix}rle", size * config.itemsize
                yield Case(name, {"steps": steps}, lengths, size * bits // 8, scales)


def sizes(raw: float, coded: float) -> dict[str, float]:
    """Returns the bytes of keys, and of keys with as many bytes of values that stay as they are."""
    return {"key_bytes": raw, "key_bytes_coded": coded, "saved": 1 - coded / raw, "kv_bytes": 2 * raw,
            "kv_bytes_coded": raw + coded, "kv_saved": (1 - coded / raw) / 2}


def runs_row(kind: str, case: Case, length: int, size: int, config) -> dict:
    """Returns the row of one case, for keys of `size` numbers; some figures are also given by layer and head."""
    texts, layers, heads = case.lengths.shape
    count = np.vectorize(len)(case.lengths)
    coded = np.vectorize(lambda n: rle.size(length, int(n), case.vector, 1).coded + case.scales)(count)
    raw, rate = length * size * config.itemsize, float(count.mean() / length)
    by_head = case.lengths.transpose(1, 2, 0)
    return {
        "task": f"runs/{kind}", "method": case.method, "context": length, **case.tolerance, "runs_per_token": rate,
        **sizes(layers * heads * raw, float(coded.sum() / texts)), "best_saved": float(1 - coded.min() / raw),
        "saved_by_runs": float(1 - coded.sum() / (texts * layers * heads * (length * case.vector + case.scales))),
        "pays_from": rle.fewest_tokens(rate, case.vector, 1),
        "histogram": histogram(case.lengths.ravel(), config.histogram),
        "runs_per_token_by_layer_and_head": (count.mean(0) / length).tolist(),
        "histogram_by_layer_and_head": [[histogram(head, config.histogram) for head in layer] for layer in by_head],
    }


def distance_row(kind: str, place: str, key: np.ndarray) -> dict:
    """Returns the distances of neighbours of key[texts, L, K, T, D]: the absolute tolerance at which they would be one
    run."""
    apart = np.abs(np.diff(key, axis=3)).max(-1)
    quantiles = np.quantile(apart, (0.0, 0.01, 0.5), axis=(0, 2, 3)).T
    return {
        "task": f"distance/{kind}", "method": f"rle_{place}", "context": key.shape[3],
        "root_mean_square": float(np.sqrt(np.mean(key**2))), "least_hundredth_median_by_layer": quantiles.tolist(),
    }


def dictionary_rows(kind: str, key: np.ndarray, value: np.ndarray, token: np.ndarray, config) -> Iterator[dict]:
    """Yields the different keys, values, and rows of both, of each layer; and the different tokens of token[texts,
    T]."""
    length = key.shape[3]
    parts = {"key": key, "value": value, "row": np.concatenate([key, value], axis=-1)}
    for (name, part), layer in itertools.product(parts.items(), range(key.shape[1])):
        texts, heads, _, width = part[:, layer].shape
        flat = part[:, layer].reshape(-1, length, width)
        count, segments, decided = map(np.asarray, _different(flat, np.repeat(token, heads, axis=0), config.span))
        of_heads = [rle.size(length, int(n), width, config.itemsize) for n in count]
        index = dictionary.index_size(length, int(segments.max()), config.span)
        raw, coded = (float(sum(getattr(size, field) for size in of_heads) / texts) for field in ("raw", "coded"))
        yield {
            "task": f"dictionary/{kind}", "method": f"dictionary_{name}", "context": length, "layer": layer,
            "bytes": raw, "bytes_coded": coded, "saved": 1 - coded / raw, "lossless_by_token": bool(decided.all()),
            "different_per_token": float(count.mean() / length),
            "tokens_per_token": float(np.mean([len(set(row)) for row in token.tolist()]) / length),
            "segments_saved_of_index": 1.0 - index.coded / index.raw,
        }


def learned_row(kind: str, models: autoencoder.Autoencoder, length: int, config) -> dict:
    """Returns the size of the codes of all layers and heads, [L, K, ...]; also with the codecs' own weights, which all
    texts share."""
    layers, heads, size, width = models.encoder.linear.shape
    weights = sum(leaf.size for leaf in jax.tree.leaves(models)) * config.itemsize
    raw, coded = (layers * heads * length * numbers * config.itemsize for numbers in (size, width))
    return {
        "task": f"learned/{kind}", "method": f"autoencoder_{width}", "context": length, **sizes(raw, coded),
        "weight_bytes": weights, "saved_with_weights": 1 - (coded + weights) / raw,
    }
