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
from kvjax.inference import chunked_prefill, decode, dense_prefill, layer_offload, loop, progress, sampling
from kvjax.inference.answers import Answer, Ends
from kvjax.inference.cache import Cache
from kvjax.inference.decode import Driver, Step
from kvjax.inference.loop import LoopInput
from kvjax.inference.progress import CLOCK
from kvjax.inference.sampling import Sampling
from kvjax.inference.stops import Stops
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
        self._feed(questions, longest)

    def _feed(self, questions: list[list[int]], longest: int) -> None:
        """Feeds the questions token by token."""
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
        tokens, length = dense_prefill.batch(rows)
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
        self, answers: list[Answer], limit: int, how: Sampling, key: Array, ends: Ends, stops: Stops
    ) -> Iterator[None]:
        """Generates an answer in every sequence; its last token becomes pending.

        Args:
          answers: the empty answer of each sequence, to which tokens are added.
          limit: largest number of tokens of an answer.
          how: how tokens are drawn.
          key: random key.
          ends: token ids that end an answer.
          stops: texts that end an answer.

        Yields:
          Nothing, each time that tokens were drawn.

        Raises:
          NotFinite: the model computed NaN or infinity.
          StoreError: the store failed.
        """
        for drawn in self._draws(answers, limit, how, key, ends, stops):
            active = going_on(answers)
            check_drawn(drawn, active, self.params, self.cache)
            for row in np.flatnonzero(active):
                answers[row].add(int(drawn[row]), ends, stops.complete)
            yield
        for answer in answers:
            answer.ended = answer.ended or "length"
        self.cache = dataclasses.replace(self.cache, pending=tuple(answer.pending for answer in answers))

    def _draws(
        self, answers: list[Answer], limit: int, how: Sampling, key: Array, ends: Ends, stops: Stops
    ) -> Iterator[np.ndarray]:
        """Yields drawn token ids [B], and feeds them to the answers that go on after the caller has seen them."""
        for i in range(limit):
            drawn = np.asarray(sampling.sample(how, self.cache.logits, jax.random.fold_in(key, i)))
            yield drawn
            active = going_on(answers)
            if not active.any() or i + 1 == limit:
                return
            self.step(drawn, active)

    def usage(self) -> Usage:
        """Returns the cost of the run so far; waits until it is computed."""
        jax.block_until_ready(self.cache.state)
        whole, compiling = time.perf_counter() - self.started, CLOCK.seconds - self.compiled
        self.count()
        counts, branch = self.counts, self.cache.branch
        stored = None if branch is None else branch.stats()
        return Usage(
            counts.steps, counts.tokens, max(0.0, whole - compiling), compiling, counts.single_tokens,
            counts.attended / max(1, counts.heads), counts.needed, counts.missed, stored,
            layer_offload.stats(self.cache.state.layers),
        )


class LoopGeneration(Generation):
    """A run whose steps are those of one program (`kvjax.inference.loop`), which the host starts anew where it has to
    look at an answer."""

    def __init__(self, params: PyTree, cache: Cache, at_once: int | None):
        """Initialises the run.

        Args:
          params: weights of the model.
          cache: cache, which the run owns.
          at_once: most tokens drawn before the host is told of them; None = all of an answer.
        """
        super().__init__(params, cache, "loop", None)
        self.at_once = at_once
        self.unfed: list[list[int]] = [[] for _ in range(cache.plan.batch)]  # tokens of the question

    def _feed(self, questions: list[list[int]], longest: int) -> None:
        """Leaves the questions to the program that begins to answer."""
        self.unfed = questions

    def _draws(
        self, answers: list[Answer], limit: int, how: Sampling, key: Array, ends: Ends, stops: Stops
    ) -> Iterator[np.ndarray]:
        at_once = limit if self.at_once is None else min(limit, self.at_once)
        meaning, draw, done, unfed = self._meaning(ends, stops), sampling.operands(how), 0, self.unfed
        while True:
            now, unfed = [row[: loop.GIVEN] for row in unfed], [row[loop.GIVEN :] for row in unfed]
            draws = 0 if any(unfed) else min(limit - done, at_once)
            asked = loop.asked(now, going_on(answers), meaning, draw, key, done, draws)
            drawn = self._run(asked, loop.room(at_once))
            yield from drawn
            done += len(drawn)
            if any(unfed):
                continue
            active = going_on(answers)
            if not active.any() or done == limit:
                return
            unfed = [[int(token)] if goes_on else [] for token, goes_on in zip(drawn[-1], active, strict=True)]

    def _run(self, asked: LoopInput, most: int) -> list[np.ndarray]:
        """Runs the program once; returns what it drew, token ids [B] of each draw."""
        plan = self.cache.plan
        left = loop.run(plan, self.params, self.cache.state, self.cache.logits, asked, most)
        self.cache = dataclasses.replace(self.cache, state=left.state, logits=left.logits)
        drawn, draws, counted = jax.device_get((left.drawn, left.draws, left.counted))
        self.counts.add_steps(counted, sum(layer.spec.kv_heads for layer in plan.layers))
        return list(drawn[:, :draws].T)

    def _meaning(self, ends: Ends, stops: Stops) -> Array:
        """Returns what each token means to the loop, uint8[V]."""
        size = self.cache.plan.config.vocab_size
        meaning = np.full(size, loop.GOES_ON, np.uint8)
        meaning[stops.completing(size)] = loop.LOOK
        meaning[[token for token in ends.eos | ends.stop if token < size]] = loop.ENDS
        return jnp.asarray(meaning)


@contextlib.contextmanager
def running(
    params: PyTree, cache: Cache, driver: Driver, observer: Observer | None, at_once: int | None = None
) -> Iterator[Generation]:
    """Opens a run over a fork of the cache; the fork is discarded if the run fails.

    Args:
      params: weights of the model.
      cache: cache, which stays as it is. The caller feeds its pending tokens; the fork has none.
      driver: how a step is run, "staged" or "fused" (`kvjax.inference.decode`), or "loop" (`kvjax.inference.loop`).
      observer: function called after every token; None = none.
      at_once: most tokens that "loop" draws before the caller is told of them; None = all of an answer.

    Yields:
      The run.

    Raises:
      ConfigError: the driver does not exist, or cannot run this cache or tell the observer of every token.
      StaleCache: a token was decoded since the cache was made.
      StoreError: the store failed.
    """
    decode.check_driver(driver)
    if driver == "loop":
        loop.check(cache.state.layers, observer is not None)
    fork = dataclasses.replace(cache.fork(), pending=())
    run = LoopGeneration(params, fork, at_once) if driver == "loop" else Generation(params, fork, driver, observer)
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
    tokens, length = dense_prefill.batch(rows)
    state, logits = chunked_prefill.extend(cache.plan, params, cache.state, tokens, length, chunk)
    logits = jnp.where(jnp.asarray(length > 0)[:, None], logits, cache.logits)
    return dataclasses.replace(cache, state=state, logits=logits, pending=())


def going_on(answers: list[Answer]) -> np.ndarray:
    """Returns True [B] for sequences whose answer has not ended."""
    return np.array([answer.ended is None for answer in answers])


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
