"""Prefill: prompts are read layer by layer, and each layer is indexed while the next one is read."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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
from kvjax.inference.blocks import embed, sink_logits, unembed
from kvjax.inference.plan import Plan, Slots, State, on_store, outline, slot_pool, specs_of_layers
from kvjax.models.config import ModelConfig
from kvjax.models.mesh import MeshLayout
from kvjax.models.transformer import Block
from kvjax.ops import causal
from kvjax.ops.weights import QuantisedMatrix
from kvjax.store.geometry import as_stored
from kvjax.store.interface import Branch
from kvjax.store.prompt import Gathered, Prompt
from kvjax.typing import Array, Float, Int32, PyTree, pytree

_CHUNK = 512  # queries of one prefill attention step


@pytree
class Activations:
    """The input and outputs of one layer for prompts, right-padded to T."""

    x: Float[Array, "B T E"]  # the layer's input
    key: Float[Array, "B T K D"]
    value: Float[Array, "B T K D"]
    out: Float[Array, "B T E"]  # the next layer's input


@dataclasses.dataclass(frozen=True, repr=False)
class PromptActivations:
    """Prompts that were read densely, with the activations of every layer in host memory.

    A cache of any method can be filled from them.
    """

    tokens: Int32[np.ndarray, "B T"]  # right-padded
    length: Int32[np.ndarray, "B"]
    layers: tuple[Activations, ...]
    fingerprint: str = ""  # fingerprint of model and tokenizer
    capacity: int = 0  # of the caches it is for, on which rotary embedding may depend; 0 = not read yet

    @property
    def nbytes(self) -> int:
        """Bytes in memory; outputs do not count, as each is the next layer's input."""
        return sum(layer.x.nbytes + layer.key.nbytes + layer.value.nbytes for layer in self.layers)

    def __repr__(self) -> str:
        return (f"PromptActivations({len(self.length)} prompts of up to {int(self.length.max()):,} tokens, "
                f"{len(self.layers)} layers, {self.nbytes / 2**20:,.1f} MiB)")


def read(
    config: ModelConfig, params: PyTree, tokens: Int32[Array, "B T"] | Int32[np.ndarray, "B T"],
    layout: MeshLayout | None = None,
) -> Iterator[Activations]:
    """Reads prompts densely, layer by layer.

    Args:
      config: configuration of the model.
      params: weights of the model.
      tokens: token ids [B, T], right-padded as `pad` does.
      layout: how the model is divided on a mesh; None = it is on one device.

    Yields:
      The activations of each layer.
    """
    size = min(_CHUNK, tokens.shape[1])
    x = embed(config, params, tokens) if layout is None else on_mesh.embed(layout, config, params, tokens)
    for i, layer in enumerate(config.layers):
        weights = params[f"layers_{i}"]
        if layout is None:
            out, key, value = _read_layer(layer, size, weights, x)
        else:
            out, key, value = _read_layer_on_mesh(layout, layer, size, weights, x)
        yield Activations(x, key, value, out)
        x = out


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
    layout = plan.layout
    if layout is not None:  # devices that exchange numbers have to run the same programs in the same order
        tokens, length = (layout.put(x, layout.by_sequence) for x in (tokens, length))
        pipelined = False
    slots, caches, before = slots or Slots(), [], None
    hidden: Any = None
    lot = _offload_branch(plan, branch, slots)

    @_as_in_this_thread
    def index(i, activations):
        """Adds layer i's cache; must be called layer by layer."""
        nonlocal before
        leader = before if plan.layers[i].follows else None
        if layout is None:
            queries = _last_queries(
                plan.config.layers[i], plan.layers[i], params[f"layers_{i}"], activations.x, length)
            prompts = Prompts(activations.key, activations.value, length, tokens, queries)
            samples = _sample_queries(plan, i, branch, params, activations.x, length)
            cache = fill(plan, i, prompts, leader, branch, slots, samples)
        else:
            cache = _fill_on_mesh(plan, i, params, activations, length, tokens, leader)
        before = cache.state
        caches.append(layer_offload.offload(lot, i, cache) if lot else cache)

    try:
        with ThreadPoolExecutor(1) as indexer:
            pending = indexer.submit(lambda: None)
            with progress.shown("reading the prompt", len(plan.layers), "layers") as bar:
                for i, activations in enumerate(layers or read(plan.config, params, tokens, layout)):
                    pending.result()  # at most one layer is queued, which bounds memory
                    pending, hidden = indexer.submit(index, i, activations), activations.out
                    bar.update()
                    if not pipelined:
                        pending.result()
                pending.result()
        last = jnp.take_along_axis(hidden, (length - 1)[:, None, None], axis=1)[:, 0]
        handle, generation = (-1, 0) if branch is None else (branch.handle, branch.generation)
        ref = StoreRef(jnp.int32(handle), jnp.int32(generation))
        if layout is None:
            return State(tuple(caches), length, ref), unembed(plan.config, params, last)
        ref = jax.tree.map(lambda number: layout.put(number, layout.everywhere), ref)
        return State(tuple(caches), length, ref), on_mesh.unembed(layout, plan.config, params, last)
    except BaseException:
        if lot is not None:
            lot.discard()
        raise


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


