"""Prefill: prompts are read layer by layer, and each layer is indexed while the next one is read."""

import functools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.fill import Prompts, check_enough, empty_state, fill_state, in_memory, stored_rows
from kvjax.cache.layer import LayerCache, LayerPlan
from kvjax.cache.pool import StoreRef
from kvjax.cache.read import choose
from kvjax.cache.state import LayerState
from kvjax.errors import PromptError
from kvjax.inference import layer_offload, on_mesh, progress
from kvjax.inference.blocks import sink_logits, unembed
from kvjax.inference.dense_prefill import Activations, pad, read
from kvjax.inference.plan import Plan, Slots, State, on_store, outline, slot_pool, specs_of_layers
from kvjax.models.config import ModelConfig
from kvjax.models.transformer import Block
from kvjax.store.geometry import as_stored
from kvjax.store.interface import Branch
from kvjax.store.prompt import Gathered, Prompt
from kvjax.typing import Array, Float, Int32, PyTree


def prefill(
    plan: Plan, params: PyTree, tokens: Int32[Array, "B T"] | Int32[np.ndarray, "B T"],
    length: Int32[Array, "B"] | Int32[np.ndarray, "B"],
    branch: Branch | None = None, slots: Slots | None = None, layers: Iterable[Activations] | None = None,
    pipelined: bool = True,
):
    """Checks prompts, pads them and fills a new cache from them.

    Args:
      tokens: token ids [B, T], right-padded to any T.
      length: tokens of each prompt [B].
      plan, params, branch, slots, layers, pipelined: as for `fill_cache`.

    Returns:
      (State, logits after each prompt's last token [B, V]).

    Raises:
      PromptError: a prompt is empty, longer than the capacity, or too short for the method.
      StoreError: the store cannot be written.
    """
    check_prompts(plan, np.asarray(length))
    return fill_cache(plan, params, pad(tokens), np.asarray(length), branch, slots, layers, pipelined)


def fill_cache(
    plan: Plan, params: PyTree, padded: Int32[np.ndarray, "B T"], lengths: Int32[np.ndarray, "B"],
    branch: Branch | None = None, slots: Slots | None = None, layers: Iterable[Activations] | None = None,
    pipelined: bool = True,
):
    """Fills a new cache from prompts that fit it, one layer at a time.

    While a layer is indexed and written to the store, the next one is read (IceCache, section 4.3). Peak memory is the
    cache plus the hidden states of three layers and the keys and values of two, linear in T.

    Args:
      plan: static part of the cache.
      params: weights of the model.
      padded: token ids [B, T], right-padded as `pad` does.
      lengths: tokens of each prompt [B].
      branch: branch of a store to write the blocks to; None = they stay in memory.
      slots: how a store's blocks are kept in memory.
      layers: activations of the layers, if the prompts were read before; None = the prompts are read here.
      pipelined: False = each layer is read only after the one before it has been indexed.

    Returns:
      (State, logits after each prompt's last token [B, V]).

    Raises:
      StoreError: the store cannot be written.
    """
    tokens, length = jnp.asarray(padded), jnp.asarray(lengths, jnp.int32)
    if plan.layout is not None:  # devices that exchange numbers have to run the same programs in the same order
        tokens, length = (plan.layout.put(each, plan.layout.by_sequence) for each in (tokens, length))
        pipelined = False
    filling = _Filling(plan, params, tokens, length, branch, slots or Slots())
    try:
        activations = layers or read(plan.config, params, tokens, plan.layout)
        hidden = _overlapped(filling.add, activations, len(plan.layers), pipelined)
        return _whole(plan, params, filling.caches, hidden, length, branch)
    except BaseException:
        filling.discard()
        raise


class _Filling:
    """A cache that is filled layer by layer.

    Attributes:
      caches: the layers' caches so far.
    """

    def __init__(self, plan: Plan, params: PyTree, tokens, length, branch: Branch | None, slots: Slots):
        self.caches: list[LayerCache | layer_offload.OffloadedLayer] = []
        self._before: LayerState | None = None
        self._plan, self._params, self._branch, self._slots = plan, params, branch, slots
        self._tokens, self._length = tokens, length
        self._offloaded = _offload_branch(plan, branch, slots)

    def add(self, i: int, activations: Activations) -> None:
        """Adds layer i's cache; must be called layer by layer."""
        leader = self._before if self._plan.layers[i].follows else None
        if self._plan.layout is None:
            cache = self._fill(i, activations, leader)
        else:
            cache = _fill_on_mesh(self._plan, i, self._params, activations, self._length, self._tokens, leader)
        self._before = cache.state
        self.caches.append(layer_offload.offload(self._offloaded, i, cache) if self._offloaded else cache)

    def _fill(self, i, activations, leader):
        plan, x, length = self._plan, activations.x, self._length
        config, params = plan.config.layers[i], self._params[f"layers_{i}"]
        queries = _last_queries(config, plan.layers[i], params, x, length)
        logits = sink_logits(config, params)
        prompts = Prompts(activations.key, activations.value, length, self._tokens, queries, logits)
        samples = _sample_queries(plan, i, self._branch, self._params, x, length)
        return fill(plan, i, prompts, leader, self._branch, self._slots, samples)

    def discard(self) -> None:
        """Drops the branch of offloaded layers, if there is one."""
        if self._offloaded is not None:
            self._offloaded.discard()


