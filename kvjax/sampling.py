"""Choosing the next token from logits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from kvjax import fields
from kvjax.errors import ConfigError
from kvjax.typing import Array, Float, Int32, Logits, PRNGKey

_LEAST = 1e-6  # below, the logits of any model are greedy, and then beyond what f32 holds


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Greedy at temperature 0; otherwise softmax sampling, cut to `top_k` tokens and then to mass `top_p`."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self):
        fields.check(self)
        if self.temperature and not _LEAST <= self.temperature < float("inf"):
            raise ConfigError(f"temperature={self.temperature} must be 0 (greedy), or finite and at least {_LEAST}")
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
    logits = logits.astype(jnp.float32) / temperature
    logits = jnp.where(logits >= _least(logits, count, mass), logits, -jnp.inf)
    keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(logits.shape[0]))
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def _least(logits: Logits, count: int | None, mass) -> Float[Array, "B 1"]:
    """Of the tokens that are drawn from: the `count` most likely ones, of those the smallest set that reaches `mass`.

    A minimum, and not the last one: of a top-k of which it needs a part, XLA:CPU makes a sort of the whole vocabulary.
    """
    if count is not None and count < logits.shape[-1]:
        ranked = jax.lax.top_k(logits, count)[0]
    elif mass is not None:
        ranked = jnp.sort(logits, axis=-1, descending=True)
    else:
        return jnp.full((logits.shape[0], 1), -jnp.inf)
    if mass is not None:
        probability = jax.nn.softmax(ranked, axis=-1)
        before = jnp.cumsum(probability, axis=-1) - probability
        ranked = jnp.where(before < mass, ranked, jnp.inf)
    return jnp.min(ranked, axis=-1, keepdims=True)
