"""What a buffer that evicts first what came first reads for recorded needs (KVSwap's reuse buffer), in NumPy.

Apart from the code that serves real decoding (`kvjax.cache.residency`), as its oracle and for the tuner.
"""

import numpy as np


def misses(need: np.ndarray, slots: int) -> np.ndarray:
    """int64[steps, lanes] blocks that a FIFO buffer per lane reads for need[steps, lanes, M]; -1 = none needed."""
    return np.stack([_lane_misses(need[:, lane], slots) for lane in range(need.shape[1])], axis=1)


def _lane_misses(need: np.ndarray, slots: int) -> np.ndarray:
    block, filled, count = np.full(slots, -1), np.zeros(slots, int), []
    for step, row in enumerate(need, start=1):
        wanted = row[row >= 0]
        missing = wanted[~np.isin(wanted, block)]
        # Given away are empty slots, then those filled first, never one that is needed now.
        turn = np.where(np.isin(block, wanted), 2, np.where(block < 0, 0, 1))
        taken = np.lexsort((filled, turn))[: len(missing)]
        block[taken], filled[taken] = missing, step
        count.append(len(missing))
    return np.asarray(count)


def rate(need: np.ndarray, slots: int, skip: int = 0) -> float:
    """Share of the needed blocks that are not read, after the first `skip` steps."""
    return 1.0 - float(misses(need, slots)[skip:].sum() / max(1, np.count_nonzero(need[skip:] >= 0)))
