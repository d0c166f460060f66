"""A learned codec: keys of one head as a few numbers each, by a small autoencoder trained on keys of the same head.

Both halves are a linear map plus a two-layer correction. Keys are best encoded before rotation, where content is not
mixed with position.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax

from kvjax.errors import ConfigError
from kvjax.ops.precise import matmul
from kvjax.typing import Array, Float, PRNGKey, pytree


@dataclasses.dataclass(frozen=True)
class Training:
    """Settings of an autoencoder's training.

    Attributes:
      width: numbers per coded key.
      hidden: width of the corrections.
      steps, batch, rate: of Adam, with a cosine schedule.
    """

    width: int = 12
    hidden: int = 64
    steps: int = 400
    batch: int = 256
    rate: float = 3e-3


@pytree
class Half:
    """The map x W + gelu(x U) V + b."""

    linear: Float[Array, "*B X Y"]
    inner: Float[Array, "*B X N"]
    outer: Float[Array, "*B N Y"]
    bias: Float[Array, "*B Y"]

    def __call__(self, x: Float[Array, "*T X"]) -> Float[Array, "*T Y"]:
        return matmul(x, self.linear) + matmul(jax.nn.gelu(matmul(x, self.inner)), self.outer) + self.bias


@pytree
class Autoencoder:
    """Encoder and decoder of one head, for keys divided by their root mean square."""

    encoder: Half
    decoder: Half
    scale: Float[Array, "*B"]

    def encode(self, key: Float[Array, "*T D"]) -> Float[Array, "*T N"]:
        return self.encoder(key / self.scale)

    def decode(self, code: Float[Array, "*T N"]) -> Float[Array, "*T D"]:
        return self.decoder(code) * self.scale


@functools.partial(jax.jit, static_argnums=1)
def train(key: Float[Array, "T D"], how: Training, seed: PRNGKey) -> Autoencoder:
    """Trains an autoencoder on one head's keys; map it over heads. Raises ConfigError if the code is not shorter than
    the key."""
    size = key.shape[1]
    if how.width >= size:
        raise ConfigError(f"width={how.width} must be smaller than the head size {size}; else nothing is saved")
    seeds = jax.random.split(seed, 3)
    model = Autoencoder(
        _half(seeds[0], size, how.width, how.hidden), _half(seeds[1], how.width, size, how.hidden),
        jnp.sqrt(jnp.mean(jnp.square(key))),
    )
    optimiser = optax.adam(optax.cosine_decay_schedule(how.rate, how.steps))

    def step(carry, seed):
        model, state = carry
        rows = key[jax.random.randint(seed, (how.batch,), 0, key.shape[0], jnp.int32)]
        grads = jax.grad(_loss)(model, rows)
        grads = dataclasses.replace(grads, scale=jnp.zeros_like(grads.scale))
        updates, state = optimiser.update(grads, state)
        return (optax.apply_updates(model, updates), state), None

    (model, _), _ = jax.lax.scan(step, (model, optimiser.init(model)), jax.random.split(seeds[2], how.steps))
    return model


def _half(seed: PRNGKey, into: int, out: int, hidden: int) -> Half:
    first, second = jax.random.split(seed)
    linear = jax.random.normal(first, (into, out), jnp.float32) * into**-0.5
    inner = jax.random.normal(second, (into, hidden), jnp.float32) * into**-0.5
    return Half(linear, inner, jnp.zeros((hidden, out), jnp.float32), jnp.zeros(out, jnp.float32))


def _loss(model: Autoencoder, key: Float[Array, "T D"]) -> Float[Array, ""]:
    """Returns the mean squared error of keys divided by their root mean square."""
    return jnp.mean(jnp.square((model.decode(model.encode(key)) - key) / model.scale))
