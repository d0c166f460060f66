"""Decoder-only transformer as Flax Linen modules.

A `Block` is a layer without its attention: `project` returns rotated queries, rotated keys and values, `finish` adds
the attention's output to the residual stream and applies the feed-forward network. The decode drivers call the two
around the KV cache; `Transformer.__call__` calls them around dense attention, for training and for logits of a whole
sequence.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from kvjax.models.config import ModelConfig
from kvjax.ops import attention, experts, rotary
from kvjax.ops.precise import einsum
from kvjax.ops.shards import WHOLE, Shards
from kvjax.ops.weights import QuantisedMatrix, apply_rows, take_rows
from kvjax.typing import Array, Float, Hidden, Int32, Logits


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last axis, computed in f32."""

    eps: float
    offset: float = 0.0  # added to the scale

    @nn.compact
    def __call__(self, x):
        start = nn.initializers.constant(1 - self.offset)
        scale = self.param("scale", start, (x.shape[-1],), jnp.float32)
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        if self.offset:  # in few bits the sum would lose those of a small scale
            return (wide * (scale.astype(jnp.float32) + self.offset)).astype(x.dtype)
        return scale * wide.astype(x.dtype)


class Linear(nn.Module):
    """Linear map y = W x + b with W `[out, in]`, as in checkpoints, in few bits if the parameters are.

    The CPU reads this layout row by row; Flax's `Dense` with `[in, out]` takes a fifth to a half longer for one token.
    Where the columns of W are divided among devices (`shards`), the products are summed over them.
    """

    features: int
    use_bias: bool = False
    shards: Shards = WHOLE

    @nn.compact
    def __call__(self, x):
        start = nn.initializers.lecun_normal(in_axis=-1, out_axis=-2)
        y = self.shards.sum(apply_rows(_matrix(self, "weight", start, (self.features, x.shape[-1])), x))
        return y + self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32) if self.use_bias else y


class Embedding(nn.Module):
    """Table of vectors [V, E], in few bits if the parameters are; each of several devices may have some of the rows."""

    count: int
    features: int
    shards: Shards = WHOLE

    def setup(self):
        self.embedding = _matrix(self, "embedding", nn.initializers.normal(0.02), (self.count, self.features))

    def __call__(self, tokens):
        if self.shards.count == 1:
            return take_rows(self.embedding, tokens)
        row = tokens - self.shards.number * self.count
        here = (row >= 0) & (row < self.count)
        rows = take_rows(self.embedding, jnp.where(here, row, 0))
        return self.shards.sum(jnp.where(here[..., None], rows, 0))


def _matrix(module: nn.Module, name: str, start, shape: tuple[int, int]):
    """Returns a parameter, which is no array if it is in few bits; Flax compares shapes of arrays."""
    given = module.get_variable("params", name) if module.has_variable("params", name) else None
    return given if isinstance(given, QuantisedMatrix) else module.param(name, start, shape, jnp.float32)


class GatedMLP(nn.Module):
    """Gated feed-forward network, of the configuration's intermediate size or another one.

    SwiGLU, or GeGLU with the approximation by tanh.
    """

    config: ModelConfig
    size: int | None = None

    @nn.compact
    def __call__(self, x):
        def dense(size, name, shards=WHOLE):
            return Linear(size, self.config.mlp_bias, shards, name=name)

        act = {"silu": nn.silu, "gelu_tanh": nn.gelu}[self.config.activation]
        size = self.config.intermediate_size if self.size is None else self.size
        wide = act(dense(size, "gate_proj")(x))
        wide = wide * dense(size, "up_proj")(x)
        return dense(self.config.hidden_size, "down_proj", self.config.shards)(wide)


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
        if mixture.bias:
            biases["down_proj"] = self.config.shards.once(biases["down_proj"])

        def expert(number, rows):
            def apply(name, x):
                y = apply_rows(jax.lax.dynamic_index_in_dim(weights[name], number, keepdims=False), x)
                return y + jax.lax.dynamic_index_in_dim(biases[name], number) if mixture.bias else y

            return apply("down_proj", experts.gated(apply("gate_proj", rows), apply("up_proj", rows), mixture.limit))

        rows = x.reshape(-1, hidden)
        scores = Linear(mixture.count, mixture.bias, name="router")(rows)
        chosen, weight = experts.route(scores, mixture.per_token, mixture.normalise)
        out = self.config.shards.sum(experts.mix(expert, mixture.count, rows, chosen, weight)).reshape(x.shape)
        if mixture.shared_size is None:
            return out
        shared = GatedMLP(self.config, mixture.shared_size, name="shared")(x)
        return out + nn.sigmoid(Linear(1, name="shared_gate")(x)) * shared


