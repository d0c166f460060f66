"""Filling of one layer's cache from prompts: building the index, placing every token, packing rows for blocks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import state as caching
from kvjax.cache.in_memory import suited
from kvjax.cache.layer import LayerCache, LayerPlan, each_sequence, kept_rows
from kvjax.cache.pool import MemoryPool, Pool, scatter_prompt
from kvjax.cache.smoothing import learn_smoothing, unknown_smoothing
from kvjax.cache.state import LayerState
from kvjax.cache.types import Placement, Spec
from kvjax.errors import PromptError
from kvjax.ops import quantize
from kvjax.typing import Array, Float, Int32, Num, PyTree, pytree


@pytree
class Prompts:
    """The keys, values and queries of prompts in one layer, right-padded to T."""

    key: Float[Array, "B T K D"]
    value: Float[Array, "B T K D"]
    length: Int32[Array, "B"]
    token: Int32[Array, "B T"] | None = None  # token ids; None = unknown
    query: Float[Array, "B Q H D"] | None = None  # queries of each prompt's last Q tokens; None = unknown, Q = 0
    sink_logits: Float[Array, "K G"] | None = None  # learned logit of each query head; None = the model has none


def empty_state(plan: LayerPlan, batch: int, dtype: str = "float32", weights: PyTree | None = None) -> LayerState:
    """Creates an empty state.

    Args:
      plan: static part of the layer's cache.
      batch: number of sequences.
      dtype: type of keys and values in blocks (`kvjax.ops.quantize`).
      weights: the method's weights for this layer; None = those of layer 0.

    Returns:
      The state.
    """
    weights = plan.method.weights(0) if weights is None else weights
    index = () if plan.follows else plan.method.init(plan.spec, weights)
    layer = caching.empty_layer(plan.spec, index, quantize.tail_type(dtype))
    if dtype in quantize.BITS and plan.spec.keeps_keys:
        layer = dataclasses.replace(layer, smoothing=unknown_smoothing(plan.spec))
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (batch, *leaf.shape)), layer)


def last_queries(
    query: Float[Array, "B T H D"], length: Int32[Array, "B"], count: int | None
) -> Float[Array, "B Q H D"]:
    """Returns the queries of each prompt's last min(count, T) tokens.

    Args:
      query: queries of all tokens.
      length: tokens of each prompt.
      count: number of queries; None = T.
    """
    count = query.shape[1] if count is None else min(count, query.shape[1])
    pos = jnp.maximum(length[:, None] - count + jnp.arange(count, dtype=jnp.int32), 0)
    return jnp.take_along_axis(query, pos[..., None, None], axis=1)


def check_enough(plan: LayerPlan, length: np.ndarray) -> None:
    """Raises PromptError if the method learns from prompts and one of them [B] has too few tokens for that."""
    beside = plan.spec.sinks + plan.spec.ring
    least = plan.method.least_prompt(plan.spec)
    if least and length.min() - beside < least:
        raise PromptError(f"{plan.method.name} learns from the prompt, and needs {least + beside} tokens of it where "
                          f"there are {length.min()}; give it more at once (context or chunk), or another method")


def fill_state(plan: LayerPlan, state: LayerState, prompts: Prompts, leader: LayerState | None = None):
    """Fills an empty state from prompts.

    Args:
      plan: static part of the layer's cache.
      state: empty state.
      prompts: keys, values and queries of the layer.
      leader: state of the layer whose placements this one follows; None = it places tokens itself.

    Returns:
      (State, block and row of each token's payload).
    """
    state, placement = _placed(plan, state, prompts, leader)
    if state.smoothing is not None:
        state = dataclasses.replace(state, smoothing=_smoothing_of(plan.spec, prompts))
    return state, placement


def _placed(plan: LayerPlan, state: LayerState, prompts: Prompts, leader: LayerState | None):
    """Returns the state and each token's place."""
    spec, (batch, tokens) = plan.spec, prompts.key.shape[:2]
    token = jnp.full((batch, tokens), -1, jnp.int32) if prompts.token is None else prompts.token
    filled = (prompts.key, prompts.value, prompts.length, token)
    if plan.follows:
        placement = jax.vmap(lambda one: caching.placements(spec, one, tokens))(leader)
        return jax.vmap(lambda *args: caching.book(spec, *args))(state, placement, *filled), placement
    query = prompts.query
    if query is None:
        query = jnp.zeros((batch, 0, spec.kv_heads * spec.group, spec.head_dim), prompts.key.dtype)
    build = functools.partial(caching.build, spec, plan.method, sink_logits=prompts.sink_logits)
    return each_sequence(lambda args: build(*args), (state, *filled, query))


def _smoothing_of(spec: Spec, prompts: Prompts) -> quantize.Smoothing:
    """Learns the smoothing from each prompt's tokens after the sinks; unknown if none of them has left the window."""
    pos = jnp.arange(prompts.key.shape[1], dtype=jnp.int32)

    def one(args):
        key, length = args
        valid = (pos >= spec.sinks) & (pos < length) & (length > spec.sinks + spec.ring)
        return learn_smoothing(spec, key.swapaxes(0, 1), pos, valid)

    return each_sequence(one, (prompts.key, prompts.length))


def fill_memory(plan: LayerPlan, state: LayerState, prompts: Prompts, dtype: str = "float32") -> LayerCache:
    """Fills an empty state and a new memory pool from prompts; returns the layer's cache."""
    state, placement = fill_state(plan, state, prompts)
    return LayerCache(state, in_memory(plan, state, placement, prompts, dtype))


def in_memory(
    plan: LayerPlan, state: LayerState, placement: Placement, prompts: Prompts, dtype: str = "float32"
) -> Pool:
    """Creates the memory pool of prompts that `fill_state` has placed."""
    return _in_memory(plan, state.smoothing, placement, prompts, dtype)


@functools.partial(jax.jit, static_argnums=(0, 4))
def _in_memory(plan: LayerPlan, smoothing, placement: Placement, prompts: Prompts, dtype: str) -> Pool:
    *key, value = (scatter_prompt(plan.spec, placement, rows) for rows in _kept(plan, smoothing, prompts, dtype))
    return suited(MemoryPool(key[0] if key else None, value, dtype))


def stored_rows(
    plan: LayerPlan, state: LayerState, prompts: Prompts, dtype: str = "float32"
) -> Num[Array, "B KB T X2"]:
    """Returns each token's row in blocks of a store: a key followed by its value, or a value alone."""
    return _stored_rows(plan, state.smoothing, prompts, dtype)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _stored_rows(plan: LayerPlan, smoothing, prompts: Prompts, dtype: str) -> Num[Array, "B KB T X2"]:
    kept = [rows.reshape(*rows.shape[:2], plan.spec.block_heads, -1) for rows in _kept(plan, smoothing, prompts, dtype)]
    return jnp.concatenate(kept, axis=-1).swapaxes(1, 2)


def _kept(
    plan: LayerPlan, smoothing: quantize.Smoothing | None, prompts: Prompts, dtype: str
) -> list[Num[Array, "B T K X"]]:
    """Returns the prompts' keys (if blocks hold keys) and values as blocks store them."""
    key, value = kept_rows(plan, smoothing, prompts.key.swapaxes(1, 2), prompts.value.swapaxes(1, 2), dtype)
    return [rows.swapaxes(1, 2) for rows in (key, value) if rows is not None]
