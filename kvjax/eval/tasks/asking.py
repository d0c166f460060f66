"""Running samples: each context is read once, and each of its questions asked on a fork of the cache."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

from kvjax.eval.tasks import scoring
from kvjax.eval.tasks.base import Sample, Text
from kvjax.inference.cache import Cache
from kvjax.inference.generate import Observer
from kvjax.llm import LLM, Result

Questions = tuple[Sample, ...]  # to one context


def batches(llm: LLM, samples: Sequence[Sample], size: int) -> list[list[Questions]]:
    """Up to `size` contexts to read at a time, whose questions can be asked side by side; all as token ids."""
    asked = [tuple(group) for _, group in itertools.groupby(tokenised(llm, samples), lambda one: one.context)]
    found: list[list[Questions]] = []
    for _, alike in itertools.groupby(asked, lambda one: (len(one), one[0].max_new_tokens, one[0].stop)):
        contexts = list(alike)
        found += [contexts[i : i + size] for i in range(0, len(contexts), size)]
    return found


def tokenised(llm: LLM, samples: Sequence[Sample]) -> list[Sample]:
    """The samples with token ids for text; a context that questions share is encoded once."""
    encode = functools.cache(lambda text: tuple(llm.encode(text, start=True)))
    return [
        dataclasses.replace(one, context=encode(one.context), question=tuple(llm.encode(one.question, start=False)))
        for one in samples
    ]


def within_prompt(samples: Sequence[Sample]) -> list[Sample]:
    """The tokenised samples with their questions at the end of the context, for what compresses a prompt by its end.

    The first token of an answer then comes from dense attention.
    """
    return [dataclasses.replace(one, context=(*one.context, *one.question), question=()) for one in samples]


def contexts(batch: Sequence[Questions]) -> list[Text]:
    """What is to be read, one sequence for each context."""
    return [questions[0].context for questions in batch]


def length(sample: Sample) -> int:
    """Tokens of a question and its longest answer."""
    return len(sample.question) + sample.max_new_tokens


def capacity(batch: Sequence[Questions]) -> int:
    """Room for the longest prompt with its answer."""
    return rounded(max(len(one.context) + length(one) for group in batch for one in group))


def rounded(room: int) -> int:
    """A capacity of at least so many tokens, of which there are few, so that few shapes compile."""
    return -(-room // 64) * 64


def ask(
    llm: LLM, cache: Cache, batch: Sequence[Questions], observer: Observer | None = None
) -> tuple[list[list[float]], list[Result]]:
    """Asks each question of the contexts in the cache: scores by context and question, and a result for each round.

    The observer follows the first round. Forks of a store are closed.
    """
    rounds, results = list(zip(*batch, strict=True)), []
    for i, one in enumerate(rounds):
        results.append(llm.generate(
            [list(sample.question) for sample in one], cache, max_new_tokens=one[0].max_new_tokens, stop=one[0].stop,
            observer=observer if i == 0 else None,
        ))
        results[-1].cache.close()
    scores = [
        [scoring.score(sample.metric, text, sample.answers, sample.classes)
         for sample, text in zip(one, result.text, strict=True)]
        for one, result in zip(rounds, results, strict=True)
    ]
    return [list(of_context) for of_context in zip(*scores, strict=True)], results
