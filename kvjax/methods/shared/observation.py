"""How much attention a prompt's last queries pay to each of its tokens: what methods that drop tokens decide by."""

import jax
import jax.numpy as jnp

from kvjax.cache.method import Context, Spec
from kvjax.errors import ConfigError
from kvjax.ops.attention import NEGATIVE
from kvjax.ops.topk import AGGREGATIONS, aggregate
from kvjax.typing import Array, Bool, Float, Int32

_TOGETHER = 32  # queries looked at together: bounds memory by K G _TOGETHER T


def observation_scores(spec: Spec, context: Context) -> Float[Array, "K G T"]:
    """Attention weight that each token gets from the prompt's last queries, summed over these.

    The softmax is causal and over the whole prompt, as far as the model sees it, sinks and window included. Raises
    ConfigError where the queries are not known.
    """
    count = context.query_pos.shape[0]
    if not count:
        raise ConfigError("the method decides by the attention of the prompt's last queries, and was given none; set "
                          "its `observation`, and pass `query` to kvjax.prefill_cache if that is what fills the cache")
    short = -count % _TOGETHER
    q = jnp.pad(context.query, ((0, 0), (0, 0), (0, short), (0, 0)))
    pos = jnp.pad(context.query_pos, (0, short), constant_values=-1)
    heads, group, _, size = q.shape
    q = q.reshape(heads, group, -1, _TOGETHER, size).transpose(2, 0, 1, 3, 4)

    def add(total, some):
        return total + _weights(spec, context, *some), None

    nothing = jnp.zeros((heads, group, context.pos.shape[0]), jnp.float32)
    return jax.lax.scan(add, nothing, (q, pos.reshape(-1, _TOGETHER)))[0]


def _weights(
    spec: Spec, context: Context, q: Float[Array, "K G Q D"], pos: Int32[Array, "Q"]
) -> Float[Array, "K G T"]:
    """Attention weights of a few queries, summed over them; those at position -1 have none."""
    scores = jnp.einsum("kgqd,ktd->kgqt", q, context.key.astype(q.dtype), preferred_element_type=jnp.float32)
    seen = (context.pos <= pos[:, None]) & spec.seen(context.pos, pos[:, None])
    weight = jax.nn.softmax(jnp.where(seen, scores * q.shape[-1] ** -0.5, NEGATIVE))
    return jnp.sum(jnp.where(seen, weight, 0.0), axis=2)


def stays(spec: Spec, context: Context) -> Bool[Array, "T"]:
    """Which tokens of the prompt's middle part a later query may see."""
    return context.valid & spec.seen(context.pos, prompt_length(context))


def prompt_length(context: Context) -> Int32[Array, ""]:
    """Tokens of the prompt; the last query is that of its last token."""
    return context.query_pos[-1] + 1


def over_group(observation_scores: Float[Array, "K G T"], rule: str) -> Float[Array, "K T"]:
    """`aggregate` of votes, which are softmax weights already."""
    return aggregate(observation_scores, rule.removeprefix("softmax_"))


def check_rule(rule: str) -> None:
    """Raises ConfigError for an aggregation of raw scores: votes are weights."""
    if not rule.startswith("softmax"):
        weights = [one for one in AGGREGATIONS if one.startswith("softmax")]
        raise ConfigError(f"aggregation={rule!r} is of raw scores, and votes are weights; use {' or '.join(weights)}")
