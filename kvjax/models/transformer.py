"""Decoder-only transformer as Flax Linen modules.

A `Block` is a layer without its attention: `project` returns rotated queries, rotated keys and values, `finish` adds
the attention's output to the residual stream and applies the feed-forward network. The decode drivers call the two
around the KV cache; `Transformer.__call__` calls them around dense attention, for training and for logits of a whole
sequence.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from kvjax.models.config import ModelConfig
from kvjax.ops import rotary
from kvjax.ops.weights import QuantisedMatrix, apply_rows, take_rows
from kvjax.typing import Array, Float, Hidden, Int32, Logits


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last axis, computed in f32."""

    eps: float

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return scale * wide.astype(x.dtype)


class Linear(nn.Module):
    """Linear map y = W x + b with W `[out, in]`, as in checkpoints, in few bits if the parameters are.

    The CPU reads this layout row by row; Flax's `Dense` with `[in, out]` takes a fifth to a half longer for one token.
    """

    features: int
    use_bias: bool = False

    @nn.compact
    def __call__(self, x):
        start = nn.initializers.lecun_normal(in_axis=-1, out_axis=-2)
        y = apply_rows(_matrix(self, "weight", start, (self.features, x.shape[-1])), x)
        return y + self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32) if self.use_bias else y


class Embedding(nn.Module):
    """Table of vectors [V, E], in few bits if the parameters are."""

    count: int
    features: int

    def setup(self):
        self.embedding = _matrix(self, "embedding", nn.initializers.normal(0.02), (self.count, self.features))

    def __call__(self, tokens):
        return take_rows(self.embedding, tokens)


def _matrix(module: nn.Module, name: str, start, shape: tuple[int, int]):
    """Returns a parameter, which is no array if it is in few bits; Flax compares shapes of arrays."""
    given = module.get_variable("params", name) if module.has_variable("params", name) else None
    return given if isinstance(given, QuantisedMatrix) else module.param(name, start, shape, jnp.float32)


class GatedMLP(nn.Module):
    """SwiGLU feed-forward network."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x):
        def dense(size, name):
            return Linear(size, self.config.mlp_bias, name=name)

        wide = nn.silu(dense(self.config.intermediate_size, "gate_proj")(x))
        wide = wide * dense(self.config.intermediate_size, "up_proj")(x)
        return dense(self.config.hidden_size, "down_proj")(wide)


class Block(nn.Module):
    """Transformer layer with its attention apart: projections before it, and everything after it."""

    config: ModelConfig
    attention: str | None = None  # `implementation` of `jax.nn.dot_product_attention`, used for whole sequences

    def setup(self):
        c = self.config
        self.input_norm = RMSNorm(c.rms_norm_eps)
        self.q_proj = Linear(c.num_heads * c.head_dim, c.qkv_bias)
        self.k_proj = Linear(c.num_kv_heads * c.head_dim, c.qkv_bias)
        self.v_proj = Linear(c.num_kv_heads * c.head_dim, c.qkv_bias)
        self.o_proj = Linear(c.hidden_size, c.output_bias)
        if c.qk_norm:
            self.q_norm = RMSNorm(c.rms_norm_eps)
            self.k_norm = RMSNorm(c.rms_norm_eps)
        if c.use_mlp:
            self.post_norm = RMSNorm(c.rms_norm_eps)
            self.mlp = GatedMLP(c)

    def queries(self, x: Hidden, positions: Int32[Array, "*T"]) -> Float[Array, "*T H D"]:
        """Returns rotated queries of the layer's input; look-ahead methods call this one layer early."""
        q = _heads(self.q_proj(self.input_norm(x)), self.config.num_heads)
        return self._rotate(self.q_norm(q) if self.config.qk_norm else q, positions)

    def project(self, x: Hidden, positions: Int32[Array, "*T"]):
        """Returns rotated queries `[*T, H, D]`, rotated keys and values `[*T, K, D]` of the layer's input."""
        c, h = self.config, self.input_norm(x)
        q = _heads(self.q_proj(h), c.num_heads)
        k = _heads(self.k_proj(h), c.num_kv_heads)
        if c.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        v = _heads(self.v_proj(h), c.num_kv_heads)
        return self._rotate(q, positions), self._rotate(k, positions), v

    def finish(self, x: Hidden, attended: Float[Array, "*T H D"]) -> Hidden:
        """Returns the layer's output: output projection, feed-forward network and both residual additions."""
        x = x + self.o_proj(attended.reshape(*attended.shape[:-2], -1))
        return x + self.mlp(self.post_norm(x)) if self.config.use_mlp else x

    def __call__(self, x, positions, window):
        q, k, v = self.project(x, positions)
        local = None if window is None else (window - 1, 0)
        attended = jax.nn.dot_product_attention(
            q, k, v, is_causal=True, local_window_size=local, implementation=self.attention
        )
        return self.finish(x, attended)

    def _rotate(self, x, positions):
        rope = self.config.rope
        freqs = rotary.inverse_frequencies(self.config.head_dim, rope)
        return rotary.rotate(x, positions, freqs, rope.attention_factor)


class Transformer(nn.Module):
    """Embedding, blocks, final norm and unembedding of a model."""

    config: ModelConfig
    attention: str | None = None

    def setup(self):
        c = self.config
        self.embedding = Embedding(c.vocab_size, c.hidden_size)
        self.layers = [Block(c, self.attention, name=f"layers_{i}") for i in range(c.num_layers)]
        self.norm = RMSNorm(c.rms_norm_eps)
        if not c.tie_embeddings:
            self.lm_head = Linear(c.vocab_size)

    def embed(self, tokens: Int32[Array, "*T"]) -> Hidden:
        return self.embedding(tokens)

    def unembed(self, x: Hidden) -> Logits:
        x = self.norm(x)
        return apply_rows(self.embedding.embedding, x) if self.config.tie_embeddings else self.lm_head(x)

    def __call__(self, tokens: Int32[Array, "B T"], positions: Int32[Array, "B T"]) -> Logits:
        """Returns the logits of every position under dense causal attention, for training and as an oracle."""
        x = self.embed(tokens)
        for layer, window in zip(self.layers, self.config.windows, strict=True):
            x = layer(x, positions, window)
        return self.unembed(x)


def _heads(x, count):
    return x.reshape(*x.shape[:-1], count, -1)
