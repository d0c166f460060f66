"""Perplexity through a method's cache: the prompt is prefilled, then true tokens follow one by one.

A parallel forward pass would never exercise a method's selection.
"""

import dataclasses

from kvjax.errors import ConfigError
from kvjax.eval.tasks import files, needles
from kvjax.eval.tasks.base import Continuation, Request


def draw(request: Request) -> list[Continuation]:
    """Draws random spans of the text: prompts of `request.length` tokens and the `request.new_tokens` after them."""
    size = request.length - len(request.start) + request.new_tokens
    if size > len(request.stream):
        raise ConfigError(f"the text has {len(request.stream)} tokens but a span takes {size}; give a longer text")
    return [_span(request, size) for _ in range(request.count)]


def draw_file(request: Request) -> list[Continuation]:
    """Draws random spans of a text file, as `draw` does of the request's text."""
    return draw(dataclasses.replace(request, text=files.read_text(request.path)))


def _span(request: Request, size: int) -> Continuation:
    span = (*request.start, *needles.random_span(request.rng, request.stream, size))
    return Continuation(span[: request.length], span[request.length :], (True,) * request.new_tokens)
