"""Layer offload: whole layers are kept in a store, and at most two are in memory, one at work and the next being read.

This is DynaKV's space virtualisation (section 6.1): representatives and cached blocks of a layer leave memory after its
part of a step, and return while the layer before it computes. Memory for the cache is then bounded by the layer instead
of the model. `Slots(offload=FlashStore(directory=...))` turns it on, for any method.

An offloaded layer is its whole `LayerCache` as bytes, except shared slots (`kvjax.cache.shared_slots`). The bytes are
cut into pages, which are the blocks of a separate branch, so the store provides checksums, read-ahead, forks and device
profiles. Only changed pages are written.
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
from kvjax.store.geometry import Geometry
from kvjax.store.interface import Branch, Store
from kvjax.store.stats import Stats

PAGE_BYTES = 16 << 10
_ALIGN = 64  # bytes; every leaf begins at a multiple


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class OffloadedLayer:
    """A layer's cache that is kept in a store: an immutable value without arrays.

    Attributes:
      branch: branch that holds its pages.
      generation: generation of the branch that this value belongs to.
      number: number of the layer.
      like: the cache, with arrays that have shapes and types but take no memory.
      sums: uint64[pages], checksum of each page.
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
    """Creates a branch for layers of these outlines.

    Args:
      store: store to create it in.
      outlines: cache of each layer, with arrays that may take no memory.

    Returns:
      The branch.

    Raises:
      StoreError: the branch cannot be created.
    """
    pages = max(_pages(shared_slots.leave(layer)[0]) for layer in outlines)
    geometry = Geometry(layers=len(outlines), batch=1, kv_heads=1, num_blocks=pages, block_rows=1, width=PAGE_BYTES,
                        dtype="int8")
    return store.create(geometry, "parked layers")


def offload(branch: Branch, number: int, cache: LayerCache) -> OffloadedLayer:
    """Writes a layer, without shared slots, to its place in a new branch.

    Args:
      branch: branch from `create`.
      number: number of the layer.
      cache: cache of the layer.

    Returns:
      The offloaded layer.

    Raises:
      StoreError: the layer cannot be written.
    """
    cache, _ = shared_slots.leave(cache)
    pages = _to_pages(cache)
    blocks = np.zeros((1, 1, branch.geometry.num_blocks, 1, PAGE_BYTES), np.int8)
    blocks[0, 0, : len(pages), 0] = pages
    counts = (np.arange(branch.geometry.num_blocks) < len(pages)).astype(np.int32)
    branch.write_layer(number, blocks, counts[None, None])
    return OffloadedLayer(branch, branch.generation, number, _outline(cache), _sums(pages))


def fork(layers: tuple) -> tuple:
    """Forks the branch of offloaded layers; layers in memory are returned as they are. Raises StoreError."""
    branches = {layer.branch for layer in layers if isinstance(layer, OffloadedLayer)}
    forks = {branch: branch.fork() for branch in branches}
    return tuple(dataclasses.replace(layer, branch=forks[layer.branch]) if isinstance(layer, OffloadedLayer) else layer
                 for layer in layers)


def close(layers: tuple) -> None:
    """Releases the store space of offloaded layers. Never raises."""
    for layer in layers:
        if isinstance(layer, OffloadedLayer):
            layer.branch.discard()


def offload_all(store: Store, layers: tuple[LayerCache, ...]) -> tuple[OffloadedLayer, ...]:
    """Offloads layers that are in memory to a new branch of `store`. Raises StoreError."""
    branch = create(store, [_outline(layer) for layer in layers])
    try:
        return tuple(offload(branch, i, layer) for i, layer in enumerate(layers))
    except BaseException:
        branch.discard()
        raise


def stats(layers: tuple) -> Stats | None:
    """Returns what the branch of offloaded layers has read and written; None if no layer is offloaded."""
    return next((layer.branch.stats() for layer in layers if isinstance(layer, OffloadedLayer)), None)


def everything(layers: tuple) -> tuple[LayerCache, ...]:
    """Loads all offloaded layers into memory. Raises StoreError."""
    return tuple(_load(layer) if isinstance(layer, OffloadedLayer) else layer for layer in layers)


def working_set(layers: tuple) -> int:
    """Returns the most bytes that offloaded layers take in memory: two neighbours, one at work and one being read."""
    sizes = [layer.nbytes for layer in layers if isinstance(layer, OffloadedLayer)]
    return max((sum(sizes[i : i + 2]) for i in range(len(sizes))), default=0)


