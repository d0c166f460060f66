"""The contract of a cache method: how it groups tokens into blocks, and which blocks a query needs.

A method is a frozen dataclass of pure functions over arrays of fixed shape. It sees **one sequence**; the machinery
adds the batch with `vmap`, keeps keys and values, moves blocks, and attends. A method never touches values, slots or
file offsets. To write one, subclass `Method` and give

    blocks(capacity, rows)                 how many blocks of how many rows, and how many to select
    init(spec, weights) -> index           every array it will ever need, nothing valid in it
    build(...) -> index, Placement         the prompt's middle part, placed at prefill
    select(...) -> Selection               blocks for one query, best first
    append(...) -> index, Placement        a home for the token that leaves the recent window

`AdaptiveMethod`, `ObservingMethod` and `SamplingMethod` are mixins for methods that rewrite blocks, learn from
attention weights, or draw samples. Other methods of `Method` are for what few need: settings fitted to a model
(`weights`), arrays sized by the prompts (`for_prompts`), keys made from the index (`rebuild`, `score_rows`).
`methods/README.md` writes a method from nothing, and `kvjax.check_method` tries it.

Where devices share the heads of a layer, a method sees those of one: `spec.kv_heads` of `spec.all_heads`. Sums over all
heads, and draws that depend on a head's number, go through `spec.shards`, which does nothing on one device.

One decode step of one layer, in this order:

    select -> (plan, fetch, attend) -> observe -> append -> while due: adapt

All up to attend only reads; nothing of the rest happens unless the whole token succeeded, so that a failed read leaves
the cache as it was.
"""

import abc
import dataclasses
import inspect
import pathlib
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, get_args

import jax.numpy as jnp
import numpy as np

from kvjax import _validate
from kvjax.cache.types import Context, Edits, Placement, Selection, Spec, View, WindowEviction
from kvjax.errors import BudgetTooSmall, ConfigError
from kvjax.ops.topk import AGGREGATIONS
from kvjax.typing import Array, Bool, Float, Int32, PyTree

