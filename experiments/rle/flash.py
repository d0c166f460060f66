"""What run-length coded blocks save of a store's reads: the codec "rle" of the flash store under methods, on text.

The same tokens are decoded after the same prompt from a cache in memory and from one on flash in each codec, and are to
be as likely to the last bit. The control plants runs: every so many tokens of the prompt in a row have the key of the
first of them. It shows what the codec does where there are runs, and nothing about models.
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Iterator

import jax
import numpy as np

import kvjax
from experiments import common
from kvjax.inference.prefill import PromptActivations
from kvjax.llm import Scores
from kvjax.store.format import block_runs
from kvjax.store.interface import PAGE_BYTES


def plant(reading: PromptActivations, run: int) -> PromptActivations:
    """With one key for every `run` tokens in a row, in each layer."""
    first = np.arange(reading.tokens.shape[1]) // run * run
    layers = tuple(dataclasses.replace(one, key=one.key[:, first]) for one in reading.layers)
    return dataclasses.replace(reading, layers=layers)


def runs_of(cache: kvjax.Cache) -> dict[str, float]:
    """Runs per token inside the blocks of a cache in memory, and the share of rows that have a token."""
    runs, tokens, rows = 0, 0, 0
    for one in jax.device_get(cache.state.layers):
        count = one.state.count.reshape(-1)
        key = np.asarray(one.pool.key).reshape(count.size, -1, one.pool.key.shape[-1])
        valid = np.arange(key.shape[1]) < count[:, None]
        runs += np.count_nonzero(block_runs.begins(key) & valid)
        tokens += int(count.sum())
        rows += valid[count > 0].size
    return {"runs_per_token": runs / tokens, "rows_used": tokens / rows}


def decoded(llm: kvjax.LLM, reading: PromptActivations, rest: np.ndarray, store, **settings) -> tuple[np.ndarray, dict]:
    """Log-probabilities of what follows a prompt, and what was written and read."""
    cache = llm.prefill(reading, store=store, capacity=int(reading.length[0]) + rest.size, **settings)
    scores = llm.score(rest.tolist(), cache)
    found = runs_of(cache) if store is None else _moved(cache, scores)
    for one in (scores.cache, cache):
        one.close()
    return scores.logprobs[0], found


def _moved(cache: kvjax.Cache, scores: Scores) -> dict[str, float]:
    written, read, steps = cache.branch.stats(), scores.usage.store, scores.usage.steps
    return {
        "pages_per_block": cache.branch.geometry.extent_bytes // PAGE_BYTES, "bytes_written": written.bytes_written,
        "short_share": written.blocks_short / written.blocks_written,
        "bytes_read_per_token": read.bytes_read / steps, "reads_per_token": read.reads / steps,
    }


def rows(llm: kvjax.LLM, kind: str, token: np.ndarray, directory: pathlib.Path, config) -> Iterator[dict]:
    """One row for each codec, method, type of keys and length of planted runs (1 = as they are)."""
    settings, prompt = config.flash, token.size - config.flash.steps
    readings = {run: plant(llm.read(token[:prompt].tolist()), run) for run in settings.planted}
    for method, dtype, run in itertools.product(settings.methods, settings.dtypes, settings.planted):
        how = {"method": common.make_method(method), "dtype": dtype}
        expected, runs = decoded(llm, readings[run], token[prompt:], None, **how)
        for codec in ("raw", "rle"):
            store = kvjax.FlashStore(directory, codec=codec)
            found, moved = decoded(llm, readings[run], token[prompt:], store, **how)
            yield {
                "task": f"flash/{kind}", "store": "flash", "codec": codec, "method": common.label(how["method"]),
                "budget": how["method"].budget, "context": token.size, "dtype": dtype, "planted": run, **runs, **moved,
                "equal": bool(np.array_equal(found, expected)),
            }
