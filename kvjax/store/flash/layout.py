"""Layouts: where on flash a block's extent lies. All give equal bits; they differ in which blocks are read together.

Neighbouring extents are read by one request, so a layout is good when blocks that are fetched together are
neighbours. A *stream* is one KV head of one sequence in one layer; a selection never reaches beyond its stream.

    grouped        as a plain allocator. The prompt's blocks of a stream follow each other in the order of block ids,
                   stream after stream. A block first written later takes the lowest free extent, so that the blocks
                   which all streams add while decoding are interleaved in the order of writing. Where all KV heads of a
                   sequence fetch the same block numbers, blocks of equal number follow each other instead.
    cluster_major  every stream has a region of NB extents, and a block's place in it is its id. Methods number the
                   blocks of one cluster consecutively, so this is cluster order, and stays so.
    dual_head      DynaKV (Wang et al.), section 5: pairs of co-retrieved blocks in pools of two, see `DualHead`.
    sequential     token order, the paper's baseline; it does not place blocks, and has a file format of its own,
                   `kvjax.store.flash.sequential`.

Neighbours are adjacent in the file; whether they are adjacent on the device is up to the file system. Extents that a
layout leaves free between others are holes: they take no space on file systems with sparse files.
"""

import abc
import collections
from typing import ClassVar

import numpy as np

from kvjax.errors import ConfigError
from kvjax.store.format.extents import ExtentPool
from kvjax.store.geometry import Geometry


class Layout(abc.ABC):
    """A strategy that chooses extents for blocks and claims them. Not thread-safe: the volume's lock is held around
    every call.

    A layout keeps no list of free extents, as the pool has it. So a released extent is free again at once.

    Attributes:
      samples: number Q of a prompt's queries whose retrievals it uses.
    """

    samples: ClassVar[int] = 0

    def __init__(self, geometry: Geometry, extents: ExtentPool):
        self.geometry = geometry
        self.extents = extents

    @abc.abstractmethod
    def place_prompt(self, ids: np.ndarray, retrieved: np.ndarray | None) -> np.ndarray:
        """Claims extents for a prompt's blocks of one layer.

        Args:
          ids: int64[n] flat ids of the blocks, ascending.
          retrieved: int32[B, Q, KB, M1] blocks that `samples` queries of each prompt would fetch, NB = none; None if
            unknown.

        Returns:
          int32[n] their extents.

        Raises:
          NoSpace: no extent was claimed.
        """

    @abc.abstractmethod
    def place(self, block_id: int) -> int:
        """Claims and returns an extent for a block that is written for the first time, or copied on write. Raises
        NoSpace."""

    def restore(self, ids: np.ndarray, extents: np.ndarray) -> None:  # noqa: B027 (most need only the pool)
        """Records the blocks of an opened file: ids[n] in extents[n], which are claimed already."""


class Grouped(Layout):
    """The layout that takes the lowest free extents, in the order in which blocks are written."""

    def place_prompt(self, ids, retrieved):
        return self.extents.allocate(ids.size)

    def place(self, block_id):
        return int(self.extents.allocate(1)[0])


