"""Refinement of adapters by the attention scores of real queries (not in the KVSwap paper).

The singular vectors keep what is large in the keys, even where no query attends. Starting from them, gradient descent
brings softmax((Q A)(K A)^T) closer to softmax(Q K^T), measured by the Kullback-Leibler divergence and averaged over
query heads.
"""

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kvjax.calibration.collect_moments import layers_of
from kvjax.errors import PromptError
from kvjax.llm import LLM
from kvjax.methods.shared.adapters import Adapters
from kvjax.ops.attention import NEGATIVE
from kvjax.typing import Array, Float, Int32

QUERIES = 32  # queries of each row of tokens, spread evenly over its second half


def refine(llm: LLM, adapters: Adapters, rows: Iterable[np.ndarray], learning_rate: float = 3e-3) -> Adapters:
    """Refines adapters by one step of Adam per batch and layer.

    Args:
      llm: the model that the adapters were fitted to.
      adapters: the start.
      rows: batches of token ids, int[B, T].
      learning_rate: of Adam.

    Returns:
      Adapters of the same shapes.

    Raises:
      FormatMismatch: the adapters belong to another model.
      PromptError: there is no batch, for instance because an iterator is exhausted.
    """
    adapters.check_model(llm.identity)
    tx = optax.adam(learning_rate)
    bases = [jnp.asarray(layer) for layer in adapters.layers]
    states = [tx.init(basis) for basis in bases]
    steps = 0
    for tokens in rows:
        steps += 1
        for i, query, key in layers_of(llm, tokens):
            bases[i], states[i] = _step(tx, adapters.joint, bases[i], states[i], query, key)
    if not steps:
        raise PromptError("no batch of tokens was given to refine adapters on; give at least one")
    return Adapters([np.asarray(basis) for basis in bases], adapters.joint, adapters.fingerprint)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _step(tx, joint, basis, state, query, key):
    gradient = jax.grad(score_loss)(basis, joint, *sample(query, key))
    updates, state = tx.update(gradient, state)
    return optax.apply_updates(basis, updates), state


def sample(query: Float[Array, "B T H D"], key: Float[Array, "B T K D"]):
    """Returns some queries [B, Q, K, G, D], the keys [B, T, K, D], and the position of each query [Q]."""
    batch, tokens, heads, size = key.shape
    count = min(QUERIES, tokens // 2)
    position = jnp.linspace(tokens // 2, tokens - 1, count, dtype=jnp.float32).astype(jnp.int32)
    return query[:, position].reshape(batch, count, heads, -1, size), key, position


def score_loss(
    basis: Float[Array, "K D r"], joint: bool, query: Float[Array, "B Q K G D"], key: Float[Array, "B T K D"],
    at: Int32[Array, "Q"],
) -> Float[Array, ""]:
    """Returns the mean Kullback-Leibler divergence of the predicted attention from the true one, in nats.

    Args:
      basis: [K, D, r], adapter of one layer.
      joint: whether projections are summed over heads (`Adapters.joint`).
      query: [B, Q, K, G, D], queries.
      key: [B, T, K, D], keys.
      at: int32[Q], position of each query.
    """
    true = jax.nn.log_softmax(_causal(exact_scores(query, key), at))
    predicted = jax.nn.log_softmax(_causal(low_rank_scores(basis, joint, query, key), at))
    return jnp.mean(jnp.sum(jnp.exp(true) * (true - predicted), axis=-1))


def exact_scores(query, key) -> Float[Array, "B K G Q T"]:
    """Returns the scaled dot products of queries [B, Q, K, G, D] and keys [B, T, K, D]."""
    return jnp.einsum("bqkgd,btkd->bkgqt", query, key) * query.shape[-1] ** -0.5


def low_rank_scores(basis, joint: bool, query, key) -> Float[Array, "B K G Q T"]:
    """Returns Eq. 1 of KVSwap, (Q_h A_g(h)) K_lr^T, scaled; arguments as in `score_loss`."""
    low_query = jnp.einsum("bqkgd,kdr->bqkgr", query, basis)
    if joint:
        scores = jnp.einsum("bqkgr,btr->bkgqt", low_query, jnp.einsum("btkd,kdr->btr", key, basis))
    else:
        scores = jnp.einsum("bqkgr,btkr->bkgqt", low_query, jnp.einsum("btkd,kdr->btkr", key, basis))
    return scores * query.shape[-1] ** -0.5


def _causal(scores, at):
    return jnp.where(jnp.arange(scores.shape[-1], dtype=jnp.int32) <= at[:, None], scores, NEGATIVE)
