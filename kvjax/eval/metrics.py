"""Quality of a selection of tokens, measured against exact attention over all keys.

Functions take one layer of one sequence and may be mapped over steps and sequences. `key` and `value` are in token
order, padded to any length; `at` is the position of the newest token, and tokens after it never count.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.layer import LayerPlan
from kvjax.cache.method import ENDLESS
from kvjax.errors import ConfigError
from kvjax.inference.cache import Cache
from kvjax.inference.decode import Step
from kvjax.inference.dense_prefill import PromptActivations
from kvjax.ops.attention import NEGATIVE, soft_capped, softmax
from kvjax.ops.precise import einsum
from kvjax.typing import Array, Bool, Float, Int32


def exact_scores(
    plan: LayerPlan, q: Float[Array, "K G D"], key: Float[Array, "T K D"], at: Int32[Array, ""]
) -> Float[Array, "K G T"]:
    """Returns the scores of the newest token's queries with all keys; NEGATIVE for keys it does not see."""
    scores = einsum("kgd,tkd->kgt", q, key) * q.shape[-1] ** -0.5
    return jnp.where(_seen(plan, key.shape[0], at), soft_capped(scores, plan.spec.soft_cap), NEGATIVE)


def _seen(plan: LayerPlan, tokens: int, at: Int32[Array, ""]) -> Bool[Array, "T"]:
    """Returns the tokens that the newest token sees: up to itself, within the sliding window if there is one."""
    position = jnp.arange(tokens, dtype=jnp.int32)
    return (position <= at) & plan.spec.seen(position, at)


def attended_mask(
    plan: LayerPlan, selected: Int32[Array, "K N"], at: Int32[Array, ""], tokens: int,
    hidden: Bool[Array, "K G N"] | None = None,
) -> Bool[Array, "K #G T"]:
    """Returns which tokens were attended: sinks, recent window and selected positions.

    Args:
      plan: plan of the layer.
      selected: selected positions of each KV head; -1 for none.
      at: position of the newest token.
      tokens: T, the padded number of tokens.
      hidden: selected positions hidden from single query heads, if any.
    """
    position = jnp.arange(tokens, dtype=jnp.int32)
    always = (position < plan.spec.sinks) | (position > at - plan.spec.window) | plan.dense
    mine = selected[:, None] if hidden is None else jnp.where(hidden, -1, selected[:, None])
    head, query = jnp.indices(mine.shape[:2], dtype=jnp.int32, sparse=True)
    chosen = jnp.zeros((*mine.shape[:2], tokens), bool)
    chosen = chosen.at[head[..., None], query[..., None], jnp.where(mine >= 0, mine, tokens)].set(True, mode="drop")
    return (chosen | always) & _seen(plan, tokens, at)


def recall(
    plan: LayerPlan, scores: Float[Array, "K G T"], attended: Bool[Array, "K #G T"], at: Int32[Array, ""], k: int
) -> Float[Array, "K G"]:
    """Returns recall@k: the share of each query head's true top-k keys that were attended.

    Sinks and recent window are excluded. NaN where fewer than k keys are left.

    Args:
      plan: plan of the layer.
      scores: scores from `exact_scores`.
      attended: tokens from `attended_mask`.
      at: position of the newest token.
      k: number of keys.
    """
    position = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    candidate = (position >= plan.spec.sinks) & (position <= at - plan.spec.window) & _seen(plan, len(position), at)
    _, top = jax.lax.top_k(jnp.where(candidate, scores, -jnp.inf), min(k, len(position)))
    hit = jnp.take_along_axis(attended, top, axis=-1)
    return jnp.where(jnp.sum(candidate, dtype=jnp.int32) >= k, jnp.mean(hit, axis=-1, dtype=jnp.float32), jnp.nan)


def attention_mass(scores: Float[Array, "K G T"], attended: Bool[Array, "K #G T"]) -> Float[Array, "K G"]:
    """Returns the softmax mass of full attention on the attended tokens, of that on all tokens."""
    return jnp.sum(jax.nn.softmax(scores) * attended, axis=-1)


