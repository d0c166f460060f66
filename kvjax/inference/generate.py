"""Generation: one run of a model over a cache, token by token, to feed questions, draw answers and score given text."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.pool import FetchStats
from kvjax.errors import NotFinite
from kvjax.inference import chunked_prefill, decode, layer_offload, prefill, progress, sampling
from kvjax.inference.answers import Answer, Ends
from kvjax.inference.cache import Cache
from kvjax.inference.decode import Driver, Step
from kvjax.inference.progress import CLOCK
from kvjax.inference.sampling import Sampling
from kvjax.inference.usage import Counts, Usage
from kvjax.ops.weights import types_of
from kvjax.typing import Array, PyTree

_MOST_PENDING = 256  # steps whose reports may stay on the device before they are counted
Observer = Callable[[Step, np.ndarray], None]  # called after every token with its step and its input token ids [B]


class Generation:
    """One run over a cache that it owns and that every step replaces."""

    def __init__(self, params: PyTree, cache: Cache, driver: Driver, observer: Observer | None):
        self.params, self.cache, self.driver, self.observer = params, cache, driver, observer
        self.counts = Counts()
        self.pending: list[tuple[list[tuple[Array, FetchStats]], np.ndarray]] = []  # reports and `active` to count
        self.started, self.compiled = time.perf_counter(), CLOCK.seconds

    def step(self, tokens: np.ndarray, active: np.ndarray) -> None:
        """Feeds one token of every active sequence; the logits of the others stay.

        Args:
          tokens: token ids [B].
          active: True [B] for active sequences.

        Raises:
          StoreError: the store failed.
        """
        active = active.copy()  # `pending` keeps it, but the caller changes it
        done = decode.step(
            self.cache.plan, self.params, self.cache.state, tokens, active, self.driver, donate=True
        )
        logits = done.logits if active.all() else jnp.where(active[:, None], done.logits, self.cache.logits)
        self.cache = dataclasses.replace(self.cache, state=done.state, logits=logits)
        self.pending.append(([(report.attended, report.stats) for report in done.reports], active))
        if len(self.pending) == _MOST_PENDING:
            self.count()
        if self.observer is not None:
            self.observer(done, tokens)

    def count(self) -> None:
        """Adds the pending reports to the counts; waits until they are computed."""
        pending, self.pending = self.pending, []
        for reports, active in jax.device_get(pending):
            self.counts.add(reports, active)

    def feed(self, questions: list[list[int]], chunk: int | None = None) -> None:
        """Feeds the token ids of each sequence, which may differ in number.

        Args:
          questions: token ids of each sequence.
          chunk: longest question that is fed token by token; a longer one is read in chunks of that size, unless the
            method needs single tokens or the run has an observer. None = no limit.

        Raises:
          NotFinite: the model computed NaN or infinity.
          StoreError: the store failed.
        """
        longest = max(map(len, questions))
        if chunk is not None and longest > chunk and not self.observer and chunked_prefill.reads(self.cache.plan):
            return self.read(questions, chunk)
        with progress.shown("reading the question", longest) as bar:
            for i in range(longest):
                active = np.array([i < len(q) for q in questions])
                self.step(np.array([q[i] if i < len(q) else 0 for q in questions], np.int32), active)
                bar.update()

    def read(self, rows: list[list[int]], chunk: int) -> None:
        """Reads token ids of each sequence in chunks; raises as `chunked_prefill.extend` and NotFinite."""
        self.cache = extended(self.params, self.cache, rows, chunk)
        check_logits(self.params, self.cache)
        self.counts.add_read(np.array(list(map(len, rows))), chunk)

    def force(self, rows: list[list[int]]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Scores given tokens; the last one of each row becomes pending.

        Args:
          rows: token ids of each sequence.

        Returns:
          (Log-probability of every token, True where it was the most likely one), one array per sequence.

        Raises:
          NotFinite: the model computed NaN or infinity.
          StoreError: the store failed.
        """
        tokens, length = prefill.batch(rows)
        logprobs, greedy = np.zeros(tokens.shape, np.float32), np.zeros(tokens.shape, bool)
        with progress.shown("scoring", int(length.max())) as bar:
            for i, column in enumerate(tokens.T):
                logits = self.cache.logits
                likely = jax.nn.log_softmax(logits.astype(jnp.float32))
                chosen = jnp.take_along_axis(likely, jnp.asarray(column)[:, None], axis=1)[:, 0]
                best = np.asarray(sampling.likeliest(logits))
                check_drawn(best, i < length, self.params, self.cache)
                logprobs[:, i], greedy[:, i] = chosen, best == column
                if i + 1 < length.max():
                    self.step(column, i + 1 < length)
                bar.update()
        self.cache = dataclasses.replace(self.cache, pending=tuple((row[-1],) for row in rows))
        return _cut(logprobs, length), _cut(greedy, length)

    def answer(
        self, answers: list[Answer], limit: int, how: Sampling, key: Array, ends: Ends,
        complete: Callable[[list[int]], bool],
    ) -> Iterator[None]:
        """Generates an answer in every sequence; its last token becomes pending.

        Args:
          answers: the empty answer of each sequence, to which tokens are added.
          limit: largest number of tokens of an answer.
          how: how tokens are drawn.
          key: random key.
          ends: token ids that end an answer.
          complete: function that returns True once the tokens of an answer are all of it.

        Yields:
          Nothing, each time that tokens were drawn.

        Raises:
          NotFinite: the model computed NaN or infinity.
          StoreError: the store failed.
        """
        for i in range(limit):
            drawn = np.asarray(sampling.sample(how, self.cache.logits, jax.random.fold_in(key, i)))
            active = np.array([answer.ended is None for answer in answers])
            check_drawn(drawn, active, self.params, self.cache)
            for row in np.flatnonzero(active):
                answers[row].add(int(drawn[row]), ends, complete)
            yield
            active = np.array([answer.ended is None for answer in answers])
            if not active.any() or i + 1 == limit:
                break
            self.step(drawn, active)
        for answer in answers:
            answer.ended = answer.ended or "length"
        self.cache = dataclasses.replace(self.cache, pending=tuple(answer.pending for answer in answers))

    def usage(self) -> Usage:
        """Returns the cost of the run so far; waits until it is computed."""
        jax.block_until_ready(self.cache.state)
        whole, compiling = time.perf_counter() - self.started, CLOCK.seconds - self.compiled
        self.count()
        counts, branch = self.counts, self.cache.branch
        stored = None if branch is None else branch.stats()
        return Usage(
            counts.steps, counts.tokens, max(0.0, whole - compiling), compiling,
            counts.attended / max(1, counts.heads), counts.needed, counts.missed, stored,
            layer_offload.stats(self.cache.state.layers),
        )