def _round_up(size: int) -> int:
    """Returns the padded prompt length, one of few, so that few shapes compile: a power of two below `_CHUNK`, then
    multiples of it, and of so much of it that an eighth is added at most."""
    if size < _CHUNK:
        return max(16, 1 << (size - 1).bit_length())
    step = max(_CHUNK, 1 << (size - 1).bit_length() - 4)
    return -(-size // step) * step


def pad(tokens: Int32[Array, "B T"] | Int32[np.ndarray, "B T"]) -> Int32[np.ndarray, "B T2"]:
    """Pads prompts on the right to one of the few lengths that compile; on the host, so no length needs a program."""
    more = _round_up(tokens.shape[1]) - tokens.shape[1]
    return np.pad(np.asarray(tokens, np.int32), ((0, 0), (0, more)))


def batch(rows: Sequence[Sequence[int]]) -> tuple[Int32[np.ndarray, "B T"], Int32[np.ndarray, "B"]]:
    """Stacks the token ids of sequences on the host; returns them right-padded [B, T], and their lengths [B]."""
    length = np.array([len(row) for row in rows], np.int32)
    tokens = np.zeros((len(rows), length.max()), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return tokens, length


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _read_layer_on_mesh(layout: MeshLayout, config, size, params, x):
    """Applies one layer of the whole model to prompts, as `_read_layer` does."""
    takes, heads = (layout.params(config, params), layout.by_sequence), layout.heads_at(2)
    run = layout.run(functools.partial(_read_layer, layout.of_one(config), size), takes,
                     (layout.by_sequence, heads, heads))
    return run(params, x)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _read_layer(config, size, params, x):
    """Applies one layer to whole prompts x[B, T, E]; returns the next hidden states, keys and values.

    XLA:CPU computes nothing in bfloat16, but widens each operand and rounds each result, which takes longer than the
    products. So there a layer is widened once, unless it has experts, and its results are rounded.
    """
    if jax.default_backend() == "cpu" and x.dtype == jnp.bfloat16 and config.experts is None:
        wide = jax.tree.map(_widened, (params, x), is_leaf=lambda leaf: isinstance(leaf, QuantisedMatrix))
        return jax.tree.map(lambda leaf: leaf.astype(x.dtype), _read_layer(config, size, *wide))
    block, length = Block(config), x.shape[1]
    starts = jnp.arange(0, length, size, dtype=jnp.int32)

    def one(x):
        q, key, value = block.apply({"params": params}, x, jnp.arange(length, dtype=jnp.int32), method="project")
        q = q.reshape(length, config.num_kv_heads, config.group, config.head_dim)
        options = config.window, config.soft_cap, sink_logits(config, params)
        whole = causal.at_once(q, key, value, *options)

        def chunk(start):
            part = jax.lax.dynamic_slice_in_dim(q if whole is None else whole, start, size)
            out = causal.in_chunks(part, key, value, start, size, *options) if whole is None else part
            rows = jax.lax.dynamic_slice_in_dim(x, start, size)
            return block.apply({"params": params}, rows, out.reshape(size, -1, config.head_dim), method="finish")

        return jax.lax.map(chunk, starts).reshape(x.shape), key, value

    return jax.lax.map(one, x)


def _widened(leaf):
    """Returns an array in bfloat16 as f32, others and matrices in few bits as they are."""
    return leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 and isinstance(leaf, jax.Array) else leaf


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
        prompts = Prompts(key, value, length, tokens, _last_queries(config, layer, params, x, length))
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
