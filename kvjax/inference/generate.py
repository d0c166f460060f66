"""One run of a model over a cache, token by token: feeding questions, drawing answers, scoring given text."""

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

_MOST_PENDING = 256  # steps whose small arrays stay on the device
Observer = Callable[[Step, np.ndarray], None]  # called after every token with its step and its inputs [B]


@dataclasses.dataclass(frozen=True)
class Usage:
    """What a generation cost; means are over tokens, layers and KV heads."""

    steps: int
    tokens: int  # decoded in all sequences, the questions' included
    seconds: float
    attended_tokens: float  # per KV head and token
    blocks_needed: int  # of a store
    blocks_read: int  # of these, not resident
    store: Stats | None
    offloaded: Stats | None = None  # of the layers that wait in a store

    @property
    def hit_rate(self) -> float:
        return 1.0 - self.blocks_read / max(1, self.blocks_needed)


@dataclasses.dataclass
class Counts:
    """Totals of a run's steps."""

    steps: int = 0
    tokens: int = 0
    heads: int = 0  # tokens times layers times KV heads
    attended: int = 0  # tokens, by all of these
    needed: int = 0
    missed: int = 0

    def add(self, reports: list[tuple[np.ndarray, FetchStats]], active: np.ndarray) -> None:
        """What each layer attended and read in one step."""
        self.steps += 1
        self.tokens += int(active.sum())
        for attended, stats in reports:
            self.heads += attended[active].size
            self.attended += int(attended[active].sum())
            self.needed += int(stats.requested.sum())
            self.missed += int(stats.missed.sum())


class Generation:
    """One run over a cache of its own, which every step replaces by the next one."""

    def __init__(self, params: PyTree, cache: Cache, driver: Driver, observer: Observer | None):
        self.params, self.cache, self.driver, self.observer = params, cache, driver, observer
        self.counts = Counts()
        self.pending: list[tuple[list[tuple[Array, FetchStats]], np.ndarray]] = []  # not counted: reports, active ones
        self.started = time.perf_counter()

    def step(self, tokens: np.ndarray, active: np.ndarray) -> None:
        """One token of every active sequence; logits of the others stay."""
        active = active.copy()  # `pending` keeps it, and the caller changes it
        done = decode.step(
            self.cache.plan, self.params, self.cache.state, tokens, active, self.driver, donate=True
        )
        logits = done.logits if active.all() else jnp.where(active[:, None], done.logits, self.cache.logits)
        self.cache = dataclasses.replace(self.cache, state=done.state, logits=logits)
        self.pending.append(([(one.attended, one.stats) for one in done.reports], active))
        if len(self.pending) == _MOST_PENDING:
            self.count()
        if self.observer is not None:
            self.observer(done, tokens)

    def count(self) -> None:
        """Adds what is pending to the counts, which waits for it."""
        pending, self.pending = self.pending, []
        for reports, active in jax.device_get(pending):
            self.counts.add(reports, active)

    def feed(self, questions: list[list[int]]) -> None:
        for i in range(max(map(len, questions))):
            active = np.array([i < len(q) for q in questions])
            self.step(np.array([q[i] if i < len(q) else 0 for q in questions], np.int32), active)

    def force(self, rows: list[list[int]]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Log-probability of every given token, and whether it was the likeliest; the last one of each row is pending.
        Raises NotFinite."""
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
        """The tokens of every answer, of which the last one is pending. An answer ends before one of `eos_ids`, or
        where its tokens are `complete`; a token of `kept_ids` that ends it is pending, too. Raises NotFinite."""
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
    """A run over a fork of the cache without what is pending there; the fork is closed if the run fails."""
    decode.check_driver(driver)
    run = Generation(params, dataclasses.replace(cache.fork(), pending=()), driver, observer)
    try:
        yield run
    except BaseException:
        run.cache.discard()  # to write what it has takes time on a device that may not answer, and could fail, too
        raise


def check_drawn(drawn: np.ndarray, active: np.ndarray, params: PyTree, cache: Cache) -> None:
    """Raises NotFinite where an active sequence's logits gave no token (`sampling.NONE`)."""
    _refuse(np.flatnonzero(active & (drawn == sampling.NONE)), params, cache)


def check_logits(params: PyTree, cache: Cache) -> None:
    """Raises NotFinite unless the next token's logits are numbers in every sequence."""
    _refuse(np.flatnonzero(~np.asarray(sampling.finite(cache.logits))), params, cache)


def _refuse(rows: np.ndarray, params: PyTree, cache: Cache) -> None:
    """Raises NotFinite for the first of the sequences whose logits are not finite, if there is one."""
    if rows.size:
        config, weights = cache.plan.config, jax.tree.leaves(params)[0].dtype
        raise NotFinite(
            f"logits of the {config.family} model (fingerprint {cache.fingerprint!r}) with weights in {weights} and a "
            f"cache in {cache.plan.dtype} are NaN or infinite after {cache.length[rows[0]]} tokens of sequence "
            f"{rows[0]}; load the model with dtype='bfloat16' or 'float32', or keep the cache in one of them"
        )


def _cut(table: np.ndarray, length: np.ndarray) -> list[np.ndarray]:
    """The first `length` entries of each row."""
    return [row[:n] for row, n in zip(table, length, strict=True)]
