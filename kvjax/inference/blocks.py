"""The parts of the model that a step calls, each compiled once for all layers of one shape.

What goes in and out is rounded to its type (`kvjax.ops.barriers.rounded`), so that a token as one program equals a
token as several.
"""

import functools
from typing import Any

import jax

from kvjax.models.transformer import Block, Transformer
from kvjax.ops.barriers import rounded
from kvjax.typing import Array


@functools.partial(jax.jit, static_argnums=0)
def embed(config, params, tokens):
    """Returns the hidden states of token ids."""
    return Transformer(config).apply({"params": params}, tokens, method="embed")


@functools.partial(jax.jit, static_argnums=0)
def unembed(config, params, x):
    """Returns the logits of hidden states."""
    return Transformer(config).apply({"params": params}, x, method="unembed")


@functools.partial(jax.jit, static_argnums=0)
def queries(config, params, x, at):
    """Returns a layer's rotated queries [B, H, D] of its input x[B, E] at positions at[B]."""
    return rounded(Block(config).apply({"params": params}, rounded(x), at, method="queries"))


@functools.partial(jax.jit, static_argnums=0)
def project(config, params, x, at):
    """Returns a layer's queries, keys and values of its input x[B, E] at positions at[B]."""
    made = Block(config).apply({"params": params}, rounded(x), at, method="project")
    return jax.tree.map(rounded, made)


def sink_logits(config, params) -> Array | None:
    """Returns the learned logits [K, G] of a layer's query heads, for `kvjax.ops.attention.normalise`, or None."""
    logits: Any = Block(config).apply({"params": params}, method="sink_logits")
    return logits


@functools.partial(jax.jit, static_argnums=0)
def finish(config, params, x, out):
    """Returns a layer's output [B, E] from its input and what was attended, out[B, H, D]."""
    x, out = rounded(x), rounded(out)
    return rounded(Block(config).apply({"params": params}, x, out, method="finish"))
