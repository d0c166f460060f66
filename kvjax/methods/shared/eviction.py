"""Keeping a few tokens and dropping the rest for good: what H2O, SnapKV and ChunkKV have in common.

Beside sinks and window, each KV head keeps as many tokens as the budget has room for, in one row each. Every kept token
has a worth. A prompt's most valuable tokens are kept; later, a token that leaves the window takes the row of the kept
token that is worth least, or is dropped itself. The methods differ in what a token is worth. All kept tokens are
attended at every step, so nothing is selected.

Papers that judge the prompt alone let the cache grow by what is generated. Here the budget holds at every step.
"""

import abc
import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from kvjax.cache.method import Context, Method, Spec, WindowEviction, every_occupied, in_rows
from kvjax.errors import BudgetTooSmall, ConfigError
from kvjax.methods.shared.observation import stays
from kvjax.typing import Array, Bool, Float, pytree


@pytree
class Kept:
    worth: Float[Array, "*B K N"]  # of the token in each row, counted through the blocks; -inf = free


@dataclasses.dataclass(frozen=True)
class Evictor(Method):
    """Keeps the tokens that are worth most; `page` is only the unit of storage."""

    observation: int | None = 32
    page: int = 16
    evicts: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        if self.observation == 0:
            raise ConfigError(f"{self.name} drops what a prompt's last queries do not attend; observation=0 is none")

    @abc.abstractmethod
    def prompt_worth(self, spec: Spec, context: Context) -> Float[Array, "K T"]:
        """What each token of a prompt is worth."""

    @abc.abstractmethod
    def leaving_worth(self, spec: Spec, index: Kept, evicted: WindowEviction) -> Float[Array, "K"]:
        """What the token that leaves the window is worth."""

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
        """`build`, given what every token is worth."""
        head, room = jnp.arange(spec.kv_heads, dtype=jnp.int32)[:, None], index.worth.shape[-1]
        worth = jnp.where(stays(spec, context), worth, -jnp.inf)
        kept = largest(worth, room)
        at = jnp.cumsum(kept, axis=-1, dtype=jnp.int32) - 1  # in token order, whatever the ranks
        filled = index.worth.at[head, jnp.where(kept, at, room)].set(worth, mode="drop")
        return dataclasses.replace(index, worth=filled), in_rows(spec, at, kept)

    def select(self, spec, index, view, q):
        return every_occupied(spec, view)

    def append(self, spec, index, view, evicted):
        kept = view.pos.reshape(spec.kv_heads, -1)[:, : index.worth.shape[-1]]
        rank = jnp.where(spec.seen(kept, evicted.pos + spec.window), index.worth, -jnp.inf)  # what is hidden goes first
        head, least = jnp.arange(spec.kv_heads, dtype=jnp.int32), jnp.argmin(rank, axis=-1).astype(jnp.int32)
        worth = self.leaving_worth(spec, index, evicted)
        better = evicted.valid & (worth > rank[head, least])
        row = jnp.where(better, least, index.worth.shape[-1])
        taken = index.worth.at[head, row].set(worth, mode="drop")
        return dataclasses.replace(index, worth=taken), in_rows(spec, least, better)


def check_room(name: str, spec: Spec) -> Spec:
    """The sizes, BudgetTooSmall where nothing would be kept beside sinks and window."""
    if not spec.selected_rows and spec.capacity > spec.sinks + spec.window:
        raise BudgetTooSmall(f"budget={spec.budget} of {name} leaves nothing to keep beside {spec.sinks} sinks and a "
                             f"window of {spec.window}; raise it, or use streaming_llm")
    return spec


@dataclasses.dataclass(frozen=True)
class PromptEvictor(Evictor):
    """Only the prompt is judged: tokens that leave the window later replace the prompt's least, oldest of them last."""

    whole_prompts: ClassVar[bool] = True

    def leaving_worth(self, spec, index, evicted):
        # Above all votes, which are at most one per query; later tokens above earlier ones.
        return jnp.broadcast_to(1e6 + evicted.pos.astype(jnp.float32), (spec.kv_heads,))


def largest(worth: Float[Array, "K T"], count: int) -> Bool[Array, "K T"]:
    """Marks the `count` largest entries of each row, but none that is -inf; of equal ones the first."""
    ranked, at = jax.lax.top_k(worth, min(count, worth.shape[-1]))
    head = jnp.arange(worth.shape[0], dtype=jnp.int32)[:, None]
    return jnp.zeros(worth.shape, bool).at[head, at].set(ranked > -jnp.inf)
