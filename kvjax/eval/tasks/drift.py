"""Drift of a long generation from full attention, window by window.

A method generates; full attention then reads the same text and gives the likelihood of every token, and whether it
would have chosen it. Accumulating errors show as windows that get worse, loops in the text as repeats.
"""

import contextlib
import dataclasses
from collections.abc import Sequence

import numpy as np

from kvjax.cache.method import Method
from kvjax.llm import LLM
from kvjax.methods.full import Full
from kvjax.store.interface import Store

GRAM = 4  # tokens of a repeated run


@dataclasses.dataclass(frozen=True)
class Window:
    """Means over the tokens `start` to `stop` of all generated texts."""

    start: int
    stop: int
    nll: float  # under full attention given the same text, nats per token
    agreement: float  # share of tokens that full attention would have chosen
    repeats: float  # share of runs of four tokens that occurred in the text before


def windows(
    llm: LLM, contexts: Sequence[Sequence[int]], method: Method, new_tokens: int, size: int, store: Store | None = None
) -> list[Window]:
    """Generates greedily with a method and compares each window of tokens with full attention.

    Args:
      llm: model to generate with.
      contexts: token ids of each context.
      method: method that generates.
      new_tokens: most tokens to generate; texts may end early.
      size: tokens of a window.
      store: store of the method, if any.

    Returns:
      The windows in order; none if no text has a token.
    """
    rows = [list(context) for context in contexts]
    capacity = max(map(len, rows)) + new_tokens
    with contextlib.closing(llm.prefill(rows, method=method, store=store, capacity=capacity)) as cache:
        result = llm.generate([[]] * len(rows), cache, max_new_tokens=new_tokens)
        result.cache.close()
    kept = [i for i, tokens in enumerate(result.tokens) if tokens]
    texts = [result.tokens[i] for i in kept]
    if not texts:
        return []
    scores = llm.score(texts, llm.prefill([rows[i] for i in kept], method=Full(), capacity=capacity))
    repeated = [repeats(text) for text in texts]
    return [
        Window(start, start + size, -_mean(scores.logprobs, start, size), _mean(scores.greedy, start, size),
               _mean(repeated, start, size))
        for start in range(0, max(map(len, texts)), size)
    ]


def _mean(rows: Sequence[np.ndarray], start: int, size: int) -> float:
    """Returns the mean over the part of each row within a window."""
    return float(np.mean(np.concatenate([row[start : start + size] for row in rows])))


def repeats(tokens: Sequence[int]) -> np.ndarray:
    """Returns for each token whether the run of four that it ends occurred before; False for the first three."""
    seen: set[tuple[int, ...]] = set()
    repeated = np.zeros(len(tokens), bool)
    for i in range(GRAM, len(tokens) + 1):
        run = tuple(tokens[i - GRAM : i])
        repeated[i - 1] = run in seen
        seen.add(run)
    return repeated