def output_error(
    scores: Float[Array, "K G T"], attended: Bool[Array, "K #G T"], value: Float[Array, "T K D"],
    sink_logits: Float[Array, "K G"] | None = None,
) -> Float[Array, "K G"]:
    """Returns the relative L2 error of exact attention over the attended tokens against full attention.

    This is the error of the selection alone, without other approximations of a method (sampling weights, keys in few
    bits).

    Args:
      scores: scores from `exact_scores`.
      attended: tokens from `attended_mask`.
      value: values of all tokens.
      sink_logits: learned logit of each query head, if the model has them.
    """
    def output(scores):
        return einsum("kgt,tkd->kgd", softmax(scores, sink_logits), value.astype(jnp.float32))

    full, part = output(scores), output(jnp.where(attended, scores, NEGATIVE))
    return jnp.linalg.norm(part - full, axis=-1) / jnp.linalg.norm(full, axis=-1)


@dataclasses.dataclass(frozen=True)
class Quality:
    """Recall@k, attention mass and output error; means over layers, steps, sequences and query heads."""

    recall: float
    attention_mass: float
    output_error: float


class Probe:
    """Observer of a generation that measures the selection of every step against all keys so far.

    Keys and values of the prompt come from `LLM.read`, those of later tokens from the steps' reports. Steps with fewer
    than k candidates are left out of the recall.

    Args:
      cache: cache as it was filled from `reading`.
      reading: activations of the prompt, from `LLM.read`.
      k: number of keys of the recall.
      every: steps of which one is measured, the first of them; all are needed for their keys.

    Raises:
      ConfigError: the cache holds other lengths than `reading`.
    """

    def __init__(self, cache: Cache, reading: PromptActivations, k: int = 16, every: int = 1):
        self.plan, self.k, self.every, self.steps = cache.plan, k, every, 0
        self.length = np.asarray(cache.state.length).copy()
        if not np.array_equal(self.length, reading.length):
            raise ConfigError(f"the cache has {self.length.tolist()} tokens, but the activations have "
                              f"{np.asarray(reading.length).tolist()}; give a cache that was filled from them alone")
        self.keys: list[Any] = [layer.key for layer in reading.layers]
        self.values: list[Any] = [layer.value for layer in reading.layers]
        self._make_room(reading.tokens.shape[1] if cache.plan.capacity == ENDLESS else cache.plan.capacity)
        self.recalls: list[float] = []
        self.masses: list[float] = []
        self.errors: list[float] = []

    def _make_room(self, tokens: int) -> None:
        """Copies what is kept to arrays for sequences of at least so many tokens."""
        more = max(0, tokens - self.keys[0].shape[1])
        self.keys, self.values = (
            [np.pad(rows, ((0, 0), (0, more), (0, 0), (0, 0))) for rows in kept] for kept in (self.keys, self.values)
        )

    def __call__(self, step: Step, tokens: np.ndarray) -> None:
        after = np.asarray(step.state.length)
        if after.max() > self.keys[0].shape[1]:  # only where a sequence has no limit
            self._make_room(2 * int(after.max()))
        measured = self.steps % self.every == 0
        self.steps += 1
        for row in np.flatnonzero(after > self.length):
            at = self.length[row]
            for keys, values, plan, report in zip(
                self.keys, self.values, self.plan.layers, step.reports, strict=True
            ):
                keys[row, at], values[row, at] = np.asarray(report.key)[row], np.asarray(report.value)[row]
                if not measured:
                    continue
                kept = keys[row], values[row]
                hidden = None if report.hidden is None else report.hidden[row]
                found, mass, error = _measure(
                    plan, self.k, *kept, report.q[row], report.selected[row], at, hidden, report.sink_logits
                )
                self.masses.append(float(mass))
                self.errors.append(float(error))
                if not np.isnan(found):
                    self.recalls.append(float(found))
        self.length = after.copy()

    @property
    def quality(self) -> Quality:
        mean_recall = float(np.mean(self.recalls)) if self.recalls else float("nan")
        return Quality(mean_recall, float(np.mean(self.masses)), float(np.mean(self.errors)))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _measure(plan, k, key, value, q, selected, at, hidden, sink_logits):
    """Returns recall, attention mass and output error of one step, means over heads."""
    scores = exact_scores(plan, q, key, at)
    attended = attended_mask(plan, selected, at, key.shape[0], hidden)
    recalls = recall(plan, scores, attended, at, k)
    mass, error = attention_mass(scores, attended), output_error(scores, attended, value, sink_logits)
    return jnp.mean(recalls), jnp.mean(mass), jnp.mean(error)
