"""The cost of a run: what it counted, and the totals that users see."""

import dataclasses

import numpy as np

from kvjax.cache.pool import FetchStats
from kvjax.store.stats import Stats
from kvjax.typing import Array, Int32, pytree


@dataclasses.dataclass(frozen=True)
class Usage:
    """The cost of a run."""

    steps: int  # programs run, one for each token or chunk of tokens
    tokens: int  # tokens of all sequences, those of questions included
    seconds: float  # of decoding, without those of compiling
    compile_seconds: float  # of tracing and compiling programs, or of loading them from JAX's compilation cache
    single_tokens: int  # of these tokens, those that did not go through in chunks
    attended_tokens: float  # mean over single tokens, layers and KV heads
    blocks_needed: int  # blocks of a store that steps needed
    blocks_read: int  # of these, blocks that were not resident
    store: Stats | None  # totals of the store; None = no store
    offloaded: Stats | None = None  # totals of the offloaded layers' store; None = no layer is offloaded

    @property
    def hit_rate(self) -> float:
        """Share of the needed blocks that were resident."""
        return 1.0 - self.blocks_read / max(1, self.blocks_needed)

    def __repr__(self) -> str:
        return (f"Usage({self.tokens:,} tokens, {self.tokens / max(self.seconds, 1e-9):,.1f} a second, "
                f"{self.attended_tokens:,.0f} attended, {self.compile_seconds:.1f} s of compiling)")


@pytree
class LoopCounts:
    """Counts of one step, or of each of the S that a program has room for; of those that did not happen, 0."""

    active: Int32[Array, "*S B"]  # 1 for a sequence that took part
    attended: Int32[Array, "*S B"]  # tokens, over all layers and KV heads of a sequence that took part
    needed: Int32[Array, "*S B"]  # blocks of a store, over all layers
    missed: Int32[Array, "*S B"]  # of these, blocks that were not resident


@dataclasses.dataclass
class Counts:
    """The totals of a run's steps."""

    steps: int = 0
    tokens: int = 0
    single_tokens: int = 0
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
        self.single_tokens += int(active.sum())
        for attended, stats in reports:
            self.heads += attended[active].size
            self.attended += int(attended[active].sum())
            self.needed += int(stats.requested.sum())
            self.missed += int(stats.missed.sum())

    def add_steps(self, counted: LoopCounts, heads: int) -> None:
        """Adds the steps of a run of the loop (`kvjax.inference.loop`).

        Args:
          counted: counts [S, B] of each step, on the host; those of steps that did not happen are 0.
          heads: layers times KV heads.
        """
        tokens, attended, needed, missed = (
            int(array.sum(dtype=np.int64))
            for array in (counted.active, counted.attended, counted.needed, counted.missed)
        )
        self.steps += int(counted.active.any(axis=1).sum())
        self.tokens += tokens
        self.single_tokens += tokens
        self.heads += tokens * heads
        self.attended += attended
        self.needed += needed
        self.missed += missed

    def add_read(self, length: np.ndarray, chunk: int) -> None:
        """Adds tokens [B] that were read in chunks, of which attended tokens and fetches are not known."""
        self.steps += -(-int(length.max()) // chunk)
        self.tokens += int(length.sum())
