"""Sampling of the next token from logits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from kvjax import _validate
from kvjax.errors import ConfigError
from kvjax.typing import Array, Bool, Float, Int32, Logits, PRNGKey, pytree

NONE = -1  # replaces a token where logits are not finite
_LEAST = 1e-6  # below, every draw is the most likely token, and smaller values still do not fit into float32


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Settings of how tokens are drawn: greedily, or from the softmax, cut to `top_k` tokens and then to mass `top_p`.

    Attributes:
      temperature: 0, the default, is greedy, whatever `top_k` and `top_p` are; else the logits are divided by it.
      top_k: number of most likely tokens to draw from; None = all.
      top_p: probability mass of the most likely tokens to draw from; 1 = all.

    Raises:
      ConfigError: a value is out of range.
    """

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
    """Draws one token per sequence.

    Args:
      sampling: how tokens are drawn.
      logits: logits [B, V].
      key: random key; row b uses `fold_in(key, b)`, so that a row does not depend on the rest of the batch.

    Returns:
      Token ids [B], NONE where a row has a logit that is NaN or infinite.
    """
    return draw(operands(sampling), logits, key)


@pytree
class Draw:
    """Sampling settings as a program gets them: one program serves all temperatures and all masses below 1."""

    temperature: Float[Array, ""] | None  # None = greedy
    mass: Float[Array, ""] | None  # probability mass of the most likely tokens to draw from; None = all
    count: int | None = dataclasses.field(metadata={"static": True})  # most likely tokens to draw from; None = all


def operands(sampling: Sampling) -> Draw:
    """Returns the settings as operands of a program."""
    if sampling.temperature == 0:
        return Draw(None, None, None)
    mass = jnp.float32(sampling.top_p) if sampling.top_p < 1 else None
    return Draw(jnp.float32(sampling.temperature), mass, sampling.top_k)


def draw(how: Draw, logits: Logits, key: PRNGKey) -> Int32[Array, "B"]:
    """Draws one token per sequence; as `sample`, also inside a program."""
    return likeliest(logits) if how.temperature is None else _draw(how.count, logits, how.temperature, how.mass, key)


@jax.jit
def likeliest(logits: Logits) -> Int32[Array, "B"]:
    """Returns the most likely token of each row, NONE where a logit is NaN or infinite."""
    return _if_finite(logits, jnp.argmax(logits, axis=-1).astype(jnp.int32))


def _if_finite(logits: Logits, token: Int32[Array, "B"]) -> Int32[Array, "B"]:
    return jnp.where(finite(logits), token, NONE)


@jax.jit
def finite(logits: Logits) -> Bool[Array, "B"]:
    """Returns True for rows whose logits are all finite."""
    return jnp.all(jnp.isfinite(logits), axis=-1)


@functools.partial(jax.jit, static_argnums=0)
def _draw(count, logits, temperature, mass, key):
    """Draws tokens, in one program for all temperatures and all masses below 1."""
    given, token = logits, None
    logits = logits.astype(jnp.float32) / temperature
    if count is not None and count < logits.shape[-1]:
        logits, token = jax.lax.top_k(logits, count)  # not by a threshold, which all equal logits would reach
    if mass is not None:
        logits = jnp.where(_likely(logits, mass, ranked=token is not None), logits, -jnp.inf)
    keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(logits.shape[0], dtype=jnp.int32))
    drawn = jax.vmap(jax.random.categorical)(keys, logits)
    drawn = drawn if token is None else jnp.take_along_axis(token, drawn[:, None], axis=-1)[:, 0]
    return _if_finite(given, drawn.astype(jnp.int32))


def _likely(logits: Logits, mass, ranked: bool) -> Bool[Array, "B V"]:
    """Returns which tokens are in the smallest set that reaches `mass`; `ranked`: logits are sorted.

    Of tokens with equal logits at the end of the set, the first are in it.
    """
    ranks = logits if ranked else jnp.sort(logits, axis=-1, descending=True)
    probability = jax.nn.softmax(ranks, axis=-1)
    inside = jnp.cumsum(probability, axis=-1) - probability < mass
    least = jnp.min(jnp.where(inside, ranks, jnp.inf), axis=-1, keepdims=True)
    places = jnp.sum(inside & (ranks == least), axis=-1, keepdims=True, dtype=jnp.int32)
    last = logits == least
    return (logits > least) | (last & (jnp.cumsum(last, axis=-1, dtype=jnp.int32) <= places))
