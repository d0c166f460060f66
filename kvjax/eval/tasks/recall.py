"""Multi-query associative recall (MQAR; Zoology, Arora et al., 2023): key-value pairs, then some keys again.

The context has the pairs; the continuation repeats keys in random order, each followed by its value. Only the values
are scored: a model that looks keys up is right, any other is at chance.

Unlike here, Zoology spreads the repeated keys by a power law over random tokens, which a language model has never seen.
Each pair is on a line of its own, as in the training of the reference model.
"""

import numpy as np

from kvjax.errors import ConfigError
from kvjax.eval.tasks import needles
from kvjax.eval.tasks.base import Continuation, Request


def draw(request: Request, queries: int = 16) -> list[Continuation]:
    """Draws contexts of up to `request.length` tokens full of pairs, `queries` of which are asked for."""
    line = needles.encode(request.tokenizer.tokenizer, "\n")
    pairs = (request.length - len(request.start)) // (len(line) + 2)
    if pairs < 1:
        raise ConfigError(f"a key and its value do not fit in {request.length} tokens; raise the length")
    return [_one(request, line, pairs, min(queries, pairs)) for _ in range(request.count)]


def _one(request: Request, line: tuple[int, ...], pairs: int, queries: int) -> Continuation:
    tokenizer = request.tokenizer.tokenizer
    ids = np.setdiff1d(np.arange(tokenizer.get_vocab_size()), [*tokenizer.get_added_tokens_decoder(), *line])
    if 2 * pairs > len(ids):
        raise ConfigError(f"{pairs} pairs need {2 * pairs} different tokens but the vocabulary has {len(ids)}; "
                          "lower the length")
    keys, values = request.rng.choice(ids, size=(2, pairs), replace=False).tolist()
    context = [token for key, value in zip(keys, values, strict=True) for token in (*line, key, value)]
    asked = request.rng.permutation(pairs)[:queries]
    tokens = [token for i in asked for token in (*line, keys[i], values[i])]
    scored = [False, *[False] * len(line), True] * queries
    return Continuation((*request.start, *context), tuple(tokens), tuple(scored))
