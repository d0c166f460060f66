"""Tasks that ask for facts hidden in text: passkey, needles at every depth, many questions about one context, and
needles in what was decoded after it.
"""

import dataclasses

import numpy as np

from kvjax.errors import ConfigError
from kvjax.eval.tasks import needles
from kvjax.eval.tasks.base import Request, Sample
from kvjax.eval.tasks.needles import Needle

_DIGITS = 5
_STOP = (".",)


def passkey(request: Request) -> list[Sample]:
    """Draws held-out pass keys of 1..50000 (after landmark attention, Mohtashami and Jaggi, 2023)."""
    return [_hidden(request, [needles.passkey(request.rng, held_out=True)], depth) for depth in _depths(request.count)]


def needle(request: Request, others: int = 0) -> list[Sample]:
    """Draws a five-digit number to find by its key word, among `others` of the same wording."""
    return [
        _hidden(request, needles.draw_needles(request.rng, 1 + others, held_out=True, digits=_DIGITS), depth)
        for depth in _depths(request.count)
    ]


def needle_of_4(request: Request) -> list[Sample]:
    """Draws one needle to find among four."""
    return needle(request, others=3)


def grid(request: Request) -> list[Sample]:
    """Draws needles in a haystack (Kamradt, 2023) at depths from 0 to 1 inclusive, each after the end of a sentence."""
    samples = []
    for depth in np.linspace(0, 1, request.count):
        (fact,) = needles.draw_needles(request.rng, 1, held_out=True, digits=_DIGITS)
        samples.append(_after_sentence(request, fact, float(depth)))
    return samples


def multi_request(request: Request, questions: int = 8) -> list[Sample]:
    """Draws contexts with `questions` needles, each asked for on its own fork of the cache.

    This is the idea of SCBench (Li et al., 2024). There are `request.count` questions in all.
    """
    samples: list[Sample] = []
    while len(samples) < request.count:
        facts = needles.draw_needles(request.rng, min(questions, request.count - len(samples)), True, _DIGITS)
        depths = [float(depth) for depth in request.rng.permutation(_depths(len(facts)))]
        longest = max(len(_question(request, fact)) for fact in facts)
        hay = _haystack(request, facts, depths, longest)
        samples += [_sample(request, hay, fact, depth) for fact, depth in zip(facts, depths, strict=True)]
    return samples


def decoded_needles(request: Request, questions: int = 8) -> list[Sample]:
    """Draws texts whose facts come after the prompt, in the `request.new_tokens` tokens that are decoded one by one.

    Each text has `questions` needles, spread evenly over what is decoded, each asked for at its end on a fork of the
    cache; `Sample.depth` is a needle's place there. The prompt of `request.length` tokens has none, so that a method
    finds only what it has kept, placed and selected of its own decoding. There are `request.count` questions in all.

    Raises:
      ConfigError: the needles do not fit in the decoded tokens, or the text is too short.
    """
    samples: list[Sample] = []
    while len(samples) < request.count:
        facts = needles.draw_needles(request.rng, min(questions, request.count - len(samples)), True, _DIGITS)
        depths = _depths(len(facts))
        room = request.new_tokens - needles.needle_cost(request.tokenizer.tokenizer, facts)
        if room < len(facts):
            raise ConfigError(f"{len(facts)} needles do not fit in {request.new_tokens} decoded tokens; raise "
                              "new_tokens")
        own = request.length - len(request.start)
        span = needles.random_span(request.rng, request.stream, own + room)
        context = (*request.start, *span[:own])
        decoded = tuple(needles.insert_needles(request.tokenizer.tokenizer, span[own:], facts, depths))
        samples += [dataclasses.replace(_sample(request, context, fact, depth), decoded=decoded)
                    for fact, depth in zip(facts, depths, strict=True)]
    return samples


def _depths(count: int) -> list[float]:
    """Returns depths spread evenly over 0..1."""
    return [(i + 0.5) / count for i in range(count)]


def _question(request: Request, fact: Needle) -> tuple[int, ...]:
    return needles.encode(request.tokenizer.tokenizer, "\n" + fact.cue)


def _sample(request: Request, context: tuple[int, ...], fact: Needle, depth: float) -> Sample:
    most = 10 if fact.cue == needles.PASSKEY else _DIGITS + 1
    return Sample(context, _question(request, fact), (fact.value,), "number", most, _STOP, depth=depth)


def _hidden(request: Request, facts: list[Needle], depth: float) -> Sample:
    """Draws a sample with the first fact at its depth and the others anywhere."""
    depths = [depth, *request.rng.random(len(facts) - 1)]
    context = _haystack(request, facts, depths, len(_question(request, facts[0])))
    return _sample(request, context, facts[0], depth)


def _haystack(request: Request, facts: list[Needle], depths: list[float], question: int) -> tuple[int, ...]:
    """Makes a context that, with a question of `question` tokens, has the requested length."""
    tokenizer, length = request.tokenizer.tokenizer, request.length - question
    if length < needles.needle_cost(tokenizer, facts) + 1:
        raise ConfigError(f"{len(facts)} needles and a question do not fit in {request.length} tokens; raise that")
    return tuple(needles.haystack(request.rng, tokenizer, request.stream, length, facts, depths, request.start))


def _after_sentence(request: Request, fact: Needle, depth: float) -> Sample:
    """Makes a sample with the fact after the last whole sentence or line before its depth."""
    tokenizer, question = request.tokenizer, _question(request, fact)
    planted = needles.encode(tokenizer.tokenizer, "\n" + fact.sentence)
    room = request.length - len(request.start) - len(question) - len(planted)
    if room < 0:
        raise ConfigError(f"a needle and its question do not fit in {request.length} tokens; raise the length")
    filler = needles.random_span(request.rng, request.stream, room)
    place = int(depth * room)
    while 0 < place < room and not _ends_sentence(tokenizer.decode(filler[place - 1 : place])):
        place -= 1
    context = (*request.start, *filler[:place], *planted, *filler[place:])
    return _sample(request, context, fact, place / max(1, room))


def _ends_sentence(token: str) -> bool:
    return "\n" in token or token.rstrip().endswith((".", "!", "?"))
