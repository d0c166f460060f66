"""Choosing the next token from logits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from kvjax import fields
from kvjax.errors import ConfigError
from kvjax.typing import Array, Int32, Logits, PRNGKey


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Greedy at temperature 0; otherwise softmax sampling, cut to `top_k` tokens and then to mass `top_p`."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self):
        fields.check(self)
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature={self.temperature} must be finite and >= 0 (0 is greedy)")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k={self.top_k} must be at least 1, or None for no limit")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} must be in (0, 1]")


def sample(sampling: Sampling, logits: Logits, key: PRNGKey) -> Int32[Array, "B"]:
    """One token per row of logits `[B, V]`; row b uses `fold_in(key, b)`, so rows do not depend on the batch."""
    if sampling.temperature == 0:
        return _greedy(logits)
    mass = sampling.top_p if sampling.top_p < 1 else None
    return _draw(sampling.top_k, logits, sampling.temperature, mass, key)


@jax.jit
def _greedy(logits):
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@functools.partial(jax.jit, static_argnums=0)
def _draw(count, logits, temperature, mass, key):
    """The same program for every temperature, and for every mass below 1."""
    logits = _nucleus(_top_k(logits.astype(jnp.float32) / temperature, count), mass)
    keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(logits.shape[0]))
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def _top_k(logits, count):
    if count is None or count >= logits.shape[-1]:
        return logits
    least = jax.lax.top_k(logits, count)[0][..., -1:]
    return jnp.where(logits >= least, logits, -jnp.inf)


def _nucleus(logits, mass):
    """Keeps the smallest set of most likely tokens whose mass reaches `mass` (the first one always)."""
    if mass is None:
        return logits
    order = jnp.argsort(-logits, axis=-1)
    probability = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), order, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    rank = jnp.argsort(order, axis=-1)
    return jnp.where(jnp.take_along_axis(before < mass, rank, axis=-1), logits, -jnp.inf)
