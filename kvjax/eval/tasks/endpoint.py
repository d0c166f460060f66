"""Likelihoods and answers on demand, by any method and store, for evaluation harnesses.

The first part of a context is prefilled once for all requests that share it. Its last tokens, and those that follow it,
go through the cache token by token, so that the method is what is measured.
"""

import contextlib
import dataclasses
import itertools
import warnings
from collections.abc import Iterable, Iterator, Sequence

from kvjax.cache.method import Method
from kvjax.errors import PromptError
from kvjax.inference.cache import Cache
from kvjax.inference.plan import Slots
from kvjax.llm import LLM
from kvjax.store.interface import Store

LEAST_CAPACITY = 256


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """Model with a method and a store, which answers one sequence at a time."""

    llm: LLM
    method: Method
    store: Store | None = None
    slots: Slots | None = None
    sparse_tokens: int = 32  # last tokens of a context, which go through the cache one by one
    max_length: int = 2048  # most tokens of a request; longer contexts lose their beginning
    dtype: str = "float32"  # type of stored keys and values
    chunk: int | None = None  # tokens that `LLM.prefill` reads at a time through the cache; None = dense prefill

    def loglikelihood(self, pairs: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Iterator[tuple[float, bool]]:
        """Yields the log-probability of each continuation, and whether greedy decoding gives it.

        Results are computed one by one as they are consumed. Equal contexts that follow each other share a cache.

        Args:
          pairs: token ids of each context and its continuation.

        Raises:
          PromptError: a continuation is empty or too long, or a context is empty. Raised before anything is computed.
        """
        parts = [(*self._split(context, len(rest)), list(rest)) for context, rest in pairs]
        for read, group in itertools.groupby(parts, lambda part: part[0]):
            alike = [(tail, rest) for _, tail, rest in group]
            with_room = len(read) + max(len(tail) + len(rest) for tail, rest in alike)
            with self._cache(read, with_room) as cache:
                for tail, rest in alike:
                    yield self._score(cache, tail, rest)

    def generate(self, context: Sequence[int], max_new_tokens: int, stop: Sequence[str] = ()) -> str:
        """Returns the greedy answer to a context.

        Args:
          context: token ids of the context.
          max_new_tokens: most tokens to generate.
          stop: texts that end the answer; it is cut before the first one.

        Raises:
          PromptError: the context is empty, or the answer does not fit in `max_length`.
        """
        read, tail = self._split(context, max_new_tokens)
        with self._cache(read, len(read) + len(tail) + max_new_tokens) as cache:
            result = self.llm.generate([tail], cache, max_new_tokens=max_new_tokens, stop=stop)
            result.cache.close()
        text = result.text[0]
        return text[: min((text.find(mark) for mark in stop if mark in text), default=len(text))]

    def _split(self, context: Sequence[int], more: int) -> tuple[list[int], list[int]]:
        """Returns the part of a context to prefill, at least one token, and the part to read token by token."""
        if not context:
            raise PromptError("the context is empty; give at least one token, such as the begin-of-text token")
        if more < 1:
            raise PromptError("the continuation is empty; give at least one token")
        if more > self.max_length:
            raise PromptError(f"{more} tokens after a context are too many for max_length={self.max_length}; raise it")
        most = self.max_length + 1 - more
        if len(context) > most:
            warnings.warn(f"contexts that do not fit max_length={self.max_length} with what follows them lose their "
                          "beginning; raise max_length, or ask for shorter answers", stacklevel=3)
        kept = list(context[-most:])
        cut = max(1, len(kept) - self.sparse_tokens)
        return kept[:cut], kept[cut:]

    @contextlib.contextmanager
    def _cache(self, read: list[int], room: int) -> Iterator[Cache]:
        """Yields a cache that is closed in the end; its capacity is a power of two, so that few shapes compile."""
        capacity = max(LEAST_CAPACITY, 1 << (room - 1).bit_length())
        cache = self.llm.prefill(read, method=self.method, store=self.store, slots=self.slots, capacity=capacity,
                                 dtype=self.dtype, chunk=self.chunk)
        try:
            yield cache
        finally:
            cache.close()

    def _score(self, cache: Cache, tail: list[int], rest: list[int]) -> tuple[float, bool]:
        scores = self.llm.score([tail + rest], cache)
        scores.cache.close()
        first = len(tail)
        return float(scores.logprobs[0][first:].sum()), bool(scores.greedy[0][first:].all())
