"""A model's keys before rotation, and its likelihood with keys that went through a codec.

A *recoding* turns the keys of one layer before rotation [T, K, D] into the rotated keys that the model attends. It is a
pytree, so that its numbers can change without compiling again.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from experiments.rle import sorted_runs
from experiments.rle.autoencoder import Autoencoder
from kvjax.inference.blocks import sink_logits
from kvjax.models.config import ModelConfig
from kvjax.models.transformer import Block, Transformer
from kvjax.ops import causal, lowbit, rotary, runs
from kvjax.ops.runs import Tolerance
from kvjax.typing import Array, Bool, Float, Int32, PyTree, pytree

_BLOCK = 128  # keys of one step of attention; texts are padded to whole blocks


def rotated(config: ModelConfig, key: Float[Array, "T K D"]) -> Float[Array, "T K D"]:
    """Returns the keys rotated to positions 0 .. T - 1."""
    position = jnp.arange(key.shape[0], dtype=jnp.int32)
    return rotary.rotate(key, position, rotary.inverse_frequencies(config.head_dim, config.rope))


def _through_runs(key, tolerance: Tolerance):
    """Returns keys [T, K, D] decoded from their runs."""
    def one(key):
        return runs.decode(runs.encode(key, jnp.int32(key.shape[0]), tolerance, key.shape[0]))

    return jax.vmap(one, in_axes=1, out_axes=1)(key)


@pytree
class Plain:
    """Recoding without a codec."""

    def __call__(self, config, layer, key):
        return rotated(config, key)


@pytree
class RunsAfter:
    """Recoding by runs of rotated keys."""

    tolerance: Tolerance

    def __call__(self, config, layer, key):
        return _through_runs(rotated(config, key), self.tolerance)


@pytree
class RunsBefore:
    """Recoding by runs of keys before rotation, rotated at use."""

    tolerance: Tolerance

    def __call__(self, config, layer, key):
        return rotated(config, _through_runs(key, self.tolerance))


@pytree
class RunsSorted:
    """Recoding by runs of keys before rotation, sorted by cluster."""

    tolerance: Tolerance
    clusters: int = dataclasses.field(metadata={"static": True})

    def __call__(self, config, layer, key):
        def one(key):
            length, seed = jnp.int32(key.shape[0]), jax.random.key(0)
            return runs.decode(sorted_runs.encode(key, length, self.tolerance, self.clusters, seed))

        return rotated(config, jax.vmap(one, in_axes=1, out_axes=1)(key))


@pytree
class LowbitRuns:
    """Recoding by runs of keys before rotation in codes of few bits; the tolerance is in steps of the scale."""

    tolerance: Tolerance
    bits: int = dataclasses.field(metadata={"static": True})

    def __call__(self, config, layer, key):
        scale = jax.vmap(lambda of_head: lowbit.scale_of(of_head, self.bits), in_axes=1)(key)
        coded = _through_runs(lowbit.quantise(key, scale, self.bits), self.tolerance)
        return rotated(config, lowbit.dequantise(coded, scale))


@pytree
class Learned:
    """Recoding by an autoencoder for each layer and head."""

    models: Autoencoder  # stacked, [L, K, ...]

    def __call__(self, config, layer, key):
        mine = jax.tree.map(lambda leaf: leaf[layer], self.models)
        back = jax.vmap(lambda model, key: model.decode(model.encode(key)), in_axes=(0, 1), out_axes=1)(mine, key)
        return rotated(config, back)


@pytree
class Only:
    """Recoding in some layers and heads by another one; the others have no codec."""

    recoding: PyTree
    on: Bool[Array, "L K"]

    def __call__(self, config, layer, key):
        return jnp.where(self.on[layer][:, None], self.recoding(config, layer, key), rotated(config, key))


PLAIN = Plain()


class Pass(NamedTuple):
    """Result of reading a text: keys before codec and rotation, values, and the nats of tokens 1 .. T - 1."""

    key: np.ndarray  # [L, T, K, D]
    value: np.ndarray
    nats: np.ndarray  # [T - 1]


def run(llm: kvjax.LLM, tokens: np.ndarray, recoding=PLAIN) -> Pass:
    """Reads a text with recoded keys."""
    padded = np.zeros(-(-len(tokens) // _BLOCK) * _BLOCK, np.int32)
    padded[: len(tokens)] = tokens
    x = Transformer(llm.config).apply({"params": llm.params}, jnp.asarray(padded), method="embed")
    rows = []
    for i, layer in enumerate(llm.config.layers):
        x, *row = _layer(layer, recoding, llm.params[f"layers_{i}"], x, jnp.int32(i))
        rows.append([np.asarray(array[: len(tokens)]) for array in row])
    logits = Transformer(llm.config).apply({"params": llm.params}, x[: len(tokens) - 1], method="unembed")
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.asarray(tokens)[1:, None], axis=-1)
    return Pass(*(np.stack(array) for array in zip(*rows, strict=True)), -np.asarray(chosen[:, 0]))


@functools.partial(jax.jit, static_argnums=0)
def _layer(config: ModelConfig, recoding, params: PyTree, x: Float[Array, "T E"], layer: Int32[Array, ""]):
    """Returns hidden states, keys before rotation and values of one layer over a text with recoded keys."""
    model, tokens = Block(config), x.shape[0]
    position = jnp.arange(tokens, dtype=jnp.int32)
    _, key, value = model.apply({"params": params}, x, position * 0, method="project")  # position 0 rotates nothing
    q = model.apply({"params": params}, x, position, method="queries")
    q = q.reshape(tokens, config.num_kv_heads, config.group, config.head_dim)
    out = causal.in_chunks(
        q, recoding(config, layer, key), value, jnp.int32(0), _BLOCK, config.window, config.soft_cap,
        sink_logits(config, params),
    )
    x = model.apply({"params": params}, x, out.reshape(tokens, -1, config.head_dim), method="finish")
    return x, key, value
