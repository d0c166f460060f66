"""Belady's MIN, the fewest blocks that any replacement policy could have read (IBM Systems Journal 5(2), 1966).

It needs the future, so it runs over a recorded trace, as the limit for the policies of `kvjax.cache.residency`. One
step needs several blocks at once, all of which stay pinned during the step; the evicted block is still that whose next
use is farthest.
"""

import numpy as np

from kvjax.errors import ConfigError

NEVER = np.iinfo(np.int64).max


def fewest_misses(need: np.ndarray, slots: int, num_blocks: int) -> int:
    """Returns the number of blocks that must be read to serve the steps of one head with `slots` slots, all empty at
    first.

    Args:
      need: int[T, M1], the blocks that each step needs, all different; numbers outside 0..num_blocks-1 mean none.
      slots: slots of the head.
      num_blocks: NB.

    Raises:
      ConfigError: one step needs more blocks than there are slots.
    """
    steps = [[int(b) for b in row if 0 <= b < num_blocks] for row in need]
    widest = max(map(len, steps), default=0)
    if widest > slots:
        raise ConfigError(f"one step needs {widest} blocks but slots={slots}; raise it")
    next_use = _next_uses(steps)
    resident: dict[int, int] = {}  # block -> step of its next use
    misses = 0
    for wanted, following in zip(steps, next_use, strict=True):
        missing = [block for block in wanted if block not in resident]
        misses += len(missing)
        _make_room(resident, set(wanted), slots - len(missing))
        resident.update(zip(wanted, following, strict=True))
    return misses


def _next_uses(steps: list[list[int]]) -> list[list[int]]:
    """Returns, for each needed block of each step, the next step that needs it."""
    upcoming: dict[int, int] = {}
    next_uses = []
    for step in range(len(steps) - 1, -1, -1):
        next_uses.append([upcoming.get(block, NEVER) for block in steps[step]])
        upcoming.update(dict.fromkeys(steps[step], step))
    return next_uses[::-1]


def _make_room(resident: dict[int, int], pinned: set[int], room: int) -> None:
    """Evicts unpinned blocks, the farthest next use first, until at most `room` are left."""
    excess = len(resident) - room
    if excess > 0:
        candidates = sorted(resident.keys() - pinned, key=resident.__getitem__, reverse=True)
        for block in candidates[:excess]:
            del resident[block]
