"""Second moments of a model's keys, collected from texts of any length, one layer of a batch in memory at a time."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.errors import PromptError
from kvjax.inference import dense_prefill
from kvjax.llm import LLM
from kvjax.models.transformer import Block
from kvjax.ops.precise import matmul
from kvjax.typing import Array


@dataclasses.dataclass(frozen=True)
class Moments:
    """Second moments of keys, summed over the tokens of some texts."""

    gram: tuple[np.ndarray, ...]  # float64[K * D, K * D] per layer: sum of k k^T, k: rotated keys of all heads
    heads: int  # K
    tokens: int  # tokens that were summed
    fingerprint: str  # identity of the model (`LLM.identity`)


def key_moments(llm: LLM, rows: Iterable[np.ndarray]) -> Moments:
    """Sums the second moments of every layer's keys over texts.

    Memory is linear in T: the hidden states and one layer's queries, keys and values of one batch.

    Args:
      llm: the model.
      rows: batches of token ids, int[B, T]. Positions start at 0 in each row, so rows should be as long as later
        contexts.

    Raises:
      PromptError: there is no batch.
    """
    config, tokens = llm.config, 0
    size = config.num_kv_heads * config.head_dim
    gram = [np.zeros((size, size)) for _ in range(config.num_layers)]
    for batch in rows:
        for layer, activations in enumerate(_read(llm, batch)):
            gram[layer] += np.asarray(_gram(activations.key[:, : batch.shape[1]]), np.float64)
        tokens += batch.size
    if not tokens:
        raise PromptError("no text was given to collect keys from; give at least one batch of tokens")
    return Moments(tuple(gram), config.num_kv_heads, tokens, llm.identity)


def layers_of(llm: LLM, tokens: np.ndarray, ahead: bool = False) -> Iterator[tuple[int, Array, Array]]:
    """Yields the queries and keys of each layer.

    Args:
      llm: the model.
      tokens: int[B, T], token ids.
      ahead: True = a layer's queries are made of the input of the layer before (KVSwap, Eq. 1), those of the first
        layer of its own.

    Yields:
      Number of the layer, rotated queries [B, T, H, D] and rotated keys [B, T, K, D].
    """
    length = tokens.shape[1]
    config = llm.config.for_length(length)
    before: Array | None = None
    for i, layer in enumerate(_read(llm, tokens)):
        asked = layer.x if before is None or not ahead else before
        yield i, _queries(config.layers[i], llm.params[f"layers_{i}"], asked[:, :length]), layer.key[:, :length]
        before = layer.x


def _read(llm: LLM, tokens: np.ndarray) -> Iterator[dense_prefill.Activations]:
    """Returns the activations of each layer over tokens[B, T], padded to a length that prefill compiles for."""
    config = llm.config.for_length(tokens.shape[1])
    return dense_prefill.read(config, llm.params, dense_prefill.pad(jnp.asarray(tokens, jnp.int32)))


@functools.partial(jax.jit, static_argnums=0)
def _queries(config, params, x):
    """Returns the rotated queries [B, T, H, D] of a layer's input x[B, T, E]."""
    position = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
    return Block(config).apply({"params": params}, x, position, method="queries")


@jax.jit
def _gram(key):
    flat = key.reshape(-1, key.shape[-2] * key.shape[-1]).astype(jnp.float32)
    return matmul(flat.T, flat)
