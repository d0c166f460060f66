"""Reads that run-length coded blocks save: the codec "rle" of the flash store under several methods, on text.

The same tokens are decoded after the same prompt from a cache in memory and from one on flash in each codec; the
log-probabilities must be equal to the last bit. The control plants runs: within every stretch of `planted` prompt
tokens, all have the key of the first. It shows the effect of the codec where there are runs, and nothing about models.
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Iterator

import jax
import numpy as np

import kvjax
from experiments import common
from kvjax.inference.dense_prefill import PromptActivations
from kvjax.llm import Scores
from kvjax.store.format import block_runs
from kvjax.store.geometry import PAGE_BYTES


def plant(reading: PromptActivations, run: int) -> PromptActivations:
    """Returns the activations with one key for every `run` tokens in a row, in each layer."""
    first = np.arange(reading.tokens.shape[1]) // run * run
    layers = tuple(dataclasses.replace(layer, key=layer.key[:, first]) for layer in reading.layers)
    return dataclasses.replace(reading, layers=layers)


def runs_of(cache: kvjax.Cache) -> dict[str, float]:
    """Returns runs per token inside the blocks of a cache in memory, and the share of rows that have a token."""
    runs, tokens, rows = 0, 0, 0
    for layer in jax.device_get(cache.state.layers):
        count = layer.state.count.reshape(-1)
        key = np.asarray(layer.pool.key).reshape(count.size, -1, layer.pool.key.shape[-1])
        valid = np.arange(key.shape[1]) < count[:, None]
        runs += np.count_nonzero(block_runs.begins(key) & valid)
        tokens += int(count.sum())
        rows += valid[count > 0].size
    return {"runs_per_token": runs / tokens, "rows_used": tokens / rows}


def decoded(llm: kvjax.LLM, reading: PromptActivations, rest: np.ndarray, store, **settings) -> tuple[np.ndarray, dict]:
    """Returns the log-probabilities of the tokens after a prompt, and the runs of a cache in memory or the traffic of a
    store."""
    cache = llm.prefill(reading, store=store, capacity=int(reading.length[0]) + rest.size, **settings)
    scores = llm.score(rest.tolist(), cache)
    figures = runs_of(cache) if store is None else _moved(cache, scores)
    for open_cache in (scores.cache, cache):
        open_cache.close()
    return scores.logprobs[0], figures


def _moved(cache: kvjax.Cache, scores: Scores) -> dict[str, float]:
    written, read, steps = cache.branch.stats(), scores.usage.store, scores.usage.steps
    return {
        "pages_per_block": cache.branch.geometry.extent_bytes // PAGE_BYTES, "bytes_written": written.bytes_written,
        "short_share": written.blocks_short / written.blocks_written,
        "bytes_read_per_token": read.bytes_read / steps, "reads_per_token": read.reads / steps,
    }


def rows(llm: kvjax.LLM, kind: str, token: np.ndarray, directory: pathlib.Path, config) -> Iterator[dict]:
    """Yields one row for each codec, method, type of keys and length of planted runs (1 = keys as they are)."""
    settings, prompt = config.flash, token.size - config.flash.steps
    readings = {run: plant(llm.read(token[:prompt].tolist()), run) for run in settings.planted}
    for method, dtype, run in itertools.product(settings.methods, settings.dtypes, settings.planted):
        how = {"method": common.make_method(method), "dtype": dtype}
        expected, runs = decoded(llm, readings[run], token[prompt:], None, **how)
        for codec in ("raw", "rle"):
            store = kvjax.FlashStore(directory=directory, codec=codec)
            logprobs, moved = decoded(llm, readings[run], token[prompt:], store, **how)
            yield {
                "task": f"flash/{kind}", "store": "flash", "codec": codec, "method": common.label(how["method"]),
                "budget": how["method"].budget, "context": token.size, "dtype": dtype, "planted": run, **runs, **moved,
                "equal": bool(np.array_equal(logprobs, expected)),
            }
