"""InfLLM (Xiao et al., "InfLLM: Training-Free Long-Context Extrapolation for LLMs with an Efficient Context Memory",
2024).

A block has `block` consecutive tokens and is represented by its `representatives`, the tokens that nearby queries
attended most. A token's local score is the attention it received from itself and the tokens after it while it was in
the recent window; the tokens of a block with the best local scores represent it. The relevance of a block is

    sim(q, B) = sum_r q . k_r      over its representatives r,

summed over all heads, and the best blocks are attended by all heads (`shared`).

The local score is the softmax over the recent window alone, summed over queries and over the query heads of a KV head.
The authors' code uses attention weights as well, whereas the paper's formula has the products q . k. While decoding,
the local score comes from the step's attention weights (`observe`), restricted to the window and normalised there.

The block that is still being filled comes first in every selection; the paper likewise always attends the remainder
that does not make a block yet.

Differences from the paper:
  - A KV head has one set of representatives for its group of query heads. In the paper every query head has its own.
  - Retrieved tokens keep their true positions. In the paper everything beyond the window is at one distance, which lets
    a model read beyond its trained length. This is thus InfLLM's memory without its extrapolation.
  - Prompts are read densely instead of block by block through the memory, and cannot be read in chunks
    (`kvjax.inference.chunked_prefill`).
  - While decoding, the group's attention to the window is normalised once. For a prompt each query head's attention is
    normalised, and the heads are summed. With one query head per KV head the two are the same.
  - `kvjax.Slots` caches blocks in memory. The paper's cache evicts by a decaying sum of attention.

`build` needs the queries of the whole prompt. Resident: `representatives` keys of D numbers per block and KV head, and
the local scores of the window. Cost per step: the sum of each block's representatives and one product of size D per
block and query head, then the selected blocks.
"""

import dataclasses
from typing import ClassVar

import einops
import jax
import jax.numpy as jnp

from kvjax.cache.method import HowPlaced, ObservingMethod, in_pages, in_token_order
from kvjax.cache.types import Context, Selection
from kvjax.errors import ConfigError
from kvjax.ops.attention import NEGATIVE, products, soft_capped
from kvjax.ops.precise import einsum
from kvjax.ops.topk import aggregate, top_blocks
from kvjax.typing import Array, Float, Int32, pytree

_NONE = -1.0  # score of an empty representative entry: below every sum of attention weights


@pytree
class InfLLMIndex:
    """Representatives of each block, and local scores of the window's tokens."""

    key: Float[Array, "*B K NB r D"]  # representatives of each block, 0 = none
    score: Float[Array, "*B K NB r"]  # their local scores
    local: Float[Array, "*B K W"]  # local scores of the tokens in the window, at position % W


@dataclasses.dataclass(frozen=True)
class InfLLM(ObservingMethod):
    """A cache of blocks that are represented by their locally most attended tokens.

    Attributes:
      block: tokens of a block (128 in the paper).
      representatives: r, representatives of each block.
      shared: whether all heads share one selection; if not, each KV head selects for itself.

    Raises:
      ConfigError: there are more representatives than tokens of a block, or `observation` is not None.
    """

    aggregation: str = "mean"
    observation: int | None = None
    block: int = 32
    representatives: int = 4
    shared: bool = True
    placement: ClassVar[HowPlaced] = "in_order"

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.representatives <= self.block:
            raise ConfigError(f"representatives={self.representatives} must be from 1 to block={self.block}")
        if self.observation is not None:
            raise ConfigError(f"observation={self.observation} must be None, because infllm needs all queries of a "
                              "prompt; leave it out")

    @property
    def head_shared(self) -> bool:  # type: ignore[override]  # a class attribute elsewhere
        """Whether heads depend on each other."""
        return self.shared

    @property
    def fetches_alike(self) -> bool:  # type: ignore[override]  # a class attribute elsewhere
        """Whether all heads select the same blocks."""
        return self.shared

    def blocks(self, capacity, rows):
        return in_pages(capacity, self.block, rows)

    def init(self, spec, weights):
        shape = (spec.kv_heads, spec.num_blocks, self.representatives)
        window = jnp.zeros((spec.kv_heads, spec.window), jnp.float32)
        return InfLLMIndex(jnp.zeros((*shape, spec.head_dim), jnp.float32), jnp.full(shape, _NONE, jnp.float32), window)

    def build(self, spec, index, context):
        tokens, newest = context.pos.shape[0], jnp.max(context.query_pos, initial=-1)
        asked, (cap, sliding) = queries_by_position(context), (spec.soft_cap, spec.sliding)
        score = local_scores(asked, context.key, newest + 1, spec.window, cap, sliding)
        placement = in_token_order(spec, context)
        head = jnp.arange(spec.kv_heads, dtype=jnp.int32)[:, None]
        # The token in each row of each block; then the rows of each block by score.
        token = jnp.full((spec.kv_heads, spec.num_blocks, spec.block_rows), tokens, jnp.int32)
        token = token.at[head, placement.block, placement.row].set(context.pos, mode="drop")
        padded = jnp.pad(score, ((0, 0), (0, 1)), constant_values=_NONE)
        best, row = jax.lax.top_k(padded[head[..., None], token], self.representatives)
        chosen = jnp.take_along_axis(token, row, axis=-1)
        key = context.key.astype(jnp.float32)[head[..., None], jnp.minimum(chosen, tokens - 1)]
        key = jnp.where((best > _NONE)[..., None], key, 0.0)
        inside = (context.pos > newest - spec.window) & (context.pos <= newest)
        recent = jnp.where(inside, context.pos % spec.window, spec.window)
        return InfLLMIndex(key, best, index.local.at[:, recent].set(score, mode="drop")), placement

    def select(self, spec, index, view, q):
        """Selects the block that is being filled, then blocks by the relevance of their representatives."""
        scores = products((jnp.sum(index.key, axis=2), q)) * spec.head_dim**-0.5
        pooled = scores.reshape(1, -1, spec.num_blocks) if self.shared else scores
        occupied, full = view.count > 0, view.count == spec.block_rows
        known = jnp.where(full[: len(pooled), None], pooled, NEGATIVE)  # a block is full in all heads or in none
        score = aggregate(known, self.aggregation)
        score = spec.shards.over_all(score, self.aggregation) if self.shared else score
        score = jnp.where(full, score, jnp.inf)
        return Selection(top_blocks(score, occupied, spec.max_blocks))

    def observe(self, spec, index, view, pos, weight):
        """Adds this step's attention to the local scores of the window."""
        newest = jnp.max(pos, axis=-1, keepdims=True)
        inside = (pos >= 0) & (pos > newest - spec.window)
        column = jnp.where(inside, pos % spec.window, spec.window)
        weight = jnp.where(inside, weight, 0.0)
        share = spec.group * weight / jnp.maximum(jnp.sum(weight, axis=-1, keepdims=True), 1e-30)
        head = jnp.arange(spec.kv_heads, dtype=jnp.int32)[:, None]
        fresh = jnp.where(newest >= 0, newest % spec.window, spec.window)  # reuses the entry of a token that has left
        local = index.local.at[head, fresh].set(0.0, mode="drop").at[head, column].add(share, mode="drop")
        return dataclasses.replace(index, local=local)

    def append(self, spec, index, view, evicted):
        """Places the token and lets it replace its block's weakest representative if its local score is higher."""
        placement = in_token_order(spec, evicted)
        head, block = jnp.arange(spec.kv_heads, dtype=jnp.int32), placement.block
        score = index.local[:, evicted.pos % spec.window]
        standing = index.score[head, jnp.minimum(block, spec.num_blocks - 1)]
        weakest = jnp.argmin(standing, axis=-1).astype(jnp.int32)
        stronger = score > jnp.min(standing, axis=-1)
        place = (head, jnp.where(stronger, block, spec.num_blocks), weakest)
        return dataclasses.replace(
            index, key=index.key.at[place].set(evicted.key.astype(jnp.float32), mode="drop"),
            score=index.score.at[place].set(score, mode="drop"),
        ), placement


