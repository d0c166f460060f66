"""The static plan of a model's cache, the state of that cache, and the settings of its slots.

Nothing here runs a model: `kvjax.inference.prefill` fills a cache, and `kvjax.inference.decode` advances it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from kvjax import _validate
from kvjax.cache import residency
from kvjax.cache.callbacks import BACKENDS, default_backend
from kvjax.cache.check import check_outputs
from kvjax.cache.fill import empty_state
from kvjax.cache.in_memory import empty_pool
from kvjax.cache.layer import LayerCache, LayerPlan
from kvjax.cache.method import ENDLESS, Method
from kvjax.cache.pool import StoreRef, row_width
from kvjax.cache.slots import PREFETCH, SlotPool
from kvjax.cache.tiers import TieredPool
from kvjax.cache.types import Spec
from kvjax.errors import ConfigError, MethodError
from kvjax.inference import layer_offload
from kvjax.inference.layer_offload import OffloadedLayer
from kvjax.methods.full import Full
from kvjax.models.config import ModelConfig
from kvjax.models.mesh import MeshLayout
from kvjax.ops import quantize
from kvjax.store.geometry import Geometry
from kvjax.store.interface import Store
from kvjax.typing import Array, Int32, pytree


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static part of a model's cache."""

    config: ModelConfig  # for texts of the capacity (`ModelConfig.for_length`)
    method: Method  # as given, or as fitted to the prompts; dense layers have `Full` instead
    layers: tuple[LayerPlan, ...]
    batch: int
    capacity: int  # most tokens of a sequence
    dtype: str = "float32"  # type of keys and values in blocks (`kvjax.ops.quantize`)
    layout: MeshLayout | None = None  # how the cache is divided on a mesh; None = it is on one device

    @property
    def of_one(self) -> "Plan":
        """The plan of what one device has of the cache; this plan without a mesh."""
        return self if self.layout is None else _of_one(self, exchanging=True)


@pytree
class State:
    """The cache of a whole model, an immutable value."""

    layers: tuple[LayerCache | OffloadedLayer, ...]
    length: Int32[Array, "B"]  # tokens of each sequence
    ref: StoreRef


@dataclasses.dataclass(frozen=True)
class Slots:
    """Settings of how a store's blocks are kept in memory.

    Attributes:
      count: slots per KV head; None = M + 1, which one step needs.
      host: slots per KV head in host memory (`kvjax.cache.tiers`). Blocks that are not in a slot on the device are
        looked for there before the store is read. None = no such slots.
      policy: name of the eviction policy (`kvjax.cache.residency.POLICIES`).
      backend: how a compiled step calls the store, "buffer" (CPU only) or "io"; None = the fastest on this platform.
      prefetch: which blocks are read in advance. "off": none. "layer": while a layer computes, the blocks of the next
        one, selected with the query that this layer's input would give there. "step": the blocks ranked just below this
        step's selection, for the next step. Outputs are the same in all cases.
      keep: True = blocks stay for later steps, as in KVSwap's reuse buffer. False = every needed block is read again in
        every step (FlexGen), into slots that all layers share and forks copy; layers of an adaptive method, which
        rewrites blocks once all layers were read, still have slots of their own.
      even: True = all KV heads reuse the same number of blocks, that of the head that finds the fewest, so that each
        reads as many as the others (DynSplit-KV; see `kvjax.cache.residency.plan`).
      offload: store to which whole layers, with index, tables and slots, are offloaded while other layers are at work
        (`kvjax.inference.layer_offload`); None = layers stay in memory. The cache then takes the memory of two layers
        plus the store's `staging_bytes`; each step reads every layer twice and writes what changed.

    Raises:
      ConfigError: `count` or `host` is less than 1, `policy`, `backend` or `prefetch` does not exist, or `host` is
        combined with `offload` or keep=False.
    """

    count: int | None = None
    host: int | None = None
    policy: str = "lru"
    backend: str | None = None
    prefetch: str = "off"
    keep: bool = True
    even: bool = False
    offload: Store | None = None

    @property
    def for_memory(self) -> bool:
        """True if these slots make sense for a cache in memory: only `offload` is set."""
        return self.offload is not None and self == Slots(offload=self.offload)

    def __post_init__(self):
        _validate.check(self)
        if min(1 if n is None else n for n in (self.count, self.host)) < 1:
            raise ConfigError(f"count={self.count} and host={self.host} are numbers of slots; give at least 1, or None")
        residency.find_policy(self.policy)
        if self.host is not None and (self.offload is not None or not self.keep):
            raise ConfigError("host= is for blocks that stay in memory; leave it out with offload= or keep=False")
        if self.prefetch not in PREFETCH or self.backend not in (None, *BACKENDS):
            raise ConfigError(f"prefetch={self.prefetch!r} must be one of {', '.join(PREFETCH)}, and "
                              f"backend={self.backend!r} must be None or one of {', '.join(BACKENDS)}")