@contextlib.contextmanager
def running(params: PyTree, cache: Cache, driver: Driver, observer: Observer | None) -> Iterator[Generation]:
    """Opens a run over a fork of the cache; the fork is discarded if the run fails.

    Args:
      params: weights of the model.
      cache: cache, which stays as it is. The caller feeds its pending tokens; the fork has none.
      driver: how a step is run, "staged" or "fused" (`kvjax.inference.decode`).
      observer: function called after every token; None = none.

    Yields:
      The run.

    Raises:
      ConfigError: the driver does not exist.
      StaleCache: a token was decoded since the cache was made.
      StoreError: the store failed.
    """
    decode.check_driver(driver)
    run = Generation(params, dataclasses.replace(cache.fork(), pending=()), driver, observer)
    try:
        yield run
    except BaseException:
        run.cache.discard()  # not `close`: writing takes time on a device that may not answer, and could fail, too
        raise


def extended(params: PyTree, cache: Cache, rows: list[list[int]], chunk: int) -> Cache:
    """Reads token ids of each sequence in chunks; raises as `chunked_prefill.extend`.

    Args:
      params: weights of the model.
      cache: cache, which must not be used again.
      rows: token ids of each sequence, those that were pending included.
      chunk: tokens of a chunk.

    Returns:
      The cache after them; its logits may not be finite (`check_logits`).
    """
    tokens, length = prefill.batch(rows)
    state, logits = chunked_prefill.extend(cache.plan, params, cache.state, tokens, length, chunk)
    logits = jnp.where(jnp.asarray(length > 0)[:, None], logits, cache.logits)
    return dataclasses.replace(cache, state=state, logits=logits, pending=())


def check_drawn(drawn: np.ndarray, active: np.ndarray, params: PyTree, cache: Cache) -> None:
    """Raises NotFinite if no token could be drawn (`sampling.NONE`) for an active sequence."""
    _refuse(np.flatnonzero(active & (drawn == sampling.NONE)), params, cache)


def check_logits(params: PyTree, cache: Cache) -> None:
    """Raises NotFinite unless the next token's logits are finite in every sequence."""
    _refuse(np.flatnonzero(~np.asarray(sampling.finite(cache.logits))), params, cache)


def _refuse(rows: np.ndarray, params: PyTree, cache: Cache) -> None:
    """Raises NotFinite for the first of these sequences, whose logits are not finite, if there is one."""
    if rows.size:
        config, weights = cache.plan.config, types_of(params)
        raise NotFinite(
            f"logits of the {config.family} model (fingerprint {cache.fingerprint!r}) with weights in {weights} and a "
            f"cache in {cache.plan.dtype} are NaN or infinite after {cache.length[rows[0]]} tokens of sequence "
            f"{rows[0]}; load the model with dtype='bfloat16' or 'float32', or keep the cache in one of them"
        )


def _cut(table: np.ndarray, length: np.ndarray) -> list[np.ndarray]:
    """Returns the first `length` entries of each row."""
    return [row[:n] for row, n in zip(table, length, strict=True)]