class ClusterMajor(Layout):
    """The layout in which extent = block id. Blocks copied for a fork go to the same place in a further copy of the
    table."""

    def place_prompt(self, ids, retrieved):
        copies = -(-(self.extents.begin - ids) // self.geometry.total_blocks)  # skips extents of a read-only file
        extents = ids + copies.clip(0) * self.geometry.total_blocks
        while (taken := self.extents.occupied(extents)).any():
            extents[taken] += self.geometry.total_blocks
        return self.extents.claim(extents)

    def place(self, block_id):
        return int(self.place_prompt(np.array([block_id]), None)[0])


class DualHead(Layout):
    """The layout with pools of two blocks, filled by correlation (DynaKV, section 5).

    A pool is two neighbouring extents: twice the largest cluster. At prefill, the blocks that are most often retrieved
    together (Eq. 8) share a pool, and pools are chained so that the end of one is correlated with the beginning of the
    next. A split leaves one half in place; the other is a new block, which joins a half-empty pool of its stream or
    opens a new one. No other block ever moves.

    A block is fetched whole, so both heads of a pool store rows forward; each grows into its own extent, and the slack
    of the pool is that of the two extents.

    Beyond the paper: pools of a stream come from *segments* of `SEGMENT` extents, so that what a stream adds is
    contiguous even though all streams grow at the same time. A stream takes a new segment only when all its pools are
    full, and a segment without blocks goes to whichever stream needs one. Without releases, a stream thus leaves fewer
    than `SEGMENT` extents empty.
    """

    SEGMENT: ClassVar[int] = 16  # extents: eight pools
    samples = 128

    def __init__(self, geometry, extents):
        super().__init__(geometry, extents)
        self._stream = np.zeros(0, np.int64)  # stream of each segment; valid only while a block is in the segment

    def place_prompt(self, ids, retrieved):
        streams, starts = np.unique(ids // self.geometry.num_blocks, return_index=True)
        groups = np.split(np.arange(ids.size), starts[1:])
        segments = [-(-group.size // self.SEGMENT) for group in groups] if ids.size else []
        first = self._free_shelves(sum(segments))
        extents = np.empty(ids.size, np.int64)
        owners = np.repeat(streams, segments)
        for stream, group, count in zip(streams.tolist(), groups, segments, strict=False):
            order = correlated_order(ids[group] % self.geometry.num_blocks, self._retrieved_by(stream, retrieved))
            extents[group[order]] = first * self.SEGMENT + np.arange(group.size)
            first += count
        claimed = self.extents.claim(extents)
        self._give(first - owners.size, owners)
        return claimed

    def restore(self, ids, extents):
        self._busy()  # extends self._stream to all segments
        self._stream[extents // self.SEGMENT] = ids // self.geometry.num_blocks

    def place(self, block_id):
        stream = block_id // self.geometry.num_blocks
        segments = np.flatnonzero(self._busy() & (self._stream == stream))
        free = self._free_extents(segments)
        if not free.size:
            segments = np.array([self._free_shelves(1)])
            free = self._free_extents(segments)
        partnered = self.extents.occupied(free ^ 1)
        extent = free[np.argmax(partnered)]  # the first pool with an empty partner slot, else the first empty pool
        self.extents.claim(extent[None])
        self._give(int(extent) // self.SEGMENT, np.array([stream]))
        return int(extent)

    def _retrieved_by(self, stream: int, retrieved: np.ndarray | None) -> np.ndarray:
        """Returns the retrievals int[Q, M] of one stream; no rows if they are unknown."""
        if retrieved is None:
            return np.zeros((0, 1), np.int64)
        sequence, head = divmod(stream % self.geometry.streams, self.geometry.kv_heads)
        return retrieved[sequence, :, head]

    def _free_extents(self, segments: np.ndarray) -> np.ndarray:
        extents = (segments[:, None] * self.SEGMENT + np.arange(self.SEGMENT)).reshape(-1)
        return extents[~self.extents.occupied(extents)]

    def _busy(self) -> np.ndarray:
        """Returns which segments are not entirely free, bool[segments]. Extents in segments of no stream may be
        claimed, too."""
        busy = self.extents.groups_in_use(self.SEGMENT)
        self._stream = np.append(self._stream, np.full(max(0, busy.size - self._stream.size), -1))
        return np.append(busy, np.zeros(self._stream.size - busy.size, bool))

    def _free_shelves(self, count: int) -> int:
        """Returns the first of `count` consecutive segments without a block, as low as possible."""
        busy = np.flatnonzero(self._busy())
        starts, stops = np.append(0, busy + 1), np.append(busy, busy.size + self._stream.size + count)
        return int(starts[np.argmax(stops - starts >= count)])

    def _give(self, first: int, streams: np.ndarray) -> None:
        """Records which streams the segments from `first` on belong to."""
        missing = max(0, first + streams.size - self._stream.size)
        self._stream = np.concatenate([self._stream, np.zeros(missing, np.int64)])
        self._stream[first:first + streams.size] = streams


LAYOUTS: dict[str, type[Layout]] = {"grouped": Grouped, "cluster_major": ClusterMajor, "dual_head": DualHead}
SEQUENTIAL = "sequential"


def check_layout(name: str) -> None:
    """Raises ConfigError for an unknown layout."""
    if name not in (*LAYOUTS, SEQUENTIAL):
        raise ConfigError(f"unknown layout {name!r}; use one of {', '.join(LAYOUTS)}, {SEQUENTIAL}")


# ---------------------------------------------------------------------------- correlation of blocks


def co_retrieval(retrieved: np.ndarray, known: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns pairs of blocks that were retrieved together, with their probabilities (Eq. 8).

    f(C_i, C_j) is the number of retrievals with both. The sum in the denominator takes every pair in both orders and
    leaves out i = j. Costs Q * M^2, whatever the length of the prompt: no M_0 x M_0 matrix is made.

    Args:
      retrieved: int[Q, M] the blocks of Q retrievals.
      known: int64[m] block numbers, ascending; others are ignored.

    Returns:
      pairs int64[n, 2] and P(ij) of each, float64[n], largest first.
    """
    rank = np.searchsorted(known, retrieved)
    none = known.size
    rank = np.where(np.isin(retrieved, known), rank, none)
    rank.sort(axis=-1)
    i, j = np.triu_indices(rank.shape[-1], 1)
    first, second = rank[:, i], rank[:, j]
    both = (second < none) & (first < second)
    codes, frequency = np.unique(first[both].astype(np.int64) * none + second[both], return_counts=True)
    order = np.argsort(-frequency, kind="stable")
    pairs = known[np.stack([codes // max(none, 1), codes % max(none, 1)], axis=-1)[order]]
    return pairs, frequency[order] / max(1, 2 * frequency.sum())


def correlated_order(blocks: np.ndarray, retrieved: np.ndarray) -> np.ndarray:
    """Orders blocks so that pools of two follow each other and correlated blocks are adjacent.

    Greedy in two passes over the pairs, most probable first: disjoint pairs become pools (the remaining blocks are
    paired in order, and an odd one comes last); then pools are joined to paths wherever both blocks are ends of their
    paths.

    Args:
      blocks: int64[n] block numbers, ascending.
      retrieved: int[Q, M] the blocks of Q retrievals.

    Returns:
      int64[n] permutation of `blocks`, as indices.
    """
    ranked = co_retrieval(retrieved, blocks)[0].tolist()
    paths: dict[int, collections.deque[int]] = {}
    single = dict.fromkeys(blocks.tolist())
    for i, j in ranked:
        if i in single and j in single:
            del single[i], single[j]
            paths[i] = paths[j] = collections.deque([i, j])
    rest = list(single)
    for i, j in zip(rest[::2], rest[1::2], strict=False):
        paths[i] = paths[j] = collections.deque([i, j])
    for i, j in ranked:
        if i in paths and j in paths:
            _join(paths, i, j)
    last = rest[-1:] if len(rest) % 2 else []
    walk = {id(path): path for path in map(paths.get, blocks.tolist()) if path is not None}
    order = [block for path in walk.values() for block in path] + last
    return np.searchsorted(blocks, order)


def _join(paths: dict[int, collections.deque[int]], i: int, j: int) -> None:
    """Joins the paths of i and j, with i beside j, if both are ends of different paths."""
    if len(paths[i]) < len(paths[j]):
        i, j = j, i
    longer, shorter = paths[i], paths[j]
    if longer is shorter or i not in (longer[0], longer[-1]) or j not in (shorter[0], shorter[-1]):
        return
    outwards = shorter if shorter[0] == j else reversed(shorter)
    (longer.extend if longer[-1] == i else longer.extendleft)(outwards)
    paths.update(dict.fromkeys(shorter, longer))