def check_capacity(capacity: int) -> None:
    """Raises ConfigError unless a sequence may have so many tokens."""
    if not _validate.whole(capacity, 2) or capacity > ENDLESS:
        raise ConfigError(f"capacity={capacity!r} must be a whole number of 2 to {ENDLESS:,} tokens")


def make_plan(
    config: ModelConfig, method: Method, batch: int, capacity: int, dtype: str = "float32",
    layout: MeshLayout | None = None,
) -> Plan:
    """Sizes every layer's cache.

    Keys are rotated once, when they are placed, as for a text of `capacity` tokens.

    Args:
      config: configuration of the model.
      method: cache method.
      batch: number of sequences.
      capacity: largest number of tokens of a sequence.
      dtype: type of keys and values in blocks (`kvjax.ops.quantize`).
      layout: how the cache is divided on a mesh; None = it is on one device.

    Returns:
      The plan.

    Raises:
      ConfigError: the sizes do not fit together, or `dtype` does not exist.
    """
    if layout is not None:
        layout.check(config)
        layout.check_batch(batch)
    quantize.check(dtype, config.head_dim)
    check_capacity(capacity)
    capacity = int(capacity)  # not a NumPy integer, as it is saved as JSON
    config = config.for_length(capacity)
    return Plan(config, method, _layers_of(config, method, capacity, dtype), batch, capacity, dtype, layout)


def _layers_of(config: ModelConfig, method: Method, capacity: int, dtype: str) -> tuple[LayerPlan, ...]:
    """Returns the plan of every layer of a model, or of what one device has of it."""
    sizes = {"kv_heads": config.num_kv_heads, "group": config.group, "head_dim": config.head_dim, "capacity": capacity}
    dense = Full()
    layers = []
    for i, layer in enumerate(config.layers):
        chosen = dense if i < method.dense_layers else method
        follows = _follows(config, method, i)
        filters = chosen.dense_filters and not follows and _follows(config, method, i + 1)
        spec = dataclasses.replace(
            chosen.spec(**sizes), rope=layer.rope, key_type=quantize.tail_type(dtype), sliding=layer.window,
            soft_cap=layer.soft_cap, shards=layer.shards,
        )
        layers.append(LayerPlan(chosen, spec, follows, filters))
    return tuple(layers)


@functools.cache
def _of_one(plan: Plan, exchanging: bool) -> Plan:
    assert plan.layout is not None
    config = plan.layout.of_one(plan.config, exchanging)
    layers = _layers_of(config, plan.method, plan.capacity, plan.dtype)
    batch = plan.batch // plan.layout.sequence_parts
    return dataclasses.replace(plan, config=config, layers=layers, batch=batch, layout=None)


@functools.cache
def specs_of_layers(plan: Plan) -> tuple[LayerCache, ...]:
    """Returns where the arrays of every layer's cache are on the mesh: partition specs in the place of arrays.

    An array is divided along the axes that are shorter in the cache of one device: the first by sequences, others by
    heads.

    Raises:
      MethodError: the size of an array neither stays the same nor divides.
    """
    assert plan.layout is not None
    own, specs, known = _of_one(plan, exchanging=False), [], {}
    for i, layer in enumerate(plan.layers):
        shapes = tuple(map(np.shape, jax.tree.leaves(layer.method.weights(i))))
        if (layer, shapes) not in known:
            known[layer, shapes] = _specs(plan, layer, *(outline(some, i, False, Slots()) for some in (plan, own)))
        specs.append(known[layer, shapes])
    return tuple(specs)


def _specs(plan: Plan, layer: LayerPlan, whole: LayerCache, own: LayerCache) -> LayerCache:
    layout = plan.layout
    assert layout is not None

    def spec(whole, own):
        names = [*layout.by_sequence]
        for size, part in zip(whole.shape[1:], own.shape[1:], strict=True):
            if size not in (part, part * layout.head_parts):
                raise ValueError(f"an axis of {size} is one of {part} on each of {layout.head_parts} devices")
            names.append(None if size == part else layout.rules.heads)
        return PartitionSpec(*names)

    try:
        return jax.tree.map(spec, whole, own)
    except ValueError as cause:
        raise MethodError(f"{layer.method.name} breaks the contract of methods: its arrays do not divide by KV heads "
                          f"({cause}); size them by `spec.kv_heads`, or by `spec.all_heads` where all devices have "
                          "the same") from cause


def _follows(config: ModelConfig, method: Method, i: int) -> bool:
    """Returns True if layer i takes placements and selections from the layer before.

    It never does if their sliding windows differ: a layer does not select the tokens that its own window hides.
    """
    if not method.dense_layers < i < config.num_layers or (i - method.dense_layers) % method.reuse == 0:
        return False
    return config.windows[i] == config.windows[i - 1]


def on_store(plan: Plan, index: int) -> bool:
    """Returns True if a layer's blocks go to the store: layers that attend everything do not, unless all layers do."""
    dense_prefix = isinstance(plan.layers[index].method, Full) and plan.layers[-1].method != plan.layers[index].method
    return not dense_prefix and not plan.layers[index].filters


