"""Observation-window scores: the attention that a prompt's last queries pay to each of its tokens.

Methods that drop tokens decide by these scores (SnapKV, section 4).
"""

import einops
import jax
import jax.numpy as jnp

from kvjax.cache.types import Context, Spec
from kvjax.errors import ConfigError
from kvjax.ops.attention import NEGATIVE, soft_capped, softmax
from kvjax.ops.precise import einsum
from kvjax.ops.topk import AGGREGATIONS, aggregate
from kvjax.typing import Array, Bool, Float, Int32

_TOGETHER = 32  # queries scored at once: bounds memory by K G _TOGETHER T
_KEYS = 256  # keys scored at once where only the sum of all weights is needed, so that scores stay in caches of a CPU


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


def queries_in_parts(
    context: Context, together: int = _TOGETHER
) -> tuple[Float[Array, "P K G C D"], Int32[Array, "P C"]]:
    """Returns a prompt's last queries and their positions in parts, which bounds the memory of their attention.

    Args:
      context: the prompt with its last queries.
      together: C, queries of a part.

    Returns:
      The queries, oldest first, and their positions; the last part is filled up with queries at position -1.

    Raises:
      ConfigError: the queries are not known.
    """
    count = context.query_pos.shape[0]
    if not count:
        raise ConfigError("the method needs the prompt's last queries, and got none; set its `observation`, and pass "
                          "`query` if the cache is filled by kvjax.prefill_cache")
    short = -count % together
    q = jnp.pad(context.query, ((0, 0), (0, 0), (0, short), (0, 0)))
    pos = jnp.pad(context.query_pos, (0, short), constant_values=-1)
    return einops.rearrange(q, "k g (parts q) d -> parts k g q d", q=together), pos.reshape(-1, together)


def query_weights(
    spec: Spec, context: Context, q: Float[Array, "K G C D"], pos: Int32[Array, "C"]
) -> Float[Array, "K G C T"]:
    """Returns the attention weights of a few queries, less the share of the model's sink logits; those at position -1
    have none.

    Args:
      spec: sizes of the layer.
      context: the prompt.
      q: [K, G, C, D], rotated queries.
      pos: int32[C], their positions.
    """
    scores = einsum("kgqd,ktd->kgqt", q, context.key.astype(q.dtype))
    seen = (context.pos <= pos[:, None]) & spec.seen(context.pos, pos[:, None])
    scores = soft_capped(scores * q.shape[-1] ** -0.5, spec.soft_cap)
    weight = softmax(jnp.where(seen, scores, NEGATIVE), _per_query(context, q.shape[2]))
    return jnp.where(seen, weight, 0.0)


def _per_query(context: Context, count: int) -> Float[Array, "K G C"] | None:
    """Returns the sink logit of each of `count` queries of a head; None if the model has none."""
    logits = context.sink_logits
    return None if logits is None else jnp.broadcast_to(logits[..., None], (*logits.shape, count))


def near_weights(
    spec: Spec, context: Context, q: Float[Array, "K G C D"], pos: Int32[Array, "C"], reach: int
) -> tuple[Float[Array, "K G C N"], Float[Array, "K G C"] | None, Int32[Array, ""]]:
    """Returns the attention weights of successive queries on the keys just before them.

    The softmax is over the whole prompt. Of the weights further back only the sum is computed, in far less time.

    Args:
      spec: sizes of the layer.
      context: the prompt.
      q: [K, G, C, D], rotated queries.
      pos: int32[C], their positions, ascending by one; -1 at either end = there is no such query.
      reach: keys before each query, its own included, that are wanted.

    Returns:
      The weights on N = min(C + `reach`, T) keys, the sum of each query's weights on all keys (None = it is 1), and the
      position of the first of the N keys.
    """
    count, tokens = q.shape[2], context.key.shape[1]
    keys = min(count + reach, tokens)
    first = jnp.clip(jnp.max(pos) - count - reach + 2, 0, tokens - keys)
    scores, seen = _scores(spec, context, q, pos, first, keys)
    keys_alone, logits, whole = _log_sums(spec, context, q, pos), _per_query(context, count), None
    sums = keys_alone
    if logits is not None:
        sums = jnp.logaddexp(keys_alone, logits.astype(keys_alone.dtype))
        whole = jnp.exp(keys_alone - sums)
    weight = jnp.exp(jnp.where(seen, scores - sums[..., None], NEGATIVE))
    return jnp.where(seen, weight, 0.0), whole, first


def _log_sums(
    spec: Spec, context: Context, q: Float[Array, "K G C D"], pos: Int32[Array, "C"]
) -> Float[Array, "K G C"]:
    """Returns the logarithm of the sum of each query's exponentiated scores; no key after the last query is read."""
    tokens = context.key.shape[1]
    step = min(_KEYS, tokens)
    oldest = jnp.max(pos) - q.shape[2] + 1 - (tokens if spec.sliding is None else spec.sliding)

    def add(i, sums):
        top, total = sums
        # The last keys may overlap with those before, which then do not count again.
        scores, seen = _scores(spec, context, q, pos, jnp.minimum(i * step, tokens - step), step, i * step)
        scores = jnp.where(seen, scores, NEGATIVE)
        higher = jnp.maximum(top, jnp.max(scores, axis=-1))
        more = jnp.sum(jnp.where(seen, jnp.exp(scores - higher[..., None]), 0.0), axis=-1)
        return higher, total * jnp.exp(top - higher) + more

    kind = jnp.promote_types(q.dtype, jnp.float32)
    nothing = jnp.full(q.shape[:3], NEGATIVE, kind), jnp.zeros(q.shape[:3], kind)
    top, total = jax.lax.fori_loop(jnp.maximum(oldest, 0) // step, jnp.max(pos) // step + 1, add, nothing)
    return top + jnp.log(jnp.where(total > 0, total, 1.0))


def _scores(spec: Spec, context: Context, q, pos, first, count: int, least=0):
    """Returns the scores of `count` keys from `first` on, and which of them each query sees, those before `least` left
    out."""
    key = jax.lax.dynamic_slice_in_dim(context.key, first, count, axis=1)
    at = jax.lax.dynamic_slice_in_dim(context.pos, first, count)
    scores = soft_capped(einsum("kgqd,ktd->kgqt", q, key.astype(q.dtype)) * q.shape[-1] ** -0.5, spec.soft_cap)
    return scores, (at >= least) & (at <= pos[:, None]) & spec.seen(at, pos[:, None])


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
