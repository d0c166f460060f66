"""Boundary scores (DynSplit-KV, Algorithm 1), from the attention of the tokens after a boundary.

A token i is a good boundary if the W tokens after it, F_i = i+1 .. i+W, attend the R tokens that are kept,
O_i = i-R+1 .. i, and not those further back, D_i = 0 .. i-R:

    s_i = E_{l, h, q in F_i} ( sum_{k in O_i} A_qk - alpha sum_{k in D_i} A_qk ),     -alpha <= s_i <= 1

Sums over keys are differences of prefix sums of one query's attention, so a block of queries only needs its own rows of
the attention map, and means over layers and heads can be taken first. Memory is `block` x T, whatever the number of
layers.

Choices the paper leaves open: D_i is empty for i < R, where the paper's max(0, i-R) would count token 0 twice. A
boundary is only scored if all of F_i is in the text.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.errors import PromptError
from kvjax.models.config import ModelConfig
from kvjax.models.transformer import Block, Transformer
from kvjax.ops.attention import soft_capped, softmax
from kvjax.typing import Array, Float, Int32, PyTree


@dataclasses.dataclass(frozen=True)
class Importance:
    """Settings of Algorithm 1.

    Attributes:
      future: W, tokens after a boundary whose attention counts.
      overlap: R, tokens up to the boundary that count as kept.
      alpha: penalty of attention to tokens further back.
      block: queries whose attention is in memory at a time.
    """

    future: int = 8
    overlap: int = 128
    alpha: float = 1.0
    block: int = 128


def boundary_scores(
    config: ModelConfig, params: PyTree, tokens: np.ndarray, rule: Importance = Importance()
) -> np.ndarray:
    """Returns the score s_i of every token i < T - W of a text.

    Args:
      config: configuration of the model.
      params: parameters of the model.
      tokens: int[T], ids of the text.
      rule: settings of Algorithm 1.

    Returns:
      float[T - W].

    Raises:
      PromptError: the text has no more than W tokens.
    """
    length = len(tokens)
    config = config.for_length(length)
    if length <= rule.future:
        raise PromptError(f"no boundary in {length} tokens has {rule.future} tokens after it; take a longer text")
    padded = np.zeros(-(-length // rule.block) * rule.block, np.int32)
    padded[:length] = tokens
    x = Transformer(config).apply({"params": params}, jnp.asarray(padded), method="embed")
    total = jnp.zeros((len(padded), rule.future), jnp.float32)
    for i, layer in enumerate(config.layers):
        x, gain = _layer(layer, rule, params[f"layers_{i}"], x)
        total += gain
    return mean_over_future(np.asarray(total) / config.num_layers, length)


def mean_over_future(gain: np.ndarray, length: int) -> np.ndarray:
    """Returns the mean over q in F_i for each token i.

    Args:
      gain: float[T, W]; gain[q, j] is query q's contribution to the score of token q - 1 - j.
      length: tokens of the text, without padding.

    Returns:
      float[length - W].
    """
    future = gain.shape[1]
    scored = length - future
    return np.mean([gain[1 + j : 1 + j + scored, j] for j in range(future)], axis=0)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _layer(config: ModelConfig, rule: Importance, params: PyTree, x: Float[Array, "T E"]):
    """Runs one layer over a text, a block of queries at a time; returns hidden states and gain[T, W], mean over heads.
    """
    model, tokens = Block(config), x.shape[0]
    q, key, value = model.apply({"params": params}, x, jnp.arange(tokens, dtype=jnp.int32), method="project")
    q = q.reshape(tokens, config.num_kv_heads, config.group, config.head_dim)
    sink_logits = model.apply({"params": params}, method="sink_logits")

    def block(start):
        position = start + jnp.arange(rule.block, dtype=jnp.int32)
        rows = jax.lax.dynamic_slice_in_dim(q, start, rule.block)
        weight = attention_rows(rows, key, position, config.window, config.soft_cap, sink_logits)
        out = jnp.einsum("kgct,tkd->ckgd", weight, value).reshape(rule.block, -1, config.head_dim)
        rows = jax.lax.dynamic_slice_in_dim(x, start, rule.block)
        after = model.apply({"params": params}, rows, out, method="finish")
        return after, gain_of(jnp.mean(weight, axis=(0, 1)), position, rule)

    after, gain = jax.lax.map(block, jnp.arange(0, tokens, rule.block, dtype=jnp.int32))
    return after.reshape(x.shape), gain.reshape(tokens, rule.future)


def attention_rows(
    q: Float[Array, "C K G D"], key: Float[Array, "T K D"], at: Int32[Array, "C"], sliding: int | None,
    cap: float | None = None, sink_logits: Float[Array, "K G"] | None = None,
) -> Float[Array, "K G C T"]:
    """Returns rows of the causal attention map.

    Args:
      q: [C, K, G, D], queries.
      key: [T, K, D], keys of the text.
      at: int32[C], positions of the queries.
      sliding: newest tokens that a query sees, its own included; None = all.
      cap: bound of the scaled scores (`kvjax.ops.attention.soft_capped`).
      sink_logits: learned logit of each query head, which takes a share of its softmax.

    Returns:
      float32[K, G, C, T].
    """
    scores = jnp.einsum("ckgd,tkd->kgct", q, key, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    position = jnp.arange(key.shape[0], dtype=jnp.int32)
    seen = position <= at[:, None]
    if sliding is not None:
        seen &= position > at[:, None] - sliding
    sink_logits = None if sink_logits is None else jnp.broadcast_to(sink_logits[..., None], scores.shape[:-1])
    return softmax(jnp.where(seen, soft_capped(scores, cap), -jnp.inf), sink_logits)


def gain_of(weight: Float[Array, "C T"], at: Int32[Array, "C"], rule: Importance) -> Float[Array, "C W"]:
    """Returns the contribution of each query to the scores of the W tokens before it (lines 6 to 8).

    The attention of a query sums to one, so its last W + R weights determine the rest, which goes to keys further back.

    Args:
      weight: [C, T], attention weights, mean over heads.
      at: int32[C], positions of the queries.
      rule: settings of Algorithm 1.

    Returns:
      [C, W]; entry [c, j] is for the token j + 1 before query c.
    """
    # The query itself, then the keys before it.
    back = at[:, None] - jnp.arange(rule.future + rule.overlap, dtype=jnp.int32)
    near = jnp.where(back >= 0, jnp.take_along_axis(weight, jnp.maximum(back, 0), axis=-1), 0.0)
    mass = jnp.pad(jnp.cumsum(near, axis=-1), ((0, 0), (1, 0)))  # mass[c, n]: attention to the last n keys
    later, kept = mass[:, 1 : 1 + rule.future], mass[:, 1 + rule.overlap :]
    return (kept - later) - rule.alpha * (1.0 - kept)