def _overlapped(
    add: Callable[[int, Activations], None], layers: Iterable[Activations], count: int, pipelined: bool
) -> Float[Array, "B T E"]:
    """Calls `add` with each layer in another thread while the next one is read; returns the last layer's output."""
    with ThreadPoolExecutor(1) as indexer, progress.shown("reading the prompt", count, "layers") as bar:
        add, pending = _as_in_this_thread(add), indexer.submit(lambda: None)
        for i, activations in enumerate(layers):
            pending.result()  # at most one layer is queued, which bounds memory
            pending, hidden = indexer.submit(add, i, activations), activations.out
            bar.update()
            if not pipelined:
                pending.result()
        pending.result()
    return jnp.asarray(hidden)


def _whole(
    plan: Plan, params: PyTree, caches: Sequence[LayerCache | layer_offload.OffloadedLayer], hidden, length,
    branch: Branch | None,
):
    """Returns (State, logits [B, V]) of the layers' caches and of the last layer's output hidden[B, T, E]."""
    last = jnp.take_along_axis(hidden, (length - 1)[:, None, None], axis=1)[:, 0]
    handle, generation = (-1, 0) if branch is None else (branch.handle, branch.generation)
    ref = StoreRef(jnp.int32(handle), jnp.int32(generation))
    if (layout := plan.layout) is None:
        return State(tuple(caches), length, ref), unembed(plan.config, params, last)
    ref = StoreRef(layout.put(ref.handle, layout.everywhere), layout.put(ref.generation, layout.everywhere))
    return State(tuple(caches), length, ref), on_mesh.unembed(layout, plan.config, params, last)


def _as_in_this_thread(function):
    """Wraps a function so that it runs with this thread's JAX settings (precision, device, x64) in any thread."""
    precision, device = jax.config.jax_default_matmul_precision, jax.config.jax_default_device
    wide = jax.config.jax_enable_x64

    @functools.wraps(function)
    def there(*args):
        with jax.default_matmul_precision(precision), jax.default_device(device), jax.enable_x64(wide):
            return function(*args)

    return there


def _offload_branch(plan: Plan, branch, slots: Slots):
    """Creates a branch for offloaded layers; returns None if layers stay in memory."""
    if slots.offload is None:
        return None
    outlines = [outline(plan, i, branch is not None, slots) for i in range(len(plan.layers))]
    return layer_offload.create(slots.offload, outlines)


def check_prompts(plan: Plan, length: np.ndarray) -> None:
    """Raises PromptError unless prompts of these lengths [B] (tokens) can fill a cache of this plan."""
    if length.min() < 1:
        raise PromptError("a prompt is empty; give at least one token")
    if length.max() > plan.capacity:
        raise PromptError(f"a prompt has {length.max()} tokens but capacity={plan.capacity}; raise the capacity")
    check_enough(plan.layers[-1], length)


