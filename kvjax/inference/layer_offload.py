"""Layers that wait in a store: only the layer at work, and the next one on its way, are in memory.

This is DynaKV's space virtualisation (section 6.1): representatives and cached blocks of a layer leave memory when it
has had its turn, and come back while the layer before it computes. Memory for the cache is then bounded by the layer
and not by the model. `Slots(offload=FlashStore(directory))` turns it on, for any method.

A parked layer is everything of its `LayerCache` as bytes, but for slots that layers take in turns
(`kvjax.cache.shared_slots`), cut into pages, which are blocks of a branch of their own: checksums, read-ahead, forks
and device profiles are the store's. Only pages that changed are written.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import shared_slots
from kvjax.cache.layer import LayerCache
from kvjax.cache.slots import SlotPool
from kvjax.store.format.pages import checksum
from kvjax.store.interface import Branch, Geometry, Stats, Store

PAGE_BYTES = 16 << 10
_ALIGN = 64  # bytes between which leaves begin


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class OffloadedLayer:
    """A layer's cache that waits in a store; an immutable value without arrays.

    Attributes:
      branch, generation: where it is, and as of when.
      number: the layer's.
      like: the cache with arrays that have shapes and types and take no memory.
      sums: uint64[pages] of what each page holds.
    """

    branch: Branch
    generation: int
    number: int
    like: LayerCache
    sums: np.ndarray

    @property
    def state(self):
        return self.like.state

    @property
    def pool(self):
        return self.like.pool

    @property
    def nbytes(self) -> int:
        return _bytes(self.like)


def create(store: Store, outlines: list[LayerCache]) -> Branch:
    """A branch with room for layers of these outlines. Raises StoreError."""
    pages = max(_pages(shared_slots.leave(one)[0]) for one in outlines)
    geometry = Geometry(layers=len(outlines), batch=1, kv_heads=1, num_blocks=pages, block_rows=1, width=PAGE_BYTES,
                        dtype="int8")
    return store.create(geometry, "parked layers")


def offload(branch: Branch, number: int, cache: LayerCache) -> OffloadedLayer:
    """Writes a layer for the first time, without slots that are passed on. Raises StoreError."""
    cache, _ = shared_slots.leave(cache)
    pages = _to_pages(cache)
    blocks = np.zeros((1, 1, branch.geometry.num_blocks, 1, PAGE_BYTES), np.int8)
    blocks[0, 0, : len(pages), 0] = pages
    counts = (np.arange(branch.geometry.num_blocks) < len(pages)).astype(np.int32)
    branch.write_layer(number, blocks, counts[None, None])
    return OffloadedLayer(branch, branch.generation, number, _outline(cache), _sums(pages))


def fork(layers: tuple) -> tuple:
    """The same layers, parked ones in a branch of their own; other ones are shared."""
    branches = {one.branch for one in layers if isinstance(one, OffloadedLayer)}
    forks = {branch: branch.fork() for branch in branches}
    return tuple(dataclasses.replace(one, branch=forks[one.branch]) if isinstance(one, OffloadedLayer) else one
                 for one in layers)


def close(layers: tuple) -> None:
    """Gives back what parked layers take in their store. Never raises."""
    for one in layers:
        if isinstance(one, OffloadedLayer):
            one.branch.discard()


def offload_all(store: Store, layers: tuple[LayerCache, ...]) -> tuple[OffloadedLayer, ...]:
    """Layers in memory, parked. Raises StoreError."""
    branch = create(store, [_outline(one) for one in layers])
    try:
        return tuple(offload(branch, i, one) for i, one in enumerate(layers))
    except BaseException:
        branch.discard()
        raise


def stats(layers: tuple) -> Stats | None:
    """What parked layers have moved; None where none is parked."""
    return next((one.branch.stats() for one in layers if isinstance(one, OffloadedLayer)), None)


def everything(layers: tuple) -> tuple[LayerCache, ...]:
    """All layers in memory."""
    return tuple(_load(one) if isinstance(one, OffloadedLayer) else one for one in layers)


def working_set(layers: tuple) -> int:
    """Bytes that parked layers have in memory at most: two neighbours, as one is read while the other works."""
    sizes = [one.nbytes for one in layers if isinstance(one, OffloadedLayer)]
    return max((sum(sizes[i : i + 2]) for i in range(len(sizes))), default=0)


class LayerLoader:
    """The layers of one step, parked ones taken when they are wanted. Either all layers are parked or none.

    What is put back becomes visible together, at `commit`; an error leaves the layers as of the last one.
    """

    def __init__(self, layers: tuple):
        self.layers = tuple(layers)
        self._fresh = list(layers)
        self._opened: dict[int, LayerCache] = {}

    def begin(self, i: int) -> None:
        """Layer i, if there is one, will be wanted soon."""
        one = self._fresh[i] if i < len(self._fresh) else None
        if isinstance(one, OffloadedLayer) and i not in self._opened:
            one.branch.submit(one.number, one.generation, _all(one))

    def open(self, i: int) -> LayerCache:
        """Layer i in memory, where it stays until it is put back. Raises StoreError."""
        one = self._fresh[i]
        if not isinstance(one, OffloadedLayer):
            return one
        if i not in self._opened:
            self._opened[i] = _load(one)
        return self._opened[i]

    def put(self, i: int, cache: LayerCache) -> None:
        """Puts layer i back as it is now. Raises StoreError."""
        before = self._fresh[i]
        self._fresh[i] = _put(before, cache) if isinstance(before, OffloadedLayer) else cache
        self._opened.pop(i, None)

    def give_back(self, slots: shared_slots.Space) -> None:
        """`turns.give_back`; parked layers do without, and the first of them makes some in the next step."""
        if not is_offloaded(self._fresh):
            self._fresh = shared_slots.give_back(self._fresh, slots)

    def commit(self) -> None:
        """What was put back is what the layers are. Raises StoreError."""
        offloaded = [one for one in self._fresh if isinstance(one, OffloadedLayer)]
        if offloaded:
            branch = offloaded[0].branch
            branch.commit(branch.generation)
            self._fresh = [dataclasses.replace(one, generation=branch.generation) for one in offloaded]
        self.layers = tuple(self._fresh)

    def abandon(self) -> None:
        """Forgets what was put back since the last commit, of parked layers; waits for the callbacks of others."""
        queued = [one.pool.queued for one in self._fresh if isinstance(one.pool, SlotPool)]
        jax.block_until_ready([one for one in queued if isinstance(one, jax.Array) and not one.is_deleted()])
        for one in self.layers:
            if isinstance(one, OffloadedLayer):
                one.branch.take_error()
                one.branch.abort(one.generation)


def is_offloaded(layers: Sequence) -> bool:
    return any(isinstance(one, OffloadedLayer) for one in layers)


# ---- one layer


def _load(one: OffloadedLayer) -> LayerCache:
    pages = np.empty((1, 1, len(one.sums), 1, PAGE_BYTES), np.int8)
    where = _all(one)
    if not one.branch.read_into(one.number, one.generation, where, where, pages):
        raise one.branch.failure(f"parked layer {one.number}")
    data, leaves, start = pages.reshape(-1), [], 0
    shapes, structure = jax.tree.flatten(one.like)
    for like in shapes:
        size, turn = math.prod(like.shape) * like.dtype.itemsize, _turned(one.like, like.shape)
        leaf = data[start : start + size].view(like.dtype).reshape(turn(like).shape)
        # A copy: XLA may write to what it is given for good, and this memory would still be Python's.
        leaves.append(jnp.array(turn(leaf)))
        start += _rounded(size)
    return jax.tree.unflatten(structure, leaves)


def _put(before: OffloadedLayer, cache: LayerCache) -> OffloadedLayer:
    pages = _to_pages(cache)
    sums = _sums(pages)
    changed = np.flatnonzero(sums != before.sums).astype(np.int32)
    if changed.size and not before.branch.put_blocks(
        before.number, before.generation, changed[None, None], pages[changed][None, None, :, None]
    ):
        raise before.branch.failure(f"parked layer {before.number}")
    return dataclasses.replace(before, sums=sums)


def _all(one: OffloadedLayer) -> np.ndarray:
    return np.arange(len(one.sums), dtype=np.int32)[None, None]


def _to_pages(cache: LayerCache) -> np.ndarray:
    """int8[pages, PAGE_BYTES]: every array of the cache, one after the other."""
    pages = np.zeros((_pages(cache), PAGE_BYTES), np.int8)
    data, start = pages.reshape(-1), 0
    for leaf in map(np.asarray, jax.tree.leaves(cache)):
        raw = np.ascontiguousarray(_turned(cache, leaf.shape)(leaf)).reshape(-1).view(np.int8)
        data[start : start + raw.size] = raw
        start += _rounded(raw.size)
    return pages


def _turned(cache: LayerCache, shape: tuple[int, ...]) -> Callable[[np.ndarray], np.ndarray]:
    """How an array of a cache is parked, and taken from there. Those that go dimension by dimension through blocks or
    tokens are turned round: a new key would change a number in nearly all of their pages."""
    blocks, rows = cache.state.counts.shape[-1], cache.state.positions.shape[-1]
    if len(shape) > 3 and shape[-1] in (blocks, blocks * rows):
        return lambda leaf: leaf.swapaxes(-1, -2)
    return lambda leaf: leaf


def _sums(pages: np.ndarray) -> np.ndarray:
    return np.array([checksum(page) for page in pages], np.uint64)


def _outline(cache: LayerCache) -> LayerCache:
    return jax.tree.map(lambda leaf: shape_only(leaf.shape, leaf.dtype), cache)


def shape_only(shape: tuple[int, ...], dtype) -> np.ndarray:
    """An array of zeros that takes no memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def _rounded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _bytes(cache: LayerCache) -> int:
    return sum(_rounded(math.prod(leaf.shape) * leaf.dtype.itemsize) for leaf in jax.tree.leaves(cache))


def _pages(cache: LayerCache) -> int:
    return -(-_bytes(cache) // PAGE_BYTES)
