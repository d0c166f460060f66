"""Prefill: prompts read layer by layer, each layer being indexed while the next is read."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.fill import Prompts, check_enough, empty_state, fill_state, in_memory, stored_rows
from kvjax.cache.layer import LayerCache
from kvjax.cache.pool import StoreRef
from kvjax.cache.read import choose
from kvjax.cache.state import LayerState
from kvjax.errors import PromptError
from kvjax.inference import layer_offload
from kvjax.inference.blocks import embed, unembed
from kvjax.inference.plan import Plan, Slots, State, on_store, outline, slot_pool
from kvjax.models.config import ModelConfig
from kvjax.models.transformer import Block
from kvjax.ops import attention
from kvjax.store import interface
from kvjax.store.interface import as_stored
from kvjax.typing import Array, Float, Int32, PyTree, pytree

_CHUNK = 512  # queries of one prefill attention step


@pytree
class Activations:
    """What one layer saw and made of prompts, right-padded to T."""

    x: Float[Array, "B T E"]  # its input
    key: Float[Array, "B T K D"]
    value: Float[Array, "B T K D"]
    out: Float[Array, "B T E"]  # the next layer's input


@dataclasses.dataclass(frozen=True)
class PromptActivations:
    """Prompts that were read densely, with the activations of every layer on the host: caches of any method can be
    filled from it."""

    tokens: Int32[np.ndarray, "B T"]  # right-padded
    length: Int32[np.ndarray, "B"]
    layers: tuple[Activations, ...]
    fingerprint: str = ""  # of model and tokenizer

    @property
    def nbytes(self) -> int:
        """Bytes in memory; a layer's output is the next one's input."""
        return sum(one.x.nbytes + one.key.nbytes + one.value.nbytes for one in self.layers)


def read(
    config: ModelConfig, params: PyTree, tokens: Int32[Array, "B T"] | Int32[np.ndarray, "B T"]
) -> Iterator[Activations]:
    """Reads prompts densely, layer by layer."""
    x, size = embed(config, params, tokens), min(_CHUNK, tokens.shape[1])
    for i, sliding in enumerate(config.windows):
        out, key, value = _read_layer(config, sliding, size, params[f"layers_{i}"], x)
        yield Activations(x, key, value, out)
        x = out


def prefill(
    plan: Plan, params: PyTree, tokens: Int32[Array, "B T"] | Int32[np.ndarray, "B T"],
    length: Int32[Array, "B"] | Int32[np.ndarray, "B"],
    branch: interface.Branch | None = None, slots: Slots | None = None, layers: Iterable[Activations] | None = None,
    pipelined: bool = True,
):
    """Fills a new cache from prompts one layer at a time, after a check that it can be filled from them.

    Args, Returns and Raises are those of `fill_cache`; tokens may be padded to any T. Raises PromptError, too.
    """
    check_prompts(plan, np.asarray(length))
    return fill_cache(plan, params, pad(tokens), np.asarray(length), branch, slots, layers, pipelined)


def fill_cache(
    plan: Plan, params: PyTree, padded: Int32[np.ndarray, "B T"], lengths: Int32[np.ndarray, "B"],
    branch: interface.Branch | None = None, slots: Slots | None = None, layers: Iterable[Activations] | None = None,
    pipelined: bool = True,
):
    """Fills a new cache from prompts that fit it, one layer at a time.

    While a layer is indexed and written to the store the next one is read (IceCache, section 4.3). Peak memory then is
    the hidden states of three layers, keys and values of two, and the cache, linear in T.

    Args:
      plan: what is static about the cache.
      params: the model's.
      padded: token ids [B, T], right-padded as `pad` does.
      lengths: tokens of each prompt [B].
      branch: where the blocks go; None = memory.
      slots: how a store's blocks are kept in memory.
      layers: activations of the layers, if the prompts were read already; else they are read one by one.
      pipelined: False = a layer is read once the one before has been indexed.

    Returns:
      (State, logits after each prompt's last token [B, V]).

    Raises:
      StoreError: the store cannot be written.
    """
    tokens, length = jnp.asarray(padded), jnp.asarray(lengths, jnp.int32)
    slots, caches, before = slots or Slots(), [], None
    hidden: Any = None
    lot = _offload_branch(plan, branch, slots)

    @_as_in_this_thread
    def index(i, one):
        """Layer i's cache; layers come in their order."""
        nonlocal before
        prompts = Prompts(one.key, one.value, length, tokens, _last_queries(plan, i, params, one.x, length))
        leader = before if plan.layers[i].follows else None
        samples = _sample_queries(plan, i, branch, params, one.x, length)
        cache = fill(plan, i, prompts, leader, branch, slots, samples)
        before = cache.state
        caches.append(layer_offload.offload(lot, i, cache) if lot else cache)

    try:
        with ThreadPoolExecutor(1) as indexer:
            pending = indexer.submit(lambda: None)
            for i, one in enumerate(layers or read(plan.config, params, tokens)):
                pending.result()  # one layer waits at most, so that no more are in memory
                pending, hidden = indexer.submit(index, i, one), one.out
                if not pipelined:
                    pending.result()
            pending.result()
        last = jnp.take_along_axis(hidden, (length - 1)[:, None, None], axis=1)[:, 0]
        handle, generation = (-1, 0) if branch is None else (branch.handle, branch.generation)
        ref = StoreRef(jnp.int32(handle), jnp.int32(generation))
        return State(tuple(caches), length, ref), unembed(plan.config, params, last)
    except BaseException:
        if lot is not None:
            lot.discard()
        raise


def _as_in_this_thread(function):
    """The function with the precision, the device and the widest types that this thread has chosen, whichever thread it
    runs in."""
    precision, device = jax.config.jax_default_matmul_precision, jax.config.jax_default_device
    wide = jax.config.jax_enable_x64

    @functools.wraps(function)
    def there(*args):
        with jax.default_matmul_precision(precision), jax.default_device(device), jax.enable_x64(wide):
            return function(*args)

    return there


def _offload_branch(plan: Plan, branch, slots: Slots):
    """A branch for layers that wait in a store; None if they stay in memory."""
    if slots.offload is None:
        return None
    outlines = [outline(plan, i, branch is not None, slots) for i in range(len(plan.layers))]
    return layer_offload.create(slots.offload, outlines)


def check_prompts(plan: Plan, length: np.ndarray) -> None:
    """Raises PromptError for prompts of so many tokens that this plan cannot be filled from."""
    if length.min() < 1:
        raise PromptError("a prompt is empty; give at least one token")
    if length.max() > plan.capacity:
        raise PromptError(f"a prompt has {length.max()} tokens but capacity={plan.capacity}; raise the capacity")
    check_enough(plan.layers[-1], length)


def _round_up(size: int) -> int:
    """Padded prompt length: a power of two below the chunk, whole chunks above, so that few shapes compile."""
    return max(16, 1 << (size - 1).bit_length()) if size < _CHUNK else -(-size // _CHUNK) * _CHUNK


def pad(tokens: Int32[Array, "B T"] | Int32[np.ndarray, "B T"]) -> Int32[np.ndarray, "B T2"]:
    """Returns prompts, right-padded to one of the lengths that are read; on the host, without a program per length."""
    more = _round_up(tokens.shape[1]) - tokens.shape[1]
    return np.pad(np.asarray(tokens, np.int32), ((0, 0), (0, more)))


def batch(rows: Sequence[Sequence[int]]) -> tuple[Int32[np.ndarray, "B T"], Int32[np.ndarray, "B"]]:
    """Returns token ids of sequences side by side, right-padded, and how many each has; on the host."""
    length = np.array([len(row) for row in rows], np.int32)
    tokens = np.zeros((len(rows), length.max()), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return tokens, length


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _read_layer(config, sliding, size, params, x):
    """One layer over whole prompts x[B, T, E]; returns the next hidden states, keys and values."""
    block, length = Block(config), x.shape[1]
    starts = jnp.arange(0, length, size, dtype=jnp.int32)

    def one(x):
        q, key, value = block.apply({"params": params}, x, jnp.arange(length, dtype=jnp.int32), method="project")
        q = q.reshape(length, config.num_kv_heads, config.group, config.head_dim)

        def chunk(start):
            part = jax.lax.dynamic_slice_in_dim(q, start, size)
            out = attention.causal(part, key, value, start, size, sliding)
            rows = jax.lax.dynamic_slice_in_dim(x, start, size)
            return block.apply({"params": params}, rows, out.reshape(size, -1, config.head_dim), method="finish")

        return jax.lax.map(chunk, starts).reshape(x.shape), key, value

    return jax.lax.map(one, x)


def _sample_queries(plan: Plan, i: int, branch, params, x, length):
    """Queries `[Q, B, H, D]` by which the store's layout sees which blocks go together; None if it does not ask."""
    if branch is None or not branch.samples or plan.layers[i].method.attends_all or plan.layers[i].follows:
        return None
    # Spread evenly over the second half of each prompt, the last token's first.
    stride = jnp.maximum(1, jnp.asarray(length) // (2 * branch.samples))
    back = jnp.arange(branch.samples, dtype=jnp.int32) * stride[:, None]
    return _queries_at(plan.config, params[f"layers_{i}"], x, length, back).swapaxes(0, 1)


def _last_queries(plan: Plan, i: int, params, x, length):
    """Queries `[B, Q, H, D]` of each prompt's last tokens, if the layer's method asks for them."""
    wanted = 0 if plan.layers[i].follows else plan.layers[i].method.observation
    count = x.shape[1] if wanted is None else min(wanted, x.shape[1])
    back = jnp.arange(count, dtype=jnp.int32)[None, ::-1]
    return _queries_at(plan.config, params[f"layers_{i}"], x, length, back) if count else None


@functools.partial(jax.jit, static_argnums=0)
def _queries_at(config, params, x, length, back):
    """Queries `[B, Q, H, D]` of the tokens that are back[#B, Q] before each prompt's last in x[B, T, E]."""
    at = jnp.maximum(jnp.asarray(length)[:, None] - 1 - back, 0)
    rows = jnp.take_along_axis(x, at[..., None], axis=1)
    return Block(config).apply({"params": params}, rows, at, method="queries")


@functools.partial(jax.jit, static_argnums=0)
def _retrieved(layer_plan, state, queries):
    """Blocks `[B, Q, K, M1]` that each of queries[Q, B, H, D] would fetch; a query costs one `select`."""
    return jax.lax.map(lambda q: choose(layer_plan, state, q).need, queries).swapaxes(0, 1)


def fill(
    plan: Plan, i: int, prompts: Prompts, leader: LayerState | None, branch: interface.Branch | None, slots: Slots,
    samples: Array | None = None,
) -> LayerCache:
    """Layer i's cache from its prompts; `leader` is the layer it follows, if any, `samples` as of `_sample_queries`."""
    layer_plan, weights = plan.layers[i], plan.layers[i].method.weights(i)
    state, placement = _filled(layer_plan, plan.dtype, weights, prompts, leader)
    if branch is None or not on_store(plan, i):
        return LayerCache(state, in_memory(layer_plan, state, placement, prompts, plan.dtype))
    retrieved = None if samples is None else np.asarray(_retrieved(layer_plan, state, samples))
    heads = layer_plan.spec.block_heads
    pos = np.asarray(state.pos[:, :heads])
    rows = as_stored(np.asarray(stored_rows(layer_plan, state, prompts, plan.dtype)))
    prompt = interface.Prompt(pos, None if retrieved is None else retrieved[:, :, :heads])
    branch.write_layer(i, interface.Gathered(rows, pos), np.asarray(state.count[:, :heads]), prompt)
    return LayerCache(state, slot_pool(plan, i, slots))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _filled(layer_plan, dtype, weights, prompts, leader):
    """The state, and each token's place: what takes long to compile is the same program whatever keeps the blocks."""
    state = empty_state(layer_plan, prompts.key.shape[0], dtype, weights)
    return fill_state(layer_plan, state, prompts, leader)