ENDLESS = 2**31 - 1  # most tokens of any sequence, as positions are int32
Index = Any  # a pytree of arrays, the method's own
HowPlaced = Literal["per_head", "alike", "in_order"]
"""How the KV heads place a token: each for itself; all in the same row of the same block; or all where `in_token_order`
says, so that no table of positions is kept, and no token is dropped or held back."""


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
        dense ones places and selects, the others follow it, as far as they have its sliding window: where windows
        alternate (Gemma 2, gpt-oss) none does.
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

    head_shared: ClassVar[bool] = False  # KV heads depend on each other, through `Spec.shards`
    fetches_alike: ClassVar[bool] = False  # all KV heads of a sequence fetch the same blocks
    placement: ClassVar[HowPlaced] = "per_head"
    evicts: ClassVar[bool] = False  # tokens may be dropped for good: not placed, or their row given to another
    endless: ClassVar[bool] = False  # no array grows with the tokens, so that a sequence needs no limit
    attends_all: ClassVar[bool] = False  # selects every block, in token order
    adaptive: ClassVar[bool] = False  # see `AdaptiveMethod`
    observes: ClassVar[bool] = False  # see `ObservingMethod`
    dense_filters: ClassVar[bool] = False  # with `reuse`, layers that select for others attend everything, in memory
    samples: ClassVar[bool] = False  # see `SamplingMethod`
    fits_prompts: ClassVar[bool] = False  # `for_prompts` does something
    whole_prompts: ClassVar[bool] = False  # decides once what to keep of a prompt, so that it has to see all of it
    reads_tokens: ClassVar[bool] = False  # token ids decide where blocks end
    files: ClassVar[tuple[str, ...]] = ()  # settings that are paths

    @property
    def places_alike(self) -> bool:
        """True if all KV heads have a token in the same row of the same block."""
        return self.placement != "per_head"

    @property
    def in_order(self) -> bool:
        """True if tokens are in token order, so that no table says where they are."""
        return self.placement == "in_order"

    @property
    def observed(self) -> int | None:
        """Last queries of a prompt that `build` makes use of, `observation` unless a setting needs none; None = all."""
        return self.observation

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

    def __new__(cls, *positional, **settings):
        """Raises ConfigError, which names the likely one, for a setting that the method does not have."""
        known = list(inspect.signature(cls.__init__).parameters)[1:]
        for name in settings.keys() - set(known):
            raise ConfigError(f"{cls.__name__} has no setting {name!r}{_validate.nearest(name, known)}; it has "
                              f"{', '.join(known)}")
        return super().__new__(cls)

    def __post_init__(self):
        _validate.check(self)
        self._check_sizes()
        self._check_what_goes_together()

    def _check_sizes(self) -> None:
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

    def _check_what_goes_together(self) -> None:
        if self.reuse > 1 and self.adaptive:
            raise ConfigError(f"reuse={self.reuse}, but {self.name} rewrites blocks, each layer in its own way; leave "
                              "it at 1")
        if self.placement not in get_args(HowPlaced):
            raise ConfigError(f"placement={self.placement!r} must be one of {', '.join(get_args(HowPlaced))}")
        if self.in_order and self.evicts:
            raise ConfigError(f"{self.name} drops tokens, so that placement='in_order' cannot be; make it 'alike' or "
                              "'per_head'")
        if self.adaptive and self.places_alike:
            raise ConfigError(f"{self.name} rewrites the blocks of each head for itself; leave placement at 'per_head'")
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
        """Returns the sizes of a cache.

        Args:
          capacity: most tokens of a sequence.
          rows: selected rows that one step may attend: the budget without sinks and window.

        Returns:
          (NB, C, M, U): blocks of a KV head, rows of a block, blocks selected by a step, rows that may be held in the
          tail because their block is full.
        """

    def spec(self, *, kv_heads: int, group: int, head_dim: int, capacity: int) -> Spec:
        """Returns the sizes of one layer's cache.

        Raises:
          ConfigError: budget, window and blocks do not fit together.
          BudgetTooSmall: a larger budget is all it takes.
        """
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
            raise ConfigError(f"{self.name} holds rows back, so that others come before them; make placement "
                              "'per_head' instead of 'in_order'")
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
        """Returns what was fitted to this layer of the model beforehand (adapters, tables), for `init`."""
        return ()

    def for_prompts(
        self, spec: Spec, keys: Sequence[Float[Array, "B T K D"]], length: np.ndarray, key_bytes: int
    ) -> "Method":
        """Returns the method as it serves given prompts best; on the host, before anything is sized.

        Args:
          spec: as sized for this method.
          keys: of each layer, right-padded to T; none where prompts are read in chunks, and not known yet.
          length: tokens of each sequence.
          key_bytes: what a key takes in a block.
        """
        return self

    def for_other_prompts(self) -> "Method":
        """Returns the method without what `for_prompts` fitted to the prompts of one cache."""
        return self

    def least_prompt(self, spec: Spec) -> int:
        """Returns how many tokens a prompt must have between sinks and window to learn from; 0 = none."""
        return 0

    def for_model(self, folder: pathlib.Path, fingerprint: str, keys: tuple[int, int, int]) -> "Method":
        """Returns the method with what was fitted to a model beforehand and was found beside it.

        Args:
          folder: where such files are, if there are any (`kvjax.LLM.folder`).
          fingerprint: the model's identity (`kvjax.LLM.identity`).
          keys: its numbers of layers, of KV heads, and of a key's dimensions.
        """
        return self

    def as_saved(self) -> "Method":
        """Returns the method as saved caches describe it: without what `for_model` found."""
        return self

    def check_model(self, fingerprint: str) -> None:
        """Raises FormatMismatch if what was fitted beforehand was fitted to a model of another fingerprint."""
        return None

    @abc.abstractmethod
    def init(self, spec: Spec, weights: PyTree) -> Index:
        """Returns every array of the index, with nothing valid in it.

        Args:
          spec: sizes of the layer's cache.
          weights: what `weights` returned for this layer.
        """

    @abc.abstractmethod
    def build(self, spec: Spec, index: Index, context: Context) -> tuple[Index, Placement]:
        """Places the prompt's tokens between sinks and window.

        Args:
          spec: sizes of the layer's cache.
          index: as `init` made it.
          context: the prompt; tokens that are not `context.valid` go to block NB.

        Returns:
          The index, with the same shapes, and block and row [K, T] of every token.
        """

    @abc.abstractmethod
    def select(self, spec: Spec, index: Index, view: View, q: Float[Array, "K G D"]) -> Selection:
        """Selects blocks for a query, best first.

        Args:
          spec: sizes of the layer's cache.
          index: the method's own.
          view: positions, counts and held rows.
          q: the query, rotated [K, G, D].

        Returns:
          Unique block ids [K, M]; NB = none. The machinery attends as many of their rows as the budget holds.
        """

    def rebuild(
        self, spec: Spec, index: Index, block: Int32[Array, "K N"], row: Int32[Array, "K N"], pos: Int32[Array, "K N"]
    ) -> Float[Array, "K N D"]:
        """Returns the keys of selected rows [K, N] where blocks do not hold them; anything for block NB."""
        raise ConfigError(f"{self.name} keeps the keys of its blocks")

    def score_rows(self, spec: Spec, index: Index, q: Float[Array, "K G D"]) -> Float[Array, "K G N"]:
        """Returns scaled scores of all N = NB C rows, block after block, where everything is attended and blocks hold
        no keys; anything for empty rows."""
        raise ConfigError(f"{self.name} keeps the keys of its blocks")

    @abc.abstractmethod
    def append(self, spec: Spec, index: Index, view: View, evicted: WindowEviction) -> tuple[Index, Placement]:
        """Places the token that leaves the window.

        Args:
          spec: sizes of the layer's cache.
          index: the method's own.
          view: positions, counts and held rows.
          evicted: the token; where it is not `evicted.valid` the index stays as it is, and the block is NB.

        Returns:
          The index, with the same shapes, and block and row [K].
        """


