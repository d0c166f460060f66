"""DynSplit-KV (Ye et al., "Dynamic Semantic Splitting for KVCache Compression"): blocks that end at delimiters.

A block ends at the delimiter that matters most to the model near the block's ideal length (DD-Select, section 4.1,
`kvjax.methods.shared.segments`). How much each delimiter matters is found at prefill, for each prompt, from its own
attention (section 3, Algorithm 1, `kvjax.methods.shared.importance`). Each block, whatever its length, is one pair of
vectors and one cache block of C + Delta rows (V2F, section 4.2). Blocks are scored by their element-wise minima and
maxima. All tokens of a block share its score, and the cache attends as many as the budget holds
(`kvjax.cache.state.needed_blocks`: rows of the best blocks in order, the last block in part). Every shape is therefore
fixed, and no block needs individual treatment.

While decoding, only the end of the block that is being filled is undecided. The window has the tokens that follow the
one that leaves it, so the end of a block is known when its first possible last token is placed, and no row ever moves.

`splitting` replaces DD-Select by the paper's baselines, everything else being equal (Figures 1 and 11):

    dynamic     DD-Select
    fixed       every C tokens: without delimiters
    sentence    at the first pre-defined sentence end within C + Delta tokens, or after C + Delta tokens
    no_length   at the most important delimiter within C + Delta tokens, wherever it is: without length control
    no_weight   at the delimiter nearest to the ideal end: without weights

Differences from the paper:
  - Importance is a mean over the heads of one layer, so that each layer has blocks of its own; the paper's is over all
    layers. A layer is placed while the next one is read, before the attention of all layers is known.
  - A prompt that is read in chunks is scored by its first chunk, since methods see the queries of no other.
  - Candidates are all tokens of punctuation and line breaks; the paper's Table 7 has 13 marks (`candidates="paper"`).

Choices the paper leaves open: alpha = 0.5 and Delta = 4 (C = 14 is its "window length parameter"). `sentence` and
`no_length` have no shortest block, so `shortest` bounds the number of blocks there, and `longest` their arrays.

Resident: 2 D numbers per block, D with `vectors="mean"`. Cost of a prompt: its T^2 / 2 scores per query head in each
layer are computed and summed once more; `observation` queries instead of all T take `observation` / T of that at least,
and weigh delimiters by the end of the prompt alone, which differs. Cost per step: a score per block, then the selected
blocks.
"""

import dataclasses
import os
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from kvjax.cache.method import HowPlaced, Method
from kvjax.cache.types import Placement, Selection
from kvjax.errors import ConfigError
from kvjax.methods.shared.delimiter_texts import PAPER_MARKS
from kvjax.methods.shared.delimiters import NO_DELIMITER, Delimiters
from kvjax.methods.shared.fitted import read_once
from kvjax.methods.shared.importance import PAPER_RULE, prompt_weights
from kvjax.methods.shared.page_bounds import VECTORS, Bounds, Means
from kvjax.methods.shared.segments import CLOSENESS, Split, weights_of
from kvjax.ops.kernels import tiles
from kvjax.ops.topk import aggregate, top_blocks
from kvjax.typing import Array, Float, Int32, pytree

SPLITTINGS = ("dynamic", "fixed", "sentence", "no_length", "no_weight")
IMPORTANCE = ("prompt", "table")
CANDIDATES = ("all", "paper")


@pytree
class DynSplitIndex:
    """Vectors of each block, the delimiters' weights, and the block that is being filled."""

    vectors: Bounds | Means
    delimiter: Int32[Array, "*B X"]  # token ids, ascending
    weight: Float[Array, "*B X"]  # w of each delimiter
    block: Int32[Array, "*B"]  # the block that is being filled
    filled: Int32[Array, "*B"]  # tokens in it
    length: Int32[Array, "*B"]  # its final length; undecided while filled < least


