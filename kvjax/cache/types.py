"""What a method and the machinery hand each other: sizes, prompts, selections, placements and edits."""

import dataclasses

import jax.numpy as jnp

from kvjax.ops.rotary import RopeConfig
from kvjax.typing import Array, Bool, Float, Int32, PyTree, pytree


@dataclasses.dataclass(frozen=True)
class Spec:
    """Static sizes of one layer's cache (axes: see `kvjax.typing`)."""

    kv_heads: int
    group: int
    head_dim: int
    num_blocks: int  # NB, also the sentinel "no block"
    block_rows: int  # C, also the sentinel "hold this row in the tail"
    max_blocks: int  # M
    held: int  # U
    sinks: int  # S
    window: int  # W, the newest token included
    budget: int  # tokens attended by one KV head at one step
    capacity: int  # tokens a sequence may grow to
    tables: int  # KT: tables of positions and counts, one per KV head, or one for all if it places tokens alike
    block_heads: int  # KB: heads that have blocks of their own in stores and slots; 1 if all fetch and place alike
    in_order: bool = False  # `position_in_order` says which token a row has, so that no table does
    keeps_keys: bool = True  # blocks hold keys and values; else values alone, see `Method.rebuild`
    rope: RopeConfig | None = None  # how keys are rotated; None = not known, or not at all
    key_type: str = "float32"  # of keys in the window; those of a prompt come in the model's type
    sliding: int | None = None  # newest tokens that the model itself lets a query see, its own included; None = all

    @property
    def selected_rows(self) -> int:
        """Rows that selected blocks may contribute: the budget less sinks and window."""
        return max(0, min(self.budget - self.sinks - self.window, self.max_blocks * self.block_rows))

    def seen(self, pos: Int32[Array, "..."], at: Int32[Array, "..."]) -> Bool[Array, "..."]:
        """Which tokens before a query `at` a position the model's sliding window leaves it."""
        return jnp.bool_(True) if self.sliding is None else pos > at - self.sliding

    @property
    def ring(self) -> int:
        """Rows that keep the recent window between steps: the newest token is not in it yet."""
        return self.window - 1

    @property
    def tail_rows(self) -> int:
        """R: sinks, ring and held rows."""
        return self.sinks + self.ring + self.held


@pytree
class Context:
    """A prompt, as a method sees it when it places the middle part: what is neither sink nor in the recent window."""

    key: Float[Array, "K T D"]
    pos: Int32[Array, "T"]
    valid: Bool[Array, "T"]  # in the middle part
    token: Int32[Array, "T"]  # token ids, -1 = not known
    query: Float[Array, "K G Q D"]  # of the prompt's last Q tokens, oldest first; Q = min(`observation`, T)
    query_pos: Int32[Array, "Q"]  # -1 = the prompt is shorter, or queries are not known


@pytree
class WindowEviction:
    """The token that leaves the recent window. A method sees one sequence, without the axis B."""

    key: Float[Array, "*B K D"]
    pos: Int32[Array, "*B"]
    token: Int32[Array, "*B"]  # token id, -1 = not known
    valid: Bool[Array, "*B"]  # False: none leaves in this step
    ahead: Int32[Array, "*B ring"]  # ids of the W - 1 tokens after it, which are in the window; -1 = not known
    note: PyTree | None = None  # this step's `Selection.note`; None in a chunk of several tokens


@pytree
class Selection:
    """Blocks a query needs, best first; ids are unique, NB stands for none."""

    block: Int32[Array, "K M"]
    force: Int32[Array, "K"] | None = None  # fetched for `AdaptiveMethod.adapt`, not attended; None = none
    bias: Float[Array, "K G M"] | None = None  # for the scores of a block's rows, through `weigh`
    note: PyTree | None = None  # what `append` would compute again: the index stays as it is until then


@pytree
class Placement:
    """Where tokens go: block NB = nowhere (dropped); row C = held in the tail on that block's account.

    A method that `evicts` may name a row that is taken: the token in it is dropped and the new one takes its place.
    """

    block: Int32[Array, "*K_T"]  # [K] for one token, [K, T] for a prompt
    row: Int32[Array, "*K_T"]


@pytree
class Edits:
    """Whole blocks rewritten by a gather from what `adapt` sees: [C rows of the due block ++ U held rows ++ C rows of
    each block that is due with it]; -1 = empty row."""

    dst: Int32[Array, "*K E"]
    rows: Int32[Array, "*K E C"]


@pytree
class View:
    """What a method may look at: positions, counts, held rows, and which blocks this step fetched.

    *K: [K], or [] inside a function that a method maps over its heads.
    """

    pos: Int32[Array, "*K NB C"]  # position of each row, -1 = empty; valid rows are a prefix
    count: Int32[Array, "*K NB"]  # valid rows of each block
    held_pos: Int32[Array, "*K U"]  # -1 = free
    held_block: Int32[Array, "*K U"]  # block on whose account the row is held, NB = free
    loaded: Int32[Array, "*K M1"]  # this step's fetched blocks: the selection and the forced one
    oldest_key: Float[Array, "*K D"]  # the window's, which the next token makes leave; anything while it is not full