class AdaptiveMethod(Method):
    """Mixin of methods that rewrite blocks while they decode (DynaKV)."""

    adaptive: ClassVar[bool] = True

    @abc.abstractmethod
    def due(self, spec: Spec, index: Index, view: View) -> Int32[Array, "K P"]:
        """Returns a fetched block of each head that needs adapting, and P - 1 others that `adapt` is to see with it;
        NB = none. Called after every token, so it must be cheap."""

    @abc.abstractmethod
    def adapt(
        self, spec: Spec, index: Index, view: View, block: Int32[Array, "K P"], keys: Float[Array, "K CU D"],
        pos: Int32[Array, "K CU"],
    ) -> tuple[Index, Edits]:
        """Reorganises what is due; `keys` and `pos` are the first block's rows, the held rows, and those of the others.
        """


class ObservingMethod(Method):
    """Mixin of methods that learn from the attention weights of every step (H2O)."""

    observes: ClassVar[bool] = True

    @abc.abstractmethod
    def observe(
        self, spec: Spec, index: Index, view: View, pos: Int32[Array, "K N"], weight: Float[Array, "K N"]
    ) -> Index:
        """Learns from the attention weights of this step, keyed by position (-1 = no token)."""


class SamplingMethod(Method):
    """Mixin of methods whose selections are samples, weighed by `Selection.bias` (MagicPIG)."""

    samples: ClassVar[bool] = True

    @abc.abstractmethod
    def weigh(
        self, spec: Spec, index: Index, q: Float[Array, "K G D"], key: Float[Array, "K N D"],
        bias: Float[Array, "K G N"],
    ) -> Float[Array, "K G N"]:
        """Returns what is added to the scores of the selected rows, now that their keys are there.

        Called only if the selection had a `bias`, which comes row by row. An importance weight w is added as log w; a
        row at `attention.NEGATIVE` is left out for that query head. Rows beyond the valid ones are arbitrary.
        """


def in_pages(capacity: int, page: int, rows: int) -> tuple[int, int, int, int]:
    """Returns `Method.blocks` of pages that are filled one after the other.

    One more is selected than full ones hold `rows`, as the last page may be short.
    """
    return -(-capacity // page), page, max(1, -(-rows // page) + 1), 0


def in_token_order(spec: Spec, tokens: Context | WindowEviction) -> Placement:
    """Places a prompt, or the token that leaves the window, in consecutive rows of consecutive blocks, alike in all
    heads: where `position_in_order` says."""
    at = tokens.pos - spec.sinks
    return in_rows(spec, jnp.broadcast_to(at, (spec.kv_heads, *at.shape)), tokens.valid)


def position_in_order(spec: Spec, block: Int32[Array, "..."], row: Int32[Array, "..."]) -> Int32[Array, "..."]:
    """Returns the position of the token that `in_token_order` places in a row."""
    return spec.sinks + block * spec.block_rows + row


def in_rows(spec: Spec, at: Int32[Array, "*K_T"], valid: Bool[Array, "*#K_T"]) -> Placement:
    """Places tokens in given rows, counted through consecutive blocks."""
    block = jnp.where(valid, at // spec.block_rows, spec.num_blocks)
    return Placement(block.astype(jnp.int32), (at % spec.block_rows).astype(jnp.int32))


def every_occupied(spec: Spec, view: View) -> Selection:
    """Selects all blocks that hold anything, in their order."""
    every = jnp.arange(spec.num_blocks, dtype=jnp.int32)
    block = jnp.where(view.count > 0, every, spec.num_blocks)
    return Selection(block[:, : spec.max_blocks])
