"""Likelihoods and answers on demand, by any method and store: what evaluation harnesses ask of a model.

A context's first part is read densely, once for all requests that share it; its last tokens, and what follows, go token
by token through the cache, which is what a method is measured by.
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
    """A model with the method and the store that answer for it, one sequence at a time."""

    llm: LLM
    method: Method
    store: Store | None = None
    slots: Slots | None = None
    sparse_tokens: int = 32  # of a context that are read through the cache
    max_length: int = 2048  # longer contexts lose their beginning
    dtype: str = "float32"  # of stored keys and values
    chunk: int | None = None  # tokens of a context that are read at a time (`LLM.prefill`)

    def loglikelihood(self, pairs: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Iterator[tuple[float, bool]]:
        """For each context and continuation (token ids): the log-probability, and whether greedy decoding gives it.

        One after the other, as they are asked for. Contexts that follow each other share their cache if they are equal.
        Raises PromptError for a continuation that is empty or too long, before the first is computed.
        """
        parts = [(*self._split(context, len(rest)), list(rest)) for context, rest in pairs]
        for read, group in itertools.groupby(parts, lambda part: part[0]):
            alike = [(tail, rest) for _, tail, rest in group]
            with_room = len(read) + max(len(tail) + len(rest) for tail, rest in alike)
            with self._cache(read, with_room) as cache:
                for tail, rest in alike:
                    yield self._score(cache, tail, rest)

    def generate(self, context: Sequence[int], max_new_tokens: int, stop: Sequence[str] = ()) -> str:
        """The greedy answer up to the first of `stop`."""
        read, tail = self._split(context, max_new_tokens)
        with self._cache(read, len(read) + len(tail) + max_new_tokens) as cache:
            result = self.llm.generate([tail], cache, max_new_tokens=max_new_tokens, stop=stop)
            result.cache.close()
        text = result.text[0]
        return text[: min((text.find(mark) for mark in stop if mark in text), default=len(text))]

    def _split(self, context: Sequence[int], more: int) -> tuple[list[int], list[int]]:
        """What of a context is read densely, at least one token, and what token by token."""
        if not context:
            raise PromptError("the context is empty; give at least one token, such as one that begins a text")
        if more < 1:
            raise PromptError("the continuation is empty; give at least one token of it")
        if more > self.max_length:
            raise PromptError(f"{more} tokens after a context are too long for max_length={self.max_length}; raise it")
        most = self.max_length + 1 - more
        if len(context) > most:
            warnings.warn(f"contexts that do not fit max_length={self.max_length} with what follows them lose their "
                          "beginning; raise max_length, or ask for shorter answers", stacklevel=3)
        kept = list(context[-most:])
        cut = max(1, len(kept) - self.sparse_tokens)
        return kept[:cut], kept[cut:]

    @contextlib.contextmanager
    def _cache(self, read: list[int], room: int) -> Iterator[Cache]:
        """One cache, closed after use; its capacity is a power of two, so that few shapes compile."""
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
