"""Training of adapters on the attention of real queries (not in the KVSwap paper).

The singular vectors keep what is large in the keys, even where no query attends. Starting from them, gradient descent
brings the attention that adapters predict closer to the true one, by the Kullback-Leibler divergence of one from the
other:

    scores   of each query head's softmax over tokens, mean over query heads
    groups   of the mass of each group of G tokens, mean over all query heads: what KVSwap ranks groups by

Sinks and window are attended in any case, so that groups are those between them: the divergence is that of the
attention to these tokens, times the mass that they have.

KVSwap asks with the input of the layer before (Eq. 1), and so does the training unless `Objective.ahead` is False.
Layers do not depend on each other: each keeps the adapter whose loss on held-out text was the least.
"""

import dataclasses
import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kvjax import _validate
from kvjax.calibration.collect_moments import layers_of
from kvjax.errors import ConfigError, PromptError
from kvjax.llm import LLM
from kvjax.methods.shared.adapters import Adapters
from kvjax.ops.attention import NEGATIVE
from kvjax.ops.precise import einsum
from kvjax.typing import Array, Float, Int32, PyTree, pytree

LOSSES = ("groups", "scores")
QUERIES = 32  # queries of each row of tokens, spread evenly over its second half
_NO_MASS = 1e-9  # added to the mass of a group before its logarithm is taken


@dataclasses.dataclass(frozen=True)
class Objective:
    """The loss that the training lowers.

    Attributes:
      loss: one of LOSSES.
      group: G, tokens of a group; only used by "groups".
      sinks, window: numbers of first and of newest tokens that do not count; likewise.
      ahead: True = a layer's queries are made of the input of the layer before, as KVSwap's are.

    Raises:
      ConfigError: `loss` does not exist, `group` is less than 1, or `sinks` or `window` is less than 0.
    """

    loss: str = "groups"
    group: int = 4
    sinks: int = 4
    window: int = 32
    ahead: bool = True

    def __post_init__(self):
        _validate.check(self)
        if self.loss not in LOSSES:
            raise ConfigError(f"loss={self.loss!r} must be one of {', '.join(LOSSES)}")
        if self.group < 1:
            raise ConfigError(f"group={self.group} is a number of tokens; give at least 1")
        if min(self.sinks, self.window) < 0:
            raise ConfigError(f"sinks={self.sinks} and window={self.window} are numbers of tokens; give at least 0")


@pytree
class Training:
    """Adapters in training, those of all layers."""

    basis: tuple[Float[Array, "K D _"], ...]  # adapter of each layer
    optimiser: tuple[PyTree, ...]  # its optimiser's state
    best: tuple[Float[Array, "K D _"], ...]  # the adapter whose held-out loss was the least
    least: Float[Array, "L"]  # that loss; infinite = none was measured


def begin(adapters: Adapters, tx: optax.GradientTransformation) -> Training:
    """Returns the start of a training from these adapters, with an optimiser of its own for each layer."""
    basis = tuple(map(jnp.asarray, adapters.layers))
    return Training(basis, tuple(map(tx.init, basis)), basis, jnp.full(len(basis), jnp.inf))


def advance(
    llm: LLM, training: Training, tokens: np.ndarray, tx: optax.GradientTransformation, joint: bool,
    objective: Objective,
) -> tuple[Training, list[float]]:
    """Takes one step of the optimiser in every layer.

    Args:
      llm: the model that the adapters are for.
      training: adapters before the step.
      tokens: int[B, T], token ids.
      tx: the optimiser.
      joint: whether projections are summed over heads (`Adapters.joint`).
      objective: what is lowered.

    Returns:
      (Adapters after the step, loss of each layer before it in nats).
    """
    basis, optimiser, losses = list(training.basis), list(training.optimiser), []
    for i, query, key in layers_of(llm, tokens, objective.ahead):
        basis[i], optimiser[i], loss = _step(tx, joint, objective, basis[i], optimiser[i], query, key)
        losses.append(loss)
    return dataclasses.replace(training, basis=tuple(basis), optimiser=tuple(optimiser)), list(map(float, losses))


def keep_best(
    llm: LLM, training: Training, rows: Iterable[np.ndarray], joint: bool, objective: Objective
) -> tuple[Training, np.ndarray]:
    """Measures the adapters on held-out text, and keeps those of each layer if they are its best so far.

    Args:
      llm: the model that the adapters are for.
      training: adapters in training.
      rows: batches of token ids, int[B, T], that they are not trained on.
      joint: whether projections are summed over heads.
      objective: what is measured.

    Returns:
      (The training with its best adapters, held-out loss of each layer, float[L] in nats).

    Raises:
      PromptError: there is no batch.
    """
    total, count = np.zeros(len(training.basis)), 0
    for tokens in rows:
        count += 1
        for i, query, key in layers_of(llm, tokens, objective.ahead):
            total[i] += float(_loss_of(joint, objective, training.basis[i], query, key))
    if not count:
        raise PromptError("no batch of held-out tokens was given to measure adapters on; give at least one")
    losses = total / count
    better = losses < np.asarray(training.least)
    pairs = zip(better, training.basis, training.best, strict=True)
    best = tuple(now if is_better else before for is_better, now, before in pairs)
    least = jnp.asarray(np.minimum(losses, training.least), jnp.float32)
    return dataclasses.replace(training, best=best, least=least), losses