class LayerLoader:
    """Loads and stores the layers of one step, of which either all or none are offloaded.

    Layers that are put back become visible together, at `commit`; an error leaves the layers of the last commit.
    """

    def __init__(self, layers: tuple):
        self.layers = tuple(layers)
        self._fresh = list(layers)
        self._opened: dict[int, LayerCache] = {}

    def begin(self, i: int) -> None:
        """Starts to read layer i, if there is one."""
        layer = self._fresh[i] if i < len(self._fresh) else None
        if isinstance(layer, OffloadedLayer) and i not in self._opened:
            layer.branch.submit(layer.number, layer.generation, _all(layer))

    def open(self, i: int) -> LayerCache:
        """Returns layer i in memory, where it stays until it is put back. Raises StoreError."""
        layer = self._fresh[i]
        if not isinstance(layer, OffloadedLayer):
            return layer
        if i not in self._opened:
            self._opened[i] = _load(layer)
        return self._opened[i]

    def put(self, i: int, cache: LayerCache) -> None:
        """Puts back layer i, which is `cache` now; writes the changed pages of an offloaded one. Raises StoreError."""
        before = self._fresh[i]
        self._fresh[i] = _put(before, cache) if isinstance(before, OffloadedLayer) else cache
        self._opened.pop(i, None)

    def give_back(self, slots: shared_slots.Space) -> None:
        """Hands shared slots to the first layer that uses them (`shared_slots.give_back`).

        If layers are offloaded, the slots are dropped, and the first such layer makes new ones in the next step.
        """
        if not is_offloaded(self._fresh):
            self._fresh = shared_slots.give_back(self._fresh, slots)

    def commit(self) -> None:
        """Makes the layers that were put back the current ones. Raises StoreError."""
        offloaded = [layer for layer in self._fresh if isinstance(layer, OffloadedLayer)]
        if offloaded:
            branch = offloaded[0].branch
            branch.commit(branch.generation)
            self._fresh = [dataclasses.replace(layer, generation=branch.generation) for layer in offloaded]
        self.layers = tuple(self._fresh)

    def abandon(self) -> None:
        """Drops offloaded layers put back since the last commit; for layers in memory, waits for their callbacks."""
        queued = [layer.pool.queued for layer in self._fresh if isinstance(layer.pool, SlotPool)]
        jax.block_until_ready([count for count in queued if isinstance(count, jax.Array) and not count.is_deleted()])
        for layer in self.layers:
            if isinstance(layer, OffloadedLayer):
                layer.branch.take_error()
                layer.branch.abort(layer.generation)


def is_offloaded(layers: Sequence) -> bool:
    return any(isinstance(layer, OffloadedLayer) for layer in layers)


# ---- one layer


def _load(layer: OffloadedLayer) -> LayerCache:
    pages = np.empty((1, 1, len(layer.sums), 1, PAGE_BYTES), np.int8)
    where = _all(layer)
    if not layer.branch.read_into(layer.number, layer.generation, where, where, pages):
        raise layer.branch.failure(f"offloaded layer {layer.number}")
    data, leaves, start = pages.reshape(-1), [], 0
    shapes, structure = jax.tree.flatten(layer.like)
    for like in shapes:
        size, turn = math.prod(like.shape) * like.dtype.itemsize, _turned(layer.like, like.shape)
        leaf = data[start : start + size].view(like.dtype).reshape(turn(like).shape)
        # A copy, because XLA may write to donated arrays, and this memory would still belong to NumPy.
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
        raise before.branch.failure(f"offloaded layer {before.number}")
    return dataclasses.replace(before, sums=sums)


def _all(layer: OffloadedLayer) -> np.ndarray:
    return np.arange(len(layer.sums), dtype=np.int32)[None, None]


def _to_pages(cache: LayerCache) -> np.ndarray:
    """Packs the arrays of a cache, one after the other, into int8[pages, PAGE_BYTES]."""
    pages = np.zeros((_pages(cache), PAGE_BYTES), np.int8)
    data, start = pages.reshape(-1), 0
    for leaf in map(np.asarray, jax.tree.leaves(cache)):
        raw = np.ascontiguousarray(_turned(cache, leaf.shape)(leaf)).reshape(-1).view(np.int8)
        data[start : start + raw.size] = raw
        start += _rounded(raw.size)
    return pages


def _turned(cache: LayerCache, shape: tuple[int, ...]) -> Callable[[np.ndarray], np.ndarray]:
    """Returns how an array of this shape is transposed for the store (its own inverse).

    Arrays whose last axis runs over blocks or tokens are transposed; otherwise a new key would change a number in
    nearly all of their pages.
    """
    blocks, rows = cache.state.counts.shape[-1], cache.state.positions.shape[-1]
    if len(shape) > 3 and shape[-1] in (blocks, blocks * rows):
        return lambda leaf: leaf.swapaxes(-1, -2)
    return lambda leaf: leaf


def _sums(pages: np.ndarray) -> np.ndarray:
    return np.array([checksum(page) for page in pages], np.uint64)


def _outline(cache: LayerCache) -> LayerCache:
    return jax.tree.map(lambda leaf: shape_only(leaf.shape, leaf.dtype), cache)


def shape_only(shape: tuple[int, ...], dtype) -> np.ndarray:
    """Returns an array of zeros that takes no memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def _rounded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _bytes(cache: LayerCache) -> int:
    return sum(_rounded(math.prod(leaf.shape) * leaf.dtype.itemsize) for leaf in jax.tree.leaves(cache))


def _pages(cache: LayerCache) -> int:
    return -(-_bytes(cache) // PAGE_BYTES)
