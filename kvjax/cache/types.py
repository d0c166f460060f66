"""The types that a method and the library exchange: sizes, prompts, selections, placements and edits."""

import dataclasses

import jax.numpy as jnp

from kvjax.ops.rotary import RopeConfig
from kvjax.ops.shards import WHOLE, Shards
from kvjax.typing import Array, Bool, Float, Int32, PyTree, pytree


@dataclasses.dataclass(frozen=True)
class Spec:
    """The static sizes of one layer's cache (axes: see `kvjax.typing`)."""

    kv_heads: int
    group: int
    head_dim: int
    num_blocks: int  # NB, also the sentinel "no block"
    block_rows: int  # C, also the sentinel "hold this row in the tail"
    max_blocks: int  # M
    held: int  # U
    sinks: int  # S
    window: int  # W, the newest token included
    budget: int  # tokens attended by one KV head in one step
    capacity: int  # tokens a sequence may grow to
    tables: int  # KT: tables of positions and counts, one per KV head, or one for all if heads place tokens alike
    block_heads: int  # KB: heads that have blocks of their own in stores and slots; 1 if all fetch and place alike
    in_order: bool = False  # `position_in_order` gives the token of each row, so no table is kept
    keeps_keys: bool = True  # blocks hold keys and values; False = values alone, see `Method.rebuild`
    rope: RopeConfig | None = None  # how keys are rotated; None = unknown, or not at all
    key_type: str = "float32"  # type of keys in the window; keys of a prompt come in the model's type
    sliding: int | None = None  # newest tokens that the model lets a query attend, its own included; None = all
    soft_cap: float | None = None  # bound of the model's scores (`kvjax.ops.attention.soft_capped`); None = none
    shards: Shards = WHOLE  # devices that share the layer's KV heads, each of which sees `kv_heads` of them

    @property
    def all_heads(self) -> int:
        """KV heads of the layer, those of other devices included."""
        return self.kv_heads * self.shards.count

    @property
    def selected_rows(self) -> int:
        """Rows that selected blocks may contribute: the budget less sinks and window."""
        return max(0, min(self.budget - self.sinks - self.window, self.max_blocks * self.block_rows))

    def seen(self, pos: Int32[Array, "..."], at: Int32[Array, "..."]) -> Bool[Array, "..."]:
        """Returns True for positions inside the model's sliding window of a query at position `at`."""
        return jnp.bool_(True) if self.sliding is None else pos > at - self.sliding

    @property
    def ring(self) -> int:
        """Rows that keep the recent window between steps, without the newest token: W - 1."""
        return self.window - 1

    @property
    def tail_rows(self) -> int:
        """R: sinks, ring and held rows."""
        return self.sinks + self.ring + self.held


@pytree
class Context:
    """A prompt, as a method sees it when it places the middle part: the tokens between sinks and recent window."""

    key: Float[Array, "K T D"]
    pos: Int32[Array, "T"]
    valid: Bool[Array, "T"]  # True for tokens of the middle part
    token: Int32[Array, "T"]  # token ids, -1 = unknown
    query: Float[Array, "K G Q D"]  # queries of the prompt's last Q tokens, oldest first; Q = min(`observation`, T)
    query_pos: Int32[Array, "Q"]  # positions of the queries; -1 = the prompt is shorter, or queries are unknown
    sink_logits: Float[Array, "K G"] | None = None  # learned logit of each query head; None = the model has none


@pytree
class WindowEviction:
    """The token that leaves the recent window. A method sees one sequence, without the axis B."""

    key: Float[Array, "*B K D"]
    pos: Int32[Array, "*B"]
    token: Int32[Array, "*B"]  # token id, -1 = unknown
    valid: Bool[Array, "*B"]  # False = no token leaves in this step
    ahead: Int32[Array, "*B ring"]  # ids of the W - 1 tokens after it, which are in the window; -1 = unknown
    note: PyTree | None = None  # this step's `Selection.note`; None in a chunk of several tokens


@pytree
class Selection:
    """The blocks that a query needs, best first; ids are unique, and NB stands for none."""

    block: Int32[Array, "K M"]
    force: Int32[Array, "K"] | None = None  # block fetched for `AdaptiveMethod.adapt` but not attended; None = none
    bias: Float[Array, "K G M"] | None = None  # bias of each block, which `weigh` turns into biases of its rows' scores
    note: PyTree | None = None  # results that `append` would compute again, as the index does not change until then


@pytree
class Placement:
    """The places of tokens: block NB = nowhere (dropped); row C = held in the tail for that block.

    A method that `evicts` may name an occupied row: the new token then replaces the one in it, which is dropped.
    """

    block: Int32[Array, "*K_T"]  # [K] for one token, [K, T] for a prompt
    row: Int32[Array, "*K_T"]


@pytree
class Edits:
    """Whole blocks to rewrite, gathered from the rows that `adapt` sees.

    These are [C rows of the due block ++ U held rows ++ C rows of each block that is due with it].
    """

    dst: Int32[Array, "*K E"]  # blocks to rewrite, NB = none
    rows: Int32[Array, "*K E C"]  # index of each of their rows among those, -1 = empty row


@pytree
class View:
    """The state that a method may look at: positions, counts, held rows, and the blocks that this step fetched.

    *K: [K], or [] inside a function that a method maps over its heads.
    """

    pos: Int32[Array, "*K NB C"]  # position of each row, -1 = empty; valid rows are a prefix
    count: Int32[Array, "*K NB"]  # valid rows of each block
    held_pos: Int32[Array, "*K U"]  # position in each held row, -1 = free
    held_block: Int32[Array, "*K U"]  # block for which the row is held, NB = free
    loaded: Int32[Array, "*K M1"]  # blocks fetched in this step: the selection and the forced one
    oldest_key: Float[Array, "*K D"]  # oldest key of the window, which leaves next; undefined until the window is full
