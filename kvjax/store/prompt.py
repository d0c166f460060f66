"""A prompt, as it is given to a store: its blocks, whole or gathered on demand, and what guides their layout."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Information about a prefilled layer, beside its blocks, for layouts that use it.

    Attributes:
      pos: int32[B, KB, NB, C] position of the token in each row, -1 = empty.
      retrieved: int32[B, Q, KB, M1] blocks that Q sampled queries of the prompt would fetch, NB = none; None if
        unknown.
    """

    pos: np.ndarray
    retrieved: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Gathered:
    """Blocks of a prompt that are gathered on demand, so that they are never all in memory.

    Attributes:
      rows: [B, K, T, width] the row of each token.
      pos: int32[B, K, NB, C] token in each row of each block, -1 = a row of zeros.
    """

    rows: np.ndarray
    pos: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.pos.shape, self.rows.shape[-1])

    @property
    def dtype(self) -> np.dtype:
        return self.rows.dtype

    def take(self, ids: np.ndarray) -> np.ndarray:
        """Returns blocks `[n, C, width]`; ids[n] are flat numbers over [B, K, NB]."""
        pos = self.pos.reshape(-1, self.pos.shape[-1])[ids]
        streams = self.rows.reshape(-1, *self.rows.shape[2:])
        blocks = streams[ids[:, None] // self.pos.shape[2], pos]
        blocks[pos < 0] = 0
        return blocks

    def all(self) -> np.ndarray:
        """Returns all blocks, `[B, K, NB, C, width]`."""
        return self.take(np.arange(self.pos[..., 0].size)).reshape(self.shape)


def whole(blocks: np.ndarray | Gathered) -> np.ndarray:
    """Returns blocks `[B, K, NB, C, width]` as an array in memory."""
    return blocks.all() if isinstance(blocks, Gathered) else blocks
