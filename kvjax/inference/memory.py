"""What a cache takes, by part and place."""

import dataclasses
import math
from collections import Counter

import jax

from kvjax.cache.pool import InMemory
from kvjax.cache.tiers import TieredPool
from kvjax.inference import layer_offload
from kvjax.inference.plan import State, bytes_of
from kvjax.store.interface import Branch

DEVICE, HOST, FLASH = PLACES = ("device", "host", "flash")


@dataclasses.dataclass(frozen=True, repr=False)
class Memory:
    """Bytes of a cache; printed as a table in MiB.

    The parts are: `blocks`, keys and values of all tokens but the tail; `slots`, those of them that were fetched from a
    store, and which they are; `index`, the method's arrays; `tables`, which token is in which row; `tail`, sinks,
    recent window and held rows; `staging`, a store's tables, blocks that are not written yet, and read buffers;
    `layers`, those that are offloaded.

    Attributes:
      bytes: bytes by part and place ("device", "host" or "flash"). On CPU the device's memory is the host's.
    """

    bytes: dict[tuple[str, str], int]

    def at(self, place: str) -> int:
        """Returns the bytes of all parts at a place."""
        return sum(count for (_, where), count in self.bytes.items() if where == place)

    def __repr__(self) -> str:
        parts = list(dict.fromkeys(part for part, _ in self.bytes))
        lines = ["{:<10}{:>12}{:>12}{:>12}".format("MiB", *PLACES)]
        for part in parts:
            cells = [_mib(self.bytes.get((part, place), 0)) for place in PLACES]
            lines.append("{:<10}{:>12}{:>12}{:>12}".format(part, *cells))
        lines.append("{:<10}{:>12}{:>12}{:>12}".format("total", *(_mib(self.at(place)) for place in PLACES)))
        return "\n".join(lines)


def _mib(count: int) -> str:
    return f"{count / 2**20:,.2f}" if count else "-"


def memory_of(state: State, branch: Branch | None) -> Memory:
    """Returns what a cache takes now.

    Args:
      state: state of the cache.
      branch: branch of the store that holds the blocks; None = they are in memory.

    Returns:
      The bytes. Those on the device are `bytes_of(state.layers)` together.
    """
    found: Counter[tuple[str, str]] = Counter()
    for layer in state.layers:
        if isinstance(layer, layer_offload.OffloadedLayer):
            found["layers", _place(layer.branch)] += layer.nbytes
            continue
        pool, state_of = layer.pool, layer.state
        found["blocks" if isinstance(pool, InMemory) else "slots", DEVICE] += _bytes(pool)
        if isinstance(pool, TieredPool):
            host = _bytes(pool.host_rows)
            found["slots", DEVICE] -= host
            found["slots", HOST] += host
        found["index", DEVICE] += _bytes(state_of.index)
        found["tail", DEVICE] += _bytes(state_of.tail)
        found["tables", DEVICE] += _bytes(state_of) - _bytes((state_of.index, state_of.tail))
    everywhere = bytes_of(state.layers)
    known = found.total() - sum(found["layers", place] for place in PLACES)
    if everywhere > known:  # slots that a step makes, or layers that it loads
        found["slots", DEVICE] += everywhere - known
    if branch is not None:
        found["blocks", _place(branch)] += branch.stored_bytes
        found["staging", HOST] += branch.held_bytes
    return Memory({key: count for key, count in found.items() if count})


def _place(branch: Branch) -> str:
    return FLASH if branch.on_flash else HOST


def _bytes(tree) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
