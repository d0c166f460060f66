"""Observation-window scores: the attention that a prompt's last queries pay to each of its tokens.

Methods that drop tokens decide by these scores (SnapKV, section 4).
"""

import einops
import jax
import jax.numpy as jnp

from kvjax.cache.types import Context, Spec
from kvjax.errors import ConfigError
from kvjax.ops.attention import NEGATIVE, soft_capped
from kvjax.ops.precise import einsum
from kvjax.ops.topk import AGGREGATIONS, aggregate
from kvjax.typing import Array, Bool, Float, Int32

_TOGETHER = 32  # queries scored at once: bounds memory by K G _TOGETHER T


def observation_scores(spec: Spec, context: Context) -> Float[Array, "K G T"]:
    """Returns the attention weights that each token gets from the prompt's last queries, summed over these.

    The softmax is causal and over the whole prompt, sinks and window included, as far as the model's sliding window
    reaches.

    Args:
      spec: sizes of the layer.
      context: the prompt with its last queries.

    Returns:
      float32[K, G, T].

    Raises:
      ConfigError: the queries are not known.
    """
    def add(total, queries):
        return total + jnp.sum(query_weights(spec, context, *queries), axis=2), None

    parts = queries_in_parts(context)
    nothing = jnp.zeros((*parts[0].shape[1:3], context.pos.shape[0]), jnp.float32)
    return jax.lax.scan(add, nothing, parts)[0]


def queries_in_parts(context: Context) -> tuple[Float[Array, "P K G C D"], Int32[Array, "P C"]]:
    """Returns a prompt's last queries and their positions in parts, oldest first, which bounds the memory of their
    attention; the last part is filled up with queries at position -1.

    Raises:
      ConfigError: the queries are not known.
    """
    count = context.query_pos.shape[0]
    if not count:
        raise ConfigError("the method needs the prompt's last queries, and got none; set its `observation`, and pass "
                          "`query` if the cache is filled by kvjax.prefill_cache")
    short = -count % _TOGETHER
    q = jnp.pad(context.query, ((0, 0), (0, 0), (0, short), (0, 0)))
    pos = jnp.pad(context.query_pos, (0, short), constant_values=-1)
    return einops.rearrange(q, "k g (parts q) d -> parts k g q d", q=_TOGETHER), pos.reshape(-1, _TOGETHER)


def query_weights(
    spec: Spec, context: Context, q: Float[Array, "K G C D"], pos: Int32[Array, "C"]
) -> Float[Array, "K G C T"]:
    """Returns the attention weights of a few queries; those at position -1 have none.

    Args:
      spec: sizes of the layer.
      context: the prompt.
      q: [K, G, C, D], rotated queries.
      pos: int32[C], their positions.
    """
    scores = einsum("kgqd,ktd->kgqt", q, context.key.astype(q.dtype))
    seen = (context.pos <= pos[:, None]) & spec.seen(context.pos, pos[:, None])
    scores = soft_capped(scores * q.shape[-1] ** -0.5, spec.soft_cap)
    weight = jax.nn.softmax(jnp.where(seen, scores, NEGATIVE))
    return jnp.where(seen, weight, 0.0)


def stays(spec: Spec, context: Context) -> Bool[Array, "T"]:
    """Returns which tokens of the prompt's middle part a later query may see."""
    return context.valid & spec.seen(context.pos, prompt_length(context))


def prompt_length(context: Context) -> Int32[Array, ""]:
    """Returns the number of tokens of the prompt; its last query belongs to its last token."""
    return context.query_pos[-1] + 1


def over_group(observation_scores: Float[Array, "K G T"], rule: str) -> Float[Array, "K T"]:
    """Aggregates observation-window scores over the query heads of a KV head; `rule` is "softmax_mean" or
    "softmax_max", whose softmax the scores already are."""
    return aggregate(observation_scores, rule.removeprefix("softmax_"))


def check_rule(rule: str) -> None:
    """Raises ConfigError for an aggregation of raw scores, because observation-window scores are softmax weights."""
    if not rule.startswith("softmax"):
        weights = [known for known in AGGREGATIONS if known.startswith("softmax")]
        raise ConfigError(f"aggregation={rule!r} is for raw scores, but observation-window scores are softmax weights; "
                          f"use {' or '.join(weights)}")
