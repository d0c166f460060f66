"""A model's keys before rotation, and its likelihood with keys that went through a codec.

A *recoding* turns the keys of one layer before rotation `[T, K, D]` into the rotated keys that the model attends to. It
is a pytree, so that its numbers can change without compiling again.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax import attention
from kvjax.codecs import int8, rle
from kvjax.codecs.autoencoder import Autoencoder
from kvjax.codecs.rle import Tolerance
from kvjax.models import rope
from kvjax.models.config import ModelConfig
from kvjax.models.transformer import Block, Transformer
from kvjax.typing import Array, Float, Int32, PyTree, pytree

_BLOCK = 128  # keys of one step of attention; texts are padded to whole blocks


def rotated(config: ModelConfig, key: Float[Array, "T K D"]) -> Float[Array, "T K D"]:
    """Keys as they are at positions 0 .. T - 1."""
    at = jnp.arange(key.shape[0], dtype=jnp.int32)
    return rope.rotate(key, at, rope.inverse_frequencies(config.head_dim, config.rope))


def _through_runs(key, tolerance: Tolerance):
    """Keys `[T, K, D]` as their runs give them back."""
    def one(key):
        return rle.decode(rle.encode(key, jnp.int32(key.shape[0]), tolerance, key.shape[0]))

    return jax.vmap(one, in_axes=1, out_axes=1)(key)


@pytree
class Plain:
    """No codec."""

    def __call__(self, config, layer, key):
        return rotated(config, key)


@pytree
class RunsAfter:
    """Runs of rotated keys."""

    tolerance: Tolerance

    def __call__(self, config, layer, key):
        return _through_runs(rotated(config, key), self.tolerance)


@pytree
class RunsBefore:
    """Runs of keys before rotation, rotated at use."""

    tolerance: Tolerance

    def __call__(self, config, layer, key):
        return rotated(config, _through_runs(key, self.tolerance))


@pytree
class Int8Runs:
    """Runs of int8 keys before rotation; the tolerance is in steps of the scale."""

    tolerance: Tolerance

    def __call__(self, config, layer, key):
        scale = jax.vmap(int8.scale_of, in_axes=1)(key)
        coded = _through_runs(int8.quantise(key, scale), self.tolerance)
        return rotated(config, int8.dequantise(coded, scale))


@pytree
class Learned:
    """An autoencoder for each layer and head."""

    models: Autoencoder  # stacked, [L, K, ...]

    def __call__(self, config, layer, key):
        mine = jax.tree.map(lambda leaf: leaf[layer], self.models)
        back = jax.vmap(lambda model, key: model.decode(model.encode(key)), in_axes=(0, 1), out_axes=1)(mine, key)
        return rotated(config, back)


PLAIN = Plain()


def run(llm: kvjax.LLM, tokens: np.ndarray, recoding=PLAIN) -> tuple[np.ndarray, np.ndarray]:
    """Keys of every layer before codec and rotation `[L, T, K, D]`, and the nats of tokens 1 .. T - 1."""
    padded = np.zeros(-(-len(tokens) // _BLOCK) * _BLOCK, np.int32)
    padded[: len(tokens)] = tokens
    x = Transformer(llm.config).apply({"params": llm.params}, jnp.asarray(padded), method="embed")
    keys = []
    for i, window in enumerate(llm.config.windows):
        x, key = _layer(llm.config, window, recoding, llm.params[f"layers_{i}"], x, jnp.int32(i))
        keys.append(np.asarray(key[: len(tokens)]))
    logits = Transformer(llm.config).apply({"params": llm.params}, x[: len(tokens) - 1], method="unembed")
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.asarray(tokens)[1:, None], axis=-1)
    return np.stack(keys), -np.asarray(chosen[:, 0])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _layer(
    config: ModelConfig, window: int | None, recoding, params: PyTree, x: Float[Array, "T E"], layer: Int32[Array, ""]
):
    """One layer over a text with recoded keys; returns hidden states, and keys before rotation."""
    model, tokens = Block(config), x.shape[0]
    at = jnp.arange(tokens, dtype=jnp.int32)
    _, key, value = model.apply({"params": params}, x, at * 0, method="project")  # position 0 turns nothing
    q = model.apply({"params": params}, x, at, method="queries")
    q = q.reshape(tokens, config.num_kv_heads, config.group, config.head_dim)
    out = attention.causal(q, recoding(config, layer, key), value, jnp.int32(0), _BLOCK, window)
    return model.apply({"params": params}, x, out.reshape(tokens, -1, config.head_dim), method="finish"), key
