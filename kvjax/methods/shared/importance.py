"""Importance of delimiters, from the attention of the tokens after them (DynSplit-KV, section 3, Algorithm 1).

A token i is a good boundary if the W tokens after it, F_i = i+1 .. i+W, attend the R tokens that are kept,
O_i = i-R+1 .. i, and not those further back, D_i = 0 .. i-R:

    s_i = E_{l, h, q in F_i} ( sum_{k in O_i} A_qk - alpha sum_{k in D_i} A_qk ),     -alpha <= s_i <= 1

Sums over keys are differences of prefix sums of one query's attention, so a block of queries only needs its own rows of
the attention map, and means over heads can be taken first.

`kvjax.calibration.boundaries` scores whole texts over all layers, for a table; `prompt_weights` scores a prompt in one
layer while it is read.

Choices the paper leaves open: D_i is empty for i < R, where the paper's max(0, i-R) would count token 0 twice. A
boundary is only scored if all of F_i is in the text. A delimiter's score is the mean over its occurrences, and its
weight w that score stretched to [0, 1]; a delimiter that is too rare has the mean over all occurrences of all
delimiters. Nothing corrects for where a boundary is, although more is further back the later it is.
"""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.cache.types import Context, Spec
from kvjax.methods.shared.observation import near_weights, queries_in_parts
from kvjax.typing import Array, Bool, Float, Int32

_TOGETHER = 128  # queries of a prompt scored at once
RAREST = 4  # occurrences below which a delimiter of a prompt has no score of its own


@dataclasses.dataclass(frozen=True)
class Importance:
    """Settings of Algorithm 1.

    Attributes:
      future: W, tokens after a boundary whose attention counts.
      overlap: R, tokens up to the boundary that count as kept.
      alpha: penalty of attention to tokens further back.
      block: queries whose attention is in memory at a time, where a text is scored for a table.
    """

    future: int = 8
    overlap: int = 128
    alpha: float = 1.0
    block: int = 128


PAPER_RULE = Importance()


def gain_of(
    weight: Float[Array, "C N"], at: Int32[Array, "C"], rule: Importance, whole: Float[Array, "C"] | None = None
) -> Float[Array, "C W"]:
    """Returns the contribution of each query to the scores of the W tokens before it (lines 6 to 8).

    The sum of a query's attention is known, so its last W + R weights determine the rest, which goes to keys further
    back.

    Args:
      weight: [C, N], attention weights, mean over heads, on the last W + R keys of each query at least.
      at: int32[C], columns of the queries' own keys.
      rule: settings of Algorithm 1.
      whole: [C], sum of each query's weights on all keys; None = 1, as it is without sink logits.

    Returns:
      [C, W]; entry [c, j] is for the token j + 1 before query c.
    """
    # The query itself, then the keys before it.
    back = at[:, None] - jnp.arange(rule.future + rule.overlap, dtype=jnp.int32)
    near = jnp.where(back >= 0, jnp.take_along_axis(weight, jnp.maximum(back, 0), axis=-1), 0.0)
    mass = jnp.pad(jnp.cumsum(near, axis=-1), ((0, 0), (1, 0)))  # mass[c, n]: attention to the last n keys
    later, kept = mass[:, 1 : 1 + rule.future], mass[:, 1 + rule.overlap :]
    return (kept - later) - rule.alpha * ((1.0 if whole is None else whole[:, None]) - kept)


def prompt_scores(
    spec: Spec, context: Context, rule: Importance
) -> tuple[Float[Array, "N"], Int32[Array, "N"], Bool[Array, "N"]]:
    """Returns the boundary scores of a prompt's last tokens in one layer, mean over its heads.

    Args:
      spec: sizes of the layer.
      context: the prompt with its last Q queries.
      rule: settings of Algorithm 1.

    Returns:
      s_i and position of the N = Q - W + 1 tokens i whose W followers have known queries, and which of them are in the
      prompt. N = 0 if Q < W.

    Raises:
      ConfigError: the queries are not known.
    """
    def gain(queries):
        weight, whole, first = near_weights(spec, context, *queries, rule.future + rule.overlap)
        # Means over heads; without sink logits there is no `whole`.
        weight, whole = jax.tree.map(lambda each: spec.shards.mean(jnp.mean(each, axis=(0, 1))), (weight, whole))
        return gain_of(weight, queries[1] - first, rule, whole)

    gains = jax.lax.map(gain, queries_in_parts(context, _TOGETHER)).reshape(-1, rule.future)
    scored = max(0, context.query_pos.shape[0] - rule.future + 1)
    # Entry j of a query's row is for the token j + 1 before it, whose followers are the queries n to n + W - 1.
    score = jnp.mean(jnp.stack([gains[j : j + scored, j] for j in range(rule.future)]), axis=0)
    boundary = context.query_pos[:scored] - 1
    return score, boundary, boundary >= 0


def prompt_weights(
    spec: Spec, context: Context, delimiter: Int32[Array, "X"], rule: Importance, rarest: int = RAREST
) -> Float[Array, "X"]:
    """Returns the weight w of each delimiter in a prompt.

    Args:
      spec: sizes of the layer.
      context: the prompt with its last queries.
      delimiter: int32[X], ascending ids of the delimiters.
      rule: settings of Algorithm 1.
      rarest: occurrences below which a delimiter has the mean score.

    Returns:
      float32[X] in [0, 1]; all 1 if no two delimiters differ, as in a prompt too short to have scores.

    Raises:
      ConfigError: the queries are not known.
    """
    score, boundary, known = prompt_scores(spec, context, rule)
    token, size = context.token[jnp.maximum(boundary, 0)], delimiter.shape[0]
    entry = jnp.minimum(jnp.searchsorted(delimiter, token), size - 1)
    entry = jnp.where(known & (delimiter[entry] == token), entry, size)
    count = jnp.zeros(size, jnp.int32).at[entry].add(1, mode="drop")
    total = jnp.zeros(size, jnp.float32).at[entry].add(score, mode="drop")
    overall = jnp.sum(total) / jnp.maximum(jnp.sum(count), 1)
    mean = jnp.where(count >= rarest, total / jnp.maximum(count, 1), overall)
    least, spread = jnp.min(mean), jnp.ptp(mean)
    return jnp.where(spread > 0, (mean - least) / jnp.where(spread > 0, spread, 1.0), 1.0)