def refine(
    llm: LLM, adapters: Adapters, rows: Iterable[np.ndarray], learning_rate: float = 3e-3,
    objective: Objective | None = None,
) -> Adapters:
    """Refines adapters by one step of Adam per batch and layer.

    Args:
      llm: the model that the adapters were fitted to.
      adapters: the start.
      rows: batches of token ids, int[B, T].
      learning_rate: of Adam.
      objective: what is lowered; None = the attention mass of groups of 4 tokens.

    Returns:
      Adapters of the same shapes, those after the last step.

    Raises:
      FormatMismatch: the adapters belong to another model.
      PromptError: there is no batch, for instance because an iterator is exhausted.
    """
    adapters.check_model(llm.identity)
    tx, objective, steps = optax.adam(learning_rate), objective or Objective(), 0
    training = begin(adapters, tx)
    for tokens in rows:
        training, _ = advance(llm, training, tokens, tx, adapters.joint, objective)
        steps += 1
    if not steps:
        raise PromptError("no batch of tokens was given to refine adapters on; give at least one")
    return Adapters([np.asarray(basis) for basis in training.basis], adapters.joint, adapters.fingerprint)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _step(tx, joint, objective, basis, state, query, key):
    loss, gradient = jax.value_and_grad(_loss)(basis, joint, objective, *sample(query, key))
    updates, state = tx.update(gradient, state, basis)
    return optax.apply_updates(basis, updates), state, loss


@functools.partial(jax.jit, static_argnums=(0, 1))
def _loss_of(joint, objective, basis, query, key):
    return _loss(basis, joint, objective, *sample(query, key))


def _loss(basis, joint: bool, objective: Objective, query, key, at) -> Float[Array, ""]:
    if objective.loss == "scores":
        return score_loss(basis, joint, query, key, at)
    return group_loss(basis, joint, query, key, at, objective)


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


def group_loss(
    basis: Float[Array, "K D r"], joint: bool, query: Float[Array, "B Q K G D"], key: Float[Array, "B T K D"],
    at: Int32[Array, "Q"], objective: Objective,
) -> Float[Array, ""]:
    """Returns the mean Kullback-Leibler divergence of the predicted mass of groups from the true one, in nats, each
    query's times the mass of its groups.

    Args:
      basis, joint, query, key, at: as for `score_loss`.
      objective: size of a group, and which tokens do not count.
    """
    position = jnp.arange(key.shape[1], dtype=jnp.int32)
    counts = (position >= objective.sinks) & (position <= at[:, None] - objective.window)
    attention = jax.nn.softmax(_causal(exact_scores(query, key), at))
    true = _group_mass(jnp.where(counts, attention, 0.0), objective.group)
    scores = jnp.where(counts, low_rank_scores(basis, joint, query, key), NEGATIVE)
    predicted = _group_mass(jax.nn.softmax(scores), objective.group)
    total = jnp.sum(true, axis=-1, keepdims=True)
    apart = jnp.log(true + _NO_MASS) - jnp.log(total + _NO_MASS) - jnp.log(predicted + _NO_MASS)
    return jnp.mean(jnp.sum(true * apart, axis=-1))


def _group_mass(weight: Float[Array, "B K G Q T"], group: int) -> Float[Array, "B Q N"]:
    """Returns the attention to each group of tokens, mean over query heads; the last group may have fewer tokens."""
    weight = jnp.mean(weight, axis=(1, 2))
    weight = jnp.pad(weight, ((0, 0), (0, 0), (0, -weight.shape[-1] % group)))
    return jnp.sum(weight.reshape(*weight.shape[:2], -1, group), axis=-1)


def exact_scores(query, key) -> Float[Array, "B K G Q T"]:
    """Returns the scaled dot products of queries [B, Q, K, G, D] and keys [B, T, K, D]."""
    return einsum("bqkgd,btkd->bkgqt", query, key) * query.shape[-1] ** -0.5


def low_rank_scores(basis, joint: bool, query, key) -> Float[Array, "B K G Q T"]:
    """Returns Eq. 1 of KVSwap, (Q_h A_g(h)) K_lr^T, scaled; arguments as in `score_loss`."""
    low_query = einsum("bqkgd,kdr->bqkgr", query, basis)
    if joint:
        scores = einsum("bqkgr,btr->bkgqt", low_query, einsum("btkd,kdr->btr", key, basis))
    else:
        scores = einsum("bqkgr,btkr->bkgqt", low_query, einsum("btkd,kdr->btkr", key, basis))
    return scores * query.shape[-1] ** -0.5


def _causal(scores, at):
    return jnp.where(jnp.arange(scores.shape[-1], dtype=jnp.int32) <= at[:, None], scores, NEGATIVE)
