"""Simulation of a first-in-first-out buffer (KVSwap's reuse buffer) for recorded needs, in NumPy.

The tuner uses it, and it is the test oracle of the code that serves decoding (`kvjax.cache.residency`).
"""

import numpy as np


def misses(need: np.ndarray, slots: int) -> np.ndarray:
    """Returns the number of blocks that FIFO buffers read.

    Args:
      need: int[steps, lanes, M], blocks needed in each step by each lane, which has a buffer of its own; -1 = none.
      slots: blocks of each buffer.

    Returns:
      int64[steps, lanes].
    """
    return np.stack([_lane_misses(need[:, lane], slots) for lane in range(need.shape[1])], axis=1)


def _lane_misses(need: np.ndarray, slots: int) -> np.ndarray:
    block, filled, count = np.full(slots, -1), np.zeros(slots, int), []
    for step, row in enumerate(need, start=1):
        wanted = row[row >= 0]
        missing = wanted[~np.isin(wanted, block)]
        # Empty slots are taken first, then those filled first, and none whose block is needed now.
        rank = np.where(np.isin(block, wanted), 2, np.where(block < 0, 0, 1))
        taken = np.lexsort((filled, rank))[: len(missing)]
        block[taken], filled[taken] = missing, step
        count.append(len(missing))
    return np.asarray(count)


def rate(need: np.ndarray, slots: int, skip: int = 0) -> float:
    """Returns the share of the needed blocks that are not read, after the first `skip` steps; `need` and `slots` as in
    `misses`."""
    return 1.0 - float(misses(need, slots)[skip:].sum() / max(1, np.count_nonzero(need[skip:] >= 0)))
