"""What is static about decoding with a cache, the cache of a whole model, and how the two are made to fit.

Nothing here runs a model: `kvjax.inference.prefill` fills a cache, `kvjax.inference.decode` advances it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import _validate
from kvjax.cache import residency
from kvjax.cache.callbacks import BACKENDS, default_backend
from kvjax.cache.check import check_outputs
from kvjax.cache.fill import empty_state
from kvjax.cache.layer import LayerCache, LayerPlan
from kvjax.cache.method import Method
from kvjax.cache.pool import MemoryPool, StoreRef, row_width
from kvjax.cache.slots import PREFETCH, SlotPool
from kvjax.cache.tiers import TieredPool
from kvjax.cache.types import Spec
from kvjax.errors import ConfigError
from kvjax.inference import layer_offload
from kvjax.inference.layer_offload import OffloadedLayer
from kvjax.methods.full import Full
from kvjax.models.config import ModelConfig
from kvjax.ops import quantize
from kvjax.store import interface
from kvjax.typing import Array, Int32, pytree

_MOST_TOKENS = 2**31 - 1  # positions are int32


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about decoding with one cache."""

    config: ModelConfig
    method: Method  # as it was given, or as it fits the prompts; dense layers have `full` in its place
    layers: tuple[LayerPlan, ...]
    batch: int
    capacity: int
    dtype: str = "float32"  # of keys and values in blocks (`kvjax.ops.quantize`)


@pytree
class State:
    """The cache of a whole model: an immutable value."""

    layers: tuple[LayerCache | OffloadedLayer, ...]
    length: Int32[Array, "B"]  # tokens of each sequence
    ref: StoreRef


@dataclasses.dataclass(frozen=True)
class Slots:
    """How a store's blocks are kept in memory.

    Attributes:
      count: slots per KV head; None = M + 1, what one step needs.
      host: slots per KV head in host memory (`kvjax.cache.tiers`), where blocks that are not in the others, those of
        the device, are looked for before the store is asked; None = none.
      policy: whom to evict (`kvjax.cache.residency.POLICIES`).
      backend: how a step reaches the store; None = the fastest that the platform has.
      prefetch: what is read before it is asked for. "layer": while a layer computes, the blocks of the next, chosen
        with the query that this layer's input would give there. "step": the blocks ranked just below this step's, for
        the next step. Outputs are the same in all cases.
      keep: whether blocks stay for later steps, as in KVSwap's reuse buffer; if not, every needed block is read again
        in every step (FlexGen), into slots that all layers share, and forks copy. An adaptive method, which
        rewrites blocks once all layers were read, has slots in each layer all the same.
      even: whether all KV heads reuse equally many blocks, as in DynSplit-KV's reuse (`kvjax.cache.residency.plan`), so
        that each reads as many as the others; the head that finds the fewest decides.
      offload: a store to which whole layers are offloaded between their turns, with index, tables and slots
        (`kvjax.inference.layer_offload`). Memory then is that of two layers, and what its `staging_bytes` allow; each
        step reads every layer twice and writes what changed.

    Raises ConfigError for a policy, backend or prefetch that does not exist, and for host with offload or keep=False.
    """

    count: int | None = None
    host: int | None = None
    policy: str = "lru"
    backend: str | None = None
    prefetch: str = "off"
    keep: bool = True
    even: bool = False
    offload: interface.Store | None = None

    @property
    def for_memory(self) -> bool:
        """Whether they have no need of a store: nothing is said but where layers are parked."""
        return self.offload is not None and self == Slots(offload=self.offload)

    def __post_init__(self):
        _validate.check(self)
        if min(1 if n is None else n for n in (self.count, self.host)) < 1:
            raise ConfigError(f"count={self.count} and host={self.host} are slots of a head; give at least 1, or None")
        residency.find_policy(self.policy)
        if self.host is not None and (self.offload is not None or not self.keep):
            raise ConfigError("host= is for blocks that stay in memory; leave it out with offload= or keep=False")
        if self.prefetch not in PREFETCH or self.backend not in (None, *BACKENDS):
            raise ConfigError(f"prefetch={self.prefetch!r} must be one of {', '.join(PREFETCH)}; "
                              f"backend={self.backend!r} None or one of {', '.join(BACKENDS)}")


def make_plan(config: ModelConfig, method: Method, batch: int, capacity: int, dtype: str = "float32") -> Plan:
    """Sizes every layer's cache. Raises ConfigError where they do not fit together, or for a type that there is not."""
    quantize.check(dtype, config.head_dim)
    if not _validate.whole(capacity, 2) or capacity > _MOST_TOKENS:
        raise ConfigError(f"capacity={capacity!r} must be a whole number of 2 to {_MOST_TOKENS:,} tokens")
    capacity = int(capacity)  # not NumPy's: it is saved as JSON
    sizes = {"kv_heads": config.num_kv_heads, "group": config.group, "head_dim": config.head_dim, "capacity": capacity}
    dense = Full()
    layers = []
    for i in range(config.num_layers):
        chosen = dense if i < method.dense_layers else method
        follows = _follows(config, method, i)
        filters = chosen.dense_filters and not follows and _follows(config, method, i + 1)
        spec = dataclasses.replace(
            chosen.spec(**sizes), rope=config.rope, key_type=quantize.tail_type(dtype), sliding=config.windows[i]
        )
        layers.append(LayerPlan(chosen, spec, follows, filters))
    return Plan(config, method, tuple(layers), batch, capacity, dtype)


