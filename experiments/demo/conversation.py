"""Questions and answers in one cache, with the time and the memory that they take."""

import time

import numpy as np

import kvjax
from kvjax.inference import decode
from kvjax.inference.generate import Generation
from kvjax.store.stats import Stats

_WARM = 2  # tokens that are not timed: the first one compiles


class Conversation:
    """Questions and answers in one cache, which is not copied: `LLM.generate` would keep the one before each answer.

    Attributes:
      run: the run that owns the cache.
      seconds: time of each token, until its logits are known.
      memory_bytes: the most that the cache has held after a token.
    """

    def __init__(self, llm: kvjax.LLM, cache: kvjax.Cache, driver: decode.Driver):
        self.run, self._llm = Generation(llm.params, cache, driver, None), llm
        self.seconds: list[float] = []
        self._before: Stats | None = None  # totals of the store before the first token that is timed
        self.memory_bytes = self._held()

    def ask(self, question: str, stop: tuple[str, ...], most: int) -> str:
        """Feeds a question and returns the likeliest answer, of at most `most` tokens."""
        for token in self._llm.encode(question, start=False):
            self._feed(token)
        answer: list[int] = []
        while len(answer) < most:
            token = int(np.argmax(self.run.cache.logits[0]))
            if token in self._llm.eos_ids:
                break
            answer.append(token)
            self._feed(token)
            if any(mark in self._text(answer) for mark in stop):
                break
        return self._text(answer)

    def _text(self, answer: list[int]) -> str:
        return self._llm.tokenizer.decode_continuation(answer)

    def _feed(self, token: int) -> None:
        branch = self.run.cache.branch
        if branch is not None and len(self.seconds) <= _WARM:
            self._before = branch.stats()
        began = time.perf_counter()
        self.run.step(np.array([token], np.int32), np.ones(1, bool))
        self.run.cache.logits.block_until_ready()
        self.seconds.append(time.perf_counter() - began)
        self.memory_bytes = max(self.memory_bytes, self._held())

    def _held(self) -> int:
        return self.run.cache.resident_bytes + self.run.cache.store_bytes

    def cost(self) -> dict:
        """Returns what a timed token has cost: tokens a second and, with a store, bytes, reads, and the share of the
        time in which the answer waited for reads."""
        seconds, tokens = sum(self.seconds[_WARM:]), len(self.seconds[_WARM:])
        cost = {"tokens": tokens, "tokens_per_s": tokens / seconds if tokens else None, "wait_share": None,
                "bytes_read_per_token": 0.0, "reads_per_token": 0.0, "engine": None, "direct": None}
        branch = self.run.cache.branch
        if branch is not None and self._before is not None and tokens:
            before, after = self._before, branch.stats()
            cost |= {"wait_share": (after.wait_seconds - before.wait_seconds) / seconds,
                     "bytes_read_per_token": (after.bytes_read - before.bytes_read) / tokens,
                     "reads_per_token": (after.reads - before.reads) / tokens,
                     "engine": getattr(branch, "engine", None), "direct": getattr(branch, "direct", None)}
        return cost

    def close(self) -> None:
        """Releases the cache."""
        self.run.cache.close()
