"""Dense prefill: whole prompts are padded and read with full attention, layer by layer."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.inference import on_mesh
from kvjax.inference.blocks import embed, sink_logits
from kvjax.models.config import ModelConfig
from kvjax.models.mesh import MeshLayout
from kvjax.models.transformer import Block
from kvjax.ops import causal
from kvjax.ops.weights import QuantisedMatrix
from kvjax.typing import Array, Float, Int32, PyTree, pytree

CHUNK = 512  # queries of one prefill attention step


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
    size = min(CHUNK, tokens.shape[1])
    x = embed(config, params, tokens) if layout is None else on_mesh.embed(layout, config, params, tokens)
    for i, layer in enumerate(config.layers):
        weights = params[f"layers_{i}"]
        if layout is None:
            out, key, value = read_layer(layer, size, weights, x)
        else:
            out, key, value = _read_layer_on_mesh(layout, layer, size, weights, x)
        yield Activations(x, key, value, out)
        x = out


def _round_up(size: int) -> int:
    """Returns the padded prompt length, one of few, so that few shapes compile: a power of two below `CHUNK`, then
    multiples of it, and of so much of it that an eighth is added at most."""
    if size < CHUNK:
        return max(16, 1 << (size - 1).bit_length())
    step = max(CHUNK, 1 << (size - 1).bit_length() - 4)
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
    """Applies one layer of the whole model to prompts, as `read_layer` does."""
    takes, heads = (layout.params(config, params), layout.by_sequence), layout.heads_at(2)
    run = layout.run(functools.partial(read_layer, layout.of_one(config), size), takes,
                     (layout.by_sequence, heads, heads))
    return run(params, x)


@functools.partial(jax.jit, static_argnums=(0, 1))
def read_layer(config, size, params, x):
    """Applies one layer to whole prompts x[B, T, E]; returns the next hidden states, keys and values.

    XLA:CPU computes nothing in bfloat16, but widens each operand and rounds each result, which takes longer than the
    products. So there a layer is widened once, unless it has experts, and its results are rounded.
    """
    if jax.default_backend() == "cpu" and x.dtype == jnp.bfloat16 and config.experts is None:
        wide = jax.tree.map(_widened, (params, x), is_leaf=lambda leaf: isinstance(leaf, QuantisedMatrix))
        return jax.tree.map(lambda leaf: leaf.astype(x.dtype), read_layer(config, size, *wide))
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
