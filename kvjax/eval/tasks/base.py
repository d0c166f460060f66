"""What a task gives: samples to answer, or continuations to predict, drawn for a length or read from a file."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence

import numpy as np

from kvjax.models.tokenizer import TextTokenizer

Text = str | tuple[int, ...]  # text, or token ids taken as they are


@dataclasses.dataclass(frozen=True)
class Sample:
    """A question to a context. Samples of one context follow each other: it is read once, and asked on forks."""

    context: Text
    question: Text  # fed token by token through the cache
    answers: tuple[str, ...]  # any of them, or all that are to be found: the metric says which
    metric: str  # a name in `scoring.METRICS`
    max_new_tokens: int
    stop: tuple[str, ...] = ()  # text that ends the answer
    classes: tuple[str, ...] = ()  # all labels of a classification
    depth: float | None = None  # of what is asked for: 0 = start of the context, 1 = its end


@dataclasses.dataclass(frozen=True)
class Continuation:
    """Tokens to predict one by one after a context, each after the true ones before it."""

    context: tuple[int, ...]
    tokens: tuple[int, ...]
    scored: tuple[bool, ...]  # which of them count


@dataclasses.dataclass(frozen=True)
class Request:
    """What is wanted of a task."""

    tokenizer: TextTokenizer
    text: str | np.ndarray  # to hide facts in, or to predict; token ids are taken as they are
    length: int  # tokens of a prompt
    count: int  # samples; files may have fewer
    rng: np.random.Generator
    path: pathlib.Path = pathlib.Path()  # the file of a task that reads one
    new_tokens: int = 32  # predicted by `perplexity`

    @functools.cached_property
    def stream(self) -> np.ndarray:
        """int64[n] token ids of the text, parts of which go on from other text."""
        return np.asarray(self.tokenizer.encode_continuation(self.text)) if isinstance(self.text, str) else self.text

    @functools.cached_property
    def words(self) -> list[str]:
        """Words of the text."""
        return (self.text if isinstance(self.text, str) else self.tokenizer.decode(self.text.tolist())).split()

    @property
    def start(self) -> tuple[int, ...]:
        """The token ids that begin every prompt of the model."""
        return self.tokenizer.start_ids

    def tokens(self, text: str, start: bool = False) -> int:
        """How many tokens a text has that goes on from another one, or with `start` begins a prompt."""
        return len(self.tokenizer.encode(text) if start else self.tokenizer.encode_continuation(text))


@dataclasses.dataclass(frozen=True)
class Task:
    """A task by name; `draw` may raise ConfigError or TaskFileError."""

    draw: Callable[[Request], Sequence[Sample] | Sequence[Continuation]]
    continues: bool = False  # gives continuations, not samples
    reads_file: bool = False  # its name is followed by a path: "longbench:qasper.jsonl"
