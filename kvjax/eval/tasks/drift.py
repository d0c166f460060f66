"""How a long generation departs from full attention, window by window.

A method generates; full attention then reads the same text and says of every token how likely it was and whether it
would have chosen it. Errors that add up show as windows that get worse, a text that runs in circles as repeats.
"""

import contextlib
import dataclasses
from collections.abc import Sequence

import numpy as np

from kvjax.cache.method import Method
from kvjax.llm import LLM
from kvjax.methods.full import Full
from kvjax.store.interface import Store

GRAM = 4  # tokens of a repeat


@dataclasses.dataclass(frozen=True)
class Window:
    """Tokens `start` to `stop` of the generated texts; means over tokens of all texts."""

    start: int
    stop: int
    nll: float  # under full attention after the same text, nats per token
    agreement: float  # share of tokens that full attention would have chosen
    repeats: float  # share of runs of four tokens that the text had before


def windows(
    llm: LLM, contexts: Sequence[Sequence[int]], method: Method, new_tokens: int, size: int, store: Store | None = None
) -> list[Window]:
    """Generates greedily from contexts (token ids) and compares each window of `size` tokens; texts may end early."""
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
    """Over what the rows have of a window."""
    return float(np.mean(np.concatenate([row[start : start + size] for row in rows])))


def repeats(tokens: Sequence[int]) -> np.ndarray:
    """bool[n]: whether the four tokens that end at each one were there before; False for the first three."""
    seen: set[tuple[int, ...]] = set()
    found = np.zeros(len(tokens), bool)
    for i in range(GRAM, len(tokens) + 1):
        run = tuple(tokens[i - GRAM : i])
        found[i - 1] = run in seen
        seen.add(run)
    return found