def store_geometry(plan: Plan) -> Geometry:
    """Returns the sizes of the store that this plan needs."""
    spec = plan.layers[-1].spec
    return Geometry(
        layers=len(plan.layers), batch=plan.batch, kv_heads=spec.block_heads, num_blocks=spec.num_blocks,
        block_rows=spec.block_rows, width=row_width(spec, plan.dtype), dtype=quantize.stored_type(plan.dtype),
        keys=spec.keeps_keys,
    )


def _slot_count(spec: Spec, slots: Slots) -> int:
    """Returns the number of slots per head; raises ConfigError if it is too small, or that of the host not larger."""
    least = spec.max_blocks + 1
    count = least if slots.count is None else slots.count
    if count < least:
        raise ConfigError(f"slots={count} is fewer than the {least} blocks that one step may need; raise it")
    if slots.host is not None and slots.host <= count:
        raise ConfigError(f"host={slots.host} must be more than the device's {count} slots; raise it")
    return count


def slot_pool(plan: Plan, i: int, slots: Slots) -> SlotPool:
    """Creates a layer's empty slots.

    Args:
      plan: static part of the cache.
      i: number of the layer.
      slots: settings.

    Returns:
      The pool.

    Raises:
      ConfigError: there are too few slots, or the backend does not exist on this platform.
    """
    spec = plan.layers[i].spec
    count = _slot_count(spec, slots)
    backend = slots.backend or default_backend()
    if backend == "buffer" and default_backend() != "buffer":
        raise ConfigError(f"backend='buffer' is only for CPU, and this is {jax.default_backend()}; leave it out")
    passing = not slots.keep and not plan.layers[i].method.adaptive
    pool = SlotPool.zeros(
        spec, plan.batch, count, plan.dtype, slots.policy, backend, slots.prefetch, slots.keep, slots.even,
        passing=passing, waits=passing and any(on_store(plan, j) for j in range(i)),
    )
    return pool if slots.host is None else TieredPool.over(pool, spec, slots.host)


def outline(plan: Plan, i: int, store: bool, slots: Slots) -> LayerCache:
    """Returns the structure of layer i's cache, with arrays that take no memory.

    Args:
      plan: static part of the cache.
      i: number of the layer.
      store: True = the cache is over a store.
      slots: how a store's blocks are kept in memory.

    Returns:
      The layer's cache.

    Raises:
      ConfigError: there are too few slots, or the backend does not exist on this platform.
    """
    layer, structures = plan.layers[i], []
    in_memory = not (store and on_store(plan, i))

    def leaves(weights):
        pool = empty_pool(layer.spec, plan.batch, plan.dtype) if in_memory else slot_pool(plan, i, slots)
        state = empty_state(layer, plan.batch, plan.dtype, weights)
        flat, structure = jax.tree.flatten(LayerCache(state, pool))
        structures.append(structure)
        return flat

    shapes = jax.eval_shape(leaves, layer.method.weights(i))
    return jax.tree.unflatten(structures[0], [layer_offload.shape_only(leaf.shape, leaf.dtype) for leaf in shapes])


def check_plan(plan: Plan, store: bool, slots: Slots) -> None:
    """Checks that every layer's cache can be made; of identical layers, only the first is tried.

    Args:
      plan: static part of the cache.
      store: True = the cache is over a store.
      slots: how a store's blocks are kept in memory.

    Raises:
      ConfigError: a layer's cache cannot be made.
      MethodError: the method breaks the contract of methods.
      ReadFailed, FormatMismatch: a file that was fitted for the method cannot be used.
    """
    tried = set()
    for i, layer in enumerate(plan.layers):
        shapes = tuple(map(np.shape, jax.tree.leaves(layer.method.weights(i))))
        kind = layer, on_store(plan, i), shapes
        if kind not in tried:
            check_outputs(layer.method, layer.spec)
            outline(plan, i, store, slots)
        tried.add(kind)
    if plan.layout is not None:
        specs_of_layers(plan)


def copy_state(state: State) -> State:
    """Copies a state, so that either copy may be donated; offloaded layers are forked. Raises StoreError."""
    leaves, structure = jax.tree.flatten(dataclasses.replace(state, layers=layer_offload.fork(state.layers)))
    return jax.tree.unflatten(structure, _copied(leaves))


@jax.jit
def _copied(leaves: list[Array]) -> list[Array]:
    return [jnp.copy(leaf) for leaf in leaves]


def bytes_of(layers: tuple) -> int:
    """Returns the bytes that layers, or outlines of them, take in memory at once, buffers and tables included."""
    passing = [layer.pool.waits_for_bytes for layer in layers
               if isinstance(layer.pool, SlotPool) and layer.pool.passing]
    made = min(passing, default=0)  # shared slots that each step makes, if no layer has them
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(layers))
    return kept + made + layer_offload.working_set(layers)
