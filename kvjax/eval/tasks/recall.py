"""Multi-query associative recall (MQAR; Zoology, Arora et al., 2023): key-value pairs, then keys asked again.

The context is the pairs; the continuation has every key again in random order, each followed by its value. Only the
values count, and only what they are is random: a model that looks keys up is right, any other is at chance.

Differs from Zoology: keys are asked for one after the other, where Zoology spreads them by a power law over random
tokens, which a model of text has never seen. As the reference model was taught, each pair is on a line of its own.
"""

import numpy as np

from kvjax.errors import ConfigError
from kvjax.eval.tasks import needles
from kvjax.eval.tasks.base import Continuation, Request


def draw(request: Request, queries: int = 16) -> list[Continuation]:
    """Contexts of up to `request.length` tokens full of pairs, `queries` of which are asked for."""
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