def _follows(config: ModelConfig, method: Method, i: int) -> bool:
    """Whether layer i takes placements and choices of the one before: not with another sliding window, as what is
    hidden from one of them is none of its choices."""
    if not method.dense_layers < i < config.num_layers or (i - method.dense_layers) % method.reuse == 0:
        return False
    return config.windows[i] == config.windows[i - 1]


def on_store(plan: Plan, index: int) -> bool:
    """Whether a layer's blocks go to the store: layers that attend everything stay in memory unless all do."""
    dense_prefix = isinstance(plan.layers[index].method, Full) and plan.layers[-1].method != plan.layers[index].method
    return not dense_prefix and not plan.layers[index].filters


def store_geometry(plan: Plan) -> interface.Geometry:
    """What a store has to hold for this plan."""
    spec = plan.layers[-1].spec
    return interface.Geometry(
        layers=len(plan.layers), batch=plan.batch, kv_heads=spec.block_heads, num_blocks=spec.num_blocks,
        block_rows=spec.block_rows, width=row_width(spec, plan.dtype), dtype=quantize.stored_type(plan.dtype),
        keys=spec.keeps_keys,
    )


def _slot_count(spec: Spec, slots: Slots) -> int:
    """Slots of each head. ConfigError when they are too few, or those of the host no more."""
    least = spec.max_blocks + 1
    count = least if slots.count is None else slots.count
    if count < least:
        raise ConfigError(f"slots={count} is fewer than the {least} blocks one step may need; raise it")
    if slots.host is not None and slots.host <= count:
        raise ConfigError(f"host={slots.host} must be more than the device's {count} slots; raise it")
    return count


def slot_pool(plan: Plan, i: int, slots: Slots) -> SlotPool:
    """A layer's slots with nothing in them. ConfigError when they are too few."""
    spec = plan.layers[i].spec
    count = _slot_count(spec, slots)
    backend = slots.backend or default_backend()
    if backend == "buffer" and default_backend() != "buffer":
        raise ConfigError(f"backend='buffer' is CPU's alone, and this is {jax.default_backend()}; leave it out")
    passing = not slots.keep and not plan.layers[i].method.adaptive
    pool = SlotPool.zeros(
        spec, plan.batch, count, plan.dtype, slots.policy, backend, slots.prefetch, slots.keep, slots.even,
        passing=passing, waits=passing and any(on_store(plan, j) for j in range(i)),
    )
    return pool if slots.host is None else TieredPool.over(pool, spec, slots.host)


def outline(plan: Plan, i: int, store: bool, slots: Slots) -> LayerCache:
    """What layer i's cache will look like, on a store or not, with arrays that take no memory."""
    one, structures = plan.layers[i], []
    in_memory = not (store and on_store(plan, i))

    def leaves(weights):
        pool = MemoryPool.zeros(one.spec, plan.batch, plan.dtype) if in_memory else slot_pool(plan, i, slots)
        state = empty_state(one, plan.batch, plan.dtype, weights)
        flat, structure = jax.tree.flatten(LayerCache(state, pool))
        structures.append(structure)
        return flat

    shapes = jax.eval_shape(leaves, one.method.weights(i))
    return jax.tree.unflatten(structures[0], [layer_offload.shape_only(one.shape, one.dtype) for one in shapes])


def check_plan(plan: Plan, store: bool, slots: Slots) -> None:
    """Raises ConfigError where a layer's cache cannot be made, on a store or not; MethodError for a method that cannot
    be right; ReadFailed or FormatMismatch for what
    was fitted beforehand. Of layers that are alike the first is tried."""
    tried = set()
    for i, one in enumerate(plan.layers):
        shapes = tuple(map(np.shape, jax.tree.leaves(one.method.weights(i))))
        kind = one, on_store(plan, i), shapes
        if kind not in tried:
            check_outputs(one.method, one.spec)
            outline(plan, i, store, slots)
        tried.add(kind)


def copy_state(state: State) -> State:
    """A state that shares no memory with the given one, so that either may be donated."""
    leaves, structure = jax.tree.flatten(dataclasses.replace(state, layers=layer_offload.fork(state.layers)))
    return jax.tree.unflatten(structure, _copied(leaves))


@jax.jit
def _copied(leaves: list[Array]) -> list[Array]:
    return [jnp.copy(leaf) for leaf in leaves]


def bytes_of(layers: tuple) -> int:
    """Bytes of every array of a cache's layers, or of outlines of them, that is in memory at once, buffers and tables
    included."""
    passing = [one.pool.waits_for_bytes for one in layers if isinstance(one.pool, SlotPool) and one.pool.passing]
    made = min(passing, default=0)  # in each step, where none of the layers has slots to hand on
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(layers))
    return kept + made + layer_offload.working_set(layers)
