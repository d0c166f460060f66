"""Types of tasks: requests, and the samples to answer or continuations to predict that a task draws for them."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence

import numpy as np

from kvjax.models.tokenizer import TextTokenizer

Text = str | tuple[int, ...]  # text, or token ids used unchanged


@dataclasses.dataclass(frozen=True)
class Sample:
    """Question about a context. Samples of one context, and one decoded text, follow each other: they are read once and
    asked on forks."""

    context: Text
    question: Text  # goes through the cache token by token
    answers: tuple[str, ...]  # right answers: alternatives, or all to be found, depending on the metric
    metric: str  # a name in `scoring.METRICS`
    max_new_tokens: int
    stop: tuple[str, ...] = ()  # text that ends the answer
    classes: tuple[str, ...] = ()  # all labels of a classification
    depth: float | None = None  # place of the answer in the context, or in `decoded` if given: 0 = start, 1 = end
    decoded: Text = ()  # fed after the context and before the question, always token by token, as if it were generated


@dataclasses.dataclass(frozen=True)
class Continuation:
    """Tokens to predict one by one after a context, each given the true tokens before it."""

    context: tuple[int, ...]
    tokens: tuple[int, ...]
    scored: tuple[bool, ...]  # which tokens count


@dataclasses.dataclass(frozen=True)
class Request:
    """Number, length and sources of the samples that a task is to draw."""

    tokenizer: TextTokenizer
    text: str | np.ndarray  # text to hide facts in or to predict; token ids are used unchanged
    length: int  # tokens of a prompt
    count: int  # number of samples; files may have fewer
    rng: np.random.Generator
    path: pathlib.Path = pathlib.Path()  # file of a task that reads one
    new_tokens: int = 32  # tokens predicted by `perplexity`, or decoded before the questions of `decoded_needles`

    @functools.cached_property
    def stream(self) -> np.ndarray:
        """Token ids of the text, `[n]`, encoded as a continuation."""
        return np.asarray(self.tokenizer.encode_continuation(self.text)) if isinstance(self.text, str) else self.text

    @functools.cached_property
    def words(self) -> list[str]:
        """Words of the text."""
        return (self.text if isinstance(self.text, str) else self.tokenizer.decode(self.text.tolist())).split()

    @property
    def start(self) -> tuple[int, ...]:
        """Token ids that begin every prompt of the model."""
        return self.tokenizer.start_ids

    def tokens(self, text: str, start: bool = False) -> int:
        """Returns the number of tokens of a text as a continuation, or with `start` as the beginning of a prompt."""
        return len(self.tokenizer.encode(text) if start else self.tokenizer.encode_continuation(text))


@dataclasses.dataclass(frozen=True)
class Task:
    """Task of the registry; `draw` may raise ConfigError or TaskFileError."""

    draw: Callable[[Request], Sequence[Sample] | Sequence[Continuation]]
    continues: bool = False  # draws continuations, not samples
    reads_file: bool = False  # its name is followed by a path: "longbench:qasper.jsonl"
    hides_in_file: bool = False  # its name may be followed by the path of its text: "niah_single_2:essays.txt"
