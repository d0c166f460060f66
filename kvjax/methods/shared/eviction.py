"""Eviction: the common part of H2O, SnapKV and ChunkKV, which keep a few tokens and drop the others for good.

Beside sinks and window, each KV head keeps as many tokens as the budget has room for, one per row. Every kept token has
a worth. The prompt's most valuable tokens are kept; later, a token that leaves the window replaces the kept token that
is worth least, or is dropped itself. The methods differ in a token's worth. All kept tokens are attended at every step,
so nothing is selected.

Papers that judge the prompt alone let the cache grow by the generated tokens. Here the budget holds at every step.
"""

import abc
import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from kvjax.cache.method import Method, every_occupied, in_rows
from kvjax.cache.types import Context, Spec, WindowEviction
from kvjax.errors import BudgetTooSmall, ConfigError
from kvjax.methods.shared.observation import stays
from kvjax.typing import Array, Bool, Float, pytree


@pytree
class Kept:
    """Worth of the kept tokens."""

    worth: Float[Array, "*B K N"]  # worth of the token in each row, counted through the blocks; -inf = free


@dataclasses.dataclass(frozen=True)
class Evictor(Method):
    """Base of the methods that keep the tokens of the highest worth; `page` (tokens) is only the unit of storage.

    Raises:
      ConfigError: `observation` is 0.
    """

    observation: int | None = 32
    page: int = 16
    evicts: ClassVar[bool] = True
    endless: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        if self.observation == 0:
            raise ConfigError(f"{self.name} keeps the tokens that a prompt's last queries attend, and observation=0 "
                              "observes no query; raise it")

    @abc.abstractmethod
    def prompt_worth(self, spec: Spec, context: Context) -> Float[Array, "K T"]:
        """Returns the worth of each token of a prompt."""

    @abc.abstractmethod
    def leaving_worth(self, spec: Spec, index: Kept, evicted: WindowEviction) -> Float[Array, "K"]:
        """Returns the worth of the token that leaves the window, for each KV head."""

    def blocks(self, capacity, rows):
        page = max(1, min(self.page, rows))
        count = max(1, -(-rows // page))
        return count, page, count, 0

    def spec(self, *, kv_heads, group, head_dim, capacity):
        spec = super().spec(kv_heads=kv_heads, group=group, head_dim=head_dim, capacity=capacity)
        return check_room(self.name, spec)

    def init(self, spec, weights):
        return Kept(jnp.full((spec.kv_heads, max(1, spec.selected_rows)), -jnp.inf, jnp.float32))

    def build(self, spec, index, context):
        return self.keep(spec, index, context, self.prompt_worth(spec, context))

    def keep(self, spec: Spec, index, context: Context, worth: Float[Array, "K T"]):
        """Does the work of `build`, given the worth of every token."""
        head, room = jnp.arange(spec.kv_heads, dtype=jnp.int32)[:, None], index.worth.shape[-1]
        worth = jnp.where(stays(spec, context), worth, -jnp.inf)
        kept = largest(worth, room)
        row = jnp.cumsum(kept, axis=-1, dtype=jnp.int32) - 1  # in token order, not by rank
        filled = index.worth.at[head, jnp.where(kept, row, room)].set(worth, mode="drop")
        return dataclasses.replace(index, worth=filled), in_rows(spec, row, kept)

    def select(self, spec, index, view, q):
        return every_occupied(spec, view)

    def append(self, spec, index, view, evicted):
        kept = view.pos.reshape(spec.kv_heads, -1)[:, : index.worth.shape[-1]]
        rank = jnp.where(spec.seen(kept, evicted.pos + spec.window), index.worth, -jnp.inf)  # hidden ones go first
        head, least = jnp.arange(spec.kv_heads, dtype=jnp.int32), jnp.argmin(rank, axis=-1).astype(jnp.int32)
        worth = self.leaving_worth(spec, index, evicted)
        better = evicted.valid & (worth > rank[head, least])
        row = jnp.where(better, least, index.worth.shape[-1])
        taken = index.worth.at[head, row].set(worth, mode="drop")
        return dataclasses.replace(index, worth=taken), in_rows(spec, least, better)


def check_room(name: str, spec: Spec) -> Spec:
    """Returns the sizes unchanged; raises BudgetTooSmall if nothing would be kept beside sinks and window."""
    if not spec.selected_rows and spec.capacity > spec.sinks + spec.window:
        raise BudgetTooSmall(f"budget={spec.budget} of {name} leaves nothing to keep beside {spec.sinks} sinks and a "
                             f"window of {spec.window}; raise the budget, or use streaming_llm")
    return spec


@dataclasses.dataclass(frozen=True)
class PromptEvictor(Evictor):
    """Base of the methods that judge the prompt alone: later tokens replace its least valuable ones, then the oldest
    generated ones."""

    whole_prompts: ClassVar[bool] = True

    def leaving_worth(self, spec, index, evicted):
        # Above all observation-window scores, which are at most one per query; later tokens above earlier ones.
        return jnp.broadcast_to(1e6 + evicted.pos.astype(jnp.float32), (spec.kv_heads,))


def largest(worth: Float[Array, "K T"], count: int) -> Bool[Array, "K T"]:
    """Marks the `count` largest entries of each row, but none that is -inf; among equal ones, the first."""
    ranked, token = jax.lax.top_k(worth, min(count, worth.shape[-1]))
    head = jnp.arange(worth.shape[0], dtype=jnp.int32)[:, None]
    return jnp.zeros(worth.shape, bool).at[head, token].set(ranked > -jnp.inf)
