"""Costs of a setting on this machine: memory, one layer's reads, one layer's computing, and how often groups recur.

All but the last are measured with artificial contents, because a layer takes the same time on any cache of the same
number of tokens.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.fill import empty_state
from kvjax.cache.layer import LayerCache, LayerPlan
from kvjax.cache.method import Method
from kvjax.cache.pool import StoreRef
from kvjax.cache.state import LayerState
from kvjax.calibration.tuner.tables import Measurement
from kvjax.inference import decode
from kvjax.inference.blocks import unembed
from kvjax.inference.plan import Plan, Slots, State, bytes_of, make_plan, outline, slot_pool, store_geometry
from kvjax.llm import LLM
from kvjax.methods.kvswap import KVSwap
from kvjax.models.config import ModelConfig
from kvjax.ops import quantize
from kvjax.store.flash.store import FlashStore
from kvjax.store.geometry import Geometry
from kvjax.store.host import HostStore
from kvjax.store.interface import Branch, Store


def memory_bytes(
    config: ModelConfig, method: Method, slots: Slots, batch: int, capacity: int, dtype: str = "float32",
    store: Store | None = None,
) -> int:
    """Returns the bytes that a cache over a store has in memory, without allocating them.

    Args:
      config: configuration of the model.
      method: the method.
      slots: slots of each layer.
      batch: number of sequences.
      capacity: tokens that a sequence may grow to.
      dtype: type in which keys and values are stored.
      store: store whose own memory is counted as well (`store_bytes`); None = none.

    Returns:
      Bytes of index, tables, tail and slots, and of the store.
    """
    plan = make_plan(config, method, batch, capacity, dtype)
    arrays = bytes_of((outline(plan, len(plan.layers) - 1, True, slots),) * config.num_layers)
    return arrays + store_bytes(store, store_geometry(plan), plan.layers[-1].spec.max_blocks)


_BLOCK_BYTES = 17  # bytes per block in a flash store's tables: extent, checksum, owners, and whether it is staged


def store_bytes(store: Store | None, geometry: Geometry, blocks: int) -> int:
    """Returns the bytes of memory that a flash store uses beside a cache, without rows that are not written yet.

    These are its tables, and buffers to read into, for one layer and for the reads of the next one. If a layer has more
    reads than may be in flight ahead of time, there may be buffers of another layer. For a store in host memory nothing
    is counted, because it has blocks alone.

    Args:
      store: the store, or None.
      geometry: sizes of the cache's blocks.
      blocks: blocks of each head that a layer reads at once.
    """
    if not isinstance(store, FlashStore):
        return 0
    return _BLOCK_BYTES * geometry.total_blocks + 2 * blocks * geometry.streams * geometry.extent_bytes


_SWEPT = 64 << 20  # bytes: more than a processor's caches hold
_STEADY = 2.0  # seconds: the speed of memory that others also use varies within one


class StoredLayer:
    """A layer of `batch` sequences of `context` tokens on a store, in groups that all KV heads read alike.

    It has its full size, because a device may cache a small file, or data that was read before.
    """

    def __init__(
        self, store: Store, config: ModelConfig, group: int, batch: int, context: int, dtype: str = "float32"
    ):
        self._groups, self._dtype = max(1, -(-context // group)), dtype
        geometry = Geometry(
            layers=1, batch=batch, kv_heads=1, num_blocks=self._groups, block_rows=group,
            width=2 * config.num_kv_heads * quantize.width(dtype, config.head_dim), dtype=quantize.stored_type(dtype),
        )
        self._branch = store.create(geometry, "tuner")
        streams = (batch, 1, self._groups)
        ones = np.broadcast_to(np.ones((), geometry.numpy_dtype), (*streams, group, geometry.width))
        self._branch.write_layer(0, ones, np.full(streams, group, np.int32))
        self._branch.settle()

    def read_seconds(self, groups: int, repeats: int = 9) -> Measurement:
        """Measures T_io: medians over random groups, none of which is read twice before all others were read.

        Args:
          groups: groups of each sequence that are read at once; at most all.
          repeats: number of measurements.
        """
        if not groups:
            return Measurement(0.0, 0.0)
        groups = min(groups, self._groups)
        geometry, picked = self._branch.geometry, _picks(self._groups, groups)
        shape = (geometry.batch, geometry.kv_heads, groups)
        slots = np.zeros((*shape, geometry.block_rows, geometry.width), quantize.array_type(self._dtype))
        slot = np.broadcast_to(np.arange(groups, dtype=np.int32), shape).copy()  # C takes contiguous arrays only

        def begin(nth):
            self._branch.submit(0, self._branch.generation, np.broadcast_to(picked(nth), shape).copy())

        def read(nth):
            block = np.broadcast_to(picked(nth), shape).copy()
            if not self._branch.read_into(0, self._branch.generation, block, slot, slots):
                raise self._branch.failure("the store that is profiled")

        whole = _median_seconds(read, repeats, between=_between)
        busy = []
        for nth in range(repeats + 1, 2 * repeats + 1):
            began = _seconds(begin, nth)
            time.sleep(2 * whole)
            _between()
            busy.append(began + _seconds(read, nth))
        return Measurement(whole, min(whole, float(np.median(busy))))

    def close(self) -> None:
        """Frees the layer's space on the store."""
        self._branch.close()