@dataclasses.dataclass(frozen=True)
class DynSplit(Method):
    """A cache of blocks of variable length.

    Attributes:
      table: file of the model's delimiters (`kvjax.methods.shared.delimiters.Delimiters`); only `splitting="fixed"`
        needs none.
      importance: where the delimiters' weights come from: "prompt", each prompt's own attention in each layer, or
        "table", the scores in the file, which were found on other texts.
      candidates: which delimiters of the file count: "all", or "paper", the 13 marks of Table 7.
      observation: last queries of the prompt by which `importance="prompt"` scores delimiters; None = all, as in the
        paper.
      splitting: how blocks are cut, one of SPLITTINGS.
      vectors: vectors that represent a block's keys: "minmax", or "mean" (Appendix A.2).
      chunk: C, ideal tokens of a block.
      deviation: Delta, tokens by which a block may be shorter or longer.
      alpha: share of the delimiter's weight in the score of an end; only used by `splitting="dynamic"`.
      closeness: form of p_e, one of `kvjax.methods.shared.segments.CLOSENESS`.
      shortest: fewest tokens of a block where nothing else bounds it.
      longest: most tokens of a block where nothing else bounds it; None = C + Delta.

    Raises:
      ConfigError: a setting is unknown or out of range, or the window is too short to decide where a block ends.
    """

    observation: int | None = None
    table: str | os.PathLike = ""
    importance: str = "prompt"
    candidates: str = "all"
    splitting: str = "dynamic"
    vectors: str = "minmax"
    chunk: int = 14
    deviation: int = 4
    alpha: float = 0.5
    closeness: str = "linear"
    shortest: int = 4
    longest: int | None = None
    placement: ClassVar[HowPlaced] = "alike"
    files: ClassVar[tuple[str, ...]] = ("table",)

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "table", os.fspath(self.table))
        for name, known in (("splitting", SPLITTINGS), ("vectors", VECTORS), ("importance", IMPORTANCE),
                            ("candidates", CANDIDATES), ("closeness", CLOSENESS)):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be one of {', '.join(known)}")
        if not 0 <= self.deviation < self.chunk or not 0 < self.shortest <= self.chunk or not 0 <= self.alpha <= 1:
            raise ConfigError(f"deviation={self.deviation} must be from 0 to chunk - 1, shortest={self.shortest} from "
                              f"1 to chunk={self.chunk}, and alpha={self.alpha} in [0, 1]")
        if self.longest is not None and (self.longest < self.chunk or not self.unbounded):
            raise ConfigError(f"longest={self.longest} must be at least chunk={self.chunk}, and is for "
                              "splitting='sentence' or 'no_length'; leave it at None elsewhere")
        if self.scores_prompts and self.observation is not None and self.observation < PAPER_RULE.future:
            raise ConfigError(f"observation={self.observation} is fewer than the {PAPER_RULE.future} queries after a "
                              "delimiter that score it; raise it, or take the weights of the file: importance='table'")
        if self.window <= self.split.ends - 1:
            raise ConfigError(f"window={self.window} must be larger than the {self.split.ends - 1} tokens that decide "
                              "where a block ends; raise it, or lower deviation or longest")

    @property
    def name(self):
        usual = {"splitting": "dynamic", "vectors": "minmax", "importance": "prompt", "candidates": "all"}
        changed = [getattr(self, name) for name in usual if getattr(self, name) != usual[name]]
        return "_".join([super().name, *changed])

    @property
    def reads_tokens(self) -> bool:  # type: ignore[override]  # a class attribute elsewhere
        """Whether token ids decide where blocks end, i.e. blocks end at delimiters."""
        return self.splitting != "fixed"

    @property
    def unbounded(self) -> bool:
        """Whether only `shortest` and `longest` bound a block."""
        return self.splitting in ("sentence", "no_length")

    @property
    def scores_prompts(self) -> bool:
        """Whether delimiters have weights of the prompt: those of "sentence" and "no_weight" are all the same."""
        return self.importance == "prompt" and self.splitting in ("dynamic", "no_length")

    @property
    def observed(self) -> int | None:
        """Queries by which a prompt's delimiters are scored, if they are."""
        return self.observation if self.scores_prompts else 0

    @property
    def split(self) -> Split:
        """The rule that cuts blocks."""
        chunk, most = self.chunk, self.chunk + self.deviation
        if self.splitting == "fixed":
            return Split(chunk, chunk, chunk, 0.0, chunk)
        if self.unbounded:
            most = most if self.longest is None else self.longest
            return Split(chunk, self.shortest, most, 1.0, most if self.splitting == "sentence" else chunk)
        alpha = 0.0 if self.splitting == "no_weight" else self.alpha
        return Split(chunk, chunk - self.deviation, most, alpha, chunk, self.closeness)

    def blocks(self, capacity, rows):
        split = self.split
        return tiles.whole(-(-capacity // split.least) + 1), split.most, -(-rows // split.least) + 1, 0

    def check_model(self, fingerprint):
        if self.splitting != "fixed":
            delimiters_in(self.table).check_model(fingerprint)

    def weights(self, layer):
        """Returns the delimiters and their weights in the file, which are the same for all layers."""
        return delimiter_weights(self.table, self.splitting, self.candidates)

    def init(self, spec, weights):
        delimiter, weight = map(jnp.asarray, weights)
        weight = jnp.ones_like(weight) if self.scores_prompts else weight  # until a prompt tells them apart
        zero = jnp.int32(0)
        return DynSplitIndex(VECTORS[self.vectors].empty(spec), delimiter, weight, zero, zero, zero)

    def build(self, spec, index, context):
        """Cuts the middle part into blocks; the tokens after it, in the window, decide where the last ones end."""
        if self.scores_prompts:
            index = dataclasses.replace(index, weight=prompt_weights(spec, context, index.delimiter, PAPER_RULE))
        weight = weights_of(context.token, index.delimiter, index.weight)
        start, stored = jnp.argmax(context.valid).astype(jnp.int32), jnp.sum(context.valid, dtype=jnp.int32)
        begins = self.split.begins(weight, start, spec.num_blocks + 1)
        block = jnp.searchsorted(begins, context.pos, side="right").astype(jnp.int32) - 1
        row = context.pos - begins[jnp.maximum(block, 0)]
        placement = _alike(spec, jnp.where(context.valid, block, spec.num_blocks), jnp.where(context.valid, row, 0))
        index = dataclasses.replace(index, vectors=index.vectors.take(placement.block, context.key))
        opened = jnp.searchsorted(begins, start + stored, side="right").astype(jnp.int32) - 1
        filled, length = start + stored - begins[opened], begins[opened + 1] - begins[opened]
        return dataclasses.replace(index, block=opened, filled=filled, length=length), placement

    def select(self, spec, index, view, q):
        occupied = view.count > 0
        score = aggregate(index.vectors.scores(q, view.count), self.aggregation)
        return Selection(top_blocks(score, occupied, spec.max_blocks))

    def append(self, spec, index, view, evicted):
        split, filled = self.split, index.filled + 1
        candidates = jnp.concatenate([evicted.token[None], evicted.ahead[: split.ends - 1]])
        decided = split.length(weights_of(candidates, index.delimiter, index.weight))
        length = jnp.where(filled == split.least, decided, index.length)
        placement = _alike(spec, jnp.where(evicted.valid, index.block, spec.num_blocks), index.filled)
        closed = (filled >= split.least) & (filled == length)
        moved = dataclasses.replace(
            index, vectors=index.vectors.take(placement.block[:, None], evicted.key[:, None]),
            block=index.block + closed, filled=jnp.where(closed, 0, filled), length=length,
        )
        keep = {name: jnp.where(evicted.valid, getattr(moved, name), getattr(index, name))
                for name in ("block", "filled", "length")}
        return dataclasses.replace(moved, **keep), placement


def _alike(spec, block, row) -> Placement:
    """Returns a placement that is the same in all heads."""
    spread = (jnp.broadcast_to(x, (spec.kv_heads, *x.shape)).astype(jnp.int32) for x in (block, row))
    return Placement(*spread)


@read_once
def delimiters_in(path: str) -> Delimiters:
    """Returns the table of delimiters in a file; raises ConfigError if there is none."""
    if not path:
        raise ConfigError("cutting at delimiters needs table=, the file of the model's delimiters "
                          "(configs/delimiters.py makes one); only dynsplit(splitting='fixed') works without")
    return Delimiters.load(path)


@read_once
def delimiter_weights(path: str, splitting: str, candidates: str = "all") -> tuple[np.ndarray, np.ndarray]:
    """Returns the delimiters that a way of splitting uses.

    Args:
      path: file of the model's delimiters; unused by "fixed".
      splitting: one of SPLITTINGS.
      candidates: one of CANDIDATES.

    Returns:
      int32[X] ascending token ids and float32[X] weights.

    Raises:
      ConfigError: there is no table, or none of its delimiters is usable.
    """
    if splitting == "fixed":
        return np.full(1, -1, np.int32), np.full(1, NO_DELIMITER, np.float32)
    table = delimiters_in(path)
    table = table.among(PAPER_MARKS) if candidates == "paper" else table
    weights = table.sentence_weights() if splitting == "sentence" else table.weights()
    token = np.flatnonzero(weights != NO_DELIMITER)
    if not len(token):
        raise ConfigError(f"{path} has no delimiter for splitting={splitting!r}; make it from other texts")
    weight = np.ones(len(token), np.float32) if splitting == "no_weight" else weights[token]
    return token.astype(np.int32), weight
