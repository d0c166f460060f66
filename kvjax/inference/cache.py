"""The prefilled cache that `LLM.prefill` returns and that questions are asked with."""

import dataclasses
import os

import jax.numpy as jnp
import numpy as np

from kvjax.cache.method import ENDLESS, Method
from kvjax.cache.pool import StoreRef
from kvjax.errors import StaleCache
from kvjax.inference import layer_offload, progress
from kvjax.inference.memory import Memory, memory_of
from kvjax.inference.plan import Plan, State, bytes_of, copy_state
from kvjax.inference.saves import saving
from kvjax.store.interface import Branch
from kvjax.typing import Array


@dataclasses.dataclass(frozen=True, repr=False)
class Cache:
    """A prefilled cache, an immutable value; each question is answered on a fork, so one cache serves many.

    It is a context manager, which closes it.

    Attributes:
      plan: static part of the cache.
      state: arrays of the cache.
      logits: logits [B, V] of the next token.
      branch: branch of the store that holds the blocks; None = they are in memory.
      fingerprint: fingerprint of model and tokenizer.
      pending: token ids [B][n] that must be fed before anything else; () = none.
    """

    plan: Plan
    state: State
    logits: Array
    branch: Branch | None = None
    fingerprint: str = ""
    pending: tuple[tuple[int, ...], ...] = ()

    @property
    def length(self) -> list[int]:
        """Tokens of each sequence that were fed; pending tokens come after them."""
        return np.asarray(self.state.length).tolist()

    def after_pending(self, rows: list[list[int]]) -> list[list[int]]:
        """Returns the pending tokens of each sequence, followed by the given token ids."""
        return [[*before, *row] for before, row in zip(self.pending or [()] * len(rows), rows, strict=True)]

    @property
    def resident_bytes(self) -> int:
        """Bytes of the cache's arrays in memory, index, tables and buffers included."""
        return bytes_of(self.state.layers)

    @property
    def store_bytes(self) -> int:
        """Bytes of host memory that the store uses now, in addition to `resident_bytes`.

        They hold block offsets and checksums, rows that are not written yet, and read buffers. Forks share most of it.
        """
        return 0 if self.branch is None else self.branch.held_bytes

    def memory(self) -> Memory:
        """Returns what the cache takes now, by part and place; it prints as a table."""
        return memory_of(self.state, self.branch)

    def __repr__(self) -> str:
        lengths = self.length
        tokens = f"{lengths[0]:,} tokens" if len(lengths) == 1 else (
            f"{len(lengths)} sequences of {min(lengths):,} to {max(lengths):,} tokens")
        stored = "" if self.branch is None else (
            f", {self.branch.stored_bytes / 2**20:,.1f} MiB in {_place_of(self.branch)}")
        room = "" if self.plan.capacity == ENDLESS else f" of {self.plan.capacity:,}"
        plan, mib = self.plan, (self.resident_bytes + self.store_bytes) / 2**20
        return f"Cache({_brief(plan.method)}, {tokens}{room}, {plan.dtype}, {mib:,.1f} MiB{stored})"

    def __enter__(self) -> "Cache":
        return self

    def __exit__(self, *raised) -> None:
        self.close()

    def fork(self) -> "Cache":
        """Creates an independent copy; blocks in a store are shared until either side writes them.

        Returns:
          The copy.

        Raises:
          StaleCache: a token was decoded since this cache was made.
          StoreError: the store failed.
        """
        self._check_current(self.branch)
        state = copy_state(self.state)
        if self.branch is None:
            return dataclasses.replace(self, state=state)
        branch = None
        try:
            branch = self.branch.fork()
            self._check_current(branch)  # another thread may have decoded a token in the meantime
        except BaseException:
            layer_offload.close(state.layers)
            if branch is not None:
                branch.discard()
            raise
        ref = StoreRef(jnp.int32(branch.handle), jnp.int32(branch.generation))
        return dataclasses.replace(self, state=dataclasses.replace(state, ref=ref), branch=branch)

    def _check_current(self, branch: Branch | None) -> None:
        """Raises StaleCache if the branch has moved past this cache's generation, so that its blocks have changed."""
        own = int(self.state.ref.generation)
        if branch is not None and own != branch.generation:
            raise StaleCache(f"the cache is of generation {own} and its store of {branch.generation}: a token was "
                             "decoded since; use the newer cache, or fork before decoding")

    def flush(self) -> None:
        """Waits until all blocks are in the store's file. Raises StoreError if a write failed."""
        if self.branch is not None:
            self.branch.flush()

    def save(self, directory: str | os.PathLike) -> None:
        """Saves this cache to a directory, for `LLM.restore` in any process; the previous save stays if this one fails.

        With a store at `directory/blocks.kv`, only changes are written; blocks of a store elsewhere are copied.

        Args:
          directory: path of the directory, which is created if it is missing.

        Raises:
          ConfigError: the directory holds a cache of the other kind (in a store, or in memory).
          StaleCache: a token was decoded since this cache was made.
          FormatMismatch, ReadFailed: the directory has a `cache.json` that is not a manifest, or that cannot be read.
          StoreLocked: another process is saving to the directory or has its store file open for writing.
          StoreError: the device failed.
        """
        self._check_current(self.branch)
        state = dataclasses.replace(self.state, layers=layer_offload.everything(self.state.layers))
        with progress.shown("saving"):
            saving.save(directory, self.plan, state, self.logits, self.pending, self.branch, self.fingerprint)

    def close(self) -> None:
        """Releases the cache's blocks in the store; forks are not affected. Raises StoreError if a write failed."""
        layer_offload.close(self.state.layers)
        if self.branch is not None:
            self.branch.close()

    def discard(self) -> None:
        """Releases the cache's blocks and drops writes that are not done yet. Never raises."""
        layer_offload.close(self.state.layers)
        if self.branch is not None:
            self.branch.discard()


def _place_of(branch: Branch) -> str:
    return str(getattr(branch, "path", "host memory"))


def _brief(method: Method) -> str:
    budget = "" if method.budget is None else f"budget={method.budget}"
    return f"{type(method).__name__}({budget})"