class Block(nn.Module):
    """Transformer layer with its attention apart: projections before it, and everything after it."""

    config: ModelConfig  # of this layer alone (`ModelConfig.layers`)
    attention: str | None = None  # `implementation` of `jax.nn.dot_product_attention`, used for whole sequences

    def setup(self):
        c = self.config
        norm = functools.partial(RMSNorm, c.rms_norm_eps, c.norm_offset)
        self.input_norm = norm()
        self.q_proj = Linear(c.num_heads * c.head_dim, c.qkv_bias)
        self.k_proj = Linear(c.num_kv_heads * c.head_dim, c.qkv_bias)
        self.v_proj = Linear(c.num_kv_heads * c.head_dim, c.qkv_bias)
        self.o_proj = Linear(c.hidden_size, c.output_bias, c.shards)
        if c.qk_norm:
            self.q_norm = norm()
            self.k_norm = norm()
        if c.sink_logits:
            self.sinks = self.param("sinks", nn.initializers.zeros, (c.num_heads,), jnp.float32)
        if c.use_mlp:
            self.post_norm = norm()
            if c.experts is None:
                self.mlp = GatedMLP(c)
            else:
                self.experts = SparseMLP(c)
        if c.out_norms:
            self.attention_out_norm = norm()
            self.mlp_out_norm = norm()

    def queries(self, x: Hidden, positions: Int32[Array, "*T"]) -> Float[Array, "*T H D"]:
        """Returns rotated queries of the layer's input; look-ahead methods call this one layer early."""
        return self._queries(self.input_norm(x), positions)

    def project(self, x: Hidden, positions: Int32[Array, "*T"]):
        """Returns rotated queries `[*T, H, D]`, rotated keys and values `[*T, K, D]` of the layer's input."""
        c, h = self.config, self.input_norm(x)
        k = _heads(self.k_proj(h), c.num_kv_heads)
        k = self.k_norm(k) if c.qk_norm else k
        v = _heads(self.v_proj(h), c.num_kv_heads)
        return self._queries(h, positions), self._rotate(k, positions), v

    def sink_logits(self) -> Float[Array, "K G"] | None:
        """Returns the learned logit of each query head (`kvjax.ops.attention.normalise`); None if there are none."""
        return self.sinks.reshape(self.config.num_kv_heads, -1) if self.config.sink_logits else None

    def finish(self, x: Hidden, attended: Float[Array, "*T H D"]) -> Hidden:
        """Returns the layer's output: output projection, feed-forward network and both residual additions."""
        c, out = self.config, self.o_proj(attended.reshape(*attended.shape[:-2], -1))
        x = x + (self.attention_out_norm(out) if c.out_norms else out)
        if not c.use_mlp:
            return x
        out = (self.mlp if c.experts is None else self.experts)(self.post_norm(x))
        return x + (self.mlp_out_norm(out) if c.out_norms else out)

    def __call__(self, x, positions):
        q, k, v = self.project(x, positions)
        c, sink_logits = self.config, self.sink_logits()
        if c.soft_cap is not None or sink_logits is not None:
            return self.finish(x, _dense_attention(c, q, k, v, sink_logits))
        local = None if c.window is None else (c.window - 1, 0)
        if q.dtype == jnp.float16:  # of which XLA:CPU has no product with this precision
            q, k, v = (part.astype(jnp.float32) for part in (q, k, v))
        with jax.default_matmul_precision("highest"):  # the function has no argument for it
            attended = jax.nn.dot_product_attention(
                q, k, v, is_causal=True, local_window_size=local, implementation=self.attention
            )
        return self.finish(x, attended.astype(x.dtype))

    def _queries(self, h, positions):
        """Returns rotated queries of the normalised input; attention divides their products by sqrt(D)."""
        c, q = self.config, _heads(self.q_proj(h), self.config.num_heads)
        q = self._rotate(self.q_norm(q) if c.qk_norm else q, positions)
        scale = 1.0 if c.query_scalar is None else (c.head_dim / c.query_scalar) ** 0.5
        return q if scale == 1 else q * scale

    def _rotate(self, x, positions):
        rope = self.config.rope
        freqs = rotary.inverse_frequencies(self.config.head_dim, rope)
        return rotary.rotate(x, positions, freqs, rope.attention_factor)


def _dense_attention(config: ModelConfig, q, k, v, sink_logits):
    """Returns causal attention [B, T, H, D] of whole sequences with capped scores or sink logits."""
    position, group = jnp.arange(q.shape[1], dtype=jnp.int32), (config.num_kv_heads, config.group)
    scores = einsum("btkgd,bskd->btkgs", q.reshape(*q.shape[:2], *group, -1), k)
    scores = attention.soft_capped(scores * config.head_dim**-0.5, config.soft_cap)
    back = position[:, None] - position
    seen = (back >= 0) & (back < (config.window or len(position)))
    scores = jnp.where(seen[:, None, None], scores, attention.NEGATIVE)
    sink_logits = None if sink_logits is None else jnp.broadcast_to(sink_logits, scores.shape[:-1])
    weight = attention.softmax(scores, sink_logits).astype(v.dtype)
    return einsum("btkgs,bskd->btkgd", weight, v).astype(v.dtype).reshape(q.shape)


class Transformer(nn.Module):
    """Embedding, blocks, final norm and unembedding of a model."""

    config: ModelConfig
    attention: str | None = None

    def setup(self):
        c = self.config
        self.embedding = Embedding(c.vocab_size, c.hidden_size, c.vocabulary)
        self.layers = [Block(layer, self.attention, name=f"layers_{i}") for i, layer in enumerate(c.layers)]
        self.norm = RMSNorm(c.rms_norm_eps, c.norm_offset)
        if not c.tie_embeddings:
            self.lm_head = Linear(c.vocab_size)

    def embed(self, tokens: Int32[Array, "*T"]) -> Hidden:
        x = self.embedding(tokens)
        return x * jnp.asarray(self.config.hidden_size**0.5, x.dtype) if self.config.scaled_embedding else x

    def unembed(self, x: Hidden) -> Logits:
        x = self.norm(x)
        logits = apply_rows(self.embedding.embedding, x) if self.config.tie_embeddings else self.lm_head(x)
        return self.config.vocabulary.gather(attention.soft_capped(logits, self.config.logit_cap), logits.ndim - 1)

    def __call__(self, tokens: Int32[Array, "B T"], positions: Int32[Array, "B T"]) -> Logits:
        """Returns the logits of every position under dense causal attention, for training and as an oracle."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, positions)
        return self.unembed(x)


def _heads(x, count):
    return x.reshape(*x.shape[:-1], count, -1)
