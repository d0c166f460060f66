"""The contract of a cache method: how it groups tokens into blocks and which blocks a query needs.

A method is a frozen dataclass of pure functions over fixed-shape arrays. It sees **one sequence**;
the machinery adds the batch with `vmap`, keeps keys and values, moves blocks, and attends. A method
never touches values, slots or file offsets. To write one, subclass `Method` and give

    blocks(capacity)                       how many blocks of how many rows, and how many to select
    init(spec, weights) -> index           every array it will ever need, nothing valid in it
    build(...) -> index, Placement         the prompt's middle part, placed at prefill
    select(...) -> Selection               blocks for one query, best first
    append(...) -> index, Placement        a home for the token that leaves the recent window

and, only if blocks are reorganised while decoding, `due` and `adapt`; only if it learns from the
attention weights, `observe`; only if it was fitted to the model beforehand, `weights`; only if its selection is a
sample, `Selection.bias` and `weigh`; only if `append` would compute again what `select` can as well, `Selection.note`;
only if keys are made from the index instead of being fetched, `rebuild`, or
`score_rows` where everything is attended; only if arrays have the size that the prompts ask for, `for_prompts`.
`methods/README.md` writes one from nothing.

One decode step of one layer, in this order:

    select -> (plan, fetch, attend) -> observe -> append -> while due: adapt

All up to attend only read; nothing of the rest happens unless the whole token succeeded, so that a
failed read leaves the cache as it was.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from kvjax import _validate
from kvjax.errors import BudgetTooSmall, ConfigError
from kvjax.models.config import RopeConfig
from kvjax.ops.topk import AGGREGATIONS
from kvjax.typing import Array, Bool, Float, Int32, PyTree, pytree

Index = Any  # a pytree of arrays, the method's own


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
    force: Int32[Array, "K"]  # fetched for `adapt`, not attended
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


@dataclasses.dataclass(frozen=True)
class Method(abc.ABC):
    """Base of all methods; the fields are what every method has in common.

    Attributes:
      budget: tokens whose keys and values enter the attention of one KV head at one step, sinks,
        window and held rows included. None = as many as the cache can hold.
      sinks: first tokens of the sequence, always attended.
      window: newest tokens, always attended (the current one included).
      max_blocks: blocks selected per step; None derives it from the budget.
      aggregation: how scores of the query heads of one KV head become one (`kvjax.ops.topk.aggregate`).
      dense_layers: first layers that keep the full cache in memory.
      lookahead: select with the query that the previous layer's input would give, so that a store knows a layer early
        what to read (KVSwap, InfiniGen); the first layer uses its own query.
      reuse: layers that share one selection (IceCache's anchors, OmniKV). The first of every so many layers after the
        dense ones places and selects, the others follow it.
      observation: last queries of the prompt that `build` is to see, as far as it has so many; None = all.
    """

    budget: int | None = 256
    sinks: int = 4
    window: int = 32
    max_blocks: int | None = None
    aggregation: str = "max"
    dense_layers: int = 0
    lookahead: bool = False
    reuse: int = 1
    observation: int | None = 0

    head_shared: ClassVar[bool] = False  # KV heads depend on each other
    fetches_alike: ClassVar[bool] = False  # all KV heads of a sequence fetch the same blocks
    places_alike: ClassVar[bool] = False  # all KV heads have a token in the same row of the same block
    in_order: ClassVar[bool] = False  # `places_alike`, and where `in_token_order` says; none is dropped or held back
    evicts: ClassVar[bool] = False  # tokens may be dropped for good: not placed, or their row given to another
    attends_all: ClassVar[bool] = False  # selects every block, in token order
    adaptive: ClassVar[bool] = False  # `due` and `adapt` do something
    observes: ClassVar[bool] = False  # `observe` does something
    dense_filters: ClassVar[bool] = False  # with `reuse`, layers that select for others attend everything, in memory
    samples: ClassVar[bool] = False  # selections are samples with a `bias`, as many tokens as are drawn
    fits_prompts: ClassVar[bool] = False  # `for_prompts` does something
    whole_prompts: ClassVar[bool] = False  # decides once what to keep of a prompt, so that it has to see all of it
    reads_tokens: ClassVar[bool] = False  # token ids decide where blocks end
    files: ClassVar[tuple[str, ...]] = ()  # settings that are paths

    @property
    def selects_together(self) -> bool:
        """Whether `select` may run for a whole batch at once on CPU: worth it where it makes few numbers of a large
        index, and right where XLA makes no sum of many terms but those of products
        (`kvjax.cache.layer.each_sequence`)."""
        return False

    @property
    def keeps_keys(self) -> bool:
        """Whether blocks hold keys; if not, `rebuild` makes those that are attended, or `score_rows` does without."""
        return True

    def __post_init__(self):
        _validate.check(self)
        for name in ("budget", "max_blocks"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1, or None")
        if self.aggregation not in AGGREGATIONS:
            raise ConfigError(f"unknown aggregation {self.aggregation!r}; use one of {', '.join(AGGREGATIONS)}")
        if self.sinks < 0 or self.window < 2:
            raise ConfigError(f"sinks={self.sinks} must be >= 0 and window={self.window} >= 2")
        for name in ("page", "chunk", "group", "cluster", "block"):  # tokens; most methods have one of them
            if getattr(self, name, 1) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        seed = getattr(self, "seed", 0)
        if not 0 <= seed < 2**32:  # of more bits JAX drops the upper ones, and NumPy takes no negative ones
            raise ConfigError(f"seed={seed} must be from 0 to 2^32 - 1")
        if self.dense_layers < 0:
            raise ConfigError(f"dense_layers={self.dense_layers} must not be negative")
        if self.observation is not None and self.observation < 0:
            raise ConfigError(f"observation={self.observation} must not be negative; None = all queries")
        if self.reuse < 1:
            raise ConfigError(f"reuse={self.reuse} must be at least 1")
        if self.reuse > 1 and self.adaptive:
            raise ConfigError(f"reuse={self.reuse}, but {self.name} rewrites blocks, each layer in its own way; leave "
                              "it at 1")
        if self.in_order and (self.evicts or not self.places_alike):
            raise ConfigError(f"{self.name} drops tokens, or places them for each head in its own way; leave in_order "
                              "at False")
        if self.adaptive and self.places_alike:
            raise ConfigError(f"{self.name} rewrites the blocks of each head for itself; leave places_alike at False")
        if self.samples and (self.reuse > 1 or self.lookahead):
            raise ConfigError(f"{self.name} weighs what it drew by the query it drew with; leave reuse at 1 and "
                              "lookahead off, which attend with another query")
        if self.reuse > 1 and not self.keeps_keys:
            raise ConfigError(f"reuse={self.reuse}, but {self.name} has keys in its index, which a layer that follows "
                              "another has not; leave it at 1")
        if self.adaptive and not self.keeps_keys:
            raise ConfigError(f"{self.name} rewrites blocks, which have to hold keys; leave keeps_keys at True")

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    @abc.abstractmethod
    def blocks(self, capacity: int, rows: int) -> tuple[int, int, int, int]:
        """(NB, C, M, U) for sequences of up to `capacity` tokens when `rows` selected rows are attended."""

    def spec(self, *, kv_heads: int, group: int, head_dim: int, capacity: int) -> Spec:
        """Sizes for one layer. Raises ConfigError where budget, window and blocks do not fit together, BudgetTooSmall
        where a larger budget is all it takes."""
        budget = capacity if self.budget is None else self.budget
        rows = max(0, min(budget, capacity) - self.sinks - self.window)
        num_blocks, block_rows, max_blocks, held = self.blocks(capacity, rows)
        max_blocks = max_blocks if self.max_blocks is None else self.max_blocks
        tables = 1 if self.places_alike else kv_heads
        spec = Spec(
            kv_heads, group, head_dim, num_blocks, block_rows, min(max_blocks, num_blocks), held,
            self.sinks, self.window, budget, capacity, tables, tables if self.fetches_alike else kv_heads,
            self.in_order, self.keeps_keys,
        )
        self._check(spec)
        return spec

    def _check(self, spec: Spec) -> None:
        if spec.in_order and spec.held:
            raise ConfigError(f"{self.name} holds rows back, so that others come before them; leave in_order at False")
        least = spec.sinks + spec.window + (0 if self.evicts else spec.block_rows) + spec.held
        if spec.budget < min(least, spec.capacity):
            raise BudgetTooSmall(
                f"budget={spec.budget} of {self.name} is smaller than sinks + window + one block + held rows "
                f"= {least}; raise the budget, or lower window or block size"
            )
        if self.attends_all and (spec.max_blocks != spec.num_blocks or spec.budget < spec.capacity):
            raise ConfigError(f"{self.name} attends every block; leave max_blocks={spec.max_blocks} and "
                              f"budget={spec.budget} at None")
        if not self.evicts and spec.num_blocks * spec.block_rows < spec.capacity:
            raise ConfigError(
                f"{spec.num_blocks} blocks of {spec.block_rows} rows cannot hold capacity={spec.capacity} tokens; "
                "raise num_blocks or block_rows"
            )

    def weights(self, layer: int) -> PyTree:
        """What was fitted to this layer of the model beforehand (adapters, tables); `init` takes it into the index."""
        return ()

    def for_prompts(
        self, spec: Spec, keys: Sequence[Float[Array, "B T K D"]], length: np.ndarray, key_bytes: int
    ) -> "Method":
        """The method as it serves given prompts best; on the host, before anything is sized.

        Args:
          spec: as sized for this method.
          keys: of each layer, right-padded to T; none where prompts are read in chunks, and not known yet.
          length: tokens of each sequence.
          key_bytes: what a key takes in a block.
        """
        return self

    def least_prompt(self, spec: Spec) -> int:
        """How many tokens prompts must have between sinks and window, if keys are changed by what they teach; else 0.
        """
        return 0

    def check_model(self, fingerprint: str) -> None:
        """Raises FormatMismatch if what was fitted beforehand was fitted to a model of another fingerprint."""
        return None

    @abc.abstractmethod
    def init(self, spec: Spec, weights: PyTree) -> Index:
        """Every array of the index, nothing valid."""

    @abc.abstractmethod
    def build(self, spec: Spec, index: Index, context: Context) -> tuple[Index, Placement]:
        """Places the prompt's tokens between sinks and window. Invalid tokens go to block NB."""

    @abc.abstractmethod
    def select(self, spec: Spec, index: Index, view: View, q: Float[Array, "K G D"]) -> Selection:
        """Blocks for a query, best first."""

    def weigh(
        self, spec: Spec, index: Index, q: Float[Array, "K G D"], key: Float[Array, "K N D"],
        bias: Float[Array, "K G N"],
    ) -> Float[Array, "K G N"]:
        """What is added to the scores of the selected rows, now that their keys are there.

        Only called if the selection had a `bias`, which comes row by row. An importance weight w is added as log w; a
        row at `attention.NEGATIVE` is left out for that query head. Rows beyond the valid ones are arbitrary.
        """
        return bias

    def rebuild(
        self, spec: Spec, index: Index, block: Int32[Array, "K N"], row: Int32[Array, "K N"], pos: Int32[Array, "K N"]
    ) -> Float[Array, "K N D"]:
        """Keys of the selected rows where blocks do not hold them; anything for block NB."""
        raise ConfigError(f"{self.name} keeps the keys of its blocks")

    def score_rows(self, spec: Spec, index: Index, q: Float[Array, "K G D"]) -> Float[Array, "K G N"]:
        """Scaled scores of all N = NB C rows, block after block, where everything is attended and blocks hold no keys;
        anything for empty rows."""
        raise ConfigError(f"{self.name} keeps the keys of its blocks")

    @abc.abstractmethod
    def append(self, spec: Spec, index: Index, view: View, evicted: WindowEviction) -> tuple[Index, Placement]:
        """A place for the token that leaves the window. Where not `evicted.valid`: index unchanged, block NB."""

    def due(self, spec: Spec, index: Index, view: View) -> Int32[Array, "K P"]:
        """A fetched block of each head that needs adapting, and P - 1 others that `adapt` is to see with it; NB = none.
        Must be cheap."""
        return jnp.full((spec.kv_heads, 1), spec.num_blocks, jnp.int32)

    def adapt(
        self, spec: Spec, index: Index, view: View, block: Int32[Array, "K P"], keys: Float[Array, "K CU D"],
        pos: Int32[Array, "K CU"],
    ) -> tuple[Index, Edits]:
        """Reorganises what is due; `keys` and `pos` are the first block's rows, the held rows, and those of the others.
        """
        raise ConfigError(f"{self.name} is not adaptive")

    def observe(
        self, spec: Spec, index: Index, view: View, pos: Int32[Array, "K N"], weight: Float[Array, "K N"]
    ) -> Index:
        """Learns from the attention weights of this step, keyed by position (-1 = no token)."""
        return index


def no_force(spec: Spec) -> Int32[Array, "K"]:
    """`Selection.force` of a method that never needs a block only to adapt it."""
    return jnp.full((spec.kv_heads,), spec.num_blocks, jnp.int32)


def in_pages(capacity: int, page: int, rows: int) -> tuple[int, int, int, int]:
    """`Method.blocks` of pages that are filled one after the other. One more is selected than full ones hold `rows`, as
    the last page may be short; no more than there are (`Method.spec`)."""
    return -(-capacity // page), page, max(1, -(-rows // page) + 1), 0


def in_token_order(spec: Spec, tokens: Context | WindowEviction) -> Placement:
    """Places a prompt, or the token that leaves the window, in consecutive rows of consecutive blocks, alike in all
    heads: where `position_in_order` says."""
    at = tokens.pos - spec.sinks
    return in_rows(spec, jnp.broadcast_to(at, (spec.kv_heads, *at.shape)), tokens.valid)


def position_in_order(spec: Spec, block: Int32[Array, "..."], row: Int32[Array, "..."]) -> Int32[Array, "..."]:
    """The token that `in_token_order` places in a row."""
    return spec.sinks + block * spec.block_rows + row


def in_rows(spec: Spec, at: Int32[Array, "*K_T"], valid: Bool[Array, "*#K_T"]) -> Placement:
    """Places tokens in given rows, counted through consecutive blocks."""
    block = jnp.where(valid, at // spec.block_rows, spec.num_blocks)
    return Placement(block.astype(jnp.int32), (at % spec.block_rows).astype(jnp.int32))


def every_occupied(spec: Spec, view: View) -> Selection:
    """All blocks that hold anything, in their order."""
    every = jnp.arange(spec.num_blocks, dtype=jnp.int32)
    block = jnp.where(view.count > 0, every, spec.num_blocks)
    return Selection(block[:, : spec.max_blocks], no_force(spec))
