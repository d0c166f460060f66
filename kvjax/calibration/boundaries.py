"""Boundary scores of whole texts over all layers (DynSplit-KV, Algorithm 1), for a table of a model's delimiters.

Rule and formula are in `kvjax.methods.shared.importance`. Means over layers are taken with those over heads, so memory
is `block` x T, whatever the number of layers.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.errors import PromptError
from kvjax.inference.blocks import sink_logits
from kvjax.methods.shared.importance import PAPER_RULE, Importance, gain_of
from kvjax.models.config import ModelConfig
from kvjax.models.transformer import Block, Transformer
from kvjax.ops.attention import soft_capped, softmax
from kvjax.ops.precise import einsum
from kvjax.typing import Array, Float, Int32, PyTree


def boundary_scores(
    config: ModelConfig, params: PyTree, tokens: np.ndarray, rule: Importance = PAPER_RULE
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
    learned = sink_logits(config, params)

    def block(start):
        position = start + jnp.arange(rule.block, dtype=jnp.int32)
        rows = jax.lax.dynamic_slice_in_dim(q, start, rule.block)
        weight = attention_rows(rows, key, position, config.window, config.soft_cap, learned)
        out = einsum("kgct,tkd->ckgd", weight, value).reshape(rule.block, -1, config.head_dim)
        rows = jax.lax.dynamic_slice_in_dim(x, start, rule.block)
        after = model.apply({"params": params}, rows, out, method="finish")
        mean = jnp.mean(weight, axis=(0, 1))
        return after, gain_of(mean, position, rule, None if learned is None else jnp.sum(mean, axis=-1))

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
    scores = einsum("ckgd,tkd->kgct", q, key) * q.shape[-1] ** -0.5
    position = jnp.arange(key.shape[0], dtype=jnp.int32)
    seen = position <= at[:, None]
    if sliding is not None:
        seen &= position > at[:, None] - sliding
    sink_logits = None if sink_logits is None else jnp.broadcast_to(sink_logits[..., None], scores.shape[:-1])
    return softmax(jnp.where(seen, soft_capped(scores, cap), -jnp.inf), sink_logits)
