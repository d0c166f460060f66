"""Running of samples: each context is read once, and each of its questions is asked on a fork of the cache."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

from kvjax.eval.tasks import scoring
from kvjax.eval.tasks.base import Sample, Text
from kvjax.inference.answers import Result
from kvjax.inference.cache import Cache
from kvjax.inference.generate import Observer
from kvjax.llm import LLM

Questions = tuple[Sample, ...]  # about one context


def batches(llm: LLM, samples: Sequence[Sample], size: int) -> list[list[Questions]]:
    """Groups samples into batches of contexts whose questions can be asked side by side, all as token ids.

    Questions of a batch have the same answer length and stop texts.

    Args:
      llm: model with a tokenizer.
      samples: samples; those of one context follow each other.
      size: most contexts of a batch.
    """
    asked = [tuple(group) for _, group in itertools.groupby(tokenised(llm, samples), lambda item: item.context)]
    groups: list[list[Questions]] = []
    for _, alike in itertools.groupby(asked, lambda item: (item[0].max_new_tokens, item[0].stop)):
        contexts = list(alike)
        groups += [contexts[i : i + size] for i in range(0, len(contexts), size)]
    return groups


def rounds(batch: Sequence[Questions]) -> list[tuple[Sample, ...]]:
    """Returns the questions that are asked side by side, one of each context; a context that has fewer questions than
    others is asked its last one again, which does not count."""
    return [tuple(asked[min(i, len(asked) - 1)] for asked in batch) for i in range(max(map(len, batch)))]


def spread(batch: Sequence[Questions], size: int) -> tuple[Questions, ...]:
    """Shares out questions among up to `size` sequences, so that fewer are asked one after the other.

    Contexts then repeat; the questions stay in order.

    Args:
      batch: questions about each context.
      size: most sequences.
    """
    parts = list(batch)
    while len(parts) < size and (most := max(map(len, parts))) > 1:
        i = next(i for i, part in enumerate(parts) if len(part) == most)
        parts[i : i + 1] = [parts[i][: (most + 1) // 2], parts[i][(most + 1) // 2 :]]
    return tuple(parts)


def tokenised(llm: LLM, samples: Sequence[Sample]) -> list[Sample]:
    """Returns the samples with text replaced by token ids; a shared context is encoded once."""
    encode = functools.cache(lambda text: tuple(llm.encode(text, start=True)))
    return [
        dataclasses.replace(
            sample, context=encode(sample.context), question=tuple(llm.encode(sample.question, start=False))
        )
        for sample in samples
    ]


def within_prompt(samples: Sequence[Sample]) -> list[Sample]:
    """Returns tokenised samples with the question moved to the end of the context.

    This is for methods that compress a prompt by its end; the first token of an answer then comes from dense attention.
    """
    return [dataclasses.replace(sample, context=(*sample.context, *sample.question), question=()) for sample in samples]


def contexts(batch: Sequence[Questions]) -> list[Text]:
    """Returns the context of each group of questions."""
    return [questions[0].context for questions in batch]


def length(sample: Sample) -> int:
    """Returns the tokens of a question and its longest answer."""
    return len(sample.question) + sample.max_new_tokens


def capacity(batch: Sequence[Questions]) -> int:
    """Returns the capacity in tokens for the longest prompt of a batch with its answer."""
    return rounded(max(len(sample.context) + length(sample) for group in batch for sample in group))


def rounded(room: int) -> int:
    """Rounds a capacity up to a multiple of 64 tokens, so that few shapes compile."""
    return -(-room // 64) * 64


def ask(
    llm: LLM, cache: Cache, batch: Sequence[Questions], observer: Observer | None = None
) -> tuple[list[list[float]], list[Result]]:
    """Asks each question about the contexts in the cache; forks of the store are closed afterwards.

    Args:
      llm: model that answers.
      cache: cache with the contexts of `batch`, one sequence each.
      batch: questions about each context.
      observer: observer of the first round, in which each context is asked its first question.

    Returns:
      Scores by context and question, and the result of each round.
    """
    asked_together, results = rounds(batch), []
    for i, asked in enumerate(asked_together):
        results.append(llm.generate(
            [list(sample.question) for sample in asked], cache, max_new_tokens=asked[0].max_new_tokens,
            stop=asked[0].stop, observer=observer if i == 0 else None,
        ))
        results[-1].cache.close()
    scores = [
        [scoring.score(sample.metric, text, sample.answers, sample.classes)
         for sample, text in zip(asked, result.text, strict=True)]
        for asked, result in zip(asked_together, results, strict=True)
    ]
    return [list(of_context[: len(asked)]) for of_context, asked in zip(zip(*scores, strict=True), batch, strict=True)
            ], results
