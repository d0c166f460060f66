"""Mixtures of experts: each token goes through the few experts that its router prefers, and no token is dropped.

Tokens are sorted by expert and cut into tiles, each of one expert's tokens. A loop over the tiles reads the weights of
one expert at a time, in place: those of experts that no token chose are not read, and the work grows with the number of
tokens, not with that of experts.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from kvjax.typing import Array, Float, Int32

_LARGEST = 64  # tokens of a tile
_STEEPNESS = 1.702  # of the sigmoid in GPT-OSS's SwiGLU


def route(
    scores: Float[Array, "T X"], count: int, normalise: bool
) -> tuple[Int32[Array, "T A"], Float[Array, "T A"]]:
    """Selects each token's experts by the softmax of the router's scores, computed in f32.

    Args:
      scores: scores of each expert.
      count: experts of a token, A.
      normalise: whether the weights of a token's experts sum to 1; otherwise they are their shares among all experts.

    Returns:
      The experts of each token, best first, and their weights in f32.
    """
    weight, chosen = jax.lax.top_k(jax.nn.softmax(scores.astype(jnp.float32), axis=-1), count)
    return chosen, weight / jnp.sum(weight, axis=-1, keepdims=True) if normalise else weight


def gated(gate: Float[Array, "C Y"], up: Float[Array, "C Y"], limit: float | None) -> Float[Array, "C Y"]:
    """Returns the inner numbers of an expert: SwiGLU, or GPT-OSS's form of it.

    Args:
      gate: what enters the activation.
      up: what it is multiplied with.
      limit: None = SwiGLU, silu(gate) up; otherwise GPT-OSS's form: `gate` is at most this, `up` is within it on both
        sides and has 1 added, and the sigmoid is steeper.
    """
    if limit is None:
        return jax.nn.silu(gate) * up
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(_STEEPNESS * gate) * (up + 1)


def mix(
    expert: Callable[[Int32[Array, ""], Float[Array, "C E"]], Float[Array, "C E"]], experts: int,
    x: Float[Array, "T E"], chosen: Int32[Array, "T A"], weight: Float[Array, "T A"],
) -> Float[Array, "T E"]:
    """Applies to each token its experts, and adds up their weighted outputs in f32.

    Args:
      expert: function of an expert's number and a tile of tokens that returns the expert's output for each.
      experts: number of experts, X.
      x: inputs of the tokens.
      chosen: experts of each token, all different.
      weight: weights of their outputs.

    Returns:
      The sums, in the type of `x`.
    """
    tokens, each = chosen.shape
    rows = tile_rows(tokens, each, experts)
    owner, pair, at = _tiles(chosen.reshape(-1), experts, rows)

    def one(tile):
        owner, pair = tile
        # Besides skipping tiles without tokens, the branch keeps XLA:CPU from widening all bfloat16 weights first.
        return jax.lax.cond(
            owner < experts, lambda: expert(owner, jnp.take(x, pair // each, axis=0)),
            lambda: jnp.zeros((rows, x.shape[-1]), x.dtype),
        )

    out = jax.lax.map(one, (owner, pair)).reshape(-1, x.shape[-1])[at].reshape(tokens, each, -1)
    return jnp.sum(out.astype(jnp.float32) * weight[..., None], axis=1).astype(x.dtype)


def tile_rows(tokens: int, each: int, experts: int) -> int:
    """Returns the tokens of a tile, a power of two.

    Reading an expert's weights takes about as long as multiplying them with eight tokens. With a mean of m tokens for
    each expert, a tile of 4 sqrt(m) tokens balances reading weights again against places that stay empty.

    Args:
      tokens: number of tokens.
      each: experts of a token.
      experts: number of experts.
    """
    best = 4 * math.sqrt(tokens * each / experts)
    return 2 ** round(math.log2(max(1, min(best, tokens, _LARGEST))))


def _tiles(
    chosen: Int32[Array, "N"], experts: int, rows: int
) -> tuple[Int32[Array, "I"], Int32[Array, "I C"], Int32[Array, "N"]]:
    """Cuts pairs of a token and its expert into tiles of one expert each.

    Args:
      chosen: expert of each pair.
      experts: number of experts.
      rows: places in a tile, C.

    Returns:
      The expert of each tile, `experts` for one without pairs; the pair in each place, any one where there is none; and
      the place of each pair among those of all tiles.
    """
    count = len(chosen)
    order = jnp.argsort(chosen).astype(jnp.int32)
    size = jnp.zeros(experts, jnp.int32).at[chosen].add(1)
    tiles = -(-size // rows)
    end = jnp.cumsum(tiles, dtype=jnp.int32)  # number of the tile after each expert's last
    tile = jnp.arange(min(count, count // rows + experts), dtype=jnp.int32)
    owner = jnp.searchsorted(end, tile, side="right").astype(jnp.int32)
    expert = jnp.minimum(owner, experts - 1)
    rank = (tile - (end - tiles)[expert])[:, None] * rows + jnp.arange(rows, dtype=jnp.int32)
    real = (owner < experts)[:, None] & (rank < size[expert][:, None])
    start = (jnp.cumsum(size, dtype=jnp.int32) - size)[expert]
    pair = order[jnp.minimum(start[:, None] + rank, count - 1)]
    place = jnp.arange(pair.size, dtype=jnp.int32)
    at = jnp.zeros(count, jnp.int32).at[jnp.where(real, pair, count).reshape(-1)].set(place, mode="drop")
    return owner, pair, at
