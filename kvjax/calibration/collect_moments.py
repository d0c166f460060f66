"""Second moments of a model's keys, collected from texts of any length: no key outlives its layer of its batch."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.errors import PromptError
from kvjax.inference import prefill
from kvjax.llm import LLM
from kvjax.models.transformer import Block
from kvjax.typing import Array


@dataclasses.dataclass(frozen=True)
class Moments:
    """Sums over the tokens of some texts."""

    gram: tuple[np.ndarray, ...]  # f64[K * D, K * D] of each layer: sum of k k^T, k a token's rotated keys of all heads
    heads: int  # K
    tokens: int  # how many were summed
    fingerprint: str  # of the model


def key_moments(llm: LLM, rows: Iterable[np.ndarray]) -> Moments:
    """Reads batches tokens[B, T] and sums the second moments of every layer's keys.

    Memory: the hidden states and one layer's queries, keys and values of one batch, linear in T. Positions start at 0
    in each row, so rows should be as long as the contexts to come. Raises PromptError where there is no batch.
    """
    config, tokens = llm.config, 0
    size = config.num_kv_heads * config.head_dim
    gram = [np.zeros((size, size)) for _ in range(config.num_layers)]
    for batch in rows:
        for layer, one in enumerate(_read(llm, batch)):
            gram[layer] += np.asarray(_gram(one.key[:, : batch.shape[1]]), np.float64)
        tokens += batch.size
    if not tokens:
        raise PromptError("there is no text to collect keys from; give at least one batch of tokens")
    return Moments(tuple(gram), config.num_kv_heads, tokens, llm.identity)


def layers_of(llm: LLM, tokens: np.ndarray) -> Iterator[tuple[int, Array, Array]]:
    """Number, rotated queries `[B, T, H, D]` and rotated keys `[B, T, K, D]` of each layer over tokens[B, T]."""
    length = tokens.shape[1]
    for i, one in enumerate(_read(llm, tokens)):
        yield i, _queries(llm.config, llm.params[f"layers_{i}"], one.x[:, :length]), one.key[:, :length]


def _read(llm: LLM, tokens: np.ndarray) -> Iterator[prefill.Activations]:
    """What each layer saw and made of tokens[B, T], padded to a length that is read."""
    return prefill.read(llm.config, llm.params, prefill.pad(jnp.asarray(tokens, jnp.int32)))


@functools.partial(jax.jit, static_argnums=0)
def _queries(config, params, x):
    """Rotated queries `[B, T, H, D]` of a layer's input x[B, T, E]."""
    at = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
    return Block(config).apply({"params": params}, x, at, method="queries")


@jax.jit
def _gram(key):
    flat = key.reshape(-1, key.shape[-2] * key.shape[-1]).astype(jnp.float32)
    return flat.T @ flat
