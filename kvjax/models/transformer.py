"""Decoder-only transformer as Flax Linen modules.

A `Block` is a layer without its attention: `project` returns rotated queries, rotated keys and values, `finish` adds
the attention's output to the residual stream and applies the feed-forward network. The decode drivers call the two
around the KV cache; `Transformer.__call__` calls them around dense attention, for training and for logits of a whole
sequence.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from kvjax.models.config import ModelConfig
from kvjax.ops import experts, rotary
from kvjax.ops.barriers import computed_once
from kvjax.typing import Array, Float, Hidden, Int32, Logits

_FEW = 64  # most vectors for which the special forms of `apply_rows` are faster


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
    """Linear map y = W x + b with W `[out, in]`, as in checkpoints.

    The CPU reads this layout row by row; Flax's `Dense` with `[in, out]` takes a fifth to a half longer for one token.
    """

    features: int
    use_bias: bool = False

    @nn.compact
    def __call__(self, x):
        start = nn.initializers.lecun_normal(in_axis=-1, out_axis=-2)
        y = apply_rows(self.param("weight", start, (self.features, x.shape[-1]), jnp.float32), x)
        return y + self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32) if self.use_bias else y


def apply_rows(weight: Float[Array, "Y X"], x: Float[Array, "*T X"]) -> Float[Array, "*T Y"]:
    """Multiplies each vector with the weights: `weight @ x` over the last axis of `x`.

    For products with a few vectors XLA:CPU rewrites the weights transposed, which makes a decode step of a batch more
    than twice as slow. It does not if the vectors are columns, behind a barrier that hides that they were rows.
    """
    count = math.prod(x.shape[:-1])
    if jax.default_backend() != "cpu" or count > _FEW:
        return jnp.einsum("yx,...x->...y", weight, x)
    if weight.dtype == x.dtype == jnp.bfloat16:
        return _apply_bfloat16(weight, x.reshape(count, -1)).reshape(*x.shape[:-1], -1)
    if count == 1:
        return jnp.einsum("yx,...x->...y", weight, x)
    columns = computed_once(weight @ computed_once(x.reshape(count, -1).T))
    return columns.T.reshape(*x.shape[:-1], -1)


def _apply_bfloat16(weight: Float[Array, "Y X"], x: Float[Array, "T X"]) -> Float[Array, "T Y"]:
    """Multiplies bfloat16 weights with at least two vectors, padded if need be, and sums in f32.

    For other bfloat16 products XLA:CPU widens all weights first, which takes five to eight times as long.
    """
    pairs = computed_once(jnp.pad(x, ((0, max(0, 2 - len(x))), (0, 0))))
    return jnp.einsum("yx,tx->ty", weight, pairs, preferred_element_type=jnp.float32)[: len(x)].astype(x.dtype)


class GatedMLP(nn.Module):
    """SwiGLU feed-forward network, of the configuration's intermediate size or another one."""

    config: ModelConfig
    size: int | None = None

    @nn.compact
    def __call__(self, x):
        def dense(size, name):
            return Linear(size, self.config.mlp_bias, name=name)

        size = self.config.intermediate_size if self.size is None else self.size
        wide = nn.silu(dense(size, "gate_proj")(x))
        wide = wide * dense(size, "up_proj")(x)
        return dense(self.config.hidden_size, "down_proj")(wide)


class SparseMLP(nn.Module):
    """Mixture of SwiGLU experts, with one for all tokens beside them if the configuration asks for it."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x):
        mixture, hidden = self.config.experts, self.config.hidden_size
        start = nn.initializers.lecun_normal(in_axis=-1, out_axis=-2, batch_axis=0)
        shapes = {"gate_proj": (mixture.size, hidden), "up_proj": (mixture.size, hidden),
                  "down_proj": (hidden, mixture.size)}
        weights = {name: self.param(name, start, (mixture.count, *shape), jnp.float32)
                   for name, shape in shapes.items()}
        biases = {name: self.param(f"{name}_bias", nn.initializers.zeros, (mixture.count, shape[0]), jnp.float32)
                  for name, shape in shapes.items() if mixture.bias}

        def expert(number, rows):
            def apply(name, x):
                y = apply_rows(jax.lax.dynamic_index_in_dim(weights[name], number, keepdims=False), x)
                return y + jax.lax.dynamic_index_in_dim(biases[name], number) if mixture.bias else y

            return apply("down_proj", experts.gated(apply("gate_proj", rows), apply("up_proj", rows), mixture.limit))

        rows = x.reshape(-1, hidden)
        scores = Linear(mixture.count, mixture.bias, name="router")(rows)
        chosen, weight = experts.route(scores, mixture.per_token, mixture.normalise)
        out = experts.mix(expert, mixture.count, rows, chosen, weight).reshape(x.shape)
        if mixture.shared_size is None:
            return out
        shared = GatedMLP(self.config, mixture.shared_size, name="shared")(x)
        return out + nn.sigmoid(Linear(1, name="shared_gate")(x)) * shared


class Block(nn.Module):
    """Transformer layer with its attention apart: projections before it, and everything after it."""

    config: ModelConfig
    attention: str | None = None  # `implementation` of `jax.nn.dot_product_attention`, used for whole sequences
    sparse: bool | None = None  # whether the layer has experts; None = its parameters tell

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
            self.experts = SparseMLP(c)

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
        if not self.config.use_mlp:
            return x
        sparse = self.has_variable("params", "experts") if self.sparse is None else self.sparse
        return x + (self.experts if sparse else self.mlp)(self.post_norm(x))

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
        self.embedding = nn.Embed(c.vocab_size, c.hidden_size, embedding_init=nn.initializers.normal(0.02))
        self.layers = [Block(c, self.attention, c.is_sparse(i), name=f"layers_{i}") for i in range(c.num_layers)]
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