def _picks(count: int, size: int) -> Callable[[int], np.ndarray]:
    """Returns a function nth -> int32[size] of range(count), without repetition until all were used."""
    order = np.random.default_rng(0).permutation(count).astype(np.int32)
    return lambda nth: order[np.arange(nth * size, (nth + 1) * size) % count]


def compute_seconds(
    llm: LLM, method: Method, slots: Slots, batch: int, capacity: int, dtype: str = "float32", repeats: int = 9
) -> float:
    """Measures T_model: seconds of one layer for one token without reads, but with key scores, slot table and writes.

    Two layers decode, because each selects for the next one. The time of the model's output layer and of reading from
    host memory is subtracted. All keys are equal, so each token selects what the one before selected. The process's
    compiled programs are dropped afterwards: each setting has its own, with hundreds of memory maps, of which a process
    may have 65,530.

    Args:
      llm: the model.
      method: the method.
      slots: slots of each layer.
      batch: number of sequences.
      capacity: tokens of a sequence.
      dtype: type in which keys and values are stored.
      repeats: least number of measurements.
    """
    layers = min(2, llm.config.num_layers)
    config = dataclasses.replace(llm.config, num_layers=layers, windows=llm.config.windows[:layers])
    plan = make_plan(config, method, batch, capacity, dtype)
    branch, tokens = HostStore().create(store_geometry(plan), "tuner"), jnp.zeros(batch, jnp.int32)
    hidden = jnp.ones((batch, config.hidden_size), llm.params["norm"]["scale"].dtype)
    most = max(repeats, min(10 * repeats, capacity // 8))
    state, reads = _zeros_state(plan, slots, branch, max(0, capacity - most - 1)), []

    def decode_token(_):
        nonlocal state
        before = branch.stats().read_seconds
        done = decode.step(plan, llm.params, state, tokens, driver="fused", donate=True)
        state = jax.block_until_ready((done.state, done.logits))[0]
        reads.append(branch.stats().read_seconds - before)

    try:
        whole = _median_seconds(decode_token, repeats, most) - float(np.median(reads))
    finally:
        branch.close()
        jax.clear_caches()

    def project(_):
        jax.block_until_ready(unembed(config, llm.params, hidden))

    return max(0.0, whole - _median_seconds(project, repeats, most)) / config.num_layers


def _zeros_state(plan: Plan, slots: Slots, branch: Branch, length: int) -> State:
    """Returns a cache of `length` tokens whose keys and values are zeros, with an empty tail."""
    layers = tuple(
        LayerCache(
            _with_groups(one, empty_state(one, plan.batch, plan.dtype), length), slot_pool(plan, i, slots)
        )
        for i, one in enumerate(plan.layers)
    )
    return State(layers, jnp.full(plan.batch, length, jnp.int32), StoreRef(jnp.int32(branch.handle), jnp.int32(0)))


def _with_groups(plan: LayerPlan, state: LayerState, length: int) -> LayerState:
    """Returns the state with groups of tokens in token order, if the layer has groups."""
    method, spec = plan.method, plan.spec
    if not isinstance(method, KVSwap):
        return state
    stored, offset = method.stored_tokens(length), jnp.arange(spec.num_blocks * spec.block_rows, dtype=jnp.int32)
    offset = offset.reshape(spec.num_blocks, spec.block_rows)
    return dataclasses.replace(
        state, index=dataclasses.replace(state.index, stored=jnp.full_like(state.index.stored, stored)),
        counts=jnp.broadcast_to(jnp.sum(offset < stored, axis=-1, dtype=state.counts.dtype), state.counts.shape),
    )


def needed_groups(
    llm: LLM, method: KVSwap, tokens: Sequence[int], context: int, dtype: str = "float32"
) -> np.ndarray:
    """Records the complete groups that are needed while tokens[context:] are decoded.

    A group that is still being filled is in memory whatever the buffer, and is left out.

    Args:
      llm: the model.
      method: KVSwap, with groups that all heads share.
      tokens: token ids of a text.
      context: tokens of the prompt.
      dtype: type in which keys and values are stored.

    Returns:
      int32[steps, layers, M + 1]; -1 = none.
    """
    needed: list[np.ndarray] = []

    def note(step, _):
        loaded = np.stack([layer_cache.state.loaded[0, 0] for layer_cache in step.state.layers])
        needed.append(np.where(loaded < method.complete_groups(int(step.state.length[0]) - 1), loaded, -1))

    cache = llm.prefill(tokens[:context], method=method, capacity=len(tokens) + 1, dtype=dtype)
    llm.score([*tokens[context:], tokens[-1]], cache, observer=note)  # the last token is not fed
    return np.stack(needed)


def _between() -> None:
    """Evicts the processor's caches, as a layer's weights do between its reads."""
    np.ones(_SWEPT // 8).sum()


def _median_seconds(
    function: Callable[[int], None], repeats: int, most: int = 0, between: Callable[[], None] = lambda: None
) -> float:
    """Returns the median seconds of `repeats` calls after a first one, or of up to `most` while they take less than
    `_STEADY` in all; `between` is called before each."""
    function(0)
    times: list[float] = []
    while len(times) < repeats or (len(times) < most and sum(times) < _STEADY):
        between()
        times.append(_seconds(function, len(times) + 1))
    return float(np.median(times))


def _seconds(function: Callable[[int], None], nth: int) -> float:
    started = time.perf_counter()
    function(nth)
    return time.perf_counter() - started
