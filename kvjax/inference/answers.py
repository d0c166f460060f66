"""Questions that are asked, and their answers: growing, whole, or scored."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from kvjax.inference.cache import Cache
from kvjax.inference.stops import Stops
from kvjax.inference.usage import Usage

Ended = Literal["eos", "stop", "length"]
"""Why an answer ended: at a token that ends a text, at a text given as `stop`, or after the most tokens allowed."""


@dataclasses.dataclass(frozen=True)
class Ends:
    """Token ids that end an answer, which they are not part of."""

    eos: frozenset[int]  # those that end a text
    stop: frozenset[int]  # those of a `stop` that is a special token
    kept: frozenset[int]  # those of either that become pending; others are dropped


@dataclasses.dataclass
class Answer:
    """The answer of one sequence while it grows."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    ended: Ended | None = None  # None = it goes on
    pending: tuple[int, ...] = ()  # its last token, which was not fed

    def add(self, token: int, ends: Ends, complete: Callable[[list[int]], bool]) -> None:
        """Adds a drawn token.

        Args:
          token: its id.
          ends: token ids that end an answer.
          complete: function that returns True once the tokens of an answer are all of it.
        """
        if token in ends.eos or token in ends.stop:
            self.ended = "eos" if token in ends.eos else "stop"
            self.pending = (token,) if token in ends.kept else ()
            return
        self.tokens.append(token)
        self.pending = (token,)
        if complete(self.tokens):
            self.ended = "stop"


@dataclasses.dataclass(frozen=True, repr=False)
class Result:
    """An answer and the cache after it.

    A token is fed only when the next one is about to be drawn. The last token of an answer is therefore not in the
    cache's arrays yet: it is in `cache.pending`, and the next call with that cache feeds it first. An end-of-text token
    is kept this way only if the model's chat template puts one after an answer; otherwise it is dropped.
    """

    text: str | list[str]  # one string per sequence for a batch
    tokens: list[list[int]]  # token ids of each sequence
    cache: Cache
    usage: Usage
    ended: Ended | list[Ended]  # why; one per sequence for a batch

    def __repr__(self) -> str:
        return f"Result({_short(self.text)}, ended={self.ended!r:.40}, {self.cache!r})"


@dataclasses.dataclass(frozen=True, repr=False)
class Scores:
    """The scores of given continuations, one array per sequence, and the cache after them."""

    logprobs: list[np.ndarray]  # natural logarithm of each token's probability
    greedy: list[np.ndarray]  # True where the token was the most likely one
    cache: Cache
    usage: Usage

    def __repr__(self) -> str:
        tokens, total = sum(map(len, self.logprobs)), sum(float(row.sum()) for row in self.logprobs)
        return f"Scores({tokens:,} tokens, {total / max(1, tokens):.3f} nats a token, {self.cache!r})"


def _short(text: str | list[str], most: int = 60) -> str:
    shown = repr(text)
    return shown if len(shown) <= most else f"{shown[:most]}..."


@runtime_checkable
class EndedRun(Protocol):
    """A run (`kvjax.inference.generate.Generation`), as far as a request needs it to make its result."""

    cache: Cache

    def usage(self) -> Usage: ...


@dataclasses.dataclass(frozen=True)
class Asked:
    """The questions of one call, and what ends their answers."""

    questions: list[list[int]]  # token ids of each sequence, after those that were pending
    batch: bool  # whether a list was given
    stops: Stops
    ends: Ends

    def texts(self, result: Result) -> list[str]:
        """Returns the text of each sequence."""
        return [result.text] if isinstance(result.text, str) else result.text

    def shaped(self, values: list[Any]) -> Any:
        """Returns values of all sequences as they were asked for: a list for a batch, else the only one."""
        return values if self.batch else values[0]

    def blank(self) -> list[Answer]:
        """Returns an empty answer for each sequence."""
        return [Answer() for _ in self.questions]

    def result(self, answers: list[Answer], run: EndedRun) -> Result:
        """Returns the answers and the cache of a run that has ended."""
        tokens, text = map(list, zip(*map(self.stops.cut, (answer.tokens for answer in answers), self.questions),
                                     strict=True))
        ended = [answer.ended for answer in answers]
        return Result(self.shaped(text), tokens, run.cache, run.usage(), self.shaped(ended))