def _sample_queries(plan: Plan, i: int, branch, params, x, length):
    """Returns queries [Q, B, H, D] that show the store's layout which blocks are fetched together.

    Returns None if the layout does not ask for any, or layer i does not select.
    """
    if branch is None or not branch.samples or plan.layers[i].method.attends_all or plan.layers[i].follows:
        return None
    # Spread evenly over the second half of each prompt, beginning with the last token's query.
    stride = jnp.maximum(1, jnp.asarray(length) // (2 * branch.samples))
    back = jnp.arange(branch.samples, dtype=jnp.int32) * stride[:, None]
    return _queries_at(plan.config.layers[i], params[f"layers_{i}"], x, length, back).swapaxes(0, 1)


def _last_queries(config: ModelConfig, plan: LayerPlan, params, x, length):
    """Returns queries [B, Q, H, D] of each prompt's last tokens; None if the layer's method does not ask for them."""
    wanted = 0 if plan.follows else plan.method.observed
    count = x.shape[1] if wanted is None else min(wanted, x.shape[1])
    back = jnp.arange(count, dtype=jnp.int32)[None, ::-1]
    return _queries_at(config, params, x, length, back) if count else None


@functools.partial(jax.jit, static_argnums=0)
def _queries_at(config, params, x, length, back):
    """Returns queries [B, Q, H, D] of the tokens back[#B, Q] positions before each prompt's last, from x[B, T, E]."""
    pos = jnp.maximum(jnp.asarray(length)[:, None] - 1 - back, 0)
    rows = jnp.take_along_axis(x, pos[..., None], axis=1)
    return Block(config).apply({"params": params}, rows, pos, method="queries")


@functools.partial(jax.jit, static_argnums=0)
def _retrieved(layer_plan, state, queries):
    """Returns the blocks [B, Q, K, M1] that each of queries[Q, B, H, D] would fetch; each query costs one `select`."""
    return jax.lax.map(lambda q: choose(layer_plan, state, q).need, queries).swapaxes(0, 1)


def fill(
    plan: Plan, i: int, prompts: Prompts, leader: LayerState | None, branch: Branch | None, slots: Slots,
    samples: Array | None = None,
) -> LayerCache:
    """Creates layer i's cache from prompts.

    Args:
      plan: static part of the cache.
      i: number of the layer.
      prompts: the layer's keys and values of the prompts.
      leader: state of the layer whose placements this one follows; None = it places tokens itself.
      branch: branch of a store to write the blocks to; None = they stay in memory.
      slots: how a store's blocks are kept in memory.
      samples: queries [Q, B, H, D] by which the store's layout finds the blocks that are fetched together; None = it
        does not ask for any.

    Returns:
      The layer's cache; over a store, its slots are empty.

    Raises:
      StoreError: the store cannot be written.
    """
    layer_plan, weights = plan.layers[i], plan.layers[i].method.weights(i)
    state, placement = _filled(layer_plan, plan.dtype, weights, prompts, leader)
    if branch is None or not on_store(plan, i):
        return LayerCache(state, in_memory(layer_plan, state, placement, prompts, plan.dtype))
    retrieved = None if samples is None else np.asarray(_retrieved(layer_plan, state, samples))
    heads = layer_plan.spec.block_heads
    pos = np.asarray(state.pos[:, :heads])
    rows = as_stored(np.asarray(stored_rows(layer_plan, state, prompts, plan.dtype)))
    prompt = Prompt(pos, None if retrieved is None else retrieved[:, :, :heads])
    branch.write_layer(i, Gathered(rows, pos), np.asarray(state.count[:, :heads]), prompt)
    return LayerCache(state, slot_pool(plan, i, slots))


def _fill_on_mesh(plan: Plan, i: int, params, activations: Activations, length, tokens, leader) -> LayerCache:
    """Creates layer i's cache in the memory of a mesh's devices, each of which indexes its own heads."""
    prompt, layer = (activations.x, activations.key, activations.value, length, tokens), plan.layers[i]
    number = i if layer.follows else plan.layers.index(layer)  # layers alike share a program
    weights = layer.method.weights(i)
    return _filled_on_mesh(plan, number, plan.config.layers[i], params[f"layers_{i}"], prompt, leader, weights)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _filled_on_mesh(plan: Plan, i: int, model: ModelConfig, params, prompt, leader, weights) -> LayerCache:
    layout, layer = plan.layout, plan.of_one.layers[i]
    assert layout is not None
    caches, each, keys, config = specs_of_layers(plan), layout.by_sequence, layout.heads_at(2), layout.of_one(model)

    def fill_own(params, prompt, leader, weights):
        x, key, value, length, tokens = prompt
        queries = _last_queries(config, layer, params, x, length)
        prompts = Prompts(key, value, length, tokens, queries, sink_logits(config, params))
        state, placement = _filled(layer, plan.dtype, weights, prompts, leader)
        return LayerCache(state, in_memory(layer, state, placement, prompts, plan.dtype))

    followed = layout.everywhere if leader is None else caches[i - 1].state
    takes = layout.params(model, params), (each, keys, keys, each, each), followed, layout.everywhere
    return layout.run(fill_own, takes, caches[i])(params, prompt, leader, weights)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _filled(layer_plan, dtype, weights, prompts, leader):
    """Returns the state and each token's place, in a program of its own: it compiles slowly, and once for all pools."""
    state = empty_state(layer_plan, prompts.key.shape[0], dtype, weights)
    return fill_state(layer_plan, state, prompts, leader)