def queries_by_position(context: Context) -> Float[Array, "K G T D"]:
    """Returns the queries of a prompt by position.

    Args:
      context: the prompt; its queries may be fewer than its tokens.

    Returns:
      float32[K, G, T, D]; zeros where there is no query.

    Raises:
      ConfigError: fewer queries are known than the prompt has tokens.
    """
    known, tokens = context.query.shape[2], context.pos.shape[0]
    if known < tokens:
        raise ConfigError(f"infllm needs the queries of all {tokens} tokens of a prompt, got {known}; pass them to "
                          "kvjax.prefill_cache as `query`")
    position = jnp.where(context.query_pos >= 0, context.query_pos, tokens)
    return jnp.zeros((*context.query.shape[:2], tokens, context.query.shape[-1]), jnp.float32).at[:, :, position].set(
        context.query.astype(jnp.float32), mode="drop"
    )


def local_scores(
    q: Float[Array, "K G T D"], key: Float[Array, "K T D"], length: Int32[Array, ""], window: int,
    cap: float | None = None, sliding: int | None = None,
) -> Float[Array, "K T"]:
    """Returns the attention that each token gets from itself and the `window` - 1 tokens after it.

    Args:
      q: [K, G, T, D], queries by position.
      key: [K, T, D], keys by position.
      length: number of valid tokens; later queries are ignored.
      window: tokens that a query attends, its own included.
      cap: bound of the model's scores (`kvjax.ops.attention.soft_capped`).
      sliding: newest tokens that the model lets a query attend; None = all.

    Returns:
      [K, T], softmax weights over each query's window, summed over queries and the group.
    """
    tokens, size = key.shape[1], key.shape[-1]
    pad = -tokens % window
    q, key = (jnp.pad(x, (*((0, 0),) * (x.ndim - 2), (0, pad), (0, 0))) for x in (q, key.astype(jnp.float32)))
    chunks = q.shape[2] // window
    there = (jnp.arange(chunks * window, dtype=jnp.int32) < length).reshape(chunks, window)
    q = einops.rearrange(q, "k g (chunks w) d -> chunks k g w d", w=window)
    key = einops.rearrange(key, "k (chunks w) d -> chunks k w d", w=window)
    before = jnp.concatenate([jnp.zeros_like(key[:1]), key[:-1]])
    ahead = jnp.arange(window, dtype=jnp.int32)[:, None] + window  # from key to query
    ahead -= jnp.arange(2 * window, dtype=jnp.int32)
    band = (ahead >= 0) & (ahead < min(window, sliding or window))

    def one(args):
        first, q, there, keys = args
        seen = band & (~first | (jnp.arange(2 * window, dtype=jnp.int32) >= window))
        scores = soft_capped(einsum("kgqd,knd->kgqn", q, keys) * size**-0.5, cap)
        weight = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        return jnp.sum(weight * there[:, None], axis=(1, 2))

    first = jnp.arange(chunks, dtype=jnp.int32) == 0
    both = jax.lax.map(one, (first, q, there, jnp.concatenate([before, key], axis=2)))
    own, earlier = both[..., window:], both[..., :window]
    total = own + jnp.concatenate([earlier[1:], jnp.zeros_like(earlier[:1])])
    return einops.rearrange(total, "chunks k w -> k (chunks w)")[:, :tokens]
