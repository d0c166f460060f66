"""Choosing the next token from logits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from kvjax import _validate
from kvjax.errors import ConfigError
from kvjax.typing import Array, Bool, Float, Int32, Logits, PRNGKey

NONE = -1  # in place of a token where logits are not finite
_LEAST = 1e-6  # with less, what is drawn is the most likely token for any model, and then f32 does not hold it


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Greedy at temperature 0; otherwise softmax sampling, cut to `top_k` tokens and then to mass `top_p`."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self):
        _validate.check(self)
        if self.temperature and not _LEAST <= self.temperature <= 1 / _LEAST:
            raise ConfigError(f"temperature={self.temperature} must be 0 (greedy), or {_LEAST} to {1 / _LEAST:.0f}")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k={self.top_k} must be at least 1, or None for no limit")
        if not _LEAST <= self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} must be {_LEAST} to 1")


def sample(sampling: Sampling, logits: Logits, key: PRNGKey) -> Int32[Array, "B"]:
    """Draws one token per row of logits `[B, V]`, or NONE where one of them is NaN or infinite.

    Row b uses `fold_in(key, b)`, so rows do not depend on the batch.
    """
    if sampling.temperature == 0:
        return likeliest(logits)
    mass = sampling.top_p if sampling.top_p < 1 else None
    return _draw(sampling.top_k, logits, sampling.temperature, mass, key)


@jax.jit
def likeliest(logits: Logits) -> Int32[Array, "B"]:
    """The likeliest token of each row, or NONE."""
    return _if_finite(logits, jnp.argmax(logits, axis=-1).astype(jnp.int32))


def _if_finite(logits: Logits, token: Int32[Array, "B"]) -> Int32[Array, "B"]:
    return jnp.where(finite(logits), token, NONE)


@jax.jit
def finite(logits: Logits) -> Bool[Array, "B"]:
    """Whether all logits of a row are numbers."""
    return jnp.all(jnp.isfinite(logits), axis=-1)


@functools.partial(jax.jit, static_argnums=0)
def _draw(count, logits, temperature, mass, key):
    """The same program for every temperature, and for every mass below 1."""
    given, token = logits, None
    logits = logits.astype(jnp.float32) / temperature
    if count is not None and count < logits.shape[-1]:
        logits, token = jax.lax.top_k(logits, count)  # not a threshold, which equal logits would all reach
    if mass is not None:
        logits = jnp.where(logits >= _least(logits, mass, ranked=token is not None), logits, -jnp.inf)
    keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(logits.shape[0], dtype=jnp.int32))
    drawn = jax.vmap(jax.random.categorical)(keys, logits)
    drawn = drawn if token is None else jnp.take_along_axis(token, drawn[:, None], axis=-1)[:, 0]
    return _if_finite(given, drawn.astype(jnp.int32))


def _least(logits: Logits, mass, ranked: bool) -> Float[Array, "B 1"]:
    """The smallest logit of the smallest set of tokens that reaches `mass`; `ranked`: they come best first."""
    ranks = logits if ranked else jnp.sort(logits, axis=-1, descending=True)
    probability = jax.nn.softmax(ranks, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    return jnp.min(jnp.where(before < mass, ranks, jnp.inf), axis=-1, keepdims=True)
