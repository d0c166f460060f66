"""RULER's needle tasks (Hsieh et al., 2024); its others: `ruler_lists`, `ruler_qa`; its files: `ruler_files`.

Prompts, counts and scores are those of its generator. Unlike RULER, key words are pairs of words of Python's library,
because the original list is a download; sentences end at ". ", "! " or "? ". Essays are the text of the request, or the
files that the task's name contains. Each sample has as much hay as fits.
The part before the question is the context; question and beginning of the answer go through the cache token by token.
"""

import dataclasses
import functools
import re
import uuid
from collections.abc import Callable, Collection, Sequence

import numpy as np

from kvjax.errors import ConfigError
from kvjax.eval.tasks import corpus
from kvjax.eval.tasks.base import Request, Sample

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
ESSAY_DEPTHS = np.round(np.linspace(0, 100, 40)) / 100  # from which those of needles in an essay are drawn


@dataclasses.dataclass(frozen=True)
class PlantedPrompt:
    """Text of a prompt: its context, and the question with the beginning of the answer."""

    context: str
    question: str


def fitted(request: Request, new_tokens: int, build: Callable[[int], PlantedPrompt]) -> PlantedPrompt:
    """Returns the prompt with the most hay that leaves room for the answer in `request.length` tokens.

    Args:
      request: tokenizer and length.
      new_tokens: tokens of the answer.
      build: function from a number of units of hay to the prompt, whose length grows with it.

    Raises:
      ConfigError: the prompt is too long even without hay.
    """
    def cost(n: int) -> int:
        prompt = build(n)
        return request.tokens(prompt.context, start=True) + request.tokens(prompt.question) + new_tokens

    if (least := cost(0)) > request.length:
        raise ConfigError(f"question and answer alone take {least} tokens, more than {request.length}; raise that")
    above = 1
    while cost(above) <= request.length:
        above *= 2
    low = above // 2  # fits
    while low + 1 < above:
        middle = (low + above) // 2
        low, above = (middle, above) if cost(middle) <= request.length else (low, middle)
    return build(low)


def sampled(
    request: Request, new_tokens: int, one: Callable[[Request], tuple[Callable[[int], PlantedPrompt], Sequence[str]]]
) -> list[Sample]:
    """Draws `request.count` samples, each of as much hay as fits.

    Args:
      request: number, length and sources of the samples.
      new_tokens: tokens of an answer.
      one: function that draws the facts of a sample and returns `build` for `fitted` and the right answers.
    """
    samples = []
    for _ in range(request.count):
        build, answers = one(request)
        prompt = fitted(request, new_tokens, build)
        samples.append(Sample(prompt.context, prompt.question, tuple(answers), "string_match_all", new_tokens))
    return samples


@dataclasses.dataclass(frozen=True)
class Niah:
    """Needle task: kinds and numbers of hay, keys and values."""

    hay: str  # noise, essay or needles
    key: str = "words"
    value: str = "numbers"
    keys: int = 1
    values: int = 1  # of each key
    queries: int = 1  # keys asked for


NIAH = {
    "niah_single_1": Niah("noise"),
    "niah_single_2": Niah("essay"),
    "niah_single_3": Niah("essay", value="uuids"),
    "niah_multikey_1": Niah("essay", keys=4),
    "niah_multikey_2": Niah("needles"),
    "niah_multikey_3": Niah("needles", key="uuids", value="uuids"),
    "niah_multivalue": Niah("essay", values=4),
    "niah_multiquery": Niah("essay", keys=4, queries=4),
}
NIAH_TOKENS = 128


def niah(task: Niah, request: Request) -> list[Sample]:
    """Draws the samples of a needle task."""
    return sampled(request, NIAH_TOKENS, functools.partial(_niah, task))


def _niah(task: Niah, request: Request):
    rng = request.rng
    values: dict[str, list[str]] = {}
    while len(values) < task.keys:
        values[_draw(rng, task.key)] = [_draw(rng, task.value) for _ in range(task.values)]
    facts = [_fact(task.value, key, value) for key, group in values.items() for value in group]
    rng.shuffle(facts)
    spread = rng.choice(ESSAY_DEPTHS, size=len(facts), replace=False)
    depths = sorted(spread if task.hay == "essay" else rng.random(len(facts)))
    asked = [str(key) for key in rng.choice(list(values), size=task.queries, replace=False)]
    hay, question = _hay(task, request, values), _question(task, asked)

    def build(n: int) -> PlantedPrompt:
        text, joint = hay(n)
        return PlantedPrompt(f"{_opening(task)}\n{planted(text, facts, depths, joint)}\n", question)

    return build, [value for key in asked for value in values[key]]


def _hay(task: Niah, request: Request, taken: Collection[str]) -> Callable[[int], tuple[Sequence[str], str]]:
    """Returns a function from n to n pieces of hay and the text between them; needles in it have no `taken` key."""
    if task.hay == "noise":
        return lambda n: ([NOISE] * n, "\n")
    if task.hay == "needles":
        others: list[str] = []

        def distractors(n: int) -> tuple[Sequence[str], str]:
            while len(others) < n:
                if (key := _draw(request.rng, task.key)) not in taken:
                    others.append(_fact(task.value, key, _draw(request.rng, task.value)))
            return others[:n], "\n"

        return distractors
    words = request.words
    if not words:
        raise ConfigError("the text has no words to hide facts among; give a text with words")
    return lambda n: (_sentences(" ".join((words * (n // len(words) + 1))[:n])), " ")


def _sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?]) ", text) if text else []


_ROUNDING = 1e-9  # so that 0.29 of 100 sentences are 29


def planted(sentences: Sequence[str], facts: Sequence[str], depths: Sequence[float], joint: str) -> str:
    """Returns the sentences joined, with each fact at its depth; depths ascend."""
    parts, previous = [], 0
    for fact, depth in zip(facts, depths, strict=True):
        place = int(depth * len(sentences) + _ROUNDING)
        parts += [*sentences[previous:place], fact]
        previous = place
    return joint.join([*parts, *sentences[previous:]])


def _draw(rng: np.random.Generator, kind: str) -> str:
    """Draws a key or value: a number of seven digits, two words, or a UUID."""
    if kind == "numbers":
        return str(rng.integers(10**6, 10**7))
    if kind == "words":
        return "-".join(rng.choice(corpus.key_words(held_out=True), size=2, replace=False))
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))


def _fact(kind: str, key: str, value: str) -> str:
    return f"One of the special magic {kind} for {key} is: {value}."


def _opening(task: Niah) -> str:
    single = task.values * task.queries == 1
    some, kind, are = ("A", task.value[:-1], "is") if single else ("Some", task.value, "are")
    return (f"{some} special magic {kind} {are} hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the {kind} afterwards.")


def _question(task: Niah, keys: Sequence[str]) -> str:
    """Returns the question with the beginning of its answer."""
    single = task.values * task.queries == 1
    kind, these, are = (task.value[:-1], "is", "is") if single else (task.value, "are all", "are")
    asked = keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}"
    return (f"What {these} the special magic {kind} for {asked} mentioned in the provided text? "
            f"The special magic {kind} for {asked} mentioned in the provided text {are}")
