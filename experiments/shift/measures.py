"""Measures of a recorded window: selection, clusters, and the loss against dense attention."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from experiments.shift.decoding import Decoding, Window, in_token_order
from kvjax.cache.layer import LayerPlan
from kvjax.eval import metrics
from kvjax.inference import dense_prefill
from kvjax.inference.blocks import unembed
from kvjax.inference.plan import Plan, State
from kvjax.methods.clusters.index import statistics

HORIZONS = (1, 2, 4, 8, 16)  # steps t of Table 2


@functools.partial(jax.jit, static_argnums=(0, 1))
def _selection(plan: LayerPlan, k: int, key, value, queries, selected, at):
    """Returns the quality of the selection in one layer of one text, means over heads and steps."""

    def one(args):
        q, chosen, at = args
        scores = metrics.exact_scores(plan, q, key, at)
        attended = metrics.attended_mask(plan, chosen, at, key.shape[0])
        return {
            "recall": metrics.recall(plan, scores, attended, at, k),
            "attention_mass": metrics.attention_mass(scores, attended),
            "output_error": metrics.output_error(scores, attended, value),
            "attended_tokens": jnp.sum(attended, axis=-1),
        }

    return jax.tree.map(jnp.nanmean, jax.lax.map(one, (queries, selected, at)))


@functools.partial(jax.jit, static_argnums=2)
def _statistics(key, cluster, blocks: int):
    return jax.vmap(jax.vmap(statistics, (1, 1, None)), (0, 0, None))(key, cluster, blocks)


def partitions(plan: Plan, state: State) -> list[tuple[np.ndarray, ...] | None]:
    """Returns n_j [B, K, NB], r_j and sigma_j^2 of every layer's clusters, from the keys; None for a layer without
    clusters."""
    found: list[tuple[np.ndarray, ...] | None] = []
    for layer, cache in zip(plan.layers, state.layers, strict=True):
        if not hasattr(cache.state.index, "cluster"):
            found.append(None)
            continue
        key, _, cluster = in_token_order(layer, cache, plan.capacity)
        found.append(jax.device_get(_statistics(key, cluster, layer.spec.num_blocks)))
    return found


def measure_window(plan: Plan, window: Window, initial, config) -> list[dict[str, float]]:
    """Returns the figures of each text: means over heads, steps and the layers that have them. `initial` are the
    partitions of the prompt."""
    position = config.prompt + window.start + jnp.arange(config.steps, dtype=jnp.int32)
    now, by_layer = partitions(plan, window.state), []
    for i, layer in enumerate(plan.layers):
        key, value, _ = in_token_order(layer, window.state.layers[i], plan.capacity)
        for b in range(plan.batch):
            asked, chosen = window.queries[i][:, b], window.selected[i][:, b]
            row = _selection(layer, config.recall_k, key[b], value[b], asked, chosen, position)
            clusters, first = now[i], initial[i]
            if clusters is not None and first is not None:
                row |= partition_figures(*(x[b] for x in clusters), *(x[b] for x in first))
                row |= updated_retrieved(window.retrieved[i][:, b], window.counts[i][:, b])
                row["refused"] = np.sum(window.state.layers[i].state.index.refused[b])
            by_layer.append(row)
    texts = [by_layer[b :: plan.batch] for b in range(plan.batch)]
    return [_means(text) for text in texts]


def _means(rows: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: float(np.nanmean([row[name] for row in rows if name in row])) for name in names}


def partition_figures(count, centroid, variance, count0, centroid0, variance0) -> dict[str, float]:
    """Returns size, variance (Table 5) and drift of the clusters of one layer; arrays are [K, NB, ...].

    Variance is the mean over keys of the squared distance to their centroid. Drift is the mean over keys of the squared
    distance from their centroid to the nearest of the prompt's clusters, over the prompt's own variance.
    """
    heads = range(len(count))
    inertia = [np.average(variance[h], weights=count[h]) for h in heads]
    inertia0 = [np.average(variance0[h], weights=count0[h]) for h in heads]
    drift = []
    for h in heads:
        used, used0 = count[h] > 0, count0[h] > 0
        apart = np.square(centroid[h][used][:, None] - centroid0[h][used0][None]).sum(-1).min(-1)
        drift.append(np.average(apart, weights=count[h][used]) / max(inertia0[h], 1e-9))
    return {
        "clusters": float(np.mean((count > 0).sum(-1))), "cluster_size": float(np.mean(count[count > 0])),
        "largest_cluster": float(np.mean(count.max(-1))), "single_clusters": float(np.mean((count == 1).sum(-1))),
        "variance": float(np.mean(inertia)), "centroid_drift": float(np.mean(drift)),
    }


def updated_retrieved(retrieved: np.ndarray, counts: np.ndarray) -> dict[str, float]:
    """Returns Table 2: the probability that a cluster updated by a step is retrieved within the next t steps.

    `retrieved` is [S, K, M], `counts` [S + 1, K, NB]. `retrieved_chance_t` is the same over all clusters.
    """
    steps, heads, blocks = len(retrieved), counts.shape[1], counts.shape[2]
    hit = np.zeros((steps, heads, blocks + 1), bool)
    np.put_along_axis(hit, retrieved, True, axis=-1)
    hit, updated, occupied = hit[..., :blocks], counts[1:] != counts[:-1], counts[1:] > 0
    figures = {}
    for t in HORIZONS:
        if t >= steps:
            continue
        soon = np.stack([hit[s + 1 : s + 1 + t].any(0) for s in range(steps - t)])
        for name, which in (("retrieved", updated), ("retrieved_chance", occupied)):
            asked = which[: steps - t]
            figures[f"{name}_{t}"] = float(soon[asked].mean()) if asked.any() else float("nan")
    return figures


def co_retrieval(retrieved: np.ndarray, blocks: int) -> np.ndarray:
    """Returns P(ij) of equation 8: how often clusters i and j are retrieved by one step; `retrieved` is [S, M]."""
    hit = np.zeros((len(retrieved), blocks + 1))
    np.put_along_axis(hit, retrieved, 1.0, axis=-1)
    pairs = hit[:, :blocks].T @ hit[:, :blocks]
    np.fill_diagonal(pairs, 0.0)
    return pairs / max(pairs.sum(), 1.0)


def dense_outputs(llm: kvjax.LLM, tokens: np.ndarray, starts: Sequence[int], config) -> np.ndarray:
    """Returns the last hidden states [B, N, S, E] of dense causal attention over tokens[B, T], at the S steps of each
    of N windows."""
    at = config.prompt + np.asarray(starts)[:, None] + np.arange(config.steps)
    out = None
    for layer in dense_prefill.read(llm.config.for_length(tokens.shape[1]), llm.params, dense_prefill.pad(tokens)):
        out = layer.out  # of each layer only this is kept
    return np.asarray(out)[:, at]


def against_dense(
    llm: kvjax.LLM, decoding: Decoding, windows: list[tuple[int, np.ndarray]], dense: np.ndarray
) -> list[list[dict]]:
    """Returns per window and text the negative log-likelihood against that of dense attention over the same tokens.

    `divergence` is KL(dense || sparse) in nats. `delta_nll` is given for teacher-forced text only: with sampled text it
    would measure the sampling. There, `text_nll` is the loss of dense attention on the text.

    Args:
      llm: the model.
      decoding: the texts, decoded.
      windows: start and logits [S, B, V] of each window.
      dense: what `dense_outputs` returned for the same texts and windows.
    """
    config = llm.config.for_length(decoding.tokens.shape[1])
    return [
        [_loss(config, llm.params, decoding, start, logits[:, b], b, dense[b, i])
         for b in range(len(decoding.tokens))]
        for i, (start, logits) in enumerate(windows)
    ]


def _loss(model, params, decoding: Decoding, start: int, logits: np.ndarray, b: int, dense: np.ndarray) -> dict:
    """Returns the figures of one window of one text; one text at a time, as a vocabulary may be large."""
    steps = decoding.config.steps - 1
    ours = jax.nn.log_softmax(logits[:steps])
    theirs = jax.nn.log_softmax(unembed(model, params, dense)[:steps])
    first = decoding.prompt + start + 1
    target = decoding.tokens[b, first : first + steps, None]
    nll, reference = (float(-np.take_along_axis(np.asarray(x), target, axis=-1).mean()) for x in (ours, theirs))
    divergence = float(jnp.sum(jnp.exp(theirs) * (theirs - ours), axis=-1).mean())
    quality = {"text_nll": reference} if decoding.mode == "free" else {"nll": nll, "delta_nll": nll - reference}
    return {**quality, "divergence": divergence}
