"""Generation: one run of a model over a cache, token by token, to feed questions, draw answers and score given text."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.pool import FetchStats
from kvjax.errors import NotFinite
from kvjax.inference import decode, layer_offload, prefill, sampling
from kvjax.inference.cache import Cache
from kvjax.inference.decode import Driver, Step
from kvjax.inference.sampling import Sampling
from kvjax.store.interface import Stats
from kvjax.typing import Array, PyTree

_MOST_PENDING = 256  # steps whose reports may stay on the device before they are counted
Observer = Callable[[Step, np.ndarray], None]  # called after every token with its step and its input token ids [B]


@dataclasses.dataclass(frozen=True)
class Usage:
    """The cost of a run."""

    steps: int
    tokens: int  # decoded tokens of all sequences, those of questions included
    seconds: float
    attended_tokens: float  # mean over tokens, layers and KV heads
    blocks_needed: int  # blocks of a store that steps needed
    blocks_read: int  # of these, blocks that were not resident
    store: Stats | None  # totals of the store; None = no store
    offloaded: Stats | None = None  # totals of the offloaded layers' store; None = no layer is offloaded

    @property
    def hit_rate(self) -> float:
        """Share of the needed blocks that were resident."""
        return 1.0 - self.blocks_read / max(1, self.blocks_needed)


@dataclasses.dataclass
class Counts:
    """The totals of a run's steps."""

    steps: int = 0
    tokens: int = 0
    heads: int = 0  # tokens times layers times KV heads
    attended: int = 0  # attended tokens, summed over all of these
    needed: int = 0
    missed: int = 0

    def add(self, reports: list[tuple[np.ndarray, FetchStats]], active: np.ndarray) -> None:
        """Adds one step.

        Args:
          reports: attended tokens [B, K] and fetch statistics of each layer.
          active: True [B] for sequences that took part in the step.
        """
        self.steps += 1
        self.tokens += int(active.sum())
        for attended, stats in reports:
            self.heads += attended[active].size
            self.attended += int(attended[active].sum())
            self.needed += int(stats.requested.sum())
            self.missed += int(stats.missed.sum())


class Generation:
    """One run over a cache that it owns and that every step replaces."""

    def __init__(self, params: PyTree, cache: Cache, driver: Driver, observer: Observer | None):
        self.params, self.cache, self.driver, self.observer = params, cache, driver, observer
        self.counts = Counts()
        self.pending: list[tuple[list[tuple[Array, FetchStats]], np.ndarray]] = []  # reports and `active` to count
        self.started = time.perf_counter()

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

    def feed(self, questions: list[list[int]]) -> None:
        """Feeds the token ids of each sequence, which may differ in number. Raises StoreError."""
        for i in range(max(map(len, questions))):
            active = np.array([i < len(q) for q in questions])
            self.step(np.array([q[i] if i < len(q) else 0 for q in questions], np.int32), active)

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
        for i, column in enumerate(tokens.T):
            logits = self.cache.logits
            likely = jax.nn.log_softmax(logits.astype(jnp.float32))
            chosen = jnp.take_along_axis(likely, jnp.asarray(column)[:, None], axis=1)[:, 0]
            best = np.asarray(sampling.likeliest(logits))
            check_drawn(best, i < length, self.params, self.cache)
            logprobs[:, i], greedy[:, i] = chosen, best == column
            if i + 1 < length.max():
                self.step(column, i + 1 < length)
        self.cache = dataclasses.replace(self.cache, pending=tuple((row[-1],) for row in rows))
        return _cut(logprobs, length), _cut(greedy, length)

    def answer(
        self, limit: int, how: Sampling, key: Array, eos_ids: Collection[int], kept_ids: Collection[int],
        complete: Callable[[list[int]], bool],
    ) -> list[list[int]]:
        """Generates an answer in every sequence; its last token becomes pending.

        Args:
          limit: largest number of tokens of an answer.
          how: how tokens are drawn.
          key: random key.
          eos_ids: token ids before which an answer ends.
          kept_ids: those of `eos_ids` that become pending when they end an answer; others are dropped.
          complete: function that returns True once the tokens of an answer are all of it.

        Returns:
          Token ids of every answer.

        Raises:
          NotFinite: the model computed NaN or infinity.
          StoreError: the store failed.
        """
        tokens: list[list[int]] = [[] for _ in range(self.cache.plan.batch)]
        pending: list[tuple[int, ...]] = [() for _ in tokens]
        active = np.ones(len(tokens), bool)
        for i in range(limit):
            drawn = np.asarray(sampling.sample(how, self.cache.logits, jax.random.fold_in(key, i)))
            check_drawn(drawn, active, self.params, self.cache)
            for row in np.flatnonzero(active):
                token = int(drawn[row])
                ended = token in eos_ids
                pending[row] = (token,) if not ended or token in kept_ids else ()
                tokens[row] += [] if ended else [token]
                active[row] = not ended and not complete(tokens[row])
            if not active.any() or i + 1 == limit:
                break
            self.step(drawn, active)
        self.cache = dataclasses.replace(self.cache, pending=tuple(pending))
        return tokens

    def usage(self) -> Usage:
        """Returns the cost of the run so far; waits until it is computed."""
        jax.block_until_ready(self.cache.state)
        seconds = time.perf_counter() - self.started
        self.count()
        counts, branch = self.counts, self.cache.branch
        return Usage(
            counts.steps, counts.tokens, seconds, counts.attended / max(1, counts.heads), counts.needed, counts.missed,
            None if branch is None else branch.stats(), layer_offload.stats(self.cache.state.layers),
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


def check_drawn(drawn: np.ndarray, active: np.ndarray, params: PyTree, cache: Cache) -> None:
    """Raises NotFinite if no token could be drawn (`sampling.NONE`) for an active sequence."""
    _refuse(np.flatnonzero(active & (drawn == sampling.NONE)), params, cache)


def check_logits(params: PyTree, cache: Cache) -> None:
    """Raises NotFinite unless the next token's logits are finite in every sequence."""
    _refuse(np.flatnonzero(~np.asarray(sampling.finite(cache.logits))), params, cache)


def _refuse(rows: np.ndarray, params: PyTree, cache: Cache) -> None:
    """Raises NotFinite for the first of these sequences, whose logits are not finite, if there is one."""
    if rows.size:
        config, weights = cache.plan.config, jax.tree.leaves(params)[0].dtype
        raise NotFinite(
            f"logits of the {config.family} model (fingerprint {cache.fingerprint!r}) with weights in {weights} and a "
            f"cache in {cache.plan.dtype} are NaN or infinite after {cache.length[rows[0]]} tokens of sequence "
            f"{rows[0]}; load the model with dtype='bfloat16' or 'float32', or keep the cache in one of them"
        )


def _cut(table: np.ndarray, length: np.ndarray) -> list[np.ndarray]:
    """Returns the first `length` entries of each row."""
    return [row[:n] for row, n in zip(table, length, strict=True)]
