"""A prefilled cache: what `LLM.prefill` gives and every question is asked of."""

import dataclasses
import os

import jax.numpy as jnp
import numpy as np

from kvjax.cache.pool import StoreRef
from kvjax.errors import StaleCache
from kvjax.inference import checkpoint, layer_offload
from kvjax.inference.plan import Plan, State, bytes_of, copy_state
from kvjax.store.interface import Branch
from kvjax.typing import Array


@dataclasses.dataclass(frozen=True)
class Cache:
    """A prefilled cache: an immutable value. Asking it forks it, so one cache serves many questions."""

    plan: Plan
    state: State
    logits: Array  # [B, V] of the next token
    branch: Branch | None = None
    fingerprint: str = ""  # of model and tokenizer
    pending: tuple[tuple[int, ...], ...] = ()  # [B][n] tokens that are fed before anything else; () = none

    @property
    def length(self) -> list[int]:
        """Tokens of each sequence that were fed; what is pending comes after them."""
        return np.asarray(self.state.length).tolist()

    def after_pending(self, rows: list[list[int]]) -> list[list[int]]:
        """Returns the token ids of each sequence behind what is pending there."""
        return [[*before, *row] for before, row in zip(self.pending or [()] * len(rows), rows, strict=True)]

    @property
    def resident_bytes(self) -> int:
        """Bytes of the cache's arrays that are in memory, index, tables and buffers included."""
        return bytes_of(self.state.layers)

    @property
    def store_bytes(self) -> int:
        """Host memory that its store takes at this moment beside them: where blocks are and what they hash to, rows
        that wait to be written, and what reads land in. Forks share most of it."""
        return 0 if self.branch is None else self.branch.held_bytes

    def fork(self) -> "Cache":
        """An independent copy; blocks on flash are shared until either side writes them."""
        self._check_current(self.branch)
        state = copy_state(self.state)
        if self.branch is None:
            return dataclasses.replace(self, state=state)
        branch = None
        try:
            branch = self.branch.fork()
            self._check_current(branch)  # nobody has decoded meanwhile
        except BaseException:
            layer_offload.close(state.layers)
            if branch is not None:
                branch.discard()
            raise
        ref = StoreRef(jnp.int32(branch.handle), jnp.int32(branch.generation))
        return dataclasses.replace(self, state=dataclasses.replace(state, ref=ref), branch=branch)

    def _check_current(self, branch: Branch | None) -> None:
        """Raises StaleCache where the store has gone on: its blocks are no longer those that this value names."""
        own = int(self.state.ref.generation)
        if branch is not None and own != branch.generation:
            raise StaleCache(f"the cache is of generation {own} and its store of {branch.generation}: a token was "
                             "decoded since; use the cache that came of it, or fork before decoding")

    def flush(self) -> None:
        """Waits until everything is in the file; raises what failed."""
        if self.branch is not None:
            self.branch.flush()

    def save(self, directory: str | os.PathLike) -> None:
        """Makes this the cache that `LLM.restore` finds in the directory, in any process; all of it or nothing.

        With a store at `directory/blocks.kv` only what has changed is written; blocks of a store elsewhere are copied.
        Raises ConfigError or StoreError (`kvjax.inference.checkpoint.save`).
        """
        self._check_current(self.branch)
        state = dataclasses.replace(self.state, layers=layer_offload.everything(self.state.layers))
        checkpoint.save(directory, self.plan, state, self.logits, self.pending, self.branch, self.fingerprint)

    def close(self) -> None:
        """Gives the store's blocks back. Forks live on."""
        layer_offload.close(self.state.layers)
        if self.branch is not None:
            self.branch.close()

    def discard(self) -> None:
        """The same for a cache that nobody wants any more: what waits to be written is dropped. Never raises."""
        layer_offload.close(self.state.layers)
        if self.branch is not None:
            self.branch.discard()
