"""Running of samples: each context is read once, and each of its questions is asked on a fork of the cache.

Text that a sample has decoded before its question goes through the cache one token at a time, once for all questions
(`LLM.score`): never in chunks, so that a method adapts to it as to a text that it generates.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import numpy as np

from kvjax.errors import ConfigError
from kvjax.eval.tasks import scoring
from kvjax.eval.tasks.base import Sample, Text
from kvjax.inference.cache import Cache
from kvjax.inference.generate import Observer
from kvjax.inference.usage import Usage
from kvjax.llm import LLM

Questions = tuple[Sample, ...]  # about one context, after one decoded text


@dataclasses.dataclass(frozen=True)
class Answers:
    """Answers to a batch."""

    scores: list[list[float]]  # by context and question
    tokens: list[list[list[int]]]  # token ids of the answers, by round and context
    usages: list[Usage]  # costs of the decoded text, if any, and of each round
    logprobs: list[np.ndarray] | None  # of each decoded text's tokens; None = no text was decoded before the questions


def batches(llm: LLM, samples: Sequence[Sample], size: int) -> list[list[Questions]]:
    """Groups samples into batches of contexts whose questions can be asked side by side, all as token ids.

    Questions of a batch have the same answer length and stop texts, and all or none of them follow a decoded text.

    Args:
      llm: model with a tokenizer.
      samples: samples; those of one context follow each other.
      size: most contexts of a batch.
    """
    asked = [tuple(group) for _, group in itertools.groupby(tokenised(llm, samples), told)]
    groups: list[list[Questions]] = []
    for _, alike in itertools.groupby(asked, _kind):
        contexts = list(alike)
        groups += [contexts[i : i + size] for i in range(0, len(contexts), size)]
    return groups


def _kind(asked: Questions) -> tuple:
    """Returns what questions of a batch have in common."""
    return asked[0].max_new_tokens, asked[0].stop, bool(asked[0].decoded)


def told(sample: Sample) -> tuple[Text, Text]:
    """Returns what comes before the question; samples with the same are asked on forks of one cache."""
    return sample.context, sample.decoded


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
            sample, context=encode(sample.context), question=tuple(llm.encode(sample.question, start=False)),
            decoded=tuple(llm.encode(sample.decoded, start=False)),
        )
        for sample in samples
    ]


def within_prompt(samples: Sequence[Sample]) -> list[Sample]:
    """Returns tokenised samples with the question moved to the end of the context.

    This is for methods that compress a prompt by its end; the first token of an answer then comes from dense attention.

    Raises:
      ConfigError: a question comes after a decoded text, and cannot be in the prompt.
    """
    if any(sample.decoded for sample in samples):
        raise ConfigError("a question about what was decoded cannot be within the prompt; ask it after")
    return [dataclasses.replace(sample, context=(*sample.context, *sample.question), question=()) for sample in samples]


def contexts(batch: Sequence[Questions]) -> list[Text]:
    """Returns the context of each group of questions."""
    return [questions[0].context for questions in batch]


def length(sample: Sample) -> int:
    """Returns the tokens after the context: decoded text, question and longest answer."""
    return len(sample.decoded) + len(sample.question) + sample.max_new_tokens


def capacity(batch: Sequence[Questions]) -> int:
    """Returns the capacity in tokens for the longest prompt of a batch with its answer."""
    return rounded(max(len(sample.context) + length(sample) for group in batch for sample in group))


def rounded(room: int) -> int:
    """Rounds a capacity up to a multiple of 64 tokens, so that few shapes compile."""
    return -(-room // 64) * 64


def ask(llm: LLM, cache: Cache, batch: Sequence[Questions], observer: Observer | None = None) -> Answers:
    """Asks each question about the contexts in the cache; forks of the store are closed afterwards.

    Args:
      llm: model that answers.
      cache: cache with the contexts of `batch`, one sequence each.
      batch: questions about each context.
      observer: observer of the decoded text and of the first round, in which each context is asked its first question.

    Returns:
      The answers.
    """
    decoded = [list(asked[0].decoded) for asked in batch]
    if not any(decoded):
        return _asked(llm, cache, batch, observer)
    scores = llm.score(decoded, cache, observer=observer)
    with scores.cache:
        answers = _asked(llm, scores.cache, batch, observer)
    return dataclasses.replace(answers, usages=[scores.usage, *answers.usages], logprobs=scores.logprobs)


def _asked(llm: LLM, cache: Cache, batch: Sequence[Questions], observer: Observer | None) -> Answers:
    """Asks one question after the other; no round's cache outlives it."""
    scores, tokens, usages = [], [], []
    for i, asked in enumerate(rounds(batch)):
        result = llm.generate(
            [list(sample.question) for sample in asked], cache, max_new_tokens=asked[0].max_new_tokens,
            stop=asked[0].stop, observer=observer if i == 0 else None,
        )
        result.cache.close()
        scores.append([scoring.score(sample.metric, text, sample.answers, sample.classes)
                       for sample, text in zip(asked, result.text, strict=True)])
        tokens.append(result.tokens)
        usages.append(result.usage)
        del result
    of_context = zip(zip(*scores, strict=True), batch, strict=True)
    return Answers([list(mine[: len(asked)]) for mine, asked in of_context], tokens, usages, None)
